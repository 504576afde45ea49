"""One simulated clock for the ranks of a job, each of which simulates its own devices.

The keeper, a thread in the process of the first rank to arrive, tells the ranks of a collective
when they *meet*, once all have *posted* it. Until then a rank asks for permission before it
advances to its next event, which is granted once no rank that it waits for, directly or through
others, can act earlier. (This is a conservative parallel simulation with a global minimum in place
of null messages: Chandy and Misra 1979, https://doi.org/10.1109/TSE.1979.230182.)

Simulation stops at the clock of a host that may still issue ops. But the host may wait for another
rank's host, which waits for this rank's simulation. So a host that is silent and uses no core while
others wait for its rank is assumed to wait, and its ops are simulated. This also applies to a host
that sleeps or waits for worker processes; its next ops may then begin late on several streams.

The keeper listens on 127.0.0.1 if all ranks are on this machine, otherwise on the interface towards
MASTER_ADDR. Both ends authenticate by a secret from torch's store, which excludes everybody without
access to the store: whoever reaches it can report wrong times. Messages are JSON: nothing in them
is executed.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from traceback import format_exc
from typing import NamedTuple

from vgpu.distributed.agreement import disagreement_text, ranks_text
from vgpu.distributed.routes import route

_PATIENCE = 0.5  # seconds of silence after which a host is assumed to wait
_PATIENCE_IF_BUSY = 20.0  # the same for a host whose process is busy
_BUSY_SHARE = 0.1  # a process that uses more than this share of a core is busy
_MAX_MESSAGE_BYTES = 2**20
KEY = "vgpu/timekeeper"  # of the keeper's address, port and secret in torch's store
_LOCAL = "127.0.0.1"
_LOST = ("lost",)  # message to this process itself: the connection is lost
NEVER = float("inf")


class JsonConnection(Connection):
    """A connection for nested tuples of strings and numbers, as JSON."""

    @classmethod
    def over(cls, tcp):
        """Return a connection over a socket, without the delay of small messages, up to 40 ms."""
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(tcp.detach())

    def send(self, message):
        self.send_bytes(json.dumps(message).encode())

    def recv(self):
        """Return the next message; ValueError if it is not JSON, OSError if it is too long."""
        return _in_tuples(json.loads(self.recv_bytes(_MAX_MESSAGE_BYTES)))


def _in_tuples(value):
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


class Post(NamedTuple):
    """A rank's report that the inputs of a collective are ready."""

    text: str
    ready: float  # seconds at which the inputs are ready and the link is free
    machine: tuple  # equal for ranks on one machine
    link: tuple  # `link_in_machine` of this rank, see routes.py
    network: tuple  # `share_of_network`
    has_values: bool  # whether it has the values that other ranks read


class Meeting:
    """A collective that some of its ranks have posted."""

    failure = None  # the reason why the ranks cannot meet

    def __init__(self, members):
        self.members, self.posts = members, {}  # rank -> its `Post`
        self.here = set()  # ranks that wait for the others' values, or need none
        self.since = 0.0  # `time.monotonic()` of the last addition to `here`

    def missing(self):
        return [rank for rank in self.members if rank not in self.posts]

    def text(self):
        return next(iter(self.posts.values())).text


class RankState:
    """The keeper's state of a rank."""

    def __init__(self, connection):
        self.connection = connection
        self.bound = 0.0  # seconds before which it does nothing, unless a meeting wakes it
        self.asks = None  # time to which it asks for permission to advance; None while it runs
        self.since = 0.0  # `time.monotonic()` of that request
        self.sent, self.ended = 0, False  # number of messages about meetings sent to it


class Keeper:
    """The keeper of the simulated clock for `size` ranks; see the module docstring.

    A rank waits for others for `timeout` seconds at most. `address` is the interface to listen on.

    Attributes:
        ranks: number -> its `RankState`, of those that have joined.
        secret, port: what a rank needs to join.
    """

    def __init__(self, size, timeout, address=_LOCAL):
        self._size, self._timeout = size, timeout
        self.ranks, self._meetings = {}, {}
        self._lock = threading.Condition()
        self.secret = secrets.token_hex(16).encode()
        self._server = socket.create_server((address, 0), family=_family(address))
        self._server.settimeout(_PATIENCE)
        self.port = self._server.getsockname()[1]
        for target in (self._welcome, self._look_after):
            threading.Thread(target=target, daemon=True).start()

    def _welcome(self):
        with self._server:
            while len(self.ranks) < self._size:
                with contextlib.suppress(OSError):  # nobody connected, or left again
                    line = JsonConnection.over(self._server.accept()[0])
                    threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line):
        number = rank = None
        with contextlib.suppress(Exception):  # the peer left, or is not a rank
            deliver_challenge(line, self.secret)
            answer_challenge(line, self.secret)
            number = line.recv()
            rank = self.join(number, line)
            while rank is not None and not rank.ended:
                self.receive(number, *line.recv())
        with self._lock:
            if rank is not None and not rank.ended:
                self._on_end(number, rank)
            line.close()  # so that the other end's thread ends

    def join(self, number, connection):
        """Return the new `RankState` with this number; None if there is one, or can be none."""
        with self._lock:
            if number not in range(self._size) or number in self.ranks:
                return None
            rank = self.ranks[number] = RankState(connection)
            return rank

    def receive(self, number, kind, *message):
        """Process a rank's message; an internal error fails all pending collectives."""
        with self._lock:
            try:
                getattr(self, f"_on_{kind}")(number, self.ranks[number], *message)
                self._grant()
            except Exception:
                text = "the keeper of the simulated clock failed, please report this:\n"
                for key, meeting in self._meetings.items():
                    self._fail(meeting, key, text + format_exc())
                raise

    def wait_for_the_end(self):
        """Wait until all ranks have left, at most for the time-out."""
        with self._lock:
            self._lock.wait_for(self._all_left, self._timeout)

    def _all_left(self):
        ranks = self.ranks.values()
        return len(ranks) == self._size and all(rank.ended for rank in ranks)

    # -- messages from ranks

    def _on_post(self, number, rank, now, key, members, post):
        meeting = self._meetings.setdefault(key, Meeting(members))
        meeting.posts[number] = post = Post(*post)
        rank.bound = max(rank.bound, now)
        texts = {post.text for post in meeting.posts.values()}
        if len(texts) > 1:
            texts = {rank: post.text for rank, post in meeting.posts.items()}
            self._fail(meeting, key, disagreement_text(texts))
        elif meeting.failure is not None:
            self._fail(meeting, key, f"{meeting.failure}\n  rank {number} joined after that")
        elif not meeting.missing():
            posts = meeting.posts.values()
            way = route(
                *zip(*((post.machine, post.link, post.network) for post in posts), strict=True)
            )
            start = max(post.ready for post in posts)
            has_values = all(post.has_values for post in posts)
            self._notify(meeting, "meet", key, start, way, has_values)
        else:
            ended = {other for other, its in self.ranks.items() if its.ended}
            gone = [other for other in meeting.missing() if other in ended]
            if gone:
                self._fail(meeting, key, f"{ranks_text(gone)} ended before {post.text}")

    def _on_ask(self, number, rank, seconds, num_received):
        if num_received == rank.sent:  # otherwise a message is in flight, and it will ask again
            rank.asks, rank.since = seconds, time.monotonic()

    def _on_idle(self, number, rank):
        """Stop waiting for a rank that has no work and whose host is silent."""
        asked = [other.asks for other in self.ranks.values() if other.asks is not None]
        rank.bound = max(rank.bound, min((t for t in asked if t < NEVER), default=0.0))

    def _on_at(self, number, rank, seconds, key):
        """Note that a rank waits at this time for the others' values; 0 if it needs none."""
        rank.bound = max(rank.bound, seconds)
        meeting = self._meetings.get(key)
        if meeting is None:
            return
        meeting.here.add(number)
        meeting.since = time.monotonic()
        if len(meeting.here) == len(meeting.members):
            del self._meetings[key]

    def _on_end(self, number, rank):
        rank.ended, rank.asks, rank.bound = True, None, NEVER
        for key, meeting in self._meetings.items():
            if number in meeting.missing() and meeting.posts and meeting.failure is None:
                self._fail(meeting, key, f"rank {number} ended before {meeting.text()}")
        self._grant()
        self._lock.notify_all()

    # -- messages to ranks

    def _fail(self, meeting, key, text):
        meeting.failure = text
        self._notify(meeting, "failed", key, text)

    def _notify(self, meeting, *message):
        """Send a message to all ranks that have posted."""
        for number in meeting.posts:
            rank = self.ranks[number]
            rank.asks = None  # it asks again after this message
            rank.sent += 1
            self._send(rank, message)

    @staticmethod
    def _send(rank, message):
        with contextlib.suppress(OSError):
            rank.connection.send(message)

    def _grant(self):
        for number, rank in self.ranks.items():
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
                rank = self.ranks.get(other)
                if rank is None:  # not connected yet
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
        """Resume ranks whose hosts are silent while others wait for them; end long waits."""
        while True:
            time.sleep(_PATIENCE / 2)
            with self._lock:
                now = time.monotonic()
                if self._all_left():
                    return
                meetings = list(self._meetings.items())
                texts = [self._look_after_one(key, meeting, now) for key, meeting in meetings]
                for (key, meeting), text in zip(meetings, texts, strict=True):
                    if text is not None:
                        self._fail(meeting, key, text)

    def _waits_in(self, number):
        """Describe the collective in which a rank waits for others; None if there is none."""
        texts = (
            f"{meeting.posts[number].text} of group {key[0]}, call {key[-1]}"
            for key, meeting in self._meetings.items()
            if number in meeting.posts and meeting.missing() and meeting.failure is None
        )
        return next(texts, None)

    def _look_after_one(self, key, meeting, now):
        """Resume the ranks that a meeting waits for; return the reason of a failure, or None."""
        if meeting.failure is not None:
            return None
        if meeting.missing():
            waiting = [self.ranks[number] for number in meeting.posts]
            since = min((rank.since for rank in waiting if rank.asks is not None), default=now)
            late = meeting.missing()
        elif meeting.here:
            since = meeting.since
            late = [number for number in meeting.members if number not in meeting.here]
        else:
            return None
        if now - since > self._timeout:
            waiting = ranks_text(sorted(meeting.posts))
            lines = [f"{waiting} waited {self._timeout:g} s in {meeting.text()}"]
            elsewhere = {number: self._waits_in(number) for number in late}
            lines += [f"  rank {n} waits in {its}" for n, its in elsewhere.items() if its]
            nowhere = [number for number in late if not elsewhere[number]]
            if nowhere:
                lines.append(f"  {ranks_text(nowhere)} did not join")
            return "\n".join(lines)
        if now - since > _PATIENCE:
            for number in late:
                rank = self.ranks.get(number)
                if rank is not None and rank.asks is None and not rank.ended:
                    insists = now - since > _PATIENCE_IF_BUSY
                    self._send(rank, ("run", insists, key, not meeting.missing()))
        return None


def own_address():
    """Return the address at which other ranks reach this machine.

    Raises RuntimeError if MASTER_ADDR is a loopback address and ranks are on other machines.
    """
    size = os.environ.get("WORLD_SIZE")
    if "MASTER_ADDR" not in os.environ or size == os.environ.get("LOCAL_WORLD_SIZE", "unknown"):
        return _LOCAL
    master = os.environ["MASTER_ADDR"]
    with socket.socket(_family(master), socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        address = probe.getsockname()[0]
    if address.startswith("127.") and "LOCAL_WORLD_SIZE" in os.environ:
        raise RuntimeError(
            f"MASTER_ADDR={master} resolves to {address} here, which the other machines of the "
            f"{size} ranks cannot reach: it must be an address of this machine's network"
        )
    return address


def _family(address):
    return socket.getaddrinfo(address, None)[0][0]


class KeeperConnection:
    """The connection of this process to the keeper, for the simulator's thread.

    `run(key of a collective, whether all its ranks have posted it)` is called in another thread
    when others wait for this rank and its host is assumed to wait. `connection` is the
    `JsonConnection` to the keeper.
    """

    def __init__(self, store, rank, size, timeout, run):
        self.rank = rank
        self._keeper = None
        if store.add(f"{KEY}/ranks", 1) == 1:  # the first: rank 0 may never come
            address = own_address()
            self._keeper = Keeper(size, timeout.total_seconds(), address)
            store.set(KEY, f"{address} {self._keeper.port} {self._keeper.secret.decode()}")
        address, port, secret = store.get(KEY).split()
        self._timeout = timeout.total_seconds()
        tcp = socket.create_connection((address.decode(), int(port)), self._timeout)
        tcp.settimeout(None)
        self.connection = JsonConnection.over(tcp)
        if not self.connection.poll(self._timeout):
            raise TimeoutError(f"no answer from the timekeeper within {self._timeout:g} s")
        answer_challenge(self.connection, secret)
        deliver_challenge(self.connection, secret)
        self.connection.send(rank)
        self._answers = SimpleQueue()
        self._num_received = 0  # messages about meetings
        self._run = run
        self._clocks = time.perf_counter(), time.process_time()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(Exception):  # the connection is lost, or a message is invalid
            while True:
                message = self.connection.recv()
                if message[0] == "run":
                    insists, *what = message[1:]
                    if not self.is_busy() or insists:
                        self._run(*what)
                else:
                    self._answers.put(message)
        self._answers.put(_LOST)
        self.connection.close()

    def is_busy(self):
        """Return whether this process was busy since the last call."""
        now = time.perf_counter(), time.process_time()
        (wall, cpu), self._clocks = self._clocks, now
        return now[1] - cpu > _BUSY_SHARE * (now[0] - wall)

    def post(self, now, key, members, post):
        """Report that a collective, given by `key` and `members`, is ready: a `Post`.

        Before `now`, in simulated seconds, this rank does nothing more. Raises OSError if the
        connection is lost.
        """
        self.connection.send(("post", now, key, members, post))

    def ask(self, seconds):
        """Wait for permission to advance to `seconds`, or news; return the messages received."""
        if self._answers.empty():
            with contextlib.suppress(OSError):  # `_listen` reports the lost connection
                self.connection.send(("ask", seconds, self._num_received))
        try:
            messages = [self._answers.get(timeout=self._timeout + _PATIENCE_IF_BUSY)]
        except Empty:  # the keeper is gone: it ends each wait within the time-out
            messages = [_LOST]
        with contextlib.suppress(Empty):
            while True:
                messages.append(self._answers.get_nowait())
        if messages[-1] == _LOST:
            self._answers.put(_LOST)  # for later calls
        self._num_received += sum(message[0] in ("meet", "failed") for message in messages)
        return messages

    def send(self, kind, *message):
        """Send a message; the methods `_on_...` of `Keeper` are the kinds."""
        with contextlib.suppress(OSError):  # the next `post` raises
            self.connection.send((kind, *message))

    def end(self):
        """Leave; the keeper's rank waits until all others have left."""
        self.send("end")
        if self._keeper is not None:
            self._keeper.wait_for_the_end()
