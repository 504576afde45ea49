"""On a machine with real GPUs, lessons use them until their first modelled GPU, and none after it.

In a process that has used virtual GPUs torch computes no gradients on CUDA. So what uses the
machine's own devices stands first.
"""

import pytest
from conftest import VIRTUAL, calls
from contents import FOLDER, find_chapters, goes_deeper, read_chapter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

OWN = {"ensure_gpus", "try_all_gpus", "try_gpu"}  # devices of the machine


def problems(notebook):
    """List what would touch a virtual GPU too early, or a real one too late."""
    found, modelled = [], None
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if "torch.vgpu" in cell.source:
            found.append(f"cell {number}: torch.vgpu")
        for name in calls(cell.source):
            if name in VIRTUAL:
                modelled = modelled or number
            elif name in OWN and modelled:
                found.append(f"cell {number}: {name} after the virtual GPUs of cell {modelled}")
    return found


# Lessons with a part "Going deeper" mix both, and take virtual GPUs.
READ = {path.stem: read_chapter(path) for path in find_chapters(FOLDER, pages=True)}
LOOKED_AT = {name: notebook for name, notebook in READ.items() if not goes_deeper(notebook)}


@pytest.mark.parametrize("notebook", LOOKED_AT.values(), ids=LOOKED_AT)
def test_real_gpus_come_before_modelled_ones(notebook):
    assert problems(notebook) == []


MIXED = {name: notebook for name, notebook in READ.items() if goes_deeper(notebook)}


@pytest.mark.parametrize("notebook", MIXED.values(), ids=MIXED)
def test_lessons_that_mix_both_take_virtual_gpus(notebook):
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    called = (name for source in sources for name in calls(source) if name in OWN | VIRTUAL)
    chosen = 'os.environ.setdefault("VGPU_DEVICES", "vgpu")' in sources[0]
    assert chosen or next(called) in VIRTUAL


@pytest.mark.parametrize(
    ("sources", "wrong"),
    [
        (["devices = d2lpar.ensure_gpus(2)", "virtual_gpus(8, model='v100')"], 0),
        (["d2lpar.virtual_gpus(8)", "devices = ensure_gpus(2)", "try_gpu()"], 2),
        (["def f():\n    return d2lpar.virtual_gpus(8), d2lpar.try_all_gpus()"], 1),
        (["%matplotlib inline\nx = torch.vgpu.Stream()"], 1),
        (["virtual = devices[0].type == 'vgpu'"], 0),
    ],
)
def test_the_order_is_seen(sources, wrong):
    cells = [new_markdown_cell("# A lesson"), *map(new_code_cell, sources)]
    assert len(problems(new_notebook(cells=cells))) == wrong
