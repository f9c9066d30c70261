"""The objects an agent holds: one chunk set each, from allocation to commit.

An object is one saved tree (one item of one step) of one group, of which this agent holds one
position. It passes through

    open       memory allocated, bytes arriving
    prepared   complete, the manifest is here; waits for the verdict
    committed  readable; never overwritten while it is the newest recoverable one

Every state change is a message from the coordinator of the save; a coordinator that dies leaves
open or prepared objects, which the next epoch drops.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hetjax.eccheck.arena import Arena
from hetjax.eccheck.layout import Layout, Placement, place
from hetjax.eccheck.manifest import save_of
from hetjax.ir.errors import CheckpointError

OPEN, PREPARED, COMMITTED = "open", "prepared", "committed"


class Refused(CheckpointError):
    """A request that does not fit the agent's state.

    Attributes:
      code: the gRPC status name to answer with.
    """

    def __init__(self, code: str, message: str):
        self.code = code
        super().__init__(message)


@dataclass(eq=False)
class Entry:
    """One object's chunks on this agent.

    Attributes:
      oid: the object's unique name.
      name: which item of which directory, the same for all its steps.
      step: training step.
      epoch: start of the job that wrote it.
      group: number of the group within the object.
      position: which member of the group this agent is for this object.
      layout: the group's layout.
      offset: start in the arena.
      chunk_offsets: arena offset of each stripe's chunk.
      sums: per stripe, the checksum of each block, uint64.
      known: per stripe, which blocks have arrived.
      state: OPEN, PREPARED or COMMITTED.
      manifest: the object's manifest, once prepared.
      damaged: (stripe, block) found bad by a scrub and not yet repaired.
      created_s: wall clock at the save.
      lock: held while bytes are written; `freed` is set under it.
      freed: the memory belongs to something else now.
    """

    oid: str
    name: str
    step: int
    epoch: int
    group: int
    position: int
    layout: Layout
    offset: int
    num_bytes: int
    chunk_offsets: list[int]
    sums: list[np.ndarray]
    known: list[np.ndarray]
    state: str = OPEN
    manifest: bytes = b""
    damaged: set[tuple[int, int]] = field(default_factory=set)
    created_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    freed: bool = False

    @property
    def placement(self) -> Placement:
        """The layout worked out."""
        return place(self.layout)

    def used(self, stripe: int) -> int:
        """Returns how many blocks of a stripe's chunk are stored here."""
        return self.placement.used_blocks[self.position][stripe]

    def span(self, stripe: int, block: int, num_blocks: int) -> tuple[int, int]:
        """Returns the arena range of some blocks.

        Raises:
          Refused: the blocks are not of this chunk.
        """
        if not (
            0 <= stripe < self.layout.n and block >= 0 and num_blocks > 0
            and block + num_blocks <= self.used(stripe)
        ):
            raise Refused(
                "invalid_argument",
                f"blocks {block}..{block + num_blocks} of stripe {stripe} are not in object "
                f"{self.name}@{self.step} at position {self.position}",
            )
        start = self.chunk_offsets[stripe] + block * self.layout.block_bytes
        return start, start + num_blocks * self.layout.block_bytes

    def missing_blocks(self) -> int:
        """Returns how many blocks have not arrived."""
        return sum(int((~known).sum()) for known in self.known)

    def sums_digest(self) -> str:
        """Returns a hash over the checksums of all blocks, as hex."""
        from xxhash import xxh3_128_hexdigest

        return xxh3_128_hexdigest(b"".join(s.tobytes() for s in self.sums))

    def summary(self) -> dict[str, Any]:
        """Returns what a list shows of this object."""
        from xxhash import xxh3_128_hexdigest

        return {
            "oid": self.oid, "name": self.name, "step": self.step, "epoch": self.epoch,
            "group": self.group, "position": self.position, "state": self.state,
            "bytes": self.num_bytes, "manifest": xxh3_128_hexdigest(self.manifest),
            "damaged": sorted(map(list, self.damaged)), "created_s": self.created_s,
            "k": self.layout.k, "m": self.layout.m,
        }


class Store:
    """All objects of an agent, and the epoch that fences older starts of the job.

    Args:
      arena: the memory.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        self.lock = threading.RLock()
        self.entries: dict[str, Entry] = {}
        self.epoch = 0
        self.evictions = 0
        # name -> what its newest save must not overwrite: what the directory listed at that time
        self.protected: dict[str, set[str]] = {}

    def fence(self, epoch: int) -> None:
        """Accepts an epoch, and drops what older epochs left unfinished.

        Raises:
          Refused: a newer start of the job is known here.
        """
        with self.lock:
            if epoch < self.epoch:
                raise Refused(
                    "failed_precondition",
                    f"epoch {epoch} is stale: epoch {self.epoch} of this job has begun; this "
                    "process was replaced and must not write",
                )
            if epoch > self.epoch:
                self.epoch = epoch
                # What is prepared may be committed elsewhere: the next save says whether it stays.
                for entry in list(self.entries.values()):
                    if entry.state == OPEN and entry.epoch < epoch:
                        self.drop(entry.oid)

    def get(self, oid: str, *states: str) -> Entry:
        """Returns an object, in one of the states where any are named.

        Raises:
          Refused: it is not here, or in another state.
        """
        with self.lock:
            entry = self.entries.get(oid)
        if entry is None:
            raise Refused("not_found", f"object {oid} is not here")
        if states and entry.state not in states:
            raise Refused(
                "failed_precondition",
                f"object {entry.name}@{entry.step} is {entry.state}, not {' or '.join(states)}",
            )
        return entry

    def begin(
        self, *, oid: str, name: str, step: int, epoch: int, group: int, position: int,
        layout: Layout, live: set[str], protect: set[str], keep_all: bool = False,
    ) -> tuple[Entry, list[dict[str, Any]]]:
        """Allocates a new object; frees what is no longer wanted first.

        Args:
          live: objects of this name that a directory still lists; all others are freed.
          protect: objects never to be overwritten (the newest recoverable step).
          keep_all: free nothing and remember nothing: a save is made again, and is no news.

        Returns:
          The entry, and summaries of the live objects that had to make room.

        Raises:
          Refused: stale epoch, or not enough memory.
        """
        with self.lock:
            self.fence(epoch)
            if oid in self.entries:
                raise Refused("failed_precondition", f"object {oid} exists")
            if not 0 <= position < layout.n:
                raise Refused("invalid_argument", f"position {position} of {layout.n}")
            if keep_all:
                entry = self._allocate(oid, name, step, epoch, group, position, layout)
                if entry is None:
                    raise Refused("resource_exhausted", self._no_room(name, step, position, layout))
                self.entries[oid] = entry
                return entry, []
            self.protected[name] = {save_of(o) for o in protect}
            wanted = {save_of(o) for o in live} | self.protected[name]
            for entry in list(self.entries.values()):
                if entry.name != name:
                    continue
                if save_of(entry.oid) not in wanted:
                    self.drop(entry.oid)
                elif entry.state == PREPARED and entry.oid in live | protect:
                    # The coordinator counts it among the committed: the word was lost on its way.
                    entry.state = COMMITTED
            entry = self._allocate(oid, name, step, epoch, group, position, layout)
            evicted = []
            while entry is None:
                victims = [
                    e for e in self.entries.values() if e.name == name and (
                        (e.state == COMMITTED and save_of(e.oid) not in self.protected[name])
                        or (e.state == OPEN and e.oid != save_of(e.oid))  # being made again: can wait
                    )
                ]
                if not victims:
                    raise Refused("resource_exhausted", self._no_room(name, step, position, layout))
                victim = min(victims, key=lambda e: (e.state == COMMITTED, e.step, e.created_s))
                if victim.state == COMMITTED:
                    evicted.append(victim.summary())
                    self.evictions += 1
                self.drop(victim.oid)
                entry = self._allocate(oid, name, step, epoch, group, position, layout)
            self.entries[oid] = entry
            return entry, evicted

    def adopt(self, *, oid: str, name: str, step: int, epoch: int, group: int, position: int,
              layout: Layout) -> Entry:
        """Allocates the place of a lost member, to be filled by a repair.

        Raises:
          Refused: not enough memory, or this agent holds another position of the object.
        """
        with self.lock:
            existing = self.entries.get(oid)
            if existing is not None:
                if existing.position == position and existing.group == group:
                    return existing
                raise Refused(
                    "failed_precondition",
                    f"object {name}@{step}: position {existing.position} of group "
                    f"{existing.group} is here already; two on one host would be lost together",
                )
            entry = self._allocate(oid, name, step, epoch, group, position, layout)
            if entry is None:
                raise Refused("resource_exhausted", self._no_room(name, step, position, layout))
            self.entries[oid] = entry
            return entry

    def _no_room(self, name: str, step: int, position: int, layout: Layout) -> str:
        need = sum(place(layout).used_blocks[position]) * layout.block_bytes
        return (
            f"object {name}@{step} needs {need} bytes here; {self.arena.largest_free_bytes} of "
            f"{self.arena.capacity_bytes} are free in one piece and the rest holds "
            f"{len(self.entries)} objects that must stay; start the agent with more --memory "
            f"(one version: {need}) or more --versions"
        )

    def _allocate(
        self, oid: str, name: str, step: int, epoch: int, group: int, position: int, layout: Layout
    ) -> Entry | None:
        used = place(layout).used_blocks[position]
        num_bytes = sum(used) * layout.block_bytes
        offset = self.arena.allocate(num_bytes)
        if offset is None:
            return None
        ends = np.cumsum([0, *used[:-1]]) * layout.block_bytes
        return Entry(
            oid, name, step, epoch, group, position, layout, offset, num_bytes,
            [offset + int(e) for e in ends],
            [np.zeros(u, np.uint64) for u in used], [np.zeros(u, bool) for u in used],
            created_s=time.time(),
        )

    def drop(self, oid: str) -> bool:
        """Frees an object; returns whether it was here."""
        with self.lock:
            entry = self.entries.pop(oid, None)
            if entry is not None:
                with entry.lock:  # a stream of a dead trainer may be writing into it
                    entry.freed = True
                self.arena.release(entry.offset, entry.num_bytes)
            return entry is not None

    def write(self, entry: Entry, stripe: int, block: int, sums: np.ndarray, data: memoryview) -> None:
        """Stores some blocks, whose last may be short: the rest of it becomes zero.

        Raises:
          Refused: the blocks are not of this object, or the bytes do not have these sums.
        """
        from hetjax.kernels.erasure import find_bad_blocks

        start, stop = entry.span(stripe, block, len(sums))
        if not stop - start - entry.layout.block_bytes < len(data) <= stop - start:
            raise Refused(
                "invalid_argument", f"{len(data)} bytes for {len(sums)} blocks of "
                f"{entry.layout.block_bytes}",
            )
        with entry.lock:
            if entry.freed:
                raise Refused("not_found", f"object {entry.name}@{entry.step} was given up")
            target = self.arena.bytes[start:stop]
            np.copyto(target[: len(data)], np.frombuffer(data, np.uint8))
            target[len(data) :] = 0
            bad = find_bad_blocks(target, sums, entry.layout.block_bytes)
        if bad:
            raise Refused(
                "data_loss", f"{len(bad)} of {len(sums)} blocks arrived damaged at stripe {stripe}"
            )
        self.mark(entry, stripe, block, sums)

    def mark(self, entry: Entry, stripe: int, block: int, sums: np.ndarray) -> None:
        """Records the sums of blocks whose bytes are in place."""
        entry.span(stripe, block, len(sums))
        entry.sums[stripe][block : block + len(sums)] = sums
        entry.known[stripe][block : block + len(sums)] = True

    def scrub(self, entry: Entry, pace: Any = None) -> list[tuple[int, int]]:
        """Returns (stripe, block) of every block whose bytes do not have their sum."""
        from hetjax.kernels.erasure import find_bad_blocks

        bad = []
        step = max(1, (1 << 20) // entry.layout.block_bytes)
        for stripe in range(entry.layout.n):
            for block in range(0, entry.used(stripe), step):
                count = min(step, entry.used(stripe) - block)
                start, stop = entry.span(stripe, block, count)
                if pace is not None:
                    pace(stop - start)
                sums = entry.sums[stripe][block : block + count]
                found = find_bad_blocks(self.arena.bytes[start:stop], sums, entry.layout.block_bytes)
                bad += [(stripe, block + i) for i in found]
        if self.entries.get(entry.oid) is not entry:
            return []  # freed meanwhile: its memory belongs to another object now
        entry.damaged = set(bad)
        return bad
