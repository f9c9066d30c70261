"""Bandwidth by message size, latency and duplex between two hosts, over one TCP connection.

One host serves, the other measures. A message of n bytes and the one byte that answers it take

    elapsed(n) = latency + n / bandwidth(n) + latency

and an exchange of single bytes gives twice the latency, so that each size's bandwidth follows. With
both directions busy at once a link of full duplex takes no longer than with one; one that is shared
by both takes as long as both in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hetjax.ir.cluster import Link
from hetjax.ir.errors import ClusterError

DEFAULT_PORT = 47115
MESSAGE_BYTES = tuple(4**k * 2**12 for k in range(8))  # 4 KiB … 64 MiB
MOST_BYTES = 2**30
# Both directions at once take as long as one, or as two: nearer to which?
_HALF_FROM = 1.5
_GREETING = b"hetjax links 1\n"
# What the client asks for: operation, bytes.
_HEAD = struct.Struct("!cQ")
_PING, _TAKE, _GIVE, _BOTH, _END = b"P", b"T", b"G", b"B", b"E"
_CHUNK = 1 << 20
_BOTH_S, _MOST_BOTH = 0.02, 2**28


@dataclasses.dataclass(frozen=True)
class LinkMeasurement:
    """What was measured, seen from the client.

    Attributes:
      latency_s: one way, half of the least time there and back.
      there, back: (message bytes, bytes/s) of each direction, latency taken off.
      duplex: "full" or "half".
      both_over_one: how much longer both directions at once took than the slower one alone.
    """

    latency_s: float
    there: tuple[tuple[int, float], ...]
    back: tuple[tuple[int, float], ...]
    duplex: str
    both_over_one: float

    def link(self, name: str, source: str, between: Sequence[str] = ()) -> Link:
        """Returns the link: of each size the slower direction; its bandwidth is the largest message's."""
        back = dict(self.back)
        curve = tuple((n, min(speed, back.get(n, speed))) for n, speed in self.there)
        return Link(
            name, curve[-1][1], self.latency_s, tuple(between), self.duplex, curve, source=source
        )


# The side that serves.


def open_server(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
      ClusterError: the address cannot be had; says which and why.
    """
    try:
        return socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise ClusterError(f"cannot serve on {host}:{port}: {error}") from None


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def serve(
    server: socket.socket, *, keep: bool = False, told: Callable[[str], None] | None = None
) -> None:
    """Answers measuring clients, one after the other.

    It keeps nothing of what it is sent, and sends nothing but zeros.

    Args:
      server: listening.
      keep: whether to go on after the first client that measured.
      told: told of every client.
    """
    while True:
        try:
            connection, address = server.accept()
        except OSError:  # closed by whoever opened it
            return
        with connection:
            connection.settimeout(60)
            measured = False
            try:
                measured = _answer(connection)
            except (OSError, EOFError) as error:
                if told:
                    told(f"{address[0]}: {error or type(error).__name__}")
            if told and measured:
                told(f"{address[0]}: measured")
        if measured and not keep:
            return


def _answer(connection: socket.socket) -> bool:
    """Serves one client; returns whether it was one."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_GREETING)
    if _receive(connection, len(_GREETING)) != _GREETING:
        return False
    while True:
        op, nbytes = _HEAD.unpack(_receive(connection, _HEAD.size))
        if nbytes > MOST_BYTES:
            return False
        if op == _END:
            return True
        if op == _PING:
            connection.sendall(b".")
        elif op == _TAKE:
            _drain(connection, nbytes)
            connection.sendall(b".")
        elif op == _GIVE:
            _flood(connection, nbytes)
        elif op == _BOTH:
            _both(connection, nbytes)
        else:
            return False


# The side that measures.


def measure(
    host: str, port: int, *, sizes: Sequence[int] = MESSAGE_BYTES, budget_s: float = 10.0,
    told: Callable[[str], None] | None = None,
) -> LinkMeasurement:
    """Returns what the way to a serving host does.

    Args:
      host, port: of the server.
      sizes: message bytes, ascending; those too large for the time left are left out.
      budget_s: about how long to measure.
      told: told what is measured.

    Raises:
      ClusterError: no server answers there, or it is no server of ours.
    """
    with _connected(host, port) as connection:
        try:
            return _measure(connection, sizes, budget_s, told or (lambda _: None))
        except (OSError, EOFError) as error:
            raise ClusterError(
                f"the connection to {host}:{port} ended while measuring: {error or type(error).__name__}"
            ) from None


@contextlib.contextmanager
def _connected(host: str, port: int) -> Iterator[socket.socket]:
    hint = f"start one there with: hetjax calibrate --links --serve --port {port}"
    try:
        connection = socket.create_connection((host, port), timeout=10)
    except OSError as error:
        raise ClusterError(f"no server at {host}:{port} ({error}); {hint}") from None
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            greeting = _receive(connection, len(_GREETING))
            if greeting == _GREETING:
                connection.sendall(_GREETING)
        except (OSError, EOFError) as error:
            raise ClusterError(f"{host}:{port} does not answer ({error}); {hint}") from None
        if greeting != _GREETING:
            raise ClusterError(f"what answers at {host}:{port} is no server of hetjax links 1; {hint}")
        connection.settimeout(120)
        yield connection


def _measure(
    connection: socket.socket, sizes: Sequence[int], budget_s: float, told: Callable[[str], None]
) -> LinkMeasurement:
    told("latency")
    trips = [_timed(connection, _PING, 0, lambda: _receive(connection, 1)) for _ in range(50)]
    round_trip_s = min(trips)
    share_s = budget_s / 3 / max(1, len(sizes))
    curves: dict[bytes, list[tuple[int, float]]] = {_TAKE: [], _GIVE: []}
    for op, words in ((_TAKE, "there"), (_GIVE, "back")):
        for nbytes in sizes:
            known = curves[op][-1][1] if curves[op] else 0.0
            if known and nbytes / known > budget_s / 3:
                break  # one message alone would take the time of all
            told(f"{nbytes >> 10} KiB {words}")
            took_s = _exchange(connection, op, nbytes, round_trip_s, share_s)
            # What the clock cannot tell from an empty message says nothing of the bandwidth.
            if took_s > 0.05 * round_trip_s:
                curves[op].append((nbytes, nbytes / took_s))
    there, back = curves[_TAKE], curves[_GIVE]
    if not there or not back:
        raise ClusterError(
            "no message took measurably longer than an empty one; give larger ones with --sizes"
        )
    # Long enough that starting a thread on either side does not count.
    slower = min(there[-1][1], back[-1][1])
    nbytes = min(_MOST_BOTH, max(there[-1][0], back[-1][0], int(_BOTH_S * slower)))
    told("both directions")
    alone_s = max(_exchange(connection, op, nbytes, round_trip_s, share_s) for op in (_TAKE, _GIVE))
    both_s = statistics.median(
        _timed(connection, _BOTH, nbytes, lambda: _both(connection, nbytes)) for _ in range(3)
    )
    ratio = max(both_s - round_trip_s, 1e-9) / alone_s
    connection.sendall(_HEAD.pack(_END, 0))
    duplex = "half" if ratio >= _HALF_FROM else "full"
    return LinkMeasurement(round_trip_s / 2, tuple(there), tuple(back), duplex, ratio)


def _exchange(
    connection: socket.socket, op: bytes, nbytes: int, round_trip_s: float, budget_s: float
) -> float:
    """Returns the seconds a message of this size occupies the link: the median of several."""

    def transfer() -> None:
        if op == _TAKE:
            _flood(connection, nbytes)
            _receive(connection, 1)
        else:
            _drain(connection, nbytes)

    times: list[float] = []
    begin = time.perf_counter()
    # The first one opens the connection's window to this size and is not counted.
    _timed(connection, op, nbytes, transfer)
    while len(times) < 3 or (len(times) < 25 and time.perf_counter() - begin < budget_s):
        times.append(_timed(connection, op, nbytes, transfer) - round_trip_s)
    return statistics.median(times)


def _timed(
    connection: socket.socket, op: bytes, nbytes: int, transfer: Callable[[], object]
) -> float:
    start = time.perf_counter()
    connection.sendall(_HEAD.pack(op, nbytes))
    transfer()
    return time.perf_counter() - start


# Both sides.


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise EOFError("closed by the other side")
        data += part
    return data


def _drain(connection: socket.socket, nbytes: int) -> None:
    buffer = bytearray(min(nbytes, _CHUNK) or 1)
    view = memoryview(buffer)
    while nbytes:
        got = connection.recv_into(view[: min(nbytes, _CHUNK)])
        if not got:
            raise EOFError("closed by the other side")
        nbytes -= got


def _flood(connection: socket.socket, nbytes: int) -> None:
    zeros = memoryview(bytes(min(nbytes, _CHUNK)))
    while nbytes:
        part = zeros[: min(nbytes, _CHUNK)]
        connection.sendall(part)
        nbytes -= len(part)


def _both(connection: socket.socket, nbytes: int) -> None:
    """Sends and receives so many bytes at once; ends when both are done on both sides."""
    failed: list[BaseException] = []

    def send() -> None:
        try:
            _flood(connection, nbytes)
        except BaseException as error:
            failed.append(error)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    _drain(connection, nbytes)
    sender.join()
    if failed:
        raise failed[0]
    # An answer each way, or the next request would overtake what is still under way.
    connection.sendall(b".")
    _receive(connection, 1)
