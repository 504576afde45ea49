"""Which ranks of a `launch` are missing when one has waited too long for the others.

The backend "vccl" finds out by itself which ranks are missing: `virtual/distributed/agreement.py`.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback

import torch

from d2lpar import virtual
from d2lpar.virtual.distributed.agreement import CollectiveTimeout, in_words, is_gloo_timeout
from d2lpar.virtual.private.process_groups import num_collectives

ANSWER = 1.0  # seconds in which a rank says where it is


class _LateAtEnd(RuntimeError):
    """Other ranks have not returned in time."""


def is_timeout(error):
    """Return whether an error, or a cause of it, is a time-out while waiting for other ranks."""
    return any(
        isinstance(reason, _LateAtEnd | CollectiveTimeout) or is_gloo_timeout(str(reason))
        for reason in _reasons(error)
    )


def _reasons(error):
    """Return an error and the chain of its causes."""
    reasons = []
    while error is not None and error not in reasons:
        reasons.append(error)
        error = error.__cause__
    return reasons


class RollCall:
    """Finds out which ranks are missing when one has waited too long.

    A thread of each rank polls the job's store for a question from another rank. It answers with
    the number of collectives that its rank has started and the line at which its main thread is.
    """

    def __init__(self, store, rank, world_size):
        self.store, self.rank = store, rank
        self.others = [other for other in range(world_size) if other != rank]
        self.main = threading.get_ident()
        self.own = None  # the answer of a rank that asks itself
        self.lock = threading.Lock()
        self.closed = threading.Event()
        # A connection of its own: the main thread's may be busy, waiting for a rank.
        self.thread = threading.Thread(target=self._answer, args=(store.clone(),), daemon=True)
        self.thread.start()

    def _answer(self, store):
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the job
            while not self.closed.wait(ANSWER / 5):
                if store.check([f"ask {self.rank}"]):
                    with self.lock:
                        stack = traceback.extract_stack(sys._current_frames()[self.main])
                        answer = self.own or (_started(), _place(stack), _in_torch(stack[-1]))
                    store.set(f"answer {self.rank}", json.dumps(answer))
                    return

    def arrive_at_end(self, timeout):
        """Wait until every rank is here."""
        self.store.set(f"end {self.rank}", "")
        if not self._wait_for([f"end {other}" for other in self.others], timeout):
            raise _LateAtEnd

    def _wait_for(self, keys, seconds):
        """Return whether the store has all keys in time. (Its own wait warns when it has not.)"""
        deadline = time.monotonic() + seconds
        while keys and not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def report(self, error, timeout):
        """Ask the others where they are; return a message that names those that are missing."""
        with self.lock:
            at_end = isinstance(error, _LateAtEnd)
            started = sys.maxsize if at_end else _started()
            late = [reason for reason in _reasons(error) if isinstance(reason, CollectiveTimeout)]
            waits = "at the end"
            if not at_end:
                place = _place(traceback.extract_tb(error.__traceback__))
                # The host may have issued more since: then the group has said who is missing.
                what = late[0].call if late else f"collective {started}"
                waits = f"in {what}, {place}"
                self.own = started, place, True
        for other in self.others:
            self.store.set(f"ask {other}", "")
        self._wait_for([f"answer {other}" for other in self.others], ANSWER)
        answers, ended, silent = {}, [], []
        for other in self.others:
            if self.store.check([f"end {other}"]):
                ended.append(other)
            elif self.store.check([f"answer {other}"]):
                answers[other] = json.loads(self.store.get(f"answer {other}"))
            else:
                silent.append(other)
        if late:
            missing = list(late[0].missing)
        else:
            missing = silent + [rank for rank, (count, _, _) in answers.items() if count < started]
            missing += [] if at_end else ended
        if not missing:  # all wait for something, or for a message from one that works
            missing = [other for other, (_, _, in_torch) in answers.items() if not in_torch]
        verdict = "the ranks wait for different things"
        if missing:
            verdict = f"{in_words(sorted(missing))} had not arrived"
        lines = [f"rank {self.rank} waited {timeout:g} s {waits}; {verdict}"]
        for other in self.others:
            if other in answers:
                count, place, _ = answers[other]
                collectives = f"{count} collective{'s' * (count != 1)}"
                lines.append(f"  rank {other} had started {collectives} and was at {place}")
            else:
                lines.append(f"  rank {other} {'had returned' if other in ended else 'is silent'}")
        return "\n".join(lines)

    def close(self):
        """End the thread: none may be in C++ code when the process ends."""
        self.closed.set()
        self.thread.join(ANSWER)


def _started():
    return num_collectives()


def _in_torch(frame):
    """Return whether a frame is in torch or in the virtual GPUs, which act as a part of it."""
    return frame.filename.startswith(_TORCH)


_TORCH = tuple(os.path.dirname(package.__file__) for package in (torch, virtual))


def _place(stack):
    """Describe the innermost line of a stack that is not torch's."""
    frame = [frame for frame in stack if not _in_torch(frame)][-1]
    return f"line {frame.lineno} of {frame.name}" + (f": {frame.line}" if frame.line else "")
