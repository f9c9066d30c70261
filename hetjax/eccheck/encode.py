"""An agent makes the parity of its stripe: pulls k data chunks, keeps one parity, pushes the rest.

Each member encodes the one stripe whose first parity row it holds, so the work and the traffic are
the same everywhere. Chunks are pulled in step, a message each, so that no more than k + m messages
are in memory; the receiver's pace holds back the senders (gRPC flow control).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetjax.eccheck import bulk
from hetjax.eccheck.layout import sole_writer
from hetjax.eccheck.peer import Pool
from hetjax.eccheck.sources import RemoteSource
from hetjax.eccheck.store import Entry, Refused, Store
from hetjax.eccheck.wire import blocks_per_message
from hetjax.ir.errors import CheckpointError
from hetjax.kernels.erasure import Code, block_sums, find_bad_blocks


class PutStream:
    """A bulk stream to one agent, fed from a queue by a thread of its own.

    Args:
      peer: the agent.
      oid: the object.
      timeout_s: deadline of the whole stream.
      depth: messages that may wait.
    """

    def __init__(self, peer: Any, oid: str, *, timeout_s: float, depth: int = 4):
        self._queue: queue.Queue[tuple[bulk.Piece, Callable[[], None]] | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._abandoned = False

        def pieces() -> Iterator[bulk.Piece]:
            while (item := self._queue.get()) is not None and not self._abandoned:
                yield item[0]
                item[1]()

        def run() -> None:
            try:
                peer.put_blocks(oid, pieces(), timeout_s=timeout_s)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="eccheck-put", daemon=True)
        self._thread.start()

    def _offer(self, message: tuple[bulk.Piece, Callable[[], None]] | None) -> None:
        # Not a plain put: after a failure nobody empties the queue any more.
        while self._error is None:
            try:
                return self._queue.put(message, timeout=0.2)
            except queue.Full:
                continue
        self.abandon()
        raise self._error

    def send(
        self, stripe: int, block: int, sums: np.ndarray, data: Any,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Queues some blocks.

        Args:
          stripe: which.
          block: the first.
          sums: one a block.
          data: their bytes; must not change before `done` is called.
          done: called when they are sent.

        Raises:
          AgentError: the stream has failed.
        """
        self._offer(((stripe, block, sums, data), done))

    def close(self) -> None:
        """Ends the stream and waits until the agent has everything.

        Raises:
          AgentError: the stream has failed.
        """
        self._offer(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Ends the stream without a verdict and without waiting."""
        self._abandoned = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)


def encode_own_stripe(
    store: Store, pool: Pool, entry: Entry, *, timeout_of: Callable[[int], float],
    pace: Callable[[int], None], count: Callable[[str, int], None],
) -> None:
    """Makes the parity of the stripe whose first row this agent holds.

    Args:
      store: this agent's objects.
      pool: connections to the other members.
      entry: the object.
      timeout_of: bytes -> deadline in seconds.
      pace: called before each round with its bytes.
      count: told ("received" | "sent", bytes).

    Raises:
      CheckpointError: a member failed, or its bytes do not have their sums.
    """
    layout, stripe = entry.layout, entry.position
    if not layout.m or sole_writer(layout, stripe) >= 0:
        return
    length, block_bytes = entry.used(stripe), layout.block_bytes
    used = entry.placement.used_blocks
    holders = {c: layout.holder(c, stripe) for c in range(layout.k)}
    columns = {c: p for c, p in holders.items() if used[p][stripe]}
    sources = {
        c: RemoteSource(pool.peer(layout.members[p]), entry.oid, timeout_of)
        for c, p in columns.items()
    }
    sums = {c: s.sums(stripe, stripe + 1) for c, s in sources.items()}
    streams = {
        c: s.read([(stripe, 0, used[columns[c]][stripe])], block_bytes) for c, s in sources.items()
    }
    rows = Code(layout.k, layout.m).matrix[layout.k :]
    pushes = {
        row: PutStream(
            pool.peer(layout.members[layout.holder(layout.k + row, stripe)]), entry.oid,
            timeout_s=timeout_of(length * block_bytes * (1 + layout.k)),
        )
        for row in range(1, layout.m)
    }
    try:
        per = blocks_per_message(block_bytes)
        scratch = np.empty((layout.m, per * block_bytes), np.uint8)
        for block in range(0, length, per):
            blocks = min(per, length - block)
            pace(blocks * block_bytes * (len(columns) + len(pushes)))
            present: dict[int, np.ndarray] = {}
            for column, position in columns.items():
                expected = min(blocks, used[position][stripe] - block)
                if expected <= 0:
                    continue
                present[column] = _next(streams[column], stripe, block, expected, block_bytes,
                                        sums[column], sources[column].label)
                count("received", len(present[column]))
            outs = _combine(rows, present, scratch, blocks * block_bytes)
            for row, out in enumerate(outs):
                out_sums = block_sums(out, block_bytes)
                if row:
                    pushes[row].send(stripe, block, out_sums, out.copy())  # the scratch is used again
                    count("sent", len(out))
                else:
                    store.write(entry, stripe, block, out_sums, out.data)
        for push in pushes.values():
            push.close()
    except BaseException:
        for push in pushes.values():
            push.abandon()
        raise
    finally:
        for stream in streams.values():
            stream.close()  # type: ignore[attr-defined]


def _next(
    stream: Iterator[tuple[int, int, np.ndarray, bool]], stripe: int, block: int, blocks: int, block_bytes: int,
    sums: np.ndarray, label: str,
) -> np.ndarray:
    got = next(stream, None)
    if got is None or got[:2] != (stripe, block) or len(got[2]) != blocks * block_bytes:
        raise CheckpointError(f"agent {label} sent other blocks than asked for")
    data = got[2]
    bad = find_bad_blocks(data, sums[block : block + blocks], block_bytes)
    if bad:
        raise Refused(
            "data_loss", f"agent {label}: {len(bad)} blocks of stripe {stripe} at {block} have "
            "other bytes than their sums say",
        )
    return data


def _combine(
    rows: np.ndarray, present: dict[int, np.ndarray], scratch: np.ndarray, length: int
) -> list[np.ndarray]:
    """Returns one array a parity row; columns not present are zero, short ones end in zeros."""
    from hetjax.kernels.erasure import combine

    data = []
    for piece in present.values():
        if len(piece) < length:
            padded = np.zeros(length, np.uint8)
            padded[: len(piece)] = piece
            piece = padded
        data.append(piece)
    outs = [scratch[row, :length] for row in range(len(rows))]
    combine(rows[:, list(present)], data, outs)
    return outs
