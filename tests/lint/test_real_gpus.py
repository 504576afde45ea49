"""On a machine with real GPUs, lessons use them until their first modelled GPU, and none after it.

In a process that has used virtual GPUs torch computes no gradients on CUDA. So what uses the
machine's own devices stands first.
"""

import pytest
from conftest import VIRTUAL, calls
from contents import FOLDER, find_chapters, read_chapter
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


READ = {path.stem: read_chapter(path) for path in find_chapters(FOLDER, pages=True)}


@pytest.mark.parametrize("notebook", READ.values(), ids=READ)
def test_real_gpus_come_before_modelled_ones(notebook):
    assert problems(notebook) == []


@pytest.mark.parametrize(("sources", "wrong"), [
    (["devices = d2lpar.ensure_gpus(2)", "virtual_gpus(8, model='v100')"], 0),
    (["d2lpar.virtual_gpus(8)", "devices = ensure_gpus(2)", "try_gpu()"], 2),
    (["def f():\n    return d2lpar.virtual_gpus(8), d2lpar.try_all_gpus()"], 1),
    (["%matplotlib inline\nx = torch.vgpu.Stream()"], 1),
    (["virtual = devices[0].type == 'vgpu'"], 0),
])  # fmt: skip
def test_the_order_is_seen(sources, wrong):
    cells = [new_markdown_cell("# A lesson"), *map(new_code_cell, sources)]
    assert len(problems(new_notebook(cells=cells))) == wrong
