"""Update imports of moved names in notebooks that a reader has changed, so that they still run."""

import json
import re

_CHAPTERS = "d2lpar.chapters"
MODULES = {  # old name of a module: new home of its names
    "d2lpar.virtual": "vgpu",
    "d2lpar.virtual.datasheets": "vgpu",
    "d2lpar.virtual.hardware": "vgpu",
    "d2lpar.virtual.host": "vgpu",
    "d2lpar.processes.collective_bytes": "vgpu",
    "d2lpar.processes.ddp": f"{_CHAPTERS}.distributed_data_parallel",
    "d2lpar.graphs.compiling": f"{_CHAPTERS}.hybridization.compiling",
    "d2lpar.graphs.operator_graph": f"{_CHAPTERS}.hybridization",
    "d2lpar.parallel.collectives": "d2lpar.collectives",
    "d2lpar.parallel.costs": f"{_CHAPTERS}.scaling",
    "d2lpar.parallel.gpt": f"{_CHAPTERS}.planning_a_training_run",
    "d2lpar.parallel.layouts": f"{_CHAPTERS}.planning_a_training_run",
    "d2lpar.parallel.pipelines": f"{_CHAPTERS}.pipeline_parallelism",
    "d2lpar.parallel.sharded_layers": f"{_CHAPTERS}.tensor_parallelism",
    "d2lpar.parallel.side_streams": "d2lpar.side_streams",
    "d2lpar.parallel.strategies": f"{_CHAPTERS}.tensor_parallelism",
    "d2lpar.servers.ad_clicks": f"{_CHAPTERS}.parameter_server",
    "d2lpar.servers.plots": f"{_CHAPTERS}.parameter_server",
    "d2lpar.servers.ray_setup": f"{_CHAPTERS}.parameter_server",
    "d2lpar.servers.store": f"{_CHAPTERS}.parameter_server",
    "d2lpar.data.workers": f"{_CHAPTERS}.image_augmentation",
}
NAMES = {  # names that have moved to another module: new home
    "alexnet": f"{_CHAPTERS}.scaling",
    "data_parallel_step": f"{_CHAPTERS}.distributed_data_parallel",
    "in_plain_threads": f"{_CHAPTERS}.scaling",
    "plot_layouts": f"{_CHAPTERS}.planning_a_training_run",
    "plot_points": f"{_CHAPTERS}.scaling",
    "plot_runs": f"{_CHAPTERS}.scaling",
    "resnet_body": f"{_CHAPTERS}.fine_tuning",
}
TEXTS = {"D2LPAR_DEVICES": "VGPU_DEVICES", "D2LPAR_THREADS": "VGPU_THREADS"}
_IMPORT = re.compile(r"from (d2lpar[\w.]*) import (\([^)]*\)|[^\n;#]+)")


def follow(data):
    """Return the bytes of a notebook with updated imports, unchanged if no name has moved.

    Raises:
        ValueError, KeyError, TypeError: the data is no notebook.
    """
    notebook, before = json.loads(data), json.loads(data)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["source"] = code("".join(cell["source"])).splitlines(keepends=True)
    if notebook == before:
        return data
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def code(text):
    """Return the text of a code cell with updated imports."""
    for before, now in TEXTS.items():
        text = text.replace(before, now)
    return _IMPORT.sub(_moved, text)


def _moved(found):
    module, homes = found[1], {}
    names = re.sub(r"#[^\n]*", "", found[2]).strip("() \n").split(",")
    for name in filter(None, map(str.strip, names)):
        home = NAMES.get(name.split()[0], MODULES.get(module, module))
        homes.setdefault(home, []).append(name)
    if list(homes) == [module]:
        return found[0]
    return "; ".join(f"from {home} import {', '.join(names)}" for home, names in homes.items())
