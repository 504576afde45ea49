"""The kernel never dies: each fault reaches the user as its exception, and the devices work
afterwards. One process meets them all, one after the other."""

import textwrap
from pathlib import Path

import fresh
import pytest

OF_A_TENSOR = """
x = torch.rand(3, device=device, requires_grad=True)
y = x.exp()
{}
y.sum().backward()
"""
OF_A_MODULE = """
net = torch.nn.Linear(3, 3).to(device)
{}
net(torch.rand(2, 3, device=device)).sum().backward()
"""
FAULTS = {
    "a shape error in dispatch under a built-in backward": (
        "RuntimeError: shape '[17]' is invalid for input of size 3",
        OF_A_TENSOR.format("x.register_hook(lambda grad: grad.view(17))"),
    ),
    **{
        f"an error in a hook {where}": (
            "ZeroDivisionError: division by zero",
            program.format(f"{register}(lambda *arguments: 1 / 0)"),
        )
        for where, program, register in (
            ("of a tensor", OF_A_TENSOR, "y.register_hook"),
            ("of a node", OF_A_TENSOR, "y.grad_fn.register_hook"),
            ("before a node", OF_A_TENSOR, "y.grad_fn.register_prehook"),
            ("after accumulation", OF_A_TENSOR, "x.register_post_accumulate_grad_hook"),
            ("behind the backward of a module", OF_A_MODULE, "net.register_full_backward_hook"),
            ("behind the forward of a module", OF_A_MODULE, "net.register_forward_hook"),
        )
    },
    "an error in autograd.Function.backward": (
        "ValueError: mine",
        """
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                raise ValueError("mine")

        Function.apply(torch.rand(3, device=device, requires_grad=True)).sum().backward()
        """,
    ),
    "an error in the recomputation of a checkpoint": (
        "KeyError: 'second'",
        """
        from torch.utils.checkpoint import checkpoint

        calls = []

        def forward(x):
            calls.append(x)
            if len(calls) == 2:
                raise KeyError("second")
            return x.exp()

        x = torch.rand(3, device=device, requires_grad=True)
        checkpoint(forward, x, use_reentrant=True).sum().backward()
        """,
    ),
    "a gradient whose size a hook changed": (
        "RuntimeError: hook '<lambda>' has changed the size of value",
        OF_A_TENSOR.format("y.register_hook(lambda grad: torch.rand(4, device=device))"),
    ),
    "an error that autograd finds itself": (
        "RuntimeError: one of the variables needed for gradient computation has been modified",
        OF_A_TENSOR.format("y.add_(1)"),
    ),
    "out of memory in the middle of backward": (
        "OutOfMemoryError: VGPU out of memory. Tried to allocate 1.00 MiB. vgpu:0 has a total "
        "capacity of 4.00 MiB",
        """
        d2lpar.virtual_gpus(2, memory=4 * 2**20)
        x = torch.rand(256, 1024, device=device, requires_grad=True)
        y = x @ torch.rand(1024, 8, device=device)
        filled = torch.empty(5 * 2**19, dtype=torch.uint8, device=device)
        y.sum().backward()
        """,
    ),
    "an asynchronous error": (
        "AcceleratorError: vgpu error: aten.embedding on vgpu:0 failed after it was issued",
        """
        weight = torch.rand(3, 4, device=device, requires_grad=True)
        index = torch.tensor([7], device=device)
        torch.nn.functional.embedding(index, weight).sum().backward()
        torch.vgpu.synchronize(device)
        """,
    ),
    "an interrupt while waiting": (
        "KeyboardInterrupt",
        """
        with held():
            torch.vgpu._sleep(0.1)  # goes on until the block ends
            threading.Timer(0.1, interrupt).start()
            torch.vgpu.synchronize(device)
        """,
    ),
}

BEGIN = """
import os, signal, sys, threading
import torch, d2lpar

sys.path.append({folder!r})
from held import held

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

"""
ONE = """
print({name!r}, flush=True)
device = d2lpar.virtual_gpus(2)[0]
try:
{fault}
except BaseException as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
y = x = net = weight = filled = None
device, other = d2lpar.virtual_gpus(2)
for each in (device, other):
    torch.vgpu.synchronize(each)
    x = torch.ones(3, device=each, requires_grad=True)
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
print("the devices work", flush=True)
"""


@pytest.fixture(scope="module")
def ran():
    program = BEGIN.format(folder=str(Path(fresh.__file__).parent))
    for name, (_, fault) in FAULTS.items():
        fault = textwrap.indent(textwrap.dedent(fault).strip(), "    ")
        program += ONE.format(name=name, fault=fault)
    return fresh.run(program, fresh.SET_UP)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_reaches_the_user_and_the_devices_work_afterwards(ran, name):
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    told = ran.stdout.partition(f"{name}\n")[2].partition("the devices work\n")
    assert told[0].startswith(FAULTS[name][0]) and told[1]
