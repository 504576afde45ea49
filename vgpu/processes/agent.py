"""torch's elastic agent on this machine: starts, monitors, restarts and ends the ranks."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import types
import uuid
from multiprocessing.connection import wait
from pathlib import Path

import cloudpickle
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from vgpu.distributed.agreement import is_lost_connection
from vgpu.processes import roll_call
from vgpu.processes.rank import STREAMS, output_path, serve, store_of

# On Linux, ranks are forks of a server that has imported torch. Windows cannot fork, and on macOS
# forking a process with torch is unsafe.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_PRELOAD = ["vgpu.processes.preload"]
_ADDRESS = "127.0.0.1"
_POLL_SECONDS = 0.1  # at most between two polls, which take 0.3 ms of a core each
_MAX_SENTINELS = 60  # Windows waits for 63 objects at most
SECONDS_TO_SETTLE = roll_call.ANSWER + 0.5


class Agent(LocalElasticAgent):
    """An agent for one call of `launch`.

    Attributes:
        error: the exception of the last attempt; None if it did not fail.
        where: a text on where the ranks were at an interrupt; "" if unknown.
    """

    def __init__(self, folder, nproc, timeout, max_restarts):
        spec = WorkerSpec(
            role="worker",
            local_world_size=nproc,
            entrypoint=serve,
            args=(folder, timeout),
            rdzv_handler=_Rendezvous(),
            max_restarts=max_restarts,
            monitor_interval=1e-4,  # `_monitor_workers` waits by itself
            local_addr=_ADDRESS,
        )
        self.folder, self.nproc = folder, nproc
        self.output = _Output(folder)
        self.interrupts = 0
        self.where = ""
        self.error = None
        if START_METHOD == "forkserver":
            multiprocessing.set_forkserver_preload(_PRELOAD)
        super().__init__(spec, self.output, start_method=START_METHOD)

    @property
    def processes(self):
        context = self._pcontext and self._pcontext._pc
        return context.processes if context else []

    def interrupt(self):
        """Make `run` end all ranks; they have roll_call.ANSWER seconds to report where they are.

        A second call ends them at once.
        """
        self.interrupts += 1

    def kill(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def results(self):
        results = []
        for rank, path in enumerate(self.files("result")):
            try:
                results.append(cloudpickle.loads(path.read_bytes()))
            except Exception as error:
                raise TypeError(
                    f"the result of rank {rank} cannot be unpickled here: {error}"
                ) from error
        return results

    @property
    def _attempt(self):
        return self.get_worker_group().spec.max_restarts - self._remaining_restarts

    def files(self, kind):
        """Return the paths of a kind of file, "result" or "error", of this attempt, by rank."""
        return [Path(self.folder, f"{self._attempt}.{rank}.{kind}") for rank in range(self.nproc)]

    def _start_workers(self, worker_group):
        self.settled = None
        self.codes = [None] * self.nproc  # the exit codes at the last poll
        with isolated():
            return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group):
        """Poll the ranks: show their output and return their state.

        torch's method reports neither exceptions nor signals, and waits 30 s without interrupts
        for a process that does not end.
        """
        ranks = zip(self.processes, self.codes, strict=True)
        alive = [process.sentinel for process, code in ranks if code is None]
        with contextlib.suppress(InterruptedError):  # Ctrl-C on Windows
            wait(alive[:_MAX_SENTINELS], _POLL_SECONDS)
        self.output.show()
        if self.interrupts:
            store = store_of(self.folder, self._attempt, self.nproc)
            self.where = roll_call.locate_ranks(store, self.nproc, lambda: self.interrupts > 1)
            self.kill()
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        self.codes = codes = [process.exitcode for process in self.processes]
        done = [path.exists() for path in self.files("result")]
        if codes == [0] * self.nproc and all(done):
            self.error = None
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(range(self.nproc)))
        if not any(
            code or (code == 0 and not here) for code, here in zip(codes, done, strict=True)
        ):
            return RunResult(WorkerState.HEALTHY)
        # One failed. Others may fail soon, as a consequence or with a better report.
        self.settled = self.settled or time.monotonic() + SECONDS_TO_SETTLE
        if None in codes and time.monotonic() < self.settled:
            return RunResult(WorkerState.HEALTHY)
        self.kill()
        self.output.show()
        self.error = failure_reason(codes, self.files("error"))
        if self._remaining_restarts:
            summary = traceback.format_exception_only(self.error)[0].strip()
            total = worker_group.spec.max_restarts
            print(f"{summary}; restart {total - self._remaining_restarts + 1} of {total}")
        return RunResult(WorkerState.FAILED)


def failure_reason(codes, paths):
    """Return the exception that made an attempt fail.

    `codes` are the exit codes of the ranks, None for those that run; `paths` their files of errors.
    """
    killed = {
        rank: signal.Signals(-code).name for rank, code in enumerate(codes) if (code or 0) < 0
    }
    if killed:
        each = (f"rank {rank} was killed by {name}" for rank, name in killed.items())
        return RuntimeError(", ".join(each))
    reports = []
    for rank, path in enumerate(paths):
        if path.exists():
            moment, error, summary, text = cloudpickle.loads(path.read_bytes())
            # Lost connections are a consequence of another rank's failure.
            reports.append((is_lost_connection(summary), moment, rank, error, summary, text))
    gone = [rank for rank, code in enumerate(codes) if code is not None]
    gone = sorted({*gone} - {report[2] for report in reports})
    if gone and (not reports or min(reports)[0]):
        rank = gone[0]
        return RuntimeError(f"rank {rank} ended with exit code {codes[rank]} before it returned")
    _, _, rank, error, summary, text = min(reports)
    try:
        error = cloudpickle.loads(error)
    except Exception:
        error = RuntimeError(summary)
    error.add_note(f"This was raised in rank {rank}:\n{text}")
    return error


class _Rendezvous(StaticTCPRendezvous):
    """A rendezvous for a single agent, without waiting and without a socket."""

    use_agent_store = False  # the ranks use a file, and a free port

    def __init__(self):
        super().__init__(_ADDRESS, 0, 0, 1, run_id=uuid.uuid4().hex, timeout=60)

    def next_rendezvous(self):
        """Return a store for the agent alone, and an address for a store of the ranks."""
        store = HashStore()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, _ADDRESS))


class _Output(DefaultLogsSpecs):
    """Shows the output of the ranks, which `rank.serve` redirects to files.

    torch's own redirection does nothing on Windows and macOS.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.files = []

    def reify(self, envs):
        """Create the files of an attempt; pass this process's environment on."""
        self.close()
        for env in envs.values():
            env.update({**os.environ, **env})
        for stream in STREAMS:
            for rank, env in envs.items():
                path = output_path(self.root_log_dir, env, stream)
                path.touch()
                self.files.append([rank, stream, open(path, "rb"), b""])
        return super().reify(envs)

    def show(self, last=False):
        """Print complete lines, each with the rank in front."""
        for entry in self.files:
            rank, stream, file, begun = entry
            *lines, entry[3] = (begun + file.read()).split(b"\n")
            if last and entry[3]:
                lines.append(entry[3])
            for line in lines:
                print(f"[{rank}] {line.decode(errors='replace')}", file=getattr(sys, stream))

    def close(self):
        try:
            self.show(last=True)
        finally:
            for *_, file, _ in self.files:
                file.close()
            self.files.clear()


@contextlib.contextmanager
def isolated():
    """Isolate this process and those started in the block from each other.

    torch's agent would leave its SIGTERM handler behind: the empty setting prevents that, and the
    disabled logger its warning. `multiprocessing` would run the script that calls `launch` again in
    each process, to find functions, which `launch` pickles by value.
    """
    setting, main = "TORCHELASTIC_SIGNALS_TO_HANDLE", sys.modules["__main__"]
    before = os.environ.get(setting)
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.disabled = True
    os.environ[setting] = ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        logger.disabled = False
        del os.environ[setting]
        if before is not None:
            os.environ[setting] = before
