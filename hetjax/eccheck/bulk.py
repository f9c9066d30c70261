"""Bulk bytes between hosts: a TCP connection a transfer, from one memory straight into the other.

gRPC carries everything small. A bulk message costs it five copies and Python objects on both sides:
2 GB/s over the loopback device of two cores where a plain socket carries 5. So blocks travel here,
received in place; under TLS, or where this port cannot be reached, they go by gRPC (see `peer`).

    -> frame {"job", "token"}              at most 4 KiB: no more is read from a stranger
    -> frame {"op": "read" | "put", "oid", "timeout_s", ...}
    <- frame {} or {"error": code, "detail": words}
    read   <- the bytes of the runs, one after the other
    put    -> pieces: stripe, block, number of sums, number of bytes; the sums; the bytes.
              A piece without sums is the last.
           <- frame {"bytes": received} or {"error", "detail"}

A frame is a uint32 length and a JSON object. Every wait ends at the deadline of its transfer.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.eccheck.store import Refused
from hetjax.eccheck.wire import PAYLOAD_BYTES, AgentError, Run, split_runs
from hetjax.ir.errors import CheckpointError

if TYPE_CHECKING:
    from hetjax.eccheck.agent import Agent

Piece = tuple[int, int, np.ndarray, Any]  # stripe, first block, sums, bytes
Land = Callable[[int, int, int], "np.ndarray | None"]  # stripe, first block, bytes -> destination

_LENGTH = struct.Struct("<I")
_PIECE = struct.Struct("<IIIQ")
_GREETING_LIMIT, _FRAME_LIMIT = 4096, 8 << 20
_GREETING_S, _CONNECTIONS, _TIMEOUT_LIMIT_S = 5.0, 128, 86_400.0
_ARM_S = 0.05  # a timeout is set anew (a system call) only when it is this much too long
# Bytes in flight that lie in the processor's cache are received a third faster than those that do
# not, measured over loopback. A near link is filled by less: twice its delay times 100 Gbit/s.
_CACHED_BYTES, _LINK_BYTES_S, _FAR_BYTES = 512 << 10, 12.5e9, 4 << 20
_TCP_INFO_BYTES, _RTT_AT = 104, 68  # struct tcp_info: tcpi_rtt, uint32, microseconds


def buffer_bytes(round_trip_s: float) -> int:
    """Returns the size of a connection's buffers, or 0 to leave it to the kernel.

    Args:
      round_trip_s: as measured when it was opened; 0 where that is not known.
    """
    wanted = max(_CACHED_BYTES, int(2 * round_trip_s * _LINK_BYTES_S))
    return wanted if round_trip_s and wanted <= _FAR_BYTES else 0


def _round_trip_s(connection: socket.socket) -> float:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return struct.unpack_from("<I", info, _RTT_AT)[0] / 1e6
    except (OSError, AttributeError, struct.error):
        return 0.0


class Line:
    """A connection with a deadline.

    Args:
      connection: a connected socket.
      timeout_s: when to give up, from now.
    """

    def __init__(self, connection: socket.socket, timeout_s: float):
        self.socket = connection
        self.set_deadline(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = buffer_bytes(_round_trip_s(connection))
        if size:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def set_deadline(self, timeout_s: float) -> None:
        """Gives up so many seconds from now."""
        self._end_s, self._armed_s = time.monotonic() + timeout_s, 0.0

    def _arm(self) -> float:
        left = self._end_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline of the transfer has passed")
        if not left <= self._armed_s <= left + _ARM_S:
            self.socket.settimeout(left)
            self._armed_s = left
        return left

    def send(self, *buffers: Any) -> None:
        """Sends buffers, one after the other."""
        for buffer in buffers:
            self._arm()
            self.socket.sendall(buffer)

    def receive(self, view: memoryview) -> None:
        """Fills a buffer.

        Raises:
          EOFError: the other side closed.
        """
        while len(view):
            self._arm()
            count = self.socket.recv_into(view)
            if not count:
                raise EOFError("the connection was closed")
            view = view[count:]

    def receive_exactly(self, length: int) -> bytearray:
        """Returns so many bytes."""
        data = bytearray(length)
        self.receive(memoryview(data))
        return data

    def wait(self) -> None:
        """Waits until there is something to receive."""
        poll = select.poll()  # not select: descriptors may be above 1023
        poll.register(self.socket, select.POLLIN)
        if not poll.poll(self._arm() * 1e3):
            raise TimeoutError("nothing came within the deadline of the transfer")

    def answered(self) -> bool:
        """Says whether the other side has sent something, or closed."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def send_frame(self, header: dict[str, Any]) -> None:
        """Sends a JSON object."""
        data = json.dumps(header, separators=(",", ":")).encode()
        self.send(_LENGTH.pack(len(data)) + data)

    def frame(self, limit_bytes: int = _FRAME_LIMIT) -> dict[str, Any]:
        """Returns the next JSON object.

        Raises:
          CheckpointError: too long, or no JSON object.
        """
        (length,) = _LENGTH.unpack(self.receive_exactly(_LENGTH.size))
        if length > limit_bytes:
            raise CheckpointError(f"a frame of {length} bytes is above {limit_bytes}")
        try:
            header = json.loads(self.receive_exactly(length))
        except ValueError as error:
            raise CheckpointError(f"a frame is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError("a frame is not a JSON object")
        return header


# -- the side that asks ------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(address: str) -> Iterator[None]:
    """Turns what a socket raises into an error that names the agent."""
    try:
        yield
    except TimeoutError:
        raise AgentError(
            "no answer within the deadline; it is stopped, overloaded or cut off",
            code="deadline_exceeded", address=address,
        ) from None
    except (OSError, EOFError) as error:
        raise AgentError(
            f"the transfer broke ({error or type(error).__name__})", code="unavailable",
            address=address,
        ) from None


def _checked(reply: dict[str, Any], address: str) -> dict[str, Any]:
    if "error" in reply:
        raise AgentError(str(reply.get("detail")), code=str(reply["error"]), address=address)
    return reply


def connect(
    host: str, port: int, job: str, token: str, *, connect_s: float, timeout_s: float
) -> Line:
    """Returns a connection that has introduced itself.

    Raises:
      OSError: nobody can be reached there.
    """
    line = Line(socket.create_connection((host, port), min(connect_s, timeout_s)), timeout_s)
    try:
        line.send_frame({"job": job, "token": token})
    except OSError:
        line.socket.close()
        raise
    return line


def read_blocks(
    line: Line, address: str, oid: str, runs: Sequence[Run], block_bytes: int,
    *, timeout_s: float, land: Land | None = None,
) -> Iterator[tuple[int, int, np.ndarray, bool]]:
    """Yields the blocks of runs in pieces of one message.

    Args:
      line: a fresh connection.
      address: the agent, for errors.
      oid: the object.
      runs: stripe, first block, number of blocks.
      block_bytes: length of a block.
      timeout_s: tells the agent when nobody waits any more.
      land: where a piece may be received in place, or None for scratch memory.

    Yields:
      stripe, first block, bytes, whether they are where `land` wanted them. Scratch is used again
      for the next piece.

    Raises:
      AgentError: refused, broken, or too late.
    """
    scratch: np.ndarray | None = None
    try:
        with _naming(address):
            line.send_frame({"op": "read", "oid": oid, "timeout_s": timeout_s,
                             "runs": [list(r) for r in runs]})
            _checked(line.frame(), address)
        for stripe, block, count in split_runs(runs, block_bytes):
            length = count * block_bytes
            out = land(stripe, block, length) if land is not None else None
            landed = out is not None
            if out is None:
                if scratch is None:
                    scratch = np.empty(max(PAYLOAD_BYTES, block_bytes), np.uint8)
                out = scratch[:length]
            with _naming(address):
                line.receive(out.data)
            yield stripe, block, out, landed
    finally:
        line.socket.close()


def put_blocks(
    line: Line, address: str, oid: str, pieces: Iterable[Piece], *, timeout_s: float
) -> None:
    """Sends blocks, and waits until the agent has them all.

    Args:
      line: a fresh connection.
      address: the agent, for errors.
      oid: the object.
      pieces: what to send.
      timeout_s: tells the agent when nobody waits any more.

    Raises:
      AgentError: refused, broken, or too late.
    """
    try:
        with _naming(address):
            line.send_frame({"op": "put", "oid": oid, "timeout_s": timeout_s})
            _checked(line.frame(), address)
        for stripe, block, sums, data in pieces:
            with _naming(address):
                if line.answered():  # before the end that is a refusal
                    break
                view = memoryview(data).cast("B")
                head = _PIECE.pack(stripe, block, len(sums), len(view)) + sums.tobytes()
                try:
                    line.send(head, view)
                except (BrokenPipeError, ConnectionResetError):
                    if not line.answered():
                        raise
                    break
        else:
            with _naming(address):
                line.send(_PIECE.pack(0, 0, 0, 0))
        with _naming(address):
            _checked(line.frame(), address)
    finally:
        line.socket.close()


# -- the agent's side ---------------------------------------------------------------------------------


def serve_bulk(agent: Agent, host: str, port: int = 0) -> int:
    """Listens for transfers; returns the port.

    Raises:
      CheckpointError: the address cannot be bound.
    """
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_CONNECTIONS)
    except OSError as error:
        raise CheckpointError(f"cannot listen on {host}:{port} for bulk transfers: {error}") from error
    agent.listeners.append(listener)
    room = threading.BoundedSemaphore(_CONNECTIONS)

    def answer(connection: socket.socket) -> None:
        try:
            with connection:
                _answer(agent, Line(connection, _GREETING_S))
        except (OSError, EOFError):
            pass  # the other side is gone; it knows
        finally:
            room.release()

    def loop() -> None:
        while True:
            room.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True, name="eccheck-bulk").start()

    threading.Thread(target=loop, daemon=True, name="eccheck-bulk-accept").start()
    return listener.getsockname()[1]


def _answer(agent: Agent, line: Line) -> None:
    try:
        greeting = line.frame(_GREETING_LIMIT)
        if not hmac.compare_digest(str(greeting.get("token", "")), agent.options.token):
            raise Refused("unauthenticated", "the job token is not the agent's")
        if greeting.get("job") != agent.options.job:
            raise Refused(
                "failed_precondition",
                f"this agent serves job '{agent.options.job}', not '{greeting.get('job')}'",
            )
        request = line.frame()
        line.set_deadline(min(float(request["timeout_s"]), _TIMEOUT_LIMIT_S))
        if request.get("op") == "read":
            _send_runs(agent, line, request)
        elif request.get("op") == "put":
            _receive_pieces(agent, line, request)
        else:
            raise Refused("unimplemented", f"no bulk operation '{request.get('op')}'")
    except (CheckpointError, KeyError, ValueError, TypeError) as error:
        code = error.code if isinstance(error, Refused) else "invalid_argument"
        line.set_deadline(_GREETING_S)
        line.send_frame({"error": code, "detail": str(error) or repr(error)})
        # Closing with unread bytes would reset the connection, and the answer would be lost.
        line.socket.shutdown(socket.SHUT_WR)
        scratch = memoryview(bytearray(1 << 20))
        while line.socket.recv_into(scratch):
            line._arm()


def _send_runs(agent: Agent, line: Line, request: dict[str, Any]) -> None:
    entry = agent.store.get(str(request["oid"]))
    spans = [entry.span(int(s), int(b), int(n)) for s, b, n in request["runs"]]
    line.send_frame({})
    for start, stop in spans:
        line.send(agent.arena.bytes[start:stop].data)
        agent.count("sent", stop - start)


def _receive_pieces(agent: Agent, line: Line, request: dict[str, Any]) -> None:
    from hetjax.kernels.erasure import find_bad_blocks

    entry, total = agent.writable(request), 0
    line.send_frame({})
    while True:
        stripe, block, count, length = _PIECE.unpack(line.receive_exactly(_PIECE.size))
        if not count:
            break
        start, stop = entry.span(stripe, block, count)
        if not stop - start - entry.layout.block_bytes < length <= stop - start:
            raise Refused(
                "invalid_argument",
                f"{length} bytes for {count} blocks of {entry.layout.block_bytes}",
            )
        sums = np.frombuffer(line.receive_exactly(8 * count), np.uint64)
        target = agent.arena.bytes[start:stop]
        view = target[:length].data
        while len(view):
            line.wait()
            # The memory may be given to another object at any time but while the lock is held, so
            # it is held for what is there already, never while waiting.
            with entry.lock:
                _still(entry)
                received = line.socket.recv_into(view)
            if not received:
                raise EOFError("the sender is gone")
            view = view[received:]
        with entry.lock:
            _still(entry)
            target[length:] = 0
            bad = find_bad_blocks(target, sums, entry.layout.block_bytes)
        if bad:
            raise Refused(
                "data_loss", f"{len(bad)} of {count} blocks arrived damaged at stripe {stripe}"
            )
        agent.store.mark(entry, stripe, block, sums)
        total += length
    agent.count("received", total)
    line.send_frame({"bytes": total})


def _still(entry: Any) -> None:
    if entry.freed:
        raise Refused("not_found", f"object {entry.name}@{entry.step} was given up")
