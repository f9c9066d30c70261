"""The seam for transports: pieces as views of host buffers, chunk by chunk, within a memory budget.

A transport moves views and knows nothing of programs. Nothing is pickled: a view is a piece of a host
buffer with its dtype, shape and place at the destination. A relay's chunk is sent when the chunks it is
made of have arrived.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hetjax.ir.blocks import chunk_bytes, chunk_edges, common, covers
from hetjax.ir.errors import RuntimeFault
from hetjax.ir.program import Block, Piece

# Bytes handed to a transport and not yet arrived.
BUDGET_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PieceView:
    """One chunk under way.

    Attributes:
      name: of its reshard.
      source, target: devices, as positions in the cluster.
      start, stop: its bounds in the whole value.
      data: a view of the sender's buffer, with dtype and shape; on the other side, what arrived.
      checksum: CRC-32 of its bytes, None unless asked for.
    """

    name: str
    source: int
    target: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    data: np.ndarray
    checksum: int | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Transport(Protocol):
    """Moves views from device to device."""

    def send(self, view: PieceView, arrived: Callable[[PieceView], None]) -> None:
        """Takes a view without waiting; calls `arrived` once, from any thread, when its bytes are there."""
        ...


class InProcess:
    """The transport of one process: what is sent has arrived."""

    def send(self, view: PieceView, arrived: Callable[[PieceView], None]) -> None:
        arrived(view)


def crc(data: np.ndarray) -> int:
    """Returns the CRC-32 of an array's bytes in row-major order."""
    return zlib.crc32(np.ascontiguousarray(data).view(np.uint8).reshape(-1).data) if data.size else 0


def carry(
    name: str, pieces: Sequence[Piece], held: Mapping[int, tuple[Block, np.ndarray]],
    due: Mapping[int, Block], transport: Transport, *, budget_bytes: int = BUDGET_BYTES, check: bool = False,
    timeout_s: float | None = None,
) -> dict[int, np.ndarray]:
    """Returns each target device's block, brought by a transport.

    Args:
      name: the reshard's, for messages.
      pieces: in an order in which relays follow what they relay.
      held: the block that each source device holds, and its host buffer.
      due: the block that each target device shall hold.
      transport: what moves the bytes.
      budget_bytes: at most this much is under way at once; one chunk always may be.
      check: whether every chunk carries a checksum.
      timeout_s: give up after so long; None waits for ever.

    Raises:
      RuntimeFault: a chunk arrived damaged, or the transport failed or was too slow.
    """
    return _Carriage(name, pieces, held, due, transport, budget_bytes, check).run(timeout_s)


class _Carriage:
    def __init__(self, name: str, pieces: Sequence[Piece], held: Mapping[int, tuple[Block, np.ndarray]],
                 due: Mapping[int, Block], transport: Transport, budget_bytes: int, check: bool):
        self.name, self.transport, self.check, self.budget = name, transport, check, budget_bytes
        dtype = next(iter(held.values()))[1].dtype
        self.due = due
        # What a device sends on it must keep: its own block where that covers it, else a buffer round all it gets.
        self.buffers: dict[int, list[tuple[Block, np.ndarray]]] = {d: [h] for d, h in held.items()}
        self.inbox: dict[int, tuple[Block, np.ndarray]] = {}
        for d in dict.fromkeys([*due, *(p.target for p in pieces)]):
            blocks = [*((p.start, p.stop) for p in pieces if p.target == d), *([due[d]] if d in due else [])]
            joins = d in held and any(p.source == d and not covers(held[d][0], (p.start, p.stop)) for p in pieces)
            if joins:  # it sends on what it held together with what it got
                blocks.append(held[d][0])
            block = (tuple(map(min, zip(*(b[0] for b in blocks)))), tuple(map(max, zip(*(b[1] for b in blocks)))))
            self.inbox[d] = (block, np.empty([b - a for a, b in zip(*block)], dtype))
            if joins:
                self.inbox[d][1][_within(held[d][0], block)] = held[d][1]
            self.buffers.setdefault(d, []).append(self.inbox[d])
        sent: collections.Counter[int] = collections.Counter()
        for p in pieces:
            sent[p.source] += int(np.prod([b - a for a, b in zip(p.start, p.stop)])) * dtype.itemsize
        limit = min(chunk_bytes(max(sent.values(), default=0)), budget_bytes)
        turns = []
        for k, p in enumerate(pieces):
            for turn, block in enumerate(chunk_edges(p.start, p.stop, dtype.itemsize, limit)):
                turns.append((turn, k, (p.source, p.target, block)))
        # All pieces advance together, so that relays start as early as they can.
        self.chunks = [c for _, _, c in sorted(turns, key=lambda x: x[:2])]
        self.missing = [0] * len(self.chunks)
        self.readers: list[list[int]] = [[] for _ in self.chunks]
        into: dict[int, list[int]] = {}
        for i, (_, target, _) in enumerate(self.chunks):
            into.setdefault(target, []).append(i)
        for i, (source, _, block) in enumerate(self.chunks):
            if source in held and covers(held[source][0], block):
                continue
            for j in into.get(source, ()):
                if common(self.chunks[j][2], block):
                    self.missing[i] += 1
                    self.readers[j].append(i)
        # What relays send on goes first, and half the budget is theirs: else what waits at a slow link fills it.
        self.first = collections.deque(i for i, m in enumerate(self.missing) if not m)
        self.relays: collections.deque[int] = collections.deque()
        self.share = budget_bytes // 2 if any(self.missing) else budget_bytes
        self.under_way = 0
        self.pumping = False
        self.left = len(self.chunks)
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.fault: Exception | None = None

    def run(self, timeout_s: float | None) -> dict[int, np.ndarray]:
        if not self.left:
            self.done.set()
        self.pump()
        if not self.done.wait(timeout_s):
            raise RuntimeFault(f"{self.name}: {self.left} of {len(self.chunks)} chunks had not arrived after {timeout_s} s")
        if self.fault is not None:
            raise self.fault
        return {d: self.block(d, block) for d, block in self.due.items()}

    def block(self, device: int, block: Block) -> np.ndarray:
        outer, data = self.inbox[device]
        return data[_within(block, outer)]

    def pump(self) -> None:
        """Hands ready chunks to the transport, as many as the budget allows; one thread at a time."""
        with self.lock:
            if self.pumping:
                return  # the one that pumps looks again before it stops
            self.pumping = True
        while True:
            with self.lock:
                queue, limit = (self.relays, self.budget) if self.relays else (self.first, self.share)
                if self.fault is not None or not queue:
                    self.pumping = False
                    return
                i = queue[0]
                source, target, block = self.chunks[i]
                outer, data = next((b, x) for b, x in self.buffers[source] if covers(b, block))
                view = data[_within(block, outer)]
                if self.under_way and self.under_way + view.nbytes > limit:
                    self.pumping = False
                    return
                queue.popleft()
                self.under_way += view.nbytes
            piece = PieceView(self.name, source, target, block[0], block[1], view, crc(view) if self.check else None)
            try:
                self.transport.send(piece, lambda back, i=i, n=view.nbytes: self.arrived(i, n, back))
            except Exception as error:
                self.fail(RuntimeFault(f"{self.name}: the transport failed from device {source} to {target}: {error}"))
                return

    def arrived(self, i: int, nbytes: int, view: PieceView) -> None:
        if view.checksum is not None and crc(view.data) != view.checksum:
            self.fail(RuntimeFault(
                f"{self.name}: the chunk {view.start} to {view.stop} from device {view.source} to {view.target} "
                "arrived damaged: its checksum differs; the transport or its host's memory is at fault"))
            return
        outer, data = self.inbox[view.target]
        data[_within((view.start, view.stop), outer)] = view.data
        with self.lock:
            self.under_way -= nbytes
            self.left -= 1
            for r in self.readers[i]:
                self.missing[r] -= 1
                if not self.missing[r]:
                    self.relays.append(r)
            if not self.left:
                self.done.set()
        self.pump()

    def fail(self, fault: Exception) -> None:
        with self.lock:
            self.fault = self.fault or fault
        self.done.set()


def _within(block: Block, outer: Block) -> tuple[Any, ...]:
    """Returns the index of a block in the buffer of another that contains it; "..." keeps scalars views."""
    return (*(slice(a - o, b - o) for a, b, o in zip(*block, outer[0])), ...)
