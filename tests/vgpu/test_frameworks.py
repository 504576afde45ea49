"""Frameworks on two virtual GPUs: a program of each finds the losses that it finds on the CPU.

They are in an environment of their own, which `make test FRAMEWORKS=1` makes in that of the tests.
`benchmarks/bench_programs.py --frameworks` runs more of them, each in an environment of its own.
"""

import os
import sys
from pathlib import Path

import bench_programs
import pytest

ENVIRONMENT = Path(sys.prefix, "frameworks")
QUICK = [
    ("accelerate", "DDP"),
    ("transformers", "Trainer: DataParallel"),
    ("lightning", "FSDP"),
    ("deepspeed", "ZeRO-2, fp16"),
    ("ray", "Ray Train: DDP"),
]


@pytest.mark.parametrize(("framework", "name"), QUICK)
@pytest.mark.slow
def test_a_framework_finds_the_losses_of_the_cpu(framework, name):
    _, programs = bench_programs.FRAMEWORKS[framework]
    if not (ENVIRONMENT / "ready").exists() and not os.environ.get("FRAMEWORKS"):
        pytest.skip(f"{framework} is not installed: make test FRAMEWORKS=1")
    (program,) = (program for program in programs if program.name == name)
    folder = Path(bench_programs.__file__).parent
    on_cpu, on_gpus = (
        bench_programs.run_program(program, folder, n, ENVIRONMENT) for n in (None, 2)
    )
    assert (on_cpu.error, on_gpus.error) == (None, None)
    assert bench_programs.difference(on_gpus.losses, on_cpu.losses) <= program.within


def test_losses_that_cannot_be_compared_are_not_equal():
    for losses, on_cpu in ([], []), ([1.0], [1.0, 1.0]):
        with pytest.raises(ValueError, match=f"{len(losses)} losses, on the CPU {len(on_cpu)}"):
            bench_programs.difference(losses, on_cpu)
    assert bench_programs.difference([1.0, 3.0], [1.0, 2.0]) == 0.5


def test_a_program_that_uses_no_virtual_gpu_is_not_well(tmp_path):
    (tmp_path / "folder").mkdir()
    command = ["python", "-c", "print('losses 1.0')"]
    program = bench_programs.Program("print", "folder", lambda n: [[command]], on_cpu=command)
    found = [bench_programs.run_program(program, tmp_path, gpus).error for gpus in (None, 2)]
    assert found == [None, "no process used a virtual GPU"]


PAGE = """
Set up, and call it::

    import os

.. code:: python

    if __name__ == "__main__":
        print(os.sep)

The same by torchrun.

.. code-block:: python

   import sys
   if __name__ == "__main__":
       print(sys.argv)

.. code:: bash

    torchrun second.py
"""


def test_the_programs_on_a_page_are_kept_apart(tmp_path):
    """PyTorch's page on DDP has one for `spawn` and one for torchrun."""
    (tmp_path / "page.rst").write_text(PAGE)
    for number, (own, other) in enumerate((("os.sep", "sys"), ("sys.argv", "os"))):
        bench_programs.prepare_page(tmp_path, "page.rst", number)
        program = (tmp_path / "program.py").read_text()
        assert own in program and f"import {other}" not in program
        compile(program, "program", "exec")
