"""Reads blocks of one group's object, and rebuilds those that are lost or damaged.

Every block is checked against sums whose digest stands in the object's manifest. A block that fails
is treated like one that is gone: it is made again from k other chunks of its stripe. Blocks are
delivered first and checked after, so that memory which is overwritten while it is copied (a save
that came too close) cannot slip through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hetjax.eccheck.bulk import Land
from hetjax.eccheck.layout import Layout, place
from hetjax.eccheck.sources import Source
from hetjax.eccheck.wire import Run, split_runs
from hetjax.ir.errors import CheckpointError
from hetjax.kernels.erasure import combine, find_bad_blocks
from hetjax.kernels.erasure.field import recovery_rows

Deliver = Callable[[int, int, int, np.ndarray], None]  # position, stripe, first block, bytes
# position, stripe, first block, bytes -> where just these bytes are wanted, if they lie together there
Destination = Callable[[int, int, int, int], "np.ndarray | None"]


def _nowhere(position: int, stripe: int, block: int, num_bytes: int) -> np.ndarray | None:
    return None


def mask_runs(mask: np.ndarray, stripe: int) -> list[Run]:
    """Returns the runs of a block mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.view(np.int8), [0]])))
    return [(stripe, int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2])]


class GroupReader:
    """The chunks of one group's object, wherever they still are.

    Args:
      layout: the group's layout.
      sources: position -> where its chunks can be read.
      digests: position -> digest of its sums, from the manifest.
      title: the object in words, for errors.
      absent: position -> why it cannot be read, for errors.
    """

    def __init__(
        self, layout: Layout, sources: Mapping[int, Source], digests: Sequence[str], title: str,
        absent: Mapping[int, str] | None = None,
    ):
        self.layout, self.sources, self.digests, self.title = layout, dict(sources), digests, title
        self.placed = place(layout)
        self.dead: dict[int, str] = {
            p: (absent or {}).get(p, "no agent holds it")
            for p in range(layout.n) if p not in self.sources
        }
        self.bad: set[tuple[int, int, int]] = set()  # position, stripe, block
        self.read_bytes = 0
        self.rebuilt_bytes = 0
        self._sums: dict[int, list[np.ndarray]] = {}
        self._spared: dict[int, int] = {}  # stripe -> healthy position that is not read but rebuilt
        self._lock = threading.Lock()
        self._destination = _nowhere

    def sums(self, position: int) -> list[np.ndarray]:
        """Returns the sums of a position's chunks by stripe, checked against the manifest.

        Raises:
          CheckpointError: it cannot be read, or its sums are not those of the manifest.
        """
        from xxhash import xxh3_128_hexdigest

        known = self._sums.get(position)
        if known is None:
            source, used = self.sources[position], self.placed.used_blocks[position]
            joined = source.sums(0, self.layout.n)
            if xxh3_128_hexdigest(joined.tobytes()) != self.digests[position]:
                raise CheckpointError(f"{source.label} has other checksums than the manifest")
            known = self._sums[position] = np.split(joined, np.cumsum(used)[:-1])
        return known

    def recoverable(self) -> list[str]:
        """Returns why stripes cannot be rebuilt, one line each; empty if all can."""
        layout, problems = self.layout, []
        for stripe in range(layout.n):
            gone = [p for p in self.dead if self.placed.used_blocks[p][stripe]]
            if len(gone) > layout.m:
                problems.append(
                    f"stripe {stripe}: {len(gone)} of {layout.n} chunks are gone and {layout.m} "
                    "may be: " + "; ".join(self._name(p, stripe) for p in sorted(gone))
                )
        return problems

    def _name(self, position: int, stripe: int) -> str:
        role = self.layout.role(position, stripe)
        kind = f"data {role}" if role < self.layout.k else f"parity {role - self.layout.k}"
        why = self.dead.get(position, "damaged")
        return f"{kind} at {self.layout.members[position]} ({why})"

    def fetch(
        self, wanted: Mapping[tuple[int, int], np.ndarray], deliver: Deliver,
        destination: Destination = _nowhere,
    ) -> None:
        """Delivers blocks, rebuilt where necessary.

        Args:
          wanted: (position, stripe) -> mask over the chunk's stored blocks.
          deliver: called with (position, stripe, first block, bytes); it may be called again for
            the same blocks, and the last call is the right one.
          destination: where blocks may be received or rebuilt in place, without a delivery.

        Raises:
          CheckpointError: more chunks of a stripe are lost than its parity covers; names them.
        """
        pending = {key: mask.copy() for key, mask in wanted.items() if mask.any()}
        self._destination = destination
        while pending:
            before = sum(int(m.sum()) for m in pending.values())
            marks = len(self.dead) + len(self.bad)
            self._check_sums(pending)
            stripes = sorted({stripe for _, stripe in pending})
            self._spared = self._spare(pending)
            # A rebuilt stripe brings those of its wanted chunks that it is rebuilt from: the rest of
            # it is read afterwards.
            lost = {stripe: gone for stripe in stripes if (gone := self._lost(stripe, pending))}
            positions = sorted({p for p, _ in pending} - set(self.dead))
            with ThreadPoolExecutor(max(1, 2 * self.layout.n)) as threads:
                work = [
                    threads.submit(self._rebuild, stripe, gone, pending, deliver)
                    for stripe, gone in lost.items()
                ]
                work += [
                    threads.submit(self._read, p, pending, deliver, set(stripes) - set(lost))
                    for p in positions
                ]
                for future in work:
                    future.result()
                for future in [
                    threads.submit(self._read, p, pending, deliver, set(lost))
                    for p in positions if lost and p not in self.dead
                ]:
                    future.result()
            pending = {key: mask for key, mask in pending.items() if mask.any()}
            left = sum(int(m.sum()) for m in pending.values())
            if left == before and marks == len(self.dead) + len(self.bad):
                raise CheckpointError(f"{self.title}: {left} blocks could not be read")

    def _spare(self, pending: Mapping[tuple[int, int], np.ndarray]) -> dict[int, int]:
        """Returns, per stripe, a remote chunk that is cheaper to rebuild than to fetch.

        Where a whole stripe is wanted and its parity lies in mapped memory, one of its data chunks
        need not cross the network: of 2+2 a restore then fetches half of the state, not three
        quarters. The holder with most to send is spared.
        """
        load: dict[int, int] = {}
        for (position, _), mask in pending.items():
            load[position] = load.get(position, 0) + int(mask.sum())
        spared: dict[int, int] = {}
        for stripe in sorted({stripe for _, stripe in pending}):
            data = [self.layout.holder(c, stripe) for c in range(self.layout.k)]
            parity = [self.layout.holder(self.layout.k + r, stripe) for r in range(self.layout.m)]
            mapped = [p for p in parity if p not in self.dead and hasattr(self.sources[p], "data")]
            whole = all(
                not self.placed.used_blocks[p][stripe]
                or (p not in self.dead and (p, stripe) in pending and pending[p, stripe].all())
                for p in data
            )
            remote = [
                p for p in data if whole and mapped and self.placed.used_blocks[p][stripe]
                and not hasattr(self.sources[p], "data")
            ]
            if remote and not self.bad:
                spared[stripe] = max(remote, key=lambda p: load[p])
                load[spared[stripe]] -= self.placed.used_blocks[spared[stripe]][stripe]
        return spared

    def _check_sums(self, pending: Mapping[tuple[int, int], np.ndarray]) -> None:
        positions = sorted({p for p, _ in pending} - set(self.dead) - set(self._sums))

        def load(position: int) -> None:
            try:
                self.sums(position)
            except CheckpointError as error:
                self._kill(position, error)

        if positions:
            with ThreadPoolExecutor(len(positions)) as threads:
                list(threads.map(load, positions))

    def _kill(self, position: int, error: BaseException) -> None:
        with self._lock:
            self.dead.setdefault(position, str(error))

    def _is_bad(self, position: int, stripe: int, block: int, count: int) -> bool:
        return bool(self.bad) and any(
            (position, stripe, b) in self.bad for b in range(block, block + count)
        )

    def _verify(self, position: int, stripe: int, block: int, data: np.ndarray) -> bool:
        """Records blocks without their right sum; returns whether all were right."""
        size = self.layout.block_bytes
        sums = self.sums(position)[stripe][block : block + len(data) // size]
        bad = find_bad_blocks(data, sums, size)
        with self._lock:
            self.read_bytes += len(data)
            if bad:  # a new set: other threads go through the old one
                self.bad = self.bad | {(position, stripe, block + i) for i in bad}
        return not bad

    def _landing(self, position: int, mask: np.ndarray | None) -> Land:
        """Returns where blocks of a position are wanted, if all of a piece still are."""
        size = self.layout.block_bytes

        def land(stripe: int, block: int, num_bytes: int) -> np.ndarray | None:
            if mask is None or not mask[block : block + num_bytes // size].all():
                return None  # what was right before must not be overwritten with what is unchecked
            return self._destination(position, stripe, block, num_bytes)

        return land

    def _read(
        self, position: int, pending: Mapping[tuple[int, int], np.ndarray], deliver: Deliver,
        stripes: Collection[int],
    ) -> None:
        """Reads the pending healthy blocks of a position in some stripes."""
        runs: list[Run] = []
        for (p, stripe), mask in sorted(pending.items()):
            if p == position and stripe in stripes:
                healthy = mask.copy()
                for b in [b for q, s, b in self.bad if (q, s) == (p, stripe)]:
                    healthy[b] = False
                runs += mask_runs(healthy, stripe)

        if not runs:
            return
        try:
            for stripe, block, data, landed in self.sources[position].read(
                runs, self.layout.block_bytes,
                lambda s, b, n: self._destination(position, s, b, n),
            ):
                if not landed:
                    deliver(position, stripe, block, data)
                count = len(data) // self.layout.block_bytes
                if self._verify(position, stripe, block, data):
                    pending[position, stripe][block : block + count] = False
                else:
                    good = [
                        b for b in range(block, block + count)
                        if (position, stripe, b) not in self.bad
                    ]
                    pending[position, stripe][good] = False
        except CheckpointError as error:
            self._kill(position, error)

    def _lost(
        self, stripe: int, pending: Mapping[tuple[int, int], np.ndarray]
    ) -> dict[int, np.ndarray]:
        """Returns pending blocks of a stripe whose holder is dead or spared, or whose bytes are bad."""
        lost: dict[int, np.ndarray] = {}
        for (position, j), mask in pending.items():
            if j != stripe:
                continue
            gone = mask.copy()
            if position not in self.dead and self._spared.get(stripe) != position:
                gone[:] = False
                for p, s, b in self.bad:
                    if (p, s) == (position, j) and mask[b]:
                        gone[b] = True
            if gone.any():
                lost[position] = gone
        return lost

    def _rebuild(
        self, stripe: int, lost: Mapping[int, np.ndarray],
        pending: Mapping[tuple[int, int], np.ndarray], deliver: Deliver,
    ) -> None:
        """Rebuilds lost blocks of a stripe, and delivers what is wanted of those it reads for that."""
        union = np.zeros(max(len(m) for m in lost.values()), bool)
        for mask in lost.values():
            union[: len(mask)] |= mask
        for run in mask_runs(union, stripe):
            for piece in self._alike(run):
                self._rebuild_runs(stripe, [piece], lost, pending, deliver)

    def _alike(self, run: Run) -> list[Run]:
        """Splits a run where the set of damaged holders changes, so that one choice fits a piece."""
        stripe, block, count = run
        damage = {b: set[int]() for b in range(block, block + count)} if self.bad else {}
        for position, s, b in self.bad:
            if s == stripe and b in damage:
                damage[b].add(position)
        pieces: list[Run] = []
        start = block
        for b in range(block + 1, block + count + 1):
            if b == block + count or (damage and damage[b] != damage[start]):
                pieces.append((stripe, start, b - start))
                start = b
        return pieces

    def _choose(
        self, stripe: int, runs: Sequence[Run], lost: Mapping[int, np.ndarray],
        pending: Mapping[tuple[int, int], np.ndarray],
    ) -> list[int]:
        """Returns k positions to rebuild from: those wanted anyway first, mapped memory next."""
        options, excluded = [], []
        for position in range(self.layout.n):
            stored = self.placed.used_blocks[position][stripe]
            if position not in self.dead:
                try:
                    self.sums(position)
                except CheckpointError as error:
                    self._kill(position, error)
            first = min(b for _, b, _ in runs)
            if stored <= first:
                # Known to be zero, wherever its holder is.
                options.append((0, position))
            elif position in self.dead or any(
                self._is_bad(position, s, b, min(n, max(0, stored - b))) for s, b, n in runs
            ):
                excluded.append(position)
            else:
                wanted = (position, stripe) in pending and position not in lost
                mapped = hasattr(self.sources[position], "data")
                options.append((1 if wanted else 2 if mapped else 3, position))
        if len(options) < self.layout.k:
            raise CheckpointError(
                f"{self.title}: stripe {stripe} has {len(options)} of the {self.layout.k} chunks "
                "it needs; missing are "
                + "; ".join(self._name(p, stripe) for p in excluded)
                + ". Restore an older step from the persistent tier, or bring an agent back"
            )
        return [position for _, position in sorted(options)[: self.layout.k]]

    def _rebuild_runs(
        self, stripe: int, runs: Sequence[Run], lost: Mapping[int, np.ndarray],
        pending: Mapping[tuple[int, int], np.ndarray], deliver: Deliver,
    ) -> None:
        layout, size = self.layout, self.layout.block_bytes
        chosen = self._choose(stripe, runs, lost, pending)
        roles = [layout.role(p, stripe) for p in chosen]
        targets = list(lost)
        rows = recovery_rows(layout.k, layout.m, roles, [layout.role(p, stripe) for p in targets])
        streams = {}
        for position in chosen:
            stored = self.placed.used_blocks[position][stripe]
            cut = [(s, b, min(n, stored - b)) for s, b, n in runs if b < stored]
            if cut:
                streams[position] = self.sources[position].read(
                    cut, size, self._landing(position, pending.get((position, stripe))))
        for _, block, count in split_runs(runs, size):
            present: dict[int, np.ndarray] = {}
            landed: dict[int, bool] = {}
            in_place: list[bool] = []
            for position, stream in streams.items():
                expected = min(count, self.placed.used_blocks[position][stripe] - block)
                if expected <= 0:
                    continue
                try:
                    s, b, piece, landed[position] = next(stream)
                except (CheckpointError, StopIteration) as error:
                    self._kill(position, error)
                    return
                if (s, b) != (stripe, block) or len(piece) != expected * size:
                    self._kill(position, CheckpointError("sent other blocks than asked for"))
                    return
                present[position] = piece
            outs = []
            for position in targets:
                whole = lost[position][block : block + count]
                place_ = self._destination(
                    position, stripe, block, count * size
                ) if len(whole) == count and whole.all() else None
                outs.append(np.empty(count * size, np.uint8) if place_ is None else place_)
                in_place.append(place_ is not None)
            data, columns = [], []
            for column, position in enumerate(chosen):
                if position in present:
                    piece = present[position]
                    if len(piece) < count * size:
                        piece = np.concatenate([piece, np.zeros(count * size - len(piece), np.uint8)])
                    data.append(piece)
                    columns.append(column)
            if columns:
                combine(rows[:, columns], data, outs)
            else:
                for out in outs:
                    out[:] = 0
            verified = {p: self._verify(p, stripe, block, d) for p, d in present.items()}
            for position, piece in present.items():
                mask = pending.get((position, stripe))
                n = len(piece) // size
                if verified[position] and mask is not None and mask[block : block + n].all():
                    if not landed[position]:
                        deliver(position, stripe, block, piece)
                    mask[block : block + n] = False
            if not all(verified.values()):
                return
            for position, out, there in zip(targets, outs, in_place):
                mask = pending[position, stripe]
                n = min(count, len(mask) - block)
                wanted = lost[position][block : block + n]
                for _, at, length in mask_runs(wanted, stripe):
                    if not there:
                        deliver(position, stripe, block + at, out[at * size : (at + length) * size])
                    self.rebuilt_bytes += length * size
                mask[block : block + n][wanted] = False
