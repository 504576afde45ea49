"""Stop cells of a real Jupyter kernel, as the stop button does, and run one more cell each time.

    PYTHONPATH=tests/helpers python -c "from stops import stop_often; stop_often(100)"

Each cell is stopped 20 to 400 ms after it began. It must end with KeyboardInterrupt, and the next
cell must give the right result and find the right number of bytes in use.
"""

import contextlib
import queue
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from waiting import wait_for_threads

SET_UP = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
"""
SET_UP += """
import time
import torch, d2lpar
from stress import compute, memory_in_use
from torch import nn
from torch.nn import functional as F

devices = d2lpar.virtual_gpus(2)
x = torch.ones(1000, device=devices[0])
net = nn.DataParallel(d2lpar.lenet().to(devices[0]), device_ids=devices)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
images = torch.rand(64, 1, 28, 28, device=devices[0])
labels = torch.arange(64, device=devices[0]) % 10
in_use = None

def is_as_before():
    # without what the stopped cell made: variables, and what Python and IPython keep of frames
    global in_use
    globals()["loss"] = None
    optimizer.zero_grad()
    for name in ("type", "value", "traceback", "exc"):
        setattr(sys, f"last_{name}", None)
    shell = get_ipython()
    shell.InteractiveTB.tb = shell.InteractiveTB.evalue = shell.last_execution_result = None
    now = memory_in_use(devices, in_use, 3)
    in_use = in_use or now
    return now == in_use or f"{now} bytes in use instead of {in_use}"

optimizer.zero_grad()
F.cross_entropy(net(images), labels).backward()
optimizer.step()
(x + 1).sum().item()
"""
NEXT = "print(compute(devices), is_as_before())"
RIGHT = "[2048.0, 2048.0] True"
CELLS = {
    "operators": "for _ in range(10**9):\n    x + 1",
    "training": """while True:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()""",
    "waiting": "while True:\n    torch.vgpu._sleep(0.5)\n    torch.vgpu.synchronize()",
}
BEHIND = "launched before the stop"  # a cell that waits for two seconds may say what for
DUMP = """
import faulthandler, signal
dump = open({!r}, "w")
faulthandler.register(signal.SIGUSR1, file=dump)
faulthandler.enable(file=dump)
"""


class Trouble(Exception):
    """A cell did not end well: it hangs, the kernel died, or something is wrong."""


class Manager(KernelManager):
    """A kernel of the Python that runs this script, whatever kernels are installed."""

    @property
    def kernel_spec(self):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


class Cell:
    """What came of a cell: what it printed, the name of its error, and its traceback."""

    printed = error = traceback = ""


class Kernel:
    """A Jupyter kernel that runs cells, and stops them."""

    def __init__(self, set_up, next_cell, right, patience):
        self.next_cell, self.right, self.patience = next_cell, right, patience
        self.threads = tempfile.NamedTemporaryFile("r")
        self.output = tempfile.TemporaryFile("w+", errors="replace")
        self.manager = Manager()
        self.manager.start_kernel(stdout=self.output, stderr=self.output)
        self.client = self.manager.blocking_client()
        try:
            self.client.start_channels()
            self.client.wait_for_ready(timeout=120)
            for code in (DUMP.format(self.threads.name), set_up, next_cell):
                cell = self.run(code, patience=120)
            if cell.printed.strip() != right:
                raise RuntimeError(f"before any stop:\n{cell.printed}{cell.traceback}")
        except BaseException:
            self.close()
            raise

    def run(self, code, stop_at=None, delay=0, patience=None, on_print=lambda printed: None):
        """Run a cell, stop it so long after it has printed this text, if given; return its Cell.

        `on_print` is called with what it has printed so far whenever that grows.

        Raises Trouble when it does not end, or the kernel does.
        """
        patience = patience or self.patience
        request = self.client.execute(code)
        cell = Cell()
        begin = time.monotonic()
        while True:
            if time.monotonic() > begin + patience or not self.manager.is_alive():
                raise self.trouble()
            try:
                message = self.client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                cell.printed += content["text"]
                on_print(cell.printed)
                if stop_at is not None and stop_at in cell.printed:
                    time.sleep(delay)
                    begin, stop_at = time.monotonic(), None
                    self.manager.interrupt_kernel()
            elif kind == "error":
                cell.error = content["ename"]
                cell.traceback = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return cell

    def stop(self, code, delay):
        """Run a cell, stop it after so many seconds and run the next. Raises Trouble."""
        cell = self.run(f"print('begun', flush=True)\n{code}", "begun", delay)
        if cell.error != "KeyboardInterrupt":
            text = f"no KeyboardInterrupt, but {cell.error}\n{cell.traceback}\n{cell.printed}"
            raise Trouble(f"wrong: {text}")
        after = self.run(self.next_cell)
        printed = after.printed.splitlines()
        if [line for line in printed if not line.endswith(BEHIND)] != [self.right]:
            text = f"{after.printed}\n{after.traceback}\nafter:\n{cell.traceback}"
            raise Trouble(f"wrong: the next cell: {text}")

    def trouble(self):
        """Return the Trouble of a kernel that has died, or hangs, with what its threads do."""
        what = "died"
        if self.manager.is_alive():
            what = "hangs"
            self.manager.signal_kernel(signal.SIGUSR1)
            wait_for_threads(self.dumped)
        self.output.seek(0)
        printed = self.output.read() + self.dumped()  # the main thread's frames come last
        return Trouble("\n".join([f"{what}:", *printed.splitlines()[-60:]]))

    def dumped(self):
        """Return what the kernel's threads did when they were asked."""
        self.threads.seek(0)
        return self.threads.read()

    def close(self):
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.threads.close()
        self.output.close()


def stop_often(tries, seed=0, patience=15):
    """Stop each of `CELLS` so many times. Raises Trouble at the first harm.

    Args:
        patience: seconds in which a stopped cell, and the next one, must end.
    """
    draw = random.Random(seed)
    with contextlib.closing(Kernel(SET_UP, NEXT, RIGHT, patience)) as kernel:
        for name, code in CELLS.items():
            for _ in range(tries):
                kernel.stop(code, draw.uniform(0.02, 0.4))
            print(f"{name}: {tries} stops, no harm", flush=True)
