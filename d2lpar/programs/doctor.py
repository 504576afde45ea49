"""`d2lpar doctor`: what this machine has, what would run where, and what is wrong."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile

from d2lpar.other_programs import taken_now
from d2lpar.virtual import cores_of_this_process, memory_of_this_process
from d2lpar.virtual.private import check_python

GIB = 2**30
ENOUGH_MEMORY = 4 * GIB  # of this process: the chapters and their kernels take about three
ENOUGH_DISK = 2 * GIB  # where temporary files go
ENOUGH_SHARED_MEMORY = 256 * 2**20  # for the batches of a DataLoader's workers
LAB = ("jupyterlab", "ipykernel", "nbformat", "nbclient", "nbconvert", "matplotlib", "tqdm")


def examine():
    """Print what was found and return the exit code: 1 when something is wrong, otherwise 0."""
    doctor = Doctor()
    doctor.look()
    print("\n".join(doctor.lines))
    return 1 if doctor.num_wrong else 0


class Doctor:
    """Collects lines of text; `num_wrong` of them report a problem."""

    def __init__(self):
        self.lines = []
        self.num_wrong = 0

    def look(self):
        self._python()
        self._cores()
        self._other_programs()
        self._memory()
        self._disk()
        self._lab()
        if self._torch():
            self._gpus()
            self._kernels()
            self._names_of_cuda()
            self._processes()
        self._entry_point()
        if self.num_wrong:
            self.lines.append(f"{self.num_wrong} of these are wrong: the lines that begin with !")
        else:
            self.lines.append("nothing is wrong")

    def _say(self, name, text):
        self.lines.append(f"  {name:<14}{text}")

    def _wrong(self, name, text):
        self.num_wrong += 1
        self.lines.append(f"! {name:<14}{text}")

    def _judge(self, name, text, good, advice):
        if good:
            self._say(name, text)
        else:
            self._wrong(name, f"{text}: {advice}")

    def _python(self):
        text = f"{platform.python_version()} on {sys.platform}, {platform.machine()}"
        try:
            check_python()
        except RuntimeError as error:
            self._wrong("Python", f"{text}: {error}")
        else:
            self._say("Python", text)

    def _cores(self):
        cores, all_cores = cores_of_this_process(), os.cpu_count()
        text = f"{cores} of {all_cores} for this process"
        text += f"; up to {cores} virtual GPUs of one thread compute at the same time"
        self._judge("cores", text, cores >= 2, "virtual GPUs need two to show that they overlap")

    def _other_programs(self):
        for sentence in taken_now().sentences():
            self._wrong("busy", f"{sentence} just now: what you measure will take longer")

    def _memory(self):
        memory = memory_of_this_process()
        self._judge(
            "memory",
            f"{memory / GIB:.1f} GiB for this process",
            memory >= ENOUGH_MEMORY,
            f"the chapters need {ENOUGH_MEMORY / GIB:.0f} GiB",
        )
        if os.path.isdir("/dev/shm"):
            shared = shutil.disk_usage("/dev/shm").free
            self._judge(
                "shared memory",
                f"{shared / 2**20:.0f} MiB free in /dev/shm",
                shared >= ENOUGH_SHARED_MEMORY,
                "workers of a DataLoader pass batches through it; in Docker, start the container "
                "with --shm-size=1g",
            )

    def _disk(self):
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        self._judge(
            "disk",
            f"{free / GIB:.1f} GiB free in {folder}",
            free >= ENOUGH_DISK,
            f"processes leave results there; {ENOUGH_DISK / GIB:.0f} GiB should be free, or let "
            "TMPDIR name another folder",
        )

    def _lab(self):
        missing = [name for name in LAB if importlib.util.find_spec(name) is None]
        found = [
            f"{name} {importlib.metadata.version(name)}" for name in LAB if name not in missing
        ]
        self._judge(
            "notebooks",
            ", ".join(found) or "not installed; in a clone: pip install '.[lab]'",
            not missing or not found,  # virtual GPUs need none of them
            f"{', '.join(missing)} missing; in a clone: pip install '.[lab]'",
        )

    def _torch(self):
        try:
            import torch

            from d2lpar.virtual.private import check_version
        except Exception as error:
            self._wrong("torch", f"cannot be imported ({type(error).__name__}: {error})")
            return False
        build = f"a build for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        try:
            check_version(torch.__version__)
        except RuntimeError as error:
            self._wrong("torch", f"{torch.__version__}, {build}: {error}")
            return False
        self._say("torch", f"{torch.__version__}, {build}")
        self._torchvision(torch.__version__, torch.version.cuda)
        return True

    def _torchvision(self, torch_version, cuda):
        try:
            self._say("torchvision", importlib.import_module("torchvision").__version__)
        except ModuleNotFoundError:
            self._say("torchvision", "not installed; chapters 12 and 13 need it")
        except Exception as error:
            version = torch_version.partition("+")[0]
            index = "" if cuda else " --index-url https://download.pytorch.org/whl/cpu"
            self._wrong(
                "torchvision",
                f"cannot be imported ({error}): the chapters work around that, other programs do "
                "not. Install both from one place: pip install --force-reinstall "
                f"torch=={version} torchvision{index}",
            )

    def _gpus(self):
        import torch

        number = torch.cuda.device_count()
        if not number:
            self._say("GPUs", "none; ensure_gpus takes virtual ones")
            return
        names = sorted({torch.cuda.get_device_name(i) for i in range(number)})
        self._say("GPUs", f"{number} x {', '.join(names)}; ensure_gpus({number}) takes them")

    def _kernels(self):
        import torch

        capability = torch.backends.cpu.get_cpu_capability()
        libraries = [
            name
            for name, module in (("oneDNN", torch.backends.mkldnn), ("MKL", torch.backends.mkl))
            if module.is_available()
        ]
        threads = torch.get_num_threads()
        self._say(
            "kernels",
            f"{capability}{''.join(f', {name}' for name in libraries)}; torch uses {threads} "
            f"thread{'s' if threads > 1 else ''}, a virtual GPU "
            f"{os.environ.get('D2LPAR_THREADS') or 1} (D2LPAR_THREADS)",
        )

    def _names_of_cuda(self):
        from d2lpar.virtual.private.virtual_tables import can_answer_without_python

        if not can_answer_without_python():
            self._say(
                "d2lpar run",
                f"not on {sys.platform}, {platform.machine()}: it needs Linux on x86-64 or 64-bit "
                "ARM; on Windows, use WSL. Notebooks run all the same",
            )
            return
        refusal = _refusal()
        text = f"it is refused ({refusal})" if refusal else "virtual GPUs can stand for CUDA's"
        self._judge("d2lpar run", text, not refusal, "notebooks run all the same")

    def _processes(self):
        import torch.distributed as dist

        if not dist.is_available():
            self._wrong("processes", "this torch has no torch.distributed: launch cannot work")
            return
        backends = [
            name
            for name, known in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available))
            if known()
        ]
        self._judge(
            "processes",
            f"torch.distributed with {', '.join(backends) or 'no backend'}",
            "gloo" in backends,
            "launch needs gloo where there are fewer GPUs than ranks",
        )

    def _entry_point(self):
        known = {point.name for point in importlib.metadata.entry_points(group="torch.backends")}
        loading = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
        self._judge(
            "entry point",
            "torch.backends lists d2lpar" if "d2lpar" in known else "torch.backends lacks d2lpar",
            "d2lpar" in known,
            "programs under d2lpar run would not find the GPUs; install the package: pip install "
            "-e .",
        )
        if not loading:
            self._say("", "TORCH_DEVICE_BACKEND_AUTOLOAD switches it off here; d2lpar run does not")


def _refusal():
    """Return why virtual GPUs cannot stand for CUDA's in a process like this one, or ""."""
    code = "from d2lpar.virtual.as_cuda import stand_for_cuda; stand_for_cuda(1)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not done.returncode:
        return ""
    return (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
