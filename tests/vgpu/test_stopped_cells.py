"""What a cell of a real kernel shows when it launches ranks, when it is stopped, and after that."""

import os
from pathlib import Path

import pytest
from stops import NEXT, RIGHT, SET_UP, Kernel

FOLDER = """
import os, tempfile
from pathlib import Path
folder = Path(tempfile.mkdtemp())
os.environ["VGPU_DEVICES"] = "vgpu"  # wherever this runs
"""
WORK = """
scale = 10
class Trouble(Exception): pass
def work(x):
    rank = torch.distributed.get_rank()
    print("hello from", rank)
    total = torch.tensor(x + rank)
    torch.distributed.all_reduce(total)
    return total.item() * scale
print(d2lpar.launch(work, 1))
"""
FAIL = """
def fail():
    raise Trouble("in a cell")
try:
    d2lpar.launch(fail)
except Trouble as error:
    print(error.__notes__[0])
"""
LAUNCH = """
import torch.distributed as dist
from vgpu.processes import roll_call; roll_call.ANSWER = 30  # here, not in the ranks
from waiting import note_when_in
def asleep():
    time.sleep(1000)
def work():
    rank = dist.get_rank()
    note_when_in(folder / str(rank), *(("asleep",) if rank else ("all_reduce", 1)))
    if rank == 1:
        asleep()
    dist.all_reduce(torch.ones(1))
def tell():
    while not all((folder / rank).exists() for rank in "01"):
        time.sleep(0.01)
    print("they are there", flush=True)
import threading; threading.Thread(target=tell).start()
d2lpar.launch(work)
"""
BEHIND = """
from vgpu.runtime import registry
from vgpu.runtime.scheduler import Op
from vgpu.runtime.threads import current_frames
def until_told(op):
    while not (folder / "told").exists():
        time.sleep(0.01)
device = registry.devices[0]
device.current_stream().issue(Op("held", "kernel", device.compute, until_told))
for _ in range(9):
    x + 1
import threading; main = threading.main_thread().ident
def tell():
    while current_frames()[main].f_code.co_name != "pass_gate":
        time.sleep(0.001)
    print("launched", flush=True)
threading.Thread(target=tell).start()
torch.vgpu.synchronize(devices[0])
"""


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel(SET_UP + FOLDER, NEXT, RIGHT, patience=60)
    yield kernel
    kernel.close()


def test_launch_in_a_notebook(kernel):
    *hello, result = kernel.run(WORK).printed.splitlines()
    assert sorted(hello) == ["[0] hello from 0", "[1] hello from 1"] and result == "[30, 30]"
    assert 'raise Trouble("in a cell")' in kernel.run(FAIL).printed  # the source of the cell
    raised = kernel.run("d2lpar.launch(fail)")
    assert raised.error == "Trouble" and "raised in rank" in raised.traceback
    assert kernel.run("print(d2lpar.launch(work, 2))").printed.endswith("[50, 50]\n")


def test_a_stopped_launch_shows_the_readers_line_and_where_the_ranks_were(kernel):
    """Jupyter interrupts the whole group of processes, the ranks among them."""
    cell = kernel.run(LAUNCH, "they are there")
    assert cell.error == "KeyboardInterrupt"
    *_, verdict, first, second = cell.traceback.splitlines()
    assert verdict == "KeyboardInterrupt: rank 1 had not arrived"
    assert first.startswith("  rank 0 had started 1 collective, waited for another rank and was at")
    assert first.endswith("of work: dist.all_reduce(torch.ones(1))")
    assert second.startswith("  rank 1 had started 0 collectives and was at")
    assert second.endswith("of asleep: time.sleep(1000)")
    assert "d2lpar.launch(work)" in cell.traceback
    assert "elastic" not in cell.traceback and "contextlib" not in cell.traceback
    assert kernel.run("print(d2lpar.launch(dist.get_rank))").printed == "[0, 1]\n"


def test_a_cell_that_waits_for_what_a_stopped_one_has_launched_says_so(kernel):
    stopped = kernel.run(BEHIND, "launched")
    assert stopped.error == "KeyboardInterrupt" and stopped.printed == "launched\n"
    assert "torch.vgpu.synchronize(devices[0])" in stopped.traceback
    assert os.sep + "vgpu" + os.sep not in stopped.traceback  # no frame of ours is shown
    folder = Path(kernel.run("print(folder)").printed.strip())
    said = "vgpu:0 is still working off 10 operators launched before the stop\n"
    code = "print((x + 1).sum().item())"
    after = kernel.run(code, on_print=lambda printed: (folder / "told").touch())
    assert after.printed == f"{said}2000.0\n"
