"""Stop cells of a real Jupyter kernel, as the stop button does, and run one more cell each time.

    python tests/helpers/stops.py --tries 100

Each cell is stopped 20 to 400 ms after it began. It must end with KeyboardInterrupt, and the next
cell must give the right result and find the right number of bytes in use, each within --patience
seconds. A kernel in which anything went wrong is replaced. The exit status is 1 if anything is
wrong.

Columns of the table: `hang`, a cell, stopped or next, that did not end; `died`, kernels; `wrong`,
another exception, result or number of bytes; `shown`, tracebacks that show the user's line; `ours`,
those that show a frame of d2lpar's.
"""

import argparse
import queue
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from waiting import wait_for_threads

import d2lpar
import vgpu

SET_UP = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
"""
SET_UP += """
import gc, sys, time
import torch, d2lpar
from torch import nn
from torch.nn import functional as F
from waiting import free_starting_threads

devices = d2lpar.virtual_gpus(2)
x = torch.ones(1000, device=devices[0])
net = nn.DataParallel(d2lpar.lenet().to(devices[0]), device_ids=devices)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
images = torch.rand(64, 1, 28, 28, device=devices[0])
labels = torch.arange(64, device=devices[0]) % 10
in_use = None

def compute():
    results = []
    for device, other in (devices, devices[::-1]):
        w = torch.full((8, 8), 2.0, device=device, requires_grad=True)
        (w @ w).sum().backward()
        results.append(w.grad.to(other).sum().item())
    return results

def drop():
    # what the stopped cell made: its variables, and what Python and IPython keep of its frames
    globals()["loss"] = None
    optimizer.zero_grad()
    for name in ("type", "value", "traceback", "exc"):
        setattr(sys, f"last_{name}", None)
    shell = get_ipython()
    shell.InteractiveTB.tb = shell.InteractiveTB.evalue = shell.last_execution_result = None

def is_as_before():
    # threads of nn.DataParallel that a stop left behind may take a moment
    global in_use
    drop()
    begin = time.monotonic()
    deadline = begin + 3
    while True:
        if time.monotonic() > begin + 1:
            free_starting_threads()
        time.sleep(0.05)  # leave Python to the threads
        gc.collect()
        now = [torch.vgpu.memory_allocated(device) for device in devices]
        in_use = in_use or now
        if now == in_use or time.monotonic() > deadline:
            return now == in_use or f"{now} bytes in use instead of {in_use}"

optimizer.zero_grad()
F.cross_entropy(net(images), labels).backward()
optimizer.step()
(x + 1).sum().item()
"""
NEXT = "print(compute(), is_as_before())"
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
COUNTS = ("tries", "fine", "hang", "died", "wrong", "shown", "ours")
WRONG = ("hang", "died", "wrong")
BEHIND = "launched before the stop"  # a cell that waits for two seconds may say what for
DUMP = """
import faulthandler, signal
dump = open({!r}, "w")
faulthandler.register(signal.SIGUSR1, file=dump)
faulthandler.enable(file=dump)
"""


class Trouble(Exception):
    """A cell did not end well: a column of the table, and what is known."""


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
            self.end()
            raise

    def run(self, code, stop_after=None, patience=None, on_print=lambda printed: None):
        """Run a cell, stop it after so many seconds, and return its Cell.

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
            if kind == "execute_input" and stop_after is not None:
                time.sleep(stop_after)
                begin = time.monotonic()
                self.manager.interrupt_kernel()
            elif kind == "stream":
                cell.printed += content["text"]
                on_print(cell.printed)
            elif kind == "error":
                cell.error = content["ename"]
                cell.traceback = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return cell

    def try_to_stop(self, code, delay):
        """Run and stop a cell, run the next; return the stopped Cell. Raises Trouble."""
        cell = self.run(code, stop_after=delay)
        if cell.error != "KeyboardInterrupt":
            text = f"no KeyboardInterrupt, but {cell.error}\n{cell.traceback}\n{cell.printed}"
            raise Trouble("wrong", text)
        try:
            after = self.run(self.next_cell)
            printed = after.printed.splitlines()
            if [line for line in printed if not line.endswith(BEHIND)] != [self.right]:
                raise Trouble("wrong", f"{after.printed}\n{after.traceback}")
        except Trouble as trouble:
            column, text = trouble.args
            raise Trouble(column, f"the next cell: {text}\nafter:\n{cell.traceback}") from None
        return cell

    def trouble(self):
        """Return the Trouble of a kernel that has died, or hangs, with what its threads do."""
        column = "died"
        if self.manager.is_alive():
            column = "hang"
            self.manager.signal_kernel(signal.SIGUSR1)
            wait_for_threads(self.dumped)
        self.output.seek(0)
        printed = self.output.read() + self.dumped()  # the main thread's frames come last
        return Trouble(column, "\n".join(printed.splitlines()[-60:]))

    def dumped(self):
        """Return what the kernel's threads did when they were asked."""
        self.threads.seek(0)
        return self.threads.read()

    def end(self):
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.threads.close()
        self.output.close()


def shows_user_line(traceback, code):
    """Return whether an arrow of `traceback` points at a line of the cell."""
    pointed = {line.strip() for line in re.findall(r"^-+> \d+ (.*)$", traceback, re.MULTILINE)}
    return bool(pointed & {line.strip() for line in code.splitlines()})


def shows_ours(traceback):
    """Return whether a frame of ours is visible in `traceback`."""
    files = re.findall(r"^File (.+?):\d+, in ", traceback, re.MULTILINE)
    ours = [Path(package.__file__).parent for package in (d2lpar, vgpu)]
    places = [Path(file).expanduser() for file in files]
    return any(place.is_relative_to(package) for place in places for package in ours)


def stops(tries, seed=0, patience=15, cells=CELLS, set_up=SET_UP, next_cell=NEXT, right=RIGHT):
    """Stop each of `cells` so many times; return {cell: Counter of the table's columns}.

    Args:
        patience: seconds in which a stopped cell, and `next_cell`, must end.
        right: what `next_cell` prints when all is well.
    """
    draw, kernel = random.Random(seed), None
    rows = {}
    try:
        for name, code in cells.items():
            row = rows[name] = Counter()
            example = ""
            for _ in range(tries):
                kernel = kernel or Kernel(set_up, next_cell, right, patience)
                row["tries"] += 1
                try:
                    cell = kernel.try_to_stop(code, draw.uniform(0.02, 0.4))
                except Trouble as trouble:
                    column, text = trouble.args
                    row[column] += 1
                    print(f"\n== {name}: {column}\n{text}", flush=True)
                    kernel.end()
                    kernel = None
                    continue
                example = cell.traceback
                row["fine"] += 1
                row["shown"] += shows_user_line(example, code)
                row["ours"] += shows_ours(example)
            print(f"\n== {name}: the last traceback of a fine stop\n{example}", flush=True)
    finally:
        if kernel:
            kernel.end()
    return rows


def print_table(rows):
    print("\n" + " " * 12 + "".join(f"{name:>8}" for name in COUNTS))
    for name, row in rows.items():
        print(f"{name:12}" + "".join(f"{row[column]:8}" for column in COUNTS))


def any_wrong(rows):
    return any(row[column] for row in rows.values() for column in WRONG)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=15, help="seconds of a hang")
    rows = stops(**vars(parser.parse_args()))
    print_table(rows)
    sys.exit(any_wrong(rows))


if __name__ == "__main__":
    main()
