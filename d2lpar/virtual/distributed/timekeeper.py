"""One modelled time for the ranks of a job, each of which simulates its own devices.

A collective begins when the last of its ranks is ready. A rank's simulation cannot know that from
its own ops, so it *posts* the collective at the time at which its inputs are ready, and the keeper,
a thread in the process of the rank that comes first, tells all of its ranks when they *meet*.

While a rank has posted what others have not, it may not simply go on: the meeting may turn out to
lie before its next event. So it asks for leave to go on to that event's time, and gets it once no
rank that it waits for, or that one of those waits for, can do anything earlier. This is what makes
the result exact, and the same in every run. (It is a conservative parallel simulation with a
global minimum in place of null messages: Chandy and Misra 1979, https://doi.org/10.1109/TSE.1979.230182.)

Nothing is simulated past the clock of a host that may still issue ops. But a host may itself wait
for what only another rank's host can tell it, which waits for this rank's simulation. So a host
that is silent and uses no core, while others wait for its rank, is taken to wait: its ops are
simulated before it asks. One that sleeps, or waits for worker processes, looks the same. What it
issues afterwards comes later then than it would have, if its rank uses several streams.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from queue import Empty, SimpleQueue

_PATIENCE = 0.5  # seconds of the wall clock until a silent host is taken to wait,
_LONG = 20.0  # even if its process works
_WORKS = 0.1  # of a core
_KEY = "d2lpar/timekeeper"
_LOCAL = "127.0.0.1", "localhost"
NEVER = float("inf")


class Meeting:
    """A collective that some of its ranks have posted.

    Attributes:
        members: the ranks that take part, as in the default group.
        posts: rank -> what it posted: text, ready, and the figures of its link.
        here: the ranks that wait for the values of the others, or need none.
        since: when the last of these came, by the wall clock.
        failure: why it will not come about; or None.
    """

    failure = None

    def __init__(self, members):
        self.members, self.posts, self.here, self.since = members, {}, set(), 0.0

    def missing(self):
        """Return the ranks that have not posted it."""
        return [rank for rank in self.members if rank not in self.posts]


class Rank:
    """What the keeper knows of a rank.

    Attributes:
        connection: to its process.
        bound: it does nothing before this time, in seconds, unless a meeting makes it.
        asks: the time to which it asks leave to go, or None while it runs.
        since: when it asked, by the wall clock.
        told: how many messages of meetings it was sent.
        ended: whether it has left.
    """

    def __init__(self, connection):
        self.connection = connection
        self.bound, self.asks, self.since = 0.0, None, 0.0
        self.told, self.ended = 0, False


class Keeper:
    """The keeper of the time; see the top of this file.

    Args:
        size: number of ranks.
        timeout: seconds that a rank waits for others at most.
        address: at which ranks reach this machine.

    Attributes:
        port: where it listens.
        secret: what ranks have to know.
    """

    def __init__(self, size, timeout, address="127.0.0.1"):
        self._size, self._timeout = size, timeout
        self._ranks, self._meetings = {}, {}
        self._lock = threading.Condition()
        self.secret = secrets.token_hex(16)
        host = address if address in _LOCAL else ""
        self._listener = Listener((host, 0), authkey=self.secret.encode())
        self.port = self._listener.address[1]
        for target in (self._welcome, self._look_after):
            threading.Thread(target=target, daemon=True).start()

    def _welcome(self):
        welcome = 0
        while welcome < self._size:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):  # somebody else
                connection = _prompt(self._listener.accept())
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                welcome += 1
        self._listener.close()

    def _serve(self, connection):
        number = connection.recv()
        with self._lock:
            rank = self._ranks[number] = Rank(connection)
        try:
            while not rank.ended:
                kind, *message = connection.recv()
                with self._lock:
                    getattr(self, f"_on_{kind}")(number, rank, *message)
                    self._give_leave()
        except (EOFError, OSError):
            with self._lock:
                self._leave(number, rank)
        with self._lock:
            connection.close()  # so that the other end hears of it, and its thread ends

    def wait_for_the_end(self):
        """Wait until all ranks have left, for as long as a rank waits at most."""

        def all_left():
            ranks = self._ranks.values()
            return len(ranks) == self._size and all(rank.ended for rank in ranks)

        with self._lock:
            self._lock.wait_for(all_left, self._timeout)

    # -- what a rank says

    def _on_post(self, number, rank, now, key, members, text, ready, *figures):
        meeting = self._meetings.setdefault(key, Meeting(members))
        meeting.posts[number] = text, ready, *figures
        rank.bound = max(rank.bound, now)
        texts = {post[0] for post in meeting.posts.values()}
        if len(texts) > 1:
            self._fail(meeting, key, _disagreement(meeting))
        elif meeting.failure is not None:
            self._fail(meeting, key, f"{meeting.failure}\n  rank {number} came after that")
        elif not meeting.missing():
            posts = meeting.posts.values()
            one_host = len({post[2] for post in posts}) == 1
            links = [post[3] if one_host else post[4] for post in posts]
            bandwidth, latency = min(link[0] for link in links), max(link[1] for link in links)
            start = max(post[1] for post in posts)
            has_values = all(post[5] for post in posts)
            self._tell(meeting, "meet", key, start, bandwidth, latency, has_values)
        else:
            gone = [other for other in meeting.missing() if self._has_ended(other)]
            if gone:
                self._fail(meeting, key, f"{_names(gone)} ended before {text}")

    def _on_ask(self, number, rank, seconds, heard):
        if heard == rank.told:  # otherwise it will ask anew, once it has heard of a meeting
            rank.asks, rank.since = seconds, time.monotonic()

    def _on_idle(self, number, rank):
        """It has nothing to do, and its host is silent: others need not wait for it now."""
        asked = [other.asks for other in self._ranks.values() if other.asks is not None]
        rank.bound = max(rank.bound, min((t for t in asked if t < NEVER), default=0.0))

    def _on_at(self, number, rank, seconds, key):
        """It is at this time, and waits there for the values of the others."""
        rank.bound = max(rank.bound, seconds)
        meeting = self._meetings.get(key)
        if meeting is None:
            return
        meeting.here.add(number)
        meeting.since = time.monotonic()
        if len(meeting.here) == len(meeting.members):
            del self._meetings[key]

    def _on_done(self, number, rank, key):
        """It needs no values."""
        self._on_at(number, rank, 0.0, key)

    def _on_end(self, number, rank):
        self._leave(number, rank)

    # -- what the keeper says

    def _leave(self, number, rank):
        rank.ended, rank.asks, rank.bound = True, None, NEVER
        for key, meeting in self._meetings.items():
            if number in meeting.missing() and meeting.posts and meeting.failure is None:
                text = next(iter(meeting.posts.values()))[0]
                self._fail(meeting, key, f"rank {number} ended before {text}")
        self._give_leave()
        self._lock.notify_all()

    def _has_ended(self, number):
        return number in self._ranks and self._ranks[number].ended

    def _fail(self, meeting, key, text):
        meeting.failure = text
        self._tell(meeting, "failed", key, text)

    def _tell(self, meeting, *message):
        """Send a message to all ranks that have posted."""
        for number in meeting.posts:
            rank = self._ranks[number]
            rank.asks = None  # it asks anew once it knows of this
            rank.told += 1
            self._send(rank, message)

    @staticmethod
    def _send(rank, message):
        with contextlib.suppress(OSError):
            rank.connection.send(message)

    def _give_leave(self):
        for number, rank in self._ranks.items():
            if rank.asks is not None and rank.asks < NEVER and self._may_go(number, rank.asks):
                rank.bound, rank.asks = rank.asks, None
                self._send(rank, ("go", rank.bound))

    def _may_go(self, number, seconds):
        """Return whether no meeting of a rank can begin before `seconds`."""
        seen, waits = {number}, [number]
        while waits:
            for other in self._awaited(waits.pop()):
                if other in seen:
                    continue
                seen.add(other)
                rank = self._ranks.get(other)
                if rank is None:  # it has not come yet
                    return False
                if rank.asks is None:
                    if rank.bound < seconds:
                        return False
                elif rank.asks < seconds:
                    return False
                else:
                    waits.append(other)
        return True

    def _awaited(self, number):
        """Return the ranks that have not posted what rank `number` has posted."""
        return {
            other
            for meeting in self._meetings.values()
            if number in meeting.posts and meeting.failure is None
            for other in meeting.missing()
        }

    def _look_after(self):
        """Let ranks go on whose hosts ask nothing while others wait for them; end long waits."""
        while True:
            time.sleep(_PATIENCE / 2)
            with self._lock:
                now = time.monotonic()
                if self._ranks and all(rank.ended for rank in self._ranks.values()):
                    return
                meetings = list(self._meetings.items())
                texts = [self._look_after_one(key, meeting, now) for key, meeting in meetings]
                for (key, meeting), text in zip(meetings, texts, strict=True):
                    if text is not None:
                        self._fail(meeting, key, text)

    def _waits_in(self, number):
        """Return what a rank has called that others have not, a text; None if nothing."""
        texts = (
            f"{meeting.posts[number][0]} of group {key[0]}, call {key[-1]}"
            for key, meeting in self._meetings.items()
            if number in meeting.posts and meeting.missing() and meeting.failure is None
        )
        return next(texts, None)

    def _look_after_one(self, key, meeting, now):
        """Let ranks go on that this meeting waits for; return why it fails, None if it does not."""
        if meeting.failure is not None:
            return None
        if meeting.missing():
            waiting = [self._ranks[number] for number in meeting.posts]
            since = min((rank.since for rank in waiting if rank.asks is not None), default=now)
            late = meeting.missing()
        elif meeting.here:
            since = meeting.since
            late = [number for number in meeting.members if number not in meeting.here]
        else:
            return None
        if now - since > self._timeout:
            text = next(iter(meeting.posts.values()))[0]
            lines = [f"{_names(sorted(meeting.posts))} waited {self._timeout:g} s in {text}"]
            elsewhere = {number: self._waits_in(number) for number in late}
            lines += [f"  rank {n} waits in {its}" for n, its in elsewhere.items() if its]
            nowhere = [number for number in late if not elsewhere[number]]
            if nowhere:
                lines.append(f"  {_names(nowhere)} did not come")
            return "\n".join(lines)
        if now - since > _PATIENCE:
            for number in late:
                rank = self._ranks.get(number)
                if rank is not None and rank.asks is None and not rank.ended:
                    insists = now - since > _LONG
                    self._send(rank, ("run", insists, key, not meeting.missing()))
        return None


def _names(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _disagreement(meeting):
    lines = ["the ranks disagree:"]
    groups = {}
    for number, post in sorted(meeting.posts.items()):
        groups.setdefault(post[0], []).append(number)
    lines += [f"  {_names(ranks)}: {text}" for text, ranks in groups.items()]
    return "\n".join(lines)


def _prompt(connection):
    """Return a connection that sends small messages at once: the kernel would wait up to 40 ms."""
    with socket.socket(fileno=os.dup(connection.fileno())) as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _own_address(rank):
    """Return an address at which other ranks reach this process."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if rank == 0 or os.environ.get("GROUP_RANK", "0") == "0":  # the machine of rank 0
        return address
    return socket.gethostname()


class Member:
    """The connection of this process to the keeper; the simulator's thread uses it.

    Args:
        store: the store of the default group.
        rank, size: of this process in it.
        timeout: a timedelta, how long a rank waits for others.
        run: function that is called, in another thread, when others wait for what this rank has
            issued, and its host is taken to wait, too. Its arguments are the key of the collective,
            and whether all of its ranks have posted it.
    """

    def __init__(self, store, rank, size, timeout, run):
        self.rank = rank
        self._keeper = None
        if store.add(f"{_KEY}/ranks", 1) == 1:  # the first: rank 0 may never come
            address = _own_address(rank)
            self._keeper = Keeper(size, timeout.total_seconds(), address)
            store.set(_KEY, f"{address} {self._keeper.port} {self._keeper.secret}")
        address, port, secret = store.get(_KEY).decode().split()
        if self._keeper is not None:
            address = "127.0.0.1"
        self._connection = _prompt(Client((address, int(port)), authkey=secret.encode()))
        self._connection.send(rank)
        self._answers = SimpleQueue()
        self._heard = 0
        self._run = run
        self._clocks = time.perf_counter(), time.process_time()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        try:
            while True:
                message = self._connection.recv()
                if message[0] == "run":
                    insists, *what = message[1:]
                    if not self._works() or insists:
                        self._run(*what)
                else:
                    self._answers.put(message)
        except (EOFError, OSError):
            self._answers.put(("lost",))
            self._connection.close()

    def _works(self):
        """Return whether this process has used some of a core since this was asked last."""
        now = time.perf_counter(), time.process_time()
        (wall, cpu), self._clocks = self._clocks, now
        return now[1] - cpu > _WORKS * (now[0] - wall)

    def post(self, now, key, members, text, ready, host, link, network, has_values):
        """Say that a collective's inputs are ready.

        Args:
            now: seconds; this rank does nothing earlier any more.
            key: of the collective, the same on all of its ranks.
            members: these ranks.
            text: what is called.
            ready: seconds at which its link is free, too.
            host: of the rank.
            link, network: (bandwidth, latency) within a host and beyond it.
            has_values: whether this rank has the values that others read.
        """
        message = "post", now, key, members, text, ready, host, link, network, has_values
        self._connection.send(message)

    def ask(self, seconds):
        """Wait for leave to go on to `seconds`, or for news; return the messages that came."""
        if self._answers.empty():
            self._connection.send(("ask", seconds, self._heard))
        messages = [self._answers.get()]
        with contextlib.suppress(Empty):
            while True:
                messages.append(self._answers.get_nowait())
        self._heard += sum(message[0] in ("meet", "failed") for message in messages)
        return messages

    def waits_for_values(self, key, seconds):
        """Say that this rank is at `seconds` and waits for the values of a collective."""
        with contextlib.suppress(OSError):  # what is posted next will fail
            self._connection.send(("at", seconds, key))

    def is_idle(self):
        """Say that this rank has done all that it was given, though others wait for more."""
        with contextlib.suppress(OSError):
            self._connection.send(("idle",))

    def done(self, key):
        """Say that this rank needs nothing more of a collective."""
        with contextlib.suppress(OSError):
            self._connection.send(("done", key))

    def leave(self):
        """Take part in nothing any more."""
        with contextlib.suppress(OSError):
            self._connection.send(("end",))

    def end(self):
        """Leave; the rank that keeps the time waits until all others have left."""
        self.leave()
        if self._keeper is not None:
            self._keeper.wait_for_the_end()
