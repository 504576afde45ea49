"""`vgpu doctor`: checks this machine and installation.

Each check yields (name, status, advice); the advice is "" where nothing is wrong.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile

from vgpu import cores_of_this_process, memory_of_this_process
from vgpu.other_programs import measure_cpu_shares
from vgpu.private import check_python, check_version

GIB = 2**30
ENOUGH_MEMORY = 4 * GIB  # for this process: the chapters and their kernels take about three
ENOUGH_DISK = 2 * GIB  # for temporary files
ENOUGH_SHARED_MEMORY = 256 * 2**20  # for the batches of a DataLoader's workers
LAB = ("jupyterlab", "ipykernel", "nbformat", "nbclient", "nbconvert", "matplotlib", "tqdm")


def examine():
    """Print the results of all checks; return the exit code, 1 if something is wrong, else 0."""
    num_wrong = 0
    for check in (_python, _cores, _other_programs, _memory, _disk, _lab, _torch, _entry_point):
        for name, text, wrong in check():
            num_wrong += bool(wrong)
            print(f"{'!' if wrong else ' '} {name:<14}{text}{f': {wrong}' if wrong else ''}")
    wrong = f"{num_wrong} of these are wrong: the lines that begin with !"
    print(wrong if num_wrong else "nothing is wrong")
    return 1 if num_wrong else 0


def _python():
    text = f"{platform.python_version()} on {sys.platform}, {platform.machine()}"
    yield "Python", text, _refusal(check_python)


def _refusal(check, *arguments):
    """Return the error that a check raises, or ""."""
    try:
        check(*arguments)
    except RuntimeError as error:
        return error
    return ""


def _cores():
    cores, all_cores = cores_of_this_process(), os.cpu_count()
    text = f"{cores} of {all_cores} for this process"
    text += f"; up to {cores} virtual GPUs of one thread compute at the same time"
    yield "cores", text, "" if cores >= 2 else "virtual GPUs overlap only on two cores or more"


def _other_programs():
    for sentence in measure_cpu_shares().sentences():
        yield "busy", f"{sentence} just now", "measured times will be longer"


def _memory():
    memory = memory_of_this_process()
    advice = f"the chapters need {ENOUGH_MEMORY / GIB:.0f} GiB"
    text = f"{memory / GIB:.1f} GiB for this process"
    yield "memory", text, "" if memory >= ENOUGH_MEMORY else advice
    if os.path.isdir("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm").free
        advice = (
            "DataLoader workers pass batches through it; in Docker, start the container "
            "with --shm-size=1g"
        )
        text = f"{shared / 2**20:.0f} MiB free in /dev/shm"
        yield "shared memory", text, "" if shared >= ENOUGH_SHARED_MEMORY else advice


def _disk():
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    advice = (
        f"processes write results there: {ENOUGH_DISK / GIB:.0f} GiB must be free, or set TMPDIR "
        "to another folder"
    )
    yield "disk", f"{free / GIB:.1f} GiB free in {folder}", "" if free >= ENOUGH_DISK else advice


def _lab():
    missing = [name for name in LAB if importlib.util.find_spec(name) is None]
    found = [f"{name} {importlib.metadata.version(name)}" for name in LAB if name not in missing]
    if not found:  # optional
        yield "notebooks", "not installed; in a clone: pip install '.[lab]'", ""
        return
    wrong = f"{', '.join(missing)} missing; in a clone: pip install '.[lab]'" if missing else ""
    yield "notebooks", ", ".join(found), wrong


def _torch():
    try:
        import torch
    except Exception as error:
        yield "torch", "cannot be imported", f"{type(error).__name__}: {error}"
        return
    build = f"a build for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    refusal = _refusal(check_version, torch.__version__)
    yield "torch", f"{torch.__version__}, {build}", refusal
    for check in () if refusal else (_torchvision, _gpus, _kernels, _vgpu_run, _processes):
        yield from check(torch)


def _torchvision(torch):
    try:
        yield "torchvision", importlib.import_module("torchvision").__version__, ""
    except ModuleNotFoundError:
        yield "torchvision", "not installed; chapters 14 and 15 need it", ""
    except Exception as error:
        version = torch.__version__.partition("+")[0]
        index = "" if torch.version.cuda else " --index-url https://download.pytorch.org/whl/cpu"
        advice = (
            "the chapters work around this, other programs do not. Install both from one index: "
            f"pip install --force-reinstall torch=={version} torchvision{index}"
        )
        yield "torchvision", f"cannot be imported ({error})", advice


def _gpus(torch):
    number = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(number)}))
    found = f"{number} x {names}; ensure_gpus({number}) takes them"
    yield "GPUs", found if number else "none; ensure_gpus takes virtual ones", ""


def _kernels(torch):
    backends = {"oneDNN": torch.backends.mkldnn, "MKL": torch.backends.mkl}
    libraries = [name for name, module in backends.items() if module.is_available()]
    threads = torch.get_num_threads()
    text = ", ".join([torch.backends.cpu.get_cpu_capability(), *libraries])
    text += f"; torch uses {threads} thread{'s' if threads > 1 else ''}, a virtual GPU "
    yield "kernels", f"{text}{os.environ.get('VGPU_THREADS') or 1} (VGPU_THREADS)", ""


def _vgpu_run(torch):
    from vgpu.private.virtual_tables import can_answer_without_python

    if not can_answer_without_python():
        text = (
            f"not on {sys.platform}, {platform.machine()}: it needs Linux on x86-64 or 64-bit ARM; "
            "on Windows, use WSL. Notebooks do not need it"
        )
        yield "vgpu run", text, ""
    elif refusal := refusal_reason():
        yield "vgpu run", f"it is refused ({refusal})", "notebooks do not need it"
    else:
        yield "vgpu run", "virtual GPUs can stand for CUDA's", ""


def _processes(torch):
    dist = torch.distributed
    if not dist.is_available():
        yield "processes", "this torch has no torch.distributed", "launch cannot work"
        return
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    backends = [name for name, is_available in known.items() if is_available()]
    text = f"torch.distributed with {', '.join(backends) or 'no backend'}"
    advice = "launch needs gloo where there are fewer GPUs than ranks"
    yield "processes", text, "" if "gloo" in backends else advice


def _entry_point():
    known = {point.name for point in importlib.metadata.entry_points(group="torch.backends")}
    verb, wrong = "lists", ""
    if "vgpu" not in known:
        verb = "lacks"
        wrong = "vgpu run will not find the GPUs; install the package: pip install -e ."
    yield "entry point", f"torch.backends {verb} vgpu", wrong
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        text = "disabled here by TORCH_DEVICE_BACKEND_AUTOLOAD; vgpu run enables it"
        yield "", text, ""


def refusal_reason():
    """Return the reason why virtual GPUs cannot replace CUDA's in a new process, or ""."""
    code = "from vgpu.cuda.cuda_device import stand_for_cuda; stand_for_cuda(1)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not done.returncode:
        return ""
    return (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
