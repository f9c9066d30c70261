"""The client side of one agent: small calls, bulk in, bulk out, each with a deadline."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from hetjax.eccheck import bulk, wire
from hetjax.eccheck.config import Config, Tls
from hetjax.eccheck.wire import AgentError
from hetjax.ir.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")

_HELLO_S, _CONNECT_S = 10.0, 2.0
_log = logging.getLogger("hetjax.eccheck")

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # one connection a channel: no sharing of flow control
    ("grpc.enable_http_proxy", 0),
    # A message a frame, and a window of several: together a third more than gRPC's defaults.
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
]


@dataclass(frozen=True)
class Credentials:
    """Who is calling.

    Attributes:
      job: the job's name.
      token: its secret.
      tls: files for TLS, or None.
    """

    job: str
    token: str = field(default="", repr=False)
    tls: Tls | None = None


class Peer:
    """A connection to one agent.

    Args:
      address: "host:port".
      credentials: who is calling.
    """

    def __init__(self, address: str, credentials: Credentials):
        import grpc

        self.address, self._grpc, self._credentials = address, grpc, credentials
        self._bulk_port = -1  # not asked for yet; 0: everything by gRPC
        options = list(CHANNEL_OPTIONS)
        tls = credentials.tls
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            if tls.name:
                options.append(("grpc.ssl_target_name_override", tls.name))
            try:
                ca, cert, key = (pathlib.Path(p).read_bytes() for p in (tls.ca, tls.cert, tls.key))
            except OSError as error:
                raise CheckpointError(f"cannot read a file for TLS: {error}") from error
            self._channel = grpc.secure_channel(
                address, grpc.ssl_channel_credentials(ca, key, cert), options=options
            )
        prefix = f"/{wire.SERVICE}/"
        self._call = self._channel.unary_unary(prefix + "Call")
        self._put = self._channel.stream_unary(prefix + "Put")
        self._get = self._channel.unary_stream(prefix + "Get")
        self._metadata = (("hetjax-job", credentials.job), ("hetjax-token", credentials.token))

    def close(self) -> None:
        """Closes the connection; calls in flight end."""
        self._channel.close()

    def _error(self, error: Any) -> AgentError:
        code = error.code().name.lower() if error.code() else "internal"
        detail = error.details() or ""
        if code == "deadline_exceeded" and detail.lower().startswith("deadline exceeded"):
            detail = "no answer within the deadline; it is stopped, overloaded or cut off"
        elif code == "unavailable":
            detail = f"not reachable ({detail}); is `hetjax agent` running there?"
        return AgentError(detail, code=code, address=self.address)

    def call(
        self, op: str, *, timeout_s: float, payload: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], memoryview]:
        """Returns header and payload of the answer.

        Raises:
          AgentError: refused, failed, unreachable, or no answer in time.
        """
        try:
            reply = self._call(
                wire.pack({"op": op, **fields}, payload), timeout=timeout_s, metadata=self._metadata
            )
        except self._grpc.RpcError as error:
            raise self._error(error) from None
        return wire.unpack(reply)

    @contextlib.contextmanager
    def watched(self, timeout_s: float) -> Iterator[Peer]:
        """Yields this peer for a call of unknown length, which ends once the agent gives no sign of life.

        Args:
          timeout_s: deadline of a sign of life, and the pause between two.

        Raises:
          AgentError: it gives none, at the start or later.
        """
        ended, silence = threading.Event(), []

        def watch() -> None:
            while not ended.wait(timeout_s):
                try:
                    self.call("hello", timeout_s=timeout_s)
                except AgentError as error:
                    silence.append(error)
                    self.close()  # which ends the call
                    return

        self.call("hello", timeout_s=timeout_s)
        watcher = threading.Thread(target=watch, daemon=True, name="eccheck-watch")
        watcher.start()
        try:
            yield self
        except AgentError as error:
            raise (silence[0] if silence else error) from None
        finally:
            ended.set()

    def put(self, messages: Iterable[bytes], *, timeout_s: float) -> dict[str, Any]:
        """Sends a stream of packed messages; returns the answer's header.

        Raises:
          AgentError: as `call`.
        """
        try:
            reply = self._put(iter(messages), timeout=timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            raise self._error(error) from None
        return wire.unpack(reply)[0]

    def get(
        self, op: str, *, timeout_s: float, **fields: Any
    ) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Yields the messages of a stream.

        Raises:
          AgentError: as `call`, also in the middle.
        """
        stream = self._get(
            wire.pack({"op": op, **fields}), timeout=timeout_s, metadata=self._metadata
        )
        try:
            for message in stream:
                yield wire.unpack(message)
        except self._grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            stream.cancel()

    def _bulk(self, timeout_s: float) -> bulk.Line | None:
        """Returns a connection for one transfer, or None where it has to go by gRPC."""
        if self._credentials.tls is not None or self._bulk_port == 0:
            return None
        host = self.address.rpartition(":")[0].strip("[]")
        for attempt in range(2):
            if self._bulk_port < 0:
                hello, _ = self.call("hello", timeout_s=min(timeout_s, _HELLO_S))
                self._bulk_port = int(hello.get("bulk_port", 0))
                if not self._bulk_port:
                    return None
            try:
                return bulk.connect(
                    host, self._bulk_port, self._credentials.job, self._credentials.token,
                    connect_s=_CONNECT_S, timeout_s=timeout_s,
                )
            except OSError as error:
                if attempt == 0:
                    self._bulk_port = -1  # another agent may have taken the address: ask again
                    continue
                _log.warning(
                    "agent %s: its port %d for bulk transfers cannot be reached (%s); they go by gRPC, "
                    "which is slower", self.address, self._bulk_port, error,
                )
                self._bulk_port = 0
        return None

    def read_blocks(
        self, oid: str, runs: Sequence[tuple[int, int, int]], block_bytes: int, *,
        timeout_s: float, land: bulk.Land | None = None,
    ) -> Iterator[tuple[int, int, np.ndarray, bool]]:
        """Yields blocks as `bulk.read_blocks` does.

        Raises:
          AgentError: as `call`, also in the middle.
        """
        line = self._bulk(timeout_s)
        if line is not None:
            yield from bulk.read_blocks(
                line, self.address, oid, runs, block_bytes, timeout_s=timeout_s, land=land)
            return
        stream = self.get("read", oid=oid, runs=[list(r) for r in runs], timeout_s=timeout_s)
        for header, payload in stream:
            yield int(header["s"]), int(header["b"]), np.frombuffer(payload, np.uint8), False

    def put_blocks(self, oid: str, pieces: Iterable[bulk.Piece], *, timeout_s: float) -> None:
        """Sends blocks and waits until the agent has them.

        Raises:
          AgentError: as `call`.
        """
        line = self._bulk(timeout_s)
        if line is not None:
            bulk.put_blocks(line, self.address, oid, pieces, timeout_s=timeout_s)
            return

        def messages() -> Iterator[bytes]:
            yield wire.pack({"op": "put", "oid": oid})
            for stripe, block, sums, data in pieces:
                yield wire.pack({"s": stripe, "b": block, "n": len(sums)}, sums.tobytes(), data)

        self.put(messages(), timeout_s=timeout_s)

    def blob(self, op: str, *, timeout_s: float, limit_bytes: int, **fields: Any) -> bytes:
        """Returns the joined payload of a stream.

        Raises:
          AgentError: as `call`, or more than the limit arrives.
        """
        parts, total = [], 0
        for _, payload in self.get(op, timeout_s=timeout_s, **fields):
            total += len(payload)
            if total > limit_bytes:
                raise AgentError(
                    f"{op} is longer than {limit_bytes} bytes", code="out_of_range",
                    address=self.address,
                )
            parts.append(payload)
        return b"".join(parts)

    def sums(self, oid: str, first: int, last: int, *, timeout_s: float) -> np.ndarray:
        """Returns the block checksums of the chunks of stripes first..last-1, one after the other."""
        data = self.blob(
            "sums", oid=oid, stripes=[first, last], timeout_s=timeout_s, limit_bytes=1 << 30
        )
        return np.frombuffer(data, np.uint64)


class Pool:
    """Connections to agents, made when first used, and parallel calls over them.

    Args:
      credentials: who is calling.
    """

    def __init__(self, credentials: Credentials):
        self.credentials = credentials
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="eccheck-rpc")

    def peer(self, address: str) -> Peer:
        """Returns the connection to an agent."""
        with self._lock:
            if address not in self._peers:
                self._peers[address] = Peer(address, self.credentials)
            return self._peers[address]

    def each(self, items: Sequence[T], run: Any) -> list[tuple[T, Any]]:
        """Returns (item, result or CheckpointError) of run(item) in parallel."""

        def guarded(item: T) -> tuple[T, Any]:
            try:
                return item, run(item)
            except CheckpointError as error:
                return item, error

        if len(items) == 1:
            return [guarded(items[0])]
        return list(self._threads.map(guarded, items))

    def submit(self, run: Any, *args: Any, **keywords: Any) -> Any:
        """Runs something in the pool's threads; returns its future."""
        return self._threads.submit(run, *args, **keywords)

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def pool_of(config: Config) -> Pool:
    """Returns a pool with the credentials of a configuration."""
    return Pool(Credentials(config.job, config.token, config.tls))
