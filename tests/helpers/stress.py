"""Interrupt programs on virtual GPUs at random moments, thousands of times, and count what breaks.

    python tests/helpers/stress.py --interrupts 5000 --seed 0
    python tests/helpers/stress.py --interrupts 200 --workload data_parallel

A child process (`stress_child.py`) repeats one of the workloads of `stress_workloads.py` until it
is interrupted, 0.2 to 60 ms later, within 1 ms as often as after 10 to 50, and sometimes twice, as
by a user who presses stop twice. Then it checks: both devices synchronize, without an error; a
fixed computation is right to the last digit; no byte of memory is lost. A child in which anything
went wrong is replaced and the count goes on. The exit status is 1 if anything is wrong.

Columns of the table: `twice`, rounds in which a second interrupt came within 0.3 ms; `lost`,
interrupts that raised nothing within --late seconds; `hangs`, `deaths`, `wrong` (results or
errors) and `leaked` bytes, afterwards.
"""

import argparse
import contextlib
import json
import os
import random
import selectors
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import fresh
from stress_workloads import WORKLOADS
from waiting import wait_for_threads

CHILD = """
import sys
sys.path.insert(0, {folder!r})
from stress_child import main
main({patience}, {fault!r}, {workload!r})
"""
COUNTS = ("interrupts", "twice", "lost", "hangs", "deaths", "wrong", "leaked")
WRONG = ("lost", "hangs", "deaths", "wrong", "leaked")


class Trouble(Exception):
    """The child cannot go on: a column of the table, and what is known."""


class Child:
    """A process that plays rounds, and what it prints."""

    def __init__(self, patience, fault, workload):
        self.patience = patience
        self.output = tempfile.TemporaryFile("w+", errors="replace")
        (stdin, requests), (answers, stdout) = os.pipe(), os.pipe()
        self.requests, self.answers = open(requests, "wb", 0), open(answers, "rb", 0)
        folder = str(Path(__file__).parent)
        code = CHILD.format(folder=folder, patience=patience, fault=fault, workload=workload)
        with open(stdin) as stdin, open(stdout, "w") as stdout:
            self.process = fresh.Process(code, fresh.SET_UP, stdin, stdout, self.output)
        self.unread = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.answers, selectors.EVENT_READ)

    def ask(self, **what):
        """Send a request."""
        with contextlib.suppress(BrokenPipeError):  # it died: `answer` will tell
            self.requests.write((json.dumps(what) + "\n").encode())

    def answer(self, event, seconds):
        """Return the next answer, which should be `event`; raises Trouble and TimeoutError."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.unread:
            if not self.selector.select(max(0, deadline - time.monotonic())):
                raise TimeoutError
            read = os.read(self.answers.fileno(), 65536)
            if not read:
                raise self.trouble_of_end()
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        answer = json.loads(line)
        if answer["event"] != event:
            raise Trouble("wrong", f"no interrupt, but\n{answer['text']}")
        return answer

    def interrupt(self, number):
        with contextlib.suppress(ProcessLookupError):  # it died: `answer` will tell
            os.kill(self.process.pid, number)

    def trouble_of_end(self):
        """Return the Trouble of a child that ended by itself."""
        status, printed = self.process.wait(), self.printed()
        if status == 1 and "Timeout (0:" in printed:
            return Trouble("hangs", f"after the interrupt:\n{tail(printed)}")
        return Trouble("deaths", f"exit status {status}:\n{tail(printed)}")

    def trouble_of_silence(self):
        """Return the Trouble of a child that says nothing, with what its threads do."""
        self.interrupt(signal.SIGUSR1)
        wait_for_threads(self.printed)
        return Trouble("hangs", f"deaf to interrupts:\n{tail(self.printed())}")

    def printed(self):
        """Return what the child printed: errors, and what its threads did."""
        self.output.seek(0)
        return self.output.read()

    def end(self):
        self.process.end()
        for file in (self.requests, self.answers, self.selector, self.output):
            file.close()


def tail(text):
    """Return the last lines of `text`; of a list of threads, the main one's."""
    return "\n".join(text.splitlines()[-60:])


class Round:
    """What one seed decides: the workload, the signal, and when it comes."""

    def __init__(self, seed, late, workload=None):
        draw = random.Random(seed)
        self.seed, self.late = seed, late
        self.delay = 0.2e-3 * 300 ** draw.random()
        self.twice = draw.random() < 0.25
        self.gap = draw.uniform(0, 300e-6)
        self.workload = draw.choice(list(WORKLOADS))
        if workload:
            self.workload = workload
        self.signal = signal.SIGALRM if self.workload == "timeouts" else signal.SIGINT

    def play(self, child, row):
        """Play the round, counting in `row`; return descriptions of what is wrong."""
        reports, where = [], "no exception was seen"
        try:
            child.ask(workload=self.workload, seed=self.seed, number=self.signal)
            child.answer("begin", 2 * child.patience)
            where, lost = self.interrupt(child)
            row["interrupts"] += 1
            row["twice"] += self.twice
            if lost:
                row["lost"] += 1
                reports.append(f"lost: the first interrupt\n{tail(child.printed())}")
            checked = child.answer("checked", 2 * child.patience)
        except (Trouble, TimeoutError) as error:
            trouble = error if isinstance(error, Trouble) else child.trouble_of_silence()
            column, text = trouble.args
            row[column] += 1
            reports.append(f"{column}: {text}")
        else:
            if checked["problems"]:
                row["wrong"] += 1
                reports += checked["problems"]
            if checked["leaked"]:
                row["leaked"] += checked["leaked"]
                reports.append(f"leaked: {checked['leaked']} bytes")
        if reports:
            reports.append(f"Where it was interrupted:\n{where}")
        return reports

    def interrupt(self, child):
        """Interrupt the child, once more if that raises nothing.

        Returns where it was interrupted, and if an interrupt was lost.
        Raises Trouble, and TimeoutError if the child is deaf to it.
        """
        time.sleep(self.delay)
        child.interrupt(self.signal)
        if self.twice:
            time.sleep(self.gap)
            child.interrupt(self.signal)
        lost = False
        try:
            caught = child.answer("caught", self.late)
        except TimeoutError:
            lost = True
            child.interrupt(self.signal)
            caught = child.answer("caught", child.patience)
        return caught["text"], lost


def stress(interrupts, seed, workload=None, patience=20, late=10, failures=None, fault=None):
    """Play rounds until so many interrupts were delivered; return {workload: Counter}.

    Args:
        workload: play this one only.
        patience: seconds after which the checks that follow an interrupt hang.
        late: seconds after which an interrupt that raised nothing is lost; then comes another.
        failures: stop after so many rounds in which something was wrong.
        fault: what to let virtual GPUs do wrong: None, "lost" or one of `stress_child.FAULTS`.
    """
    rows = {name: Counter() for name in WORKLOADS}
    failed, child = 0, None
    try:
        while total(rows)["interrupts"] < interrupts and failed != failures:
            if child is None:
                child = Child(patience, fault, workload)
                child.answer("ready", 120)
            this = Round(seed, late, workload)
            reports = this.play(child, rows[this.workload])
            if reports:
                failed += 1
                again = f"--seed {seed}" + (f" --workload {workload}" if workload else "")
                print(f"\n== {this.workload}; again: {again} --interrupts 1")
                print("\n".join(reports), flush=True)
                child.end()
                child = None
            seed += 1
    finally:
        if child:
            child.end()
    return rows


def total(rows):
    """Return the sum of the rows."""
    return sum(rows.values(), Counter())


def print_table(rows):
    print("\n" + " " * 16 + "".join(f"{name:>11}" for name in COUNTS))
    for name, row in {**rows, "total": total(rows)}.items():
        print(f"{name:16}" + "".join(f"{row[column]:11}" for column in COUNTS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--interrupts", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", choices=WORKLOADS)
    parser.add_argument("--patience", type=float, default=20, help="seconds of a hang")
    parser.add_argument("--late", type=float, default=10, help="seconds of a lost interrupt")
    parser.add_argument("--failures", type=int, default=100, help="stop after so many")
    rows = stress(**vars(parser.parse_args()))
    print_table(rows)
    sys.exit(any(total(rows)[name] for name in WRONG))


if __name__ == "__main__":
    main()
