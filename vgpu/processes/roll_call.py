"""Where the ranks of a job are, and which of them are missing.

A rank asks the others after a time-out, and `launch` asks all of them at an interrupt. The backend
"vccl" detects missing ranks by itself: `vgpu/distributed/agreement.py`.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback

import torch

import vgpu as virtual
from vgpu.distributed import agreement
from vgpu.distributed.agreement import CollectiveTimeout, is_gloo_timeout, ranks_text
from vgpu.distributed.timekeeper import KeeperConnection
from vgpu.private.process_groups import num_collectives
from vgpu.runtime.threads import current_frames

ANSWER = 1.0  # seconds for a rank to answer
RETURNED, STARTING, SILENT = "had returned", "was starting", "is silent"


class _LateAtEnd(RuntimeError):
    """Other ranks did not return in time."""


def is_timeout(error):
    """Return whether an error or one of its causes is a time-out in waiting for other ranks."""
    return any(
        isinstance(reason, _LateAtEnd | CollectiveTimeout) or is_gloo_timeout(str(reason))
        for reason in _reasons(error)
    )


def _reasons(error):
    reasons = []
    while error is not None and error not in reasons:
        reasons.append(error)
        error = error.__cause__
    return reasons


class RollCall:
    """Finds the missing ranks after a time-out.

    A thread of each rank polls the job's store for a question from another rank or from `launch`.
    It answers with the number of collectives that its rank has started, the current line of its
    main thread, and whether it waits for other ranks.
    """

    def __init__(self, store, rank, world_size):
        self.store, self.rank = store, rank
        store.set(f"here {rank}", "")
        self.others = [other for other in range(world_size) if other != rank]
        self.main = threading.get_ident()
        self.own = None  # the answer of this rank once it has timed out
        self.lock = threading.Lock()
        self.closed = threading.Event()
        # A clone is another connection: the main thread's may be blocked by a wait.
        self.thread = threading.Thread(target=self._answer, args=(store.clone(),), daemon=True)
        self.thread.start()

    def _answer(self, store):
        with contextlib.suppress(RuntimeError):  # the store, and the job, has ended
            while not self.closed.wait(ANSWER / 5):
                if store.check([f"ask {self.rank}"]):
                    with self.lock:
                        answer = self.own or self._state()
                    store.set(f"answer {self.rank}", json.dumps(answer))
                    return

    def _state(self):
        frames = current_frames()  # the innermost of each thread
        place = _place(traceback.extract_stack(frames[self.main]))
        waits = frames[self.main].f_code.co_filename.startswith(_DISTRIBUTED)
        return num_collectives(), place, waits or any(map(_waits, frames.values()))

    def arrive_at_end(self, timeout):
        self.store.set(f"end {self.rank}", "")
        if not _wait_for(self.store, [f"end {other}" for other in self.others], timeout):
            raise _LateAtEnd

    def report(self, error, timeout):
        """Ask the others where they are; return a message that names the missing ones."""
        with self.lock:
            at_end = isinstance(error, _LateAtEnd)
            started = sys.maxsize if at_end else num_collectives()
            late = [reason for reason in _reasons(error) if isinstance(reason, CollectiveTimeout)]
            waits = "at the end"
            if not at_end:
                place = _place(traceback.extract_tb(error.__traceback__))
                # The host may have issued more since; the error of vccl names the collective.
                what = late[0].call if late else f"collective {started}"
                waits = f"in {what}, {place}"
                self.own = started, place, True
        replies = ask_ranks(self.store, self.others)
        counts = {rank: reply[0] for rank, reply in replies.items() if not isinstance(reply, str)}
        absent = (SILENT, STARTING) if at_end else (SILENT, STARTING, RETURNED)
        missing = [rank for rank, reply in replies.items() if reply in absent]
        missing += [rank for rank, count in counts.items() if count < started]
        if late:
            missing = list(late[0].missing)
        if not missing:  # all wait, or wait for a message from one that does not
            missing = [rank for rank in counts if not replies[rank][2]]
        verdict = "the ranks wait for different operations"
        if missing:
            verdict = f"{ranks_text(sorted(missing))} had not arrived"
        first = f"rank {self.rank} waited {timeout:g} s {waits}; {verdict}"
        longer = f"{4 * timeout:g}"
        last = (
            f"if ranks must work for longer than {timeout:g} s while others wait for them: "
            f"launch(..., timeout={longer}), or --timeout {longer} under torchrun"
        )
        return "\n".join([first, *_lines(replies), last])

    def close(self):
        """End the thread: it must not be in C++ code when the process ends."""
        self.closed.set()
        self.thread.join(ANSWER)


def _missing(replies):
    """Return the ranks that others probably wait for.

    A rank that waits in C++ code, as in DDP's backward pass, seems to work; the numbers of
    collectives distinguish it.
    """
    counts = {rank: reply[0] for rank, reply in replies.items() if not isinstance(reply, str)}
    waiting = [rank for rank in counts if replies[rank][2]]
    some_returned = RETURNED in replies.values()
    most = max((counts[rank] for rank in waiting), default=sys.maxsize if some_returned else -1)
    absent = [SILENT]
    if waiting or some_returned:
        absent.append(STARTING)
    if waiting:
        absent.append(RETURNED)
    missing = [rank for rank, reply in replies.items() if reply in absent]
    missing += [rank for rank, count in counts.items() if count <= most and rank not in waiting]
    if not missing:
        missing = [rank for rank, count in counts.items() if count < max(counts.values())]
    return sorted(missing)


def _lines(replies):
    for rank, reply in sorted(replies.items()):
        if not isinstance(reply, str):
            count, place, waits = reply
            did = f"had started {count} collective{'s' * (count != 1)}"
            reply = f"{did}{', waited for another rank' * waits} and was at {place}"
        yield f"  rank {rank} {reply}"


def locate_ranks(store, world_size, given_up):
    """Ask all ranks where they are; return a text with their places and the missing ranks.

    `given_up` is a function that returns whether to stop waiting; the text is "" then.
    """
    replies = ask_ranks(store, range(world_size), given_up)
    if given_up():
        return ""
    missing = _missing(replies)
    verdict = f"{ranks_text(missing)} had not arrived" if missing else "no rank was missing"
    return "\n".join([verdict, *_lines(replies)])


def ask_ranks(store, ranks, given_up=lambda: False):
    """Ask ranks where they are; return their replies within ANSWER seconds, {rank: reply}.

    A reply is a list: the number of collectives that the rank has started, its line, whether it
    waits; or RETURNED, STARTING (it has no process group yet) or SILENT.
    """

    def that_are(state):
        return [rank for rank in ranks if store.check([f"{state} {rank}"])]

    for rank in ranks:
        store.set(f"ask {rank}", "")
    busy = set(that_are("here")) - set(that_are("end"))
    _wait_for(store, [f"answer {rank}" for rank in busy], ANSWER, given_up)
    returned, here, answered = that_are("end"), that_are("here"), that_are("answer")
    replies = {rank: SILENT if rank in here else STARTING for rank in ranks}
    replies |= {rank: json.loads(store.get(f"answer {rank}")) for rank in answered}
    return replies | dict.fromkeys(returned, RETURNED)


def _wait_for(store, keys, seconds, given_up=lambda: False):
    """Return whether a store gets all keys in time; its own `wait` would warn at a time-out."""
    deadline = time.monotonic() + seconds
    while keys and not store.check(keys):
        if time.monotonic() > deadline or given_up():
            return False
        time.sleep(0.01)
    return True


def _waits(frame):
    """Return whether a thread of vgpu waits for other ranks, given its innermost frame.

    On a modelled clock it waits for the timekeeper.
    """
    code = frame.f_code
    return code.co_filename == agreement.__file__ or code is KeeperConnection.ask.__code__


_TORCH = tuple(os.path.dirname(package.__file__) for package in (torch, virtual))
_DISTRIBUTED = os.path.dirname(torch.distributed.__file__)


def _place(stack):
    """Describe the innermost line of a stack outside torch and vgpu."""
    frame = [frame for frame in stack if not frame.filename.startswith(_TORCH)][-1]
    return f"line {frame.lineno} of {frame.name}" + (f": {frame.line}" if frame.line else "")
