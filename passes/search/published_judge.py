"""The judge that published plans were scored by: the equations of Sailor's simulator, in our words.

With S stages of D replicas each, M microbatches of b examples a replica, C_s the seconds of a microbatch's
forward and backward on the slowest replica of stage s, and a message of x bytes taking x / r(x):

  a_s    largest time, over replicas, of b times the output of the stage's last layer to stage s + 1
  g_s    the same to stage s - 1, of the output of the stage's first layer
  K_s    a_0 for the first stage (2 a_0 from four stages on), 2 g for the last, a_s + g_s between
  U      largest update, over replicas, of a stage's first layer alone
  R      largest ring all-reduce, over stages and neighbouring replicas, of the stage's parameters
         over its smallest tensor degree (4 at most), in buckets of 5e8 bytes, between single GPUs

  step = (M - 1) max (C_s + K_s) + sum (C_s + K_s) + U + R

A replica needs 24 bytes a parameter, S - s times what its forwards keep, and 2e9 bytes (3e9 with tensor
parallelism), of the GPU's GiB. r(x) is a polynomial in log2(x / 1e6), in 1e9 bytes/s. Where it is not
positive (far outside the messages measured) nothing is known, and the plan is not scored.

Source: the simulator published with "Sailor" (SOSP 2025), read and written anew; a benchmark compares the
two where that simulator is at hand. Its figures rank plans as the authors rank them; what a step takes on
hetjax is another judge's business (`hetjax.passes.search.own_judge`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetjax.passes.cost.sailor import KINDS, load_json
from hetjax.passes.search.judge import INF, Edges, Groups, Report, Room, StageReport
from hetjax.passes.search.space import Group, Micro, Outline, Problem
from hetjax.passes.search.table import PublishedTable, prefix

_BUCKET_BYTES = 500_000_000.0
_BYTES_PER_PARAMETER = 24
_MEMORY_GIB = {
    "V100-16": 16, "A100-40": 40, "A100-80": 80, "GH-96": 96, "Titan-RTX": 24, "RTX-2080": 11,
    "RTX-3090": 24,
}  # fmt: skip
_GPU_OF = {kind: gpu for gpu, kind in KINDS.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part's running sums over layers."""

    work: list[float]
    forward: list[float]
    update: tuple[float, ...]
    parameters: list[float]
    stored: list[float]
    free_bytes: float


class PublishedJudge:
    """Scores plans for available GPUs; see the module's text.

    Args:
      problem: its table is a `PublishedTable`, its pools' sites are named ZONE/GPU.
      folder: the published data, for the links.
    """

    name = "published"
    exact = True
    adds_up = True
    fixed_memory = True

    def __init__(self, problem: Problem, folder: str | Path):
        table = problem.table
        assert isinstance(table, PublishedTable)
        self.problem, self.folder = problem, folder
        self._between: Any = load_json(Path(folder) / "links" / "multizone_bandwidths_het.json")
        self._zones = [p.site.split("/")[0] for p in problem.pools]
        self._gpus = [_GPU_OF[p.kind] for p in problem.pools]
        self._weights = prefix([4.0 * table.model.size(1, n).parameters for n in range(problem.num_layers)])
        self._output = table.output_bytes
        self._parts: dict[tuple[int, int, int], _Part | None] = {}
        self._works: dict[Group, tuple[list[float], ...]] = {}
        self._rooms: dict[tuple[Group, int], tuple[Room, ...]] = {}
        self._stages: dict[tuple[Group, int, int, int], tuple[float, float, float]] = {}
        self._crossings: dict[tuple[Group, Group, int], float] = {}
        self._floors: dict[Micro, float] = {}

    def __reduce__(self):  # what was worked out is left behind
        return type(self), (self.problem, self.folder)

    # What the search builds on.

    def twins(self) -> tuple[int, ...]:
        pools, out = self.problem.pools, []
        for i, a in enumerate(pools):
            same = (
                j for j in range(i)
                if out[j] == j and (a.kind, a.devices) == (pools[j].kind, pools[j].devices)
                and self._rows(i, i) == self._rows(j, j) == self._rows(i, j) == self._rows(j, i)
                and all(
                    self._rows(i, k) == self._rows(j, k) and self._rows(k, i) == self._rows(k, j)
                    for k in range(len(pools)) if k not in (i, j)
                )
            )  # fmt: skip
            out.append(next(same, i))
        return tuple(out)

    def _rows(self, a: int, b: int) -> Any:
        """Returns all that was measured from one pool to another."""
        rows = self._between.get(self._zones[a], {}).get(self._gpus[a], {})
        return {
            n: row.get(self._zones[b], {}).get(self._gpus[b]) for n, row in rows.items()
        }

    def known(self, group: Group) -> bool:
        # Times were measured inside a node.
        return all(
            p.tensor <= self.problem.pools[p.pool].per_node
            and self._part(p.pool, p.tensor, p.share) is not None
            for p in group.parts
        )

    def works(self, group: Group) -> tuple[Sequence[float], ...]:
        found = self._works.get(group)
        if found is None:
            found = self._works[group] = tuple(p.work for p in self._each(group))
        return found

    def step_works(self, m: int, group: Group, *, least: bool = False) -> tuple[Sequence[float], ...]:
        return self.works(group)  # what is owed once is the largest of any stage, not the slowest's

    def rooms(self, group: Group, in_flight: int) -> tuple[Room, ...]:
        found = self._rooms.get((group, in_flight))
        if found is None:
            found = tuple(
                ([_BYTES_PER_PARAMETER * p + in_flight * a for p, a in zip(x.parameters, x.stored)], x.free_bytes)
                for x in self._each(group)
            )
            self._rooms[group, in_flight] = found
        return found

    def in_flight(self, stage: int, stages: int, m: int) -> int:
        return stages - stage

    def floor_s(self, micro: Micro) -> float:
        """Returns what the all-reduce of the mean stage takes at the best rate of any message, at least."""
        found = self._floors.get(micro)
        if found is None:
            found = 0.0
            if micro.replicas > 1:
                most = min(self.problem.stage_limit, self.problem.device_limit // micro.replicas)
                nbytes = self._weights[-1] / max(1, most) / 4
                pools = range(len(self.problem.pools))
                rate = max(self._best_rate(a, b) for a in pools for b in pools)
                if rate > 0:
                    found = 2 * (micro.replicas - 1) / micro.replicas * nbytes / 1e9 / rate
            self._floors[micro] = found
        return found

    def _best_rate(self, a: int, b: int) -> float:
        """Returns the largest rate between single GPUs over messages from a byte to a bucket."""
        try:
            row = self._between[self._zones[a]][self._gpus[a]]["1"]
            c2, c1, c0 = row[self._zones[b]][self._gpus[b]]["1"][0]
        except KeyError:
            return 0.0
        low, high = math.log2(1e-6), math.log2(_BUCKET_BYTES / 1e6)
        marks = [low, high]
        if c2 < 0 and low < -c1 / (2 * c2) < high:
            marks.append(-c1 / (2 * c2))
        return max(c2 * x * x + c1 * x + c0 for x in marks)

    def least_crossing_s(self, source: Group, target: Group) -> float:
        # Every boundary is counted by the stages at both of its ends, at least once each.
        there = min(self._crossing_s(source, target, n) for n in self._widths)
        return there + min(self._crossing_s(target, source, n) for n in self._widths)

    def least_line_s(self, source: Group, target: Group) -> float:
        return 0.0  # lines are no bottleneck of their own there

    @functools.cached_property
    def _widths(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._output)))

    # The score.

    def bound_s(self, m: int, groups: Groups, edges: Edges) -> float:
        return self.seconds(m, groups, edges)

    def seconds(self, m: int, groups: Groups, edges: Edges, than: float = INF) -> float:
        stages = len(groups)
        slowest = total = update_s = sync_s = 0.0
        known = self._stages
        for s, group in enumerate(groups):
            key = (group, edges[s], edges[s + 1], stages - s)
            found = known.get(key)
            if found is None:
                found = known[key] = self._stage(*key)
            work_s, stage_update_s, stage_sync_s = found
            if work_s == INF:
                return INF
            if stages > 1:
                work_s += self._held_s(s, groups, edges)
            total += work_s
            if work_s > slowest:
                slowest = work_s
            if stage_update_s > update_s:
                update_s = stage_update_s
            if stage_sync_s > sync_s:
                sync_s = stage_sync_s
        return (m - 1) * slowest + total + update_s + sync_s

    def report(self, outline: Outline) -> Report:
        groups, edges, m = outline.groups, outline.edges, outline.num_microbatches
        seconds = self.seconds(m, groups, edges)
        stages, problems = [], []
        for s, group in enumerate(groups):
            first, last = edges[s], edges[s + 1]
            parts = self._each(group)
            work_s, update_s, sync_s = self._stage(group, first, last, outline.num_stages - s, check=False)
            held = outline.num_stages - s
            needs = [
                (
                    _BYTES_PER_PARAMETER * (p.parameters[last] - p.parameters[first])
                    + held * (p.stored[last] - p.stored[first]), p.free_bytes, part,
                )
                for p, part in zip(parts, group.parts)
            ]  # fmt: skip
            over = [n for n in needs if n[0] > n[1]]
            problems += [
                f"stage {s} needs {need / 1e9:.4g} GB beside the framework's own on each "
                f"{self._gpus[part.pool]}, which has {free / 1e9:.4g} GB"
                for need, free, part in over
            ]
            need, free, _ = max(needs, key=lambda n: n[0] - n[1])
            forward_s = max(p.forward[last] - p.forward[first] for p in parts)
            stages.append(
                StageReport(forward_s, work_s - forward_s, sync_s, update_s, need, free, held)
            )
        crossing_s = [
            self._crossing_s(a, b, self._output[edges[s + 1] - 1])
            for s, (a, b) in enumerate(itertools.pairwise(groups))
        ]
        return Report(seconds, seconds, "1f1b", (), tuple(stages), tuple(crossing_s), tuple(problems))

    def _stage(
        self, group: Group, first: int, last: int, held: int, *, check: bool = True
    ) -> tuple[float, float, float]:
        """Returns a stage's C, update and all-reduce; C is infinite where it does not fit."""
        parts = self._each(group)
        if check:
            for (need, free) in self.rooms(group, held):
                if need[last] - need[first] > free:
                    return (INF, 0.0, 0.0)
        work_s = max([p.work[last] - p.work[first] for p in parts])
        update_s = max([p.update[first] for p in parts])
        sync_s = 0.0
        replicas = group.replicas
        if replicas > 1:
            tensor = min(4, min([p.tensor for p in group.parts]))
            nbytes = (self._weights[last] - self._weights[first]) / tensor
            for i, p in enumerate(group.parts):
                if p.replicas > 1:
                    sync_s = max(sync_s, self._ring_s(nbytes, replicas, p.pool, p.pool))
                if i + 1 < len(group.parts):
                    sync_s = max(sync_s, self._ring_s(nbytes, replicas, p.pool, group.parts[i + 1].pool))
        return (INF, 0.0, 0.0) if sync_s == INF else (work_s, update_s, sync_s)

    def _held_s(self, s: int, groups: Groups, edges: Edges) -> float:
        """Returns K_s."""
        last = len(groups) - 1
        if s == 0:
            there = self._crossing_s(groups[0], groups[1], self._output[edges[1] - 1])
            return there if last < 3 else 2 * there
        back = self._crossing_s(groups[s], groups[s - 1], self._output[edges[s]])
        if s == last:
            return 2 * back
        return self._crossing_s(groups[s], groups[s + 1], self._output[edges[s + 1] - 1]) + back

    def _crossing_s(self, source: Group, target: Group, nbytes: int) -> float:
        key = (source, target, nbytes)
        found = self._crossings.get(key)
        if found is None:
            found = max(
                self._message_s(nbytes * a.share, a.pool, a.tensor, b.pool, b.tensor)
                for a, b in pairs(source, target)
            )
            self._crossings[key] = found
        return found

    def _ring_s(self, nbytes: float, replicas: int, a: int, b: int) -> float:
        whole, rest = divmod(nbytes, _BUCKET_BYTES)
        seconds = 0.0
        for bucket, times in ((_BUCKET_BYTES, whole), (rest, 1)):
            if bucket and times:
                seconds += times * 2 * (replicas - 1) * self._message_s(bucket / replicas, a, 1, b, 1)
        return seconds

    def _message_s(self, nbytes: float, a: int, sizes: int, b: int, size: int) -> float:
        """Returns the seconds of a message from GPUs of one pool to GPUs of another."""
        try:
            row = self._between[self._zones[a]][self._gpus[a]][str(sizes)]
            c2, c1, c0 = row[self._zones[b]][self._gpus[b]][str(size)][0]
        except KeyError:
            return INF
        x = math.log2(nbytes / 1e6)
        rate = c2 * x * x + c1 * x + c0
        return nbytes / 1e9 / rate if rate > 0 else INF

    # Running sums.

    def _each(self, group: Group) -> list[_Part]:
        found = [self._part(p.pool, p.tensor, p.share) for p in group.parts]
        assert None not in found
        return found  # type: ignore[return-value]

    def _part(self, pool: int, tensor: int, share: int) -> _Part | None:
        key = (pool, tensor, share)
        if key not in self._parts:
            table, kind = self.problem.table, self.problem.pools[pool].kind
            times, sizes = table.times(kind, tensor, share), table.sizes(tensor)
            found = None
            if times is not None and sizes is not None:
                gib = _MEMORY_GIB[self._gpus[pool]]
                found = _Part(
                    prefix([f + b for f, b in zip(times.forward_s, times.backward_s)]),
                    prefix(times.forward_s), times.update_s, prefix(sizes.parameters),
                    prefix([share * x for x in sizes.stored_bytes]),
                    gib * 2**30 - (2e9 if tensor == 1 else 3e9),
                )  # fmt: skip
            self._parts[key] = found
        return self._parts[key]


def pairs(source: Group, target: Group):
    """Returns the parts that face each other when replica i of one stage sends to replica i of the next."""
    found = []
    i = j = 0
    a, b = source.parts[0].replicas, target.parts[0].replicas
    while True:
        found.append((source.parts[i], target.parts[j]))
        step = min(a, b)
        a, b = a - step, b - step
        if not a:
            i += 1
            if i == len(source.parts):
                return found
            a = source.parts[i].replicas
        if not b:
            j += 1
            if j == len(target.parts):
                return found
            b = target.parts[j].replicas
