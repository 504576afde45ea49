"""Where there are enough real GPUs, lessons touch no virtual ones until they model some.

`vgpu run` stands in for CUDA: its devices are named `cuda`, and all of torch.cuda answers. So a
cell that works on devices of the type `vgpu` alone fails here, and none may name them.
"""

import subprocess
import sys
from itertools import takewhile

import pytest
from conftest import REPEATED, VIRTUAL, calls, less_often
from contents import FOLDER, find_chapters, read_chapter

pytestmark = pytest.mark.slow

SMALL = REPEATED | {  # d2l's sizes would take hours on a core
    r"^( *)virtual = .*$": r"\1virtual = True",
    r"\b(num_epochs[^=\n]*=.*?|trainer, )(?:5|10)\b": r"\g<1>1",
    r"\brange\(10\)": "range(1)",
}
END = """
assert all(device.type == "cuda" for device in d2lpar.try_all_gpus())
print("the end of", NAME)
"""


def program(chapter):
    """Return the cells of a lesson before the first modelled GPU, as a script."""
    cells = [c.source for c in read_chapter(chapter, core=True).cells if c.cell_type == "code"]
    own = takewhile(lambda source: not VIRTUAL & {*calls(source)}, cells)
    source = less_often("\n\n".join(own), SMALL)
    assert "vgpu" not in source
    return f"NAME, display = {chapter.stem!r}, print\n\n{source}\n{END}"


GPUS = {"02": 1, "03": 2, "04": 1, "05": 4, "06": 2, "14": 2, "15": 2}


@pytest.mark.parametrize(("number", "gpus"), GPUS.items())
def test_a_lesson_runs_on_cuda_up_to_its_first_modelled_gpu(number, gpus, tmp_path):
    (chapter,) = find_chapters(FOLDER, [number])
    script = tmp_path / "lesson.py"
    script.write_text(program(chapter), encoding="utf-8")
    command = [sys.executable, "-m", "vgpu", "run", "--gpus", str(gpus), sys.executable, script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert f"the end of {chapter.stem}" in result.stdout
