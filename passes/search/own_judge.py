"""hetjax's own judge: stages by table, links by the cluster, order and memory by the simulator.

What a stage takes comes from the table: the forward and backward of a microbatch on its slowest replica, with
what its options add.

  recompute            the forward once more; only the inputs of layers are kept
  sequence             one more all-gather in the backward; replicated activations are split
  optimizer sharded    the gradient reduce-scattered, parameters gathered: what an all-reduce moves
  all sharded          parameters gathered for each forward and backward, under the compute
  experts              all-to-all there and back, in forward and backward

Activations cross a boundary once, whatever the degrees (each byte goes over a slow link a single time and is
spread on the other side), and the nodes of both sides share the work. Gradients are summed after the last
backward, or with every microbatch where the runtime does so. The order is 1F1B with the warm-ups that hide the
links, as far as memory allows (`hetjax.passes.schedules.virtual`).

`bound_s` is the largest of the chain of one microbatch, the busiest stage and the busiest line
(`hetjax.passes.bounds`, without its windows); `seconds` runs the task lists.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from hetjax.ir.cluster import Link
from hetjax.passes.bounds import lower_bound
from hetjax.passes.cost.collectives import Level, levels_price_s
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.periodic import shortest_period_s
from hetjax.passes.schedules.virtual import virtual_warmups
from hetjax.passes.search.judge import INF, Edges, Groups, Report, Room, StageReport
from hetjax.passes.search.published_judge import pairs
from hetjax.passes.search.space import EXCHANGES, Group, Micro, Options, Outline, Part, Problem
from hetjax.passes.search.table import prefix
from hetjax.passes.simulator_fast import ends_of, finish_s, tables, warmup_ops

# What the driver, collective libraries and fragmentation leave of a device's memory.
USABLE = 0.92
# Up to so many operations of a step its lower bound is asked with all its windows.
_MOST_WINDOWS = 4000


@dataclasses.dataclass(frozen=True, slots=True)
class PartTable:
    """Running sums over layers of one part of a group.

    Attributes:
      work, forward, update: seconds, of a microbatch's forward and backward, of the forward, of a step's
        optimizer.
      state: bytes that are always there.
      kept: bytes of one microbatch.
      passing: per layer, bytes that it needs while it runs (no running sums).
      usable: bytes there are.
      updating: bytes the update needs beside the state, when no microbatch is held any more.
    """

    work: list[float]
    forward: list[float]
    update: list[float]
    state: list[float]
    kept: list[float]
    passing: tuple[float, ...]
    usable: float
    updating: list[float] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A stage in numbers; `most` is how many microbatches it can hold, 0 where it does not fit."""

    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    most: int


_UNFIT = Stage(INF, INF, INF, INF, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A boundary: seconds on the line, latency, and the lines' names both ways (() for lines of its own)."""

    serialisation_s: float
    latency_s: float
    lines: tuple[str, str] | tuple[()]


class OwnJudge:
    """Prices plans as hetjax runs them; see the module's text.

    Args:
      problem: the problem.
      sync_each: whether gradients are summed over replicas with every microbatch.
    """

    name = "own"
    exact = False
    adds_up = False
    fixed_memory = False

    def __init__(self, problem: Problem, *, sync_each: bool = False):
        self.problem = problem
        self.sync_each = sync_each
        self._tables: dict[Group, tuple[PartTable, ...] | None] = {}
        self._parts: dict[tuple, PartTable | None] = {}
        self._step_works: dict[tuple[int, Group, bool], tuple[Sequence[float], ...]] = {}
        self._rooms: dict[tuple[Group, int], tuple[Room, ...]] = {}
        self._stages: dict[tuple[Group, int, int], Stage] = {}
        self._crossings: dict[tuple[Group, Group, int], Crossing] = {}
        self._levels: dict[tuple[Part, ...], tuple[Level, ...]] = {}
        self._simulated: dict[PipelineCosts, tuple[float, tuple[int, ...]]] = {}
        self._estimated: dict[PipelineCosts, float] = {}

    # What the search builds on.

    def twins(self) -> tuple[int, ...]:
        return self.problem.twins

    def known(self, group: Group) -> bool:
        return self._group(group) is not None

    def works(self, group: Group) -> tuple[Sequence[float], ...]:
        return tuple([t.work for t in self._tables_of(group)])

    def step_works(self, m: int, group: Group, *, least: bool = False) -> tuple[Sequence[float], ...]:
        key = (m, group, least)
        found = self._step_works.get(key)
        if found is None:
            each = self.sync_each  # exchanged with every microbatch, or once
            sync = self._sync_sums(group, least=least)
            share = self._update_share(group, least=least)
            found = self._step_works[key] = tuple(
                [w + u * share / m + x * (1.0 if each else 1.0 / m) for w, u, x in zip(t.work, t.update, sync)]
                for t in self._tables_of(group)
            )
        return found

    def _update_share(self, group: Group, *, least: bool) -> float:
        """Returns the share of its update that a stage may be spared by sharding it, whatever its options."""
        sharded = any(o.sharding != "none" for o in self.problem.options)
        return 1.0 / group.replicas if least and sharded and group.options.sharding == "none" else 1.0

    def _sync_sums(self, group: Group, *, least: bool) -> list[float]:
        """Returns running sums over layers that the exchange of gradients never falls below.

        A collective's price grows more slowly than its bytes, so that part of them costs at least its share
        of the price of all.
        """
        layers = self.problem.num_layers
        if group.replicas < 2:
            return [0.0] * (layers + 1)
        options = group.options
        sizes = self.problem.table.sizes(min([p.tensor for p in group.parts]))
        assert sizes is not None
        # Those of experts may be shared out; they are left to the cuts.
        dense = [p - e for p, e in zip(sizes.parameters, sizes.expert_parameters)]
        whole_s = self._dense_s(group.parts, sum(dense), options)
        if least and self.problem.compressed:
            both = (dataclasses.replace(options, exchange=e) for e in EXCHANGES)
            whole_s = min(self._dense_s(group.parts, sum(dense), o) for o in both)
        return prefix([whole_s * d / max(1, sum(dense)) for d in dense])

    def rooms(self, group: Group, in_flight: int) -> tuple[Room, ...]:
        found = self._rooms.get((group, in_flight))
        if found is None:
            held = self._tables_of(group)
            found = tuple([
                *(
                    ([s + in_flight * k for s, k in zip(t.state, t.kept)], t.usable - max(t.passing))
                    for t in held
                ),
                *(([s + u for s, u in zip(t.state, t.updating)], t.usable) for t in held if t.updating),
            ])  # fmt: skip
            self._rooms[group, in_flight] = found
        return found

    def in_flight(self, stage: int, stages: int, m: int) -> int:
        return min(m, stages - stage)

    def floor_s(self, micro: Micro) -> float:
        return 0.0

    def least_crossing_s(self, source: Group, target: Group) -> float:
        crossing = self._crossing(source, target, self._narrowest)
        return 2 * (crossing.serialisation_s + crossing.latency_s)

    def least_line_s(self, source: Group, target: Group) -> float:
        return self._crossing(source, target, self._narrowest).serialisation_s

    @functools.cached_property
    def _narrowest(self) -> int:
        """Returns the edge at which least crosses."""
        nbytes = self.problem.table.output_bytes
        return 1 + min(range(max(1, len(nbytes) - 1)), key=lambda i: nbytes[i])

    # The price.

    def bound_s(self, m: int, groups: Groups, edges: Edges) -> float:
        stages = []
        last = len(groups) - 1
        for s, group in enumerate(groups):
            key = (group, edges[s], edges[s + 1])
            stage = self._stages.get(key)
            if stage is None:
                stage = self._stages[key] = self._stage(*key)
            if not stage.most:
                return INF
            stages.append(stage)
        crossings = [self._crossing(groups[s], groups[s + 1], edges[s + 1]) for s in range(last)]
        head, heads = 0.0, []
        for s, stage in enumerate(stages):
            heads.append(head)
            if s < last:
                head += stage.forward_s + crossings[s].serialisation_s + crossings[s].latency_s
        best = 0.0
        tail = 0.0  # after the last backward of a stage
        for s in range(last + 1):
            stage = stages[s]
            own = stage.sync_s + stage.update_s
            if s:
                c = crossings[s - 1]
                link = c.serialisation_s + c.latency_s
                tail = max(own, link + stages[s - 1].backward_s + tail)
                # The line before this stage carries every activation, and every gradient.
                best = max(best, heads[s - 1] + stages[s - 1].forward_s + m * c.serialisation_s)
            else:
                tail = own
            busy = m * (stage.forward_s + stage.backward_s)
            best = max(best, heads[s] + busy + tail)
        return best

    def seconds(self, m: int, groups: Groups, edges: Edges, than: float = INF) -> float:
        costs = self.costs(m, groups, edges)
        if costs is None:
            return INF
        # The simulation of thousands of microbatches is for plans that a shorter one leaves in the race.
        if m > 2 * _window(costs) and (seconds := self._extrapolated_s(costs)) >= than:
            return seconds
        return self._simulate(costs)[0]

    def _extrapolated_s(self, costs: PipelineCosts) -> float:
        """Returns about what many microbatches take: as many as fill the pipeline, and the pace of the last.

        The pace is that of one window of microbatches after another, never less than the busiest device or
        line has; filling and draining are simulated. Within 0.1 % of the whole simulation on nearly all plans.
        """
        found = self._estimated.get(costs)
        if found is None:
            window, m = _window(costs), costs.num_microbatches
            first_s, warmups = self._simulate(_shortened(costs, window))
            twice = _shortened(costs, 2 * window)
            # What held as many as it could may hold more where there is more.
            wanted = tuple([2 * window if k >= window else k for k in warmups])
            second = self._by_warmups(twice, wanted) if wanted else None
            if second is None:
                return INF
            pace_s = max((second - first_s) / window, shortest_period_s(costs))
            found = self._estimated[costs] = second + (m - 2 * window) * pace_s
        return found

    @staticmethod
    def _by_warmups(costs: PipelineCosts, warmups: Sequence[int]) -> float | None:
        """Returns the seconds of the 1F1B pattern with these warm-ups, as far as memory allows; None for a deadlock."""
        table = tables(costs, False)
        ends = ends_of(warmup_ops(table, _allowed(costs, warmups)), table)
        return None if ends is None else finish_s(ends, costs)

    def costs(self, m: int, groups: Groups, edges: Edges) -> PipelineCosts | None:
        """Returns a plan as plain numbers, or None where it does not fit."""
        stages = [self._stage_of(g, edges[s], edges[s + 1]) for s, g in enumerate(groups)]
        if not all(s.most for s in stages):
            return None
        crossings = [
            self._crossing(a, b, edges[s + 1]) for s, (a, b) in enumerate(itertools.pairwise(groups))
        ]
        lines = ()
        if any(c.lines for c in crossings):
            lines = tuple(c.lines or (f"{s}>{s + 1}", f"{s + 1}>{s}") for s, c in enumerate(crossings))
        return PipelineCosts(
            tuple([s.forward_s for s in stages]), tuple([s.backward_s for s in stages]), m,
            tuple([c.latency_s for c in crossings]), tuple([c.serialisation_s for c in crossings]),
            tuple([min(m, s.most) for s in stages]), lines=lines,
            sync_s=tuple([s.sync_s for s in stages]), update_s=tuple([s.update_s for s in stages]),
        )  # fmt: skip

    def _simulate(self, costs: PipelineCosts) -> tuple[float, tuple[int, ...]]:
        """Returns the quickest of a few warm-ups, and these."""
        found = self._simulated.get(costs)
        if found is not None:
            return found
        stages = costs.num_stages
        plain = [stages - s for s in range(stages)]
        best: tuple[float, tuple[int, ...]] | None = None
        for wanted in (virtual_warmups(costs), plain, [2 * k - 1 for k in plain]):
            seconds = self._by_warmups(costs, wanted)
            if seconds is not None and (best is None or seconds < best[0] * (1 - 1e-12)):
                best = (seconds, _allowed(costs, wanted))
        found = self._simulated[costs] = best or (INF, ())
        return found

    def report(self, outline: Outline) -> Report:
        groups, edges, m = outline.groups, outline.edges, outline.num_microbatches
        costs = self.costs(m, groups, edges)
        seconds, warmups = (INF, ()) if costs is None else self._simulate(costs)
        stages, problems = [], []
        for s, group in enumerate(groups):
            stage = self._stage_of(group, edges[s], edges[s + 1])
            held = warmups[s] if warmups else 1
            needs = [
                (self._needs(t, edges[s], edges[s + 1], held), t.usable, p)
                for t, p in zip(self._tables_of(group), group.parts)
            ]
            need, has, part = max(needs, key=lambda n: n[0] - n[1])
            if not stage.most:
                kind = self.problem.pools[part.pool].kind
                problems.append(
                    f"stage {s} needs {need / 1e9:.4g} GB on each {kind} even with one microbatch in "
                    f"flight; {has / 1e9:.4g} GB can be used"
                )
            stages.append(
                StageReport(
                    stage.forward_s, stage.backward_s, stage.sync_s, stage.update_s, need, has, held
                )
            )
        crossing_s = [
            c.serialisation_s + c.latency_s
            for c in (self._crossing(a, b, edges[s + 1]) for s, (a, b) in enumerate(itertools.pairwise(groups)))
        ]  # fmt: skip
        bound_s = INF
        if costs is not None:  # its windows take long where there are many
            short = m * len(groups) <= _MOST_WINDOWS
            bound_s = lower_bound(costs).lower_s if short else self.bound_s(m, groups, edges)
        return Report(
            seconds, bound_s, "virtual-1f1b", warmups, tuple(stages), tuple(crossing_s), tuple(problems)
        )

    @staticmethod
    def _needs(table: PartTable, first: int, last: int, held: int) -> float:
        state = table.state[last] - table.state[first]
        kept = table.kept[last] - table.kept[first]
        update = table.updating[last] - table.updating[first] if table.updating else 0.0
        return state + max(held * kept + max(table.passing[first:last]), update)

    # Stages.

    def _stage_of(self, group: Group, first: int, last: int) -> Stage:
        key = (group, first, last)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._stage(group, first, last)
        return found

    def _stage(self, group: Group, first: int, last: int) -> Stage:
        forward_s = backward_s = update_s = 0.0
        most = None
        for t in self._tables_of(group):
            free = t.usable - (t.state[last] - t.state[first]) - max(t.passing[first:last])
            kept = t.kept[last] - t.kept[first]
            room = int(free / kept + 1e-9) if kept > 0 else 1 << 30
            if free < 0 or room < 1 or self._needs(t, first, last, 0) > t.usable:
                return _UNFIT
            most = room if most is None else min(most, room)
            forward = t.forward[last] - t.forward[first]
            forward_s = max(forward_s, forward)
            backward_s = max(backward_s, t.work[last] - t.work[first] - forward)
            update_s = max(update_s, t.update[last] - t.update[first])
        sync_s = self._sync_s(group, first, last)
        if self.sync_each:
            return Stage(forward_s, backward_s + sync_s, update_s, 0.0, most or 0)
        return Stage(forward_s, backward_s, update_s, sync_s, most or 0)

    def _sync_s(self, group: Group, first: int, last: int) -> float:
        """Returns the seconds in which a stage's replicas exchange gradients."""
        if group.replicas < 2:
            return 0.0
        options = group.options
        tensor = min([p.tensor for p in group.parts])
        sizes = self.problem.table.sizes(tensor)
        assert sizes is not None
        experts = sum(sizes.expert_parameters[first:last])
        seconds = self._dense_s(group.parts, sum(sizes.parameters[first:last]) - experts, options)
        if experts:
            sharers = group.replicas // options.experts
            nbytes = self.problem.table.state_bytes[1] * experts / options.experts
            steps = self.levels(group.parts)
            seconds += levels_price_s("all-reduce", steps, sharers, nbytes) if sharers > 1 else 0.0
        return seconds

    def _dense_s(self, parts: tuple[Part, ...], parameters: int, options: Options) -> float:
        """Returns the seconds of the exchange of what all replicas hold."""
        nbytes = self.problem.table.state_bytes[1] * parameters
        passes_s = 0.0
        if options.exchange == "compressed":
            kinds = {self.problem.pools[p.pool].kind for p in parts}
            slowest = min(self.problem.cluster.kind(k).memory_bandwidth_bytes_s for k in kinds)
            passes_s = self.problem.compress_passes * nbytes / slowest
            nbytes *= self.problem.compressed
        replicas = sum([p.replicas for p in parts])
        return passes_s + levels_price_s("all-reduce", self.levels(parts), replicas, nbytes)

    # Boundaries.

    def _crossing(self, source: Group, target: Group, edge: int) -> Crossing:
        nbytes = self.problem.table.output_bytes[edge - 1]
        key = (source, target, nbytes)
        found = self._crossings.get(key)
        if found is None:
            found = self._crossings[key] = self._make_crossing(source, target, nbytes)
        return found

    def _make_crossing(self, source: Group, target: Group, nbytes: int) -> Crossing:
        seconds = latency_s = 0.0
        lines: tuple[str, str] | tuple[()] = ()
        whole = source.examples * nbytes
        facing = list(pairs(source, target))
        for a, b in facing:
            link = self.problem.link(a.pool, b.pool)
            share = whole / len(facing) if len(facing) > 1 else whole
            pool_a, pool_b = self.problem.pools[a.pool], self.problem.pools[b.pool]
            if pool_a.site != pool_b.site:
                pace = link.serialise_s(share)
                wire = link.uplink or link.name
                lines = (
                    (f"{wire}:{pool_a.site}>{pool_b.site}", f"{wire}:{pool_b.site}>{pool_a.site}")
                    if link.duplex == "full"
                    else (wire, wire)
                )
            elif a.pool == b.pool and pool_a.nodes == 1:
                inner = self.inner(a.pool)
                flows = min(a.devices, b.devices)
                pace, link = inner.serialise_s(share / flows), inner
            else:
                flows = min(self._nodes(a), self._nodes(b))
                pace = link.serialise_s(share / flows)
            seconds, latency_s = max(seconds, pace), max(latency_s, link.latency_s)
        return Crossing(seconds, latency_s, lines)

    def _nodes(self, part: Part) -> int:
        return -(-part.devices // self.problem.pools[part.pool].per_node)

    def inner(self, pool: int) -> Link:
        """Returns the link inside a pool's nodes."""
        head = self.problem.heads[pool][0]
        return self.problem.cluster.link(head, head)

    def levels(self, parts: tuple[Part, ...]) -> tuple[Level, ...]:
        """Returns the levels of a collective over replicas, innermost first.

        The tensor-parallel ranks of a replica run one collective each, side by side on a node's port.
        """
        found = self._levels.get(parts)
        if found is not None:
            return found
        pools = self.problem.pools
        out: list[Level] = []
        inside, across, inner, between = 1, 0, [], []
        sites: dict[str, int] = {}
        for p in parts:
            pool = pools[p.pool]
            together = min(p.replicas, max(1, pool.per_node // p.tensor))
            nodes = -(-p.replicas // together)
            inside = max(inside, together)
            if together > 1:
                inner.append(self.inner(p.pool))
            sites[pool.site] = sites.get(pool.site, 0) + nodes
            if nodes > 1:
                between.append(self.problem.link(p.pool, p.pool))
        ids = sorted({p.pool for p in parts})
        far = []
        for a, b in itertools.combinations(ids, 2):
            (between if pools[a].site == pools[b].site else far).append(self.problem.link(a, b))
        tensor = max(p.tensor for p in parts)
        if inside > 1:
            out.append(Level(inside, _slowest(inner), 1))
        across = max(sites.values())
        if across > 1 and between:
            out.append(Level(across, _slowest(between), min(tensor, 8)))
        if len(sites) > 1:
            out.append(Level(len(sites), _slowest(far), min(tensor, 8)))
        found = self._levels[parts] = tuple(out)
        return found

    # Running sums.

    def _tables_of(self, group: Group) -> tuple[PartTable, ...]:
        found = self._group(group)
        assert found is not None, "nothing is known of this group"
        return found

    def _group(self, group: Group) -> tuple[PartTable, ...] | None:
        if group not in self._tables:
            found = [self._part_of(group, p) for p in group.parts]
            self._tables[group] = None if None in found else tuple(found)  # type: ignore[arg-type]
        return self._tables[group]

    def _part_of(self, group: Group, part: Part) -> PartTable | None:
        options = group.options
        # Without state or experts apart it is all the same how many fellows there are, and where.
        fellows = group.parts if options.sharding == "all" or options.experts > 1 else ()
        among = group.replicas if options.sharding != "none" else 0
        key = (part.pool, part.tensor, part.share, options, among, fellows)
        if key not in self._parts:
            self._parts[key] = self._part(group, part)
        return self._parts[key]

    def _part(self, group: Group, part: Part) -> PartTable | None:
        table, pool = self.problem.table, self.problem.pools[part.pool]
        if part.tensor not in table.tensors(pool.kind):
            return None  # the model cannot be split so far
        times, sizes = table.times(pool.kind, part.tensor, part.share), table.sizes(part.tensor)
        if times is None or sizes is None:
            return None
        options, replicas, share = group.options, group.replicas, part.share
        forward, backward = list(times.forward_s), list(times.backward_s)
        layers = range(len(forward))
        parameter, gradient, optimizer = table.state_bytes
        dense = [p - e for p, e in zip(sizes.parameters, sizes.expert_parameters)]
        mine = [d + e / options.experts for d, e in zip(dense, sizes.expert_parameters)]
        update = list(times.update_s)
        state = [(parameter + gradient + optimizer) * n for n in mine]
        if options.sharding == "optimizer":
            state = [(parameter + gradient + optimizer / replicas) * n for n in mine]
        if options.sharding == "all":
            state = [(parameter + gradient + optimizer) * n / replicas for n in mine]
        if options.sharding != "none":
            update = [u / replicas for u in update]
        if options.sequence:
            # Sums over tensor-parallel devices become a scatter and a gather; the backward gathers again.
            inner = (Level(part.tensor, self.inner(part.pool), 1),)
            for nbytes in dict.fromkeys(table.gathered_bytes):
                gather_s = levels_price_s("all-gather", inner, part.tensor, share * nbytes / 2)
                backward = [b + gather_s * (g == nbytes) for b, g in zip(backward, table.gathered_bytes)]
        if options.experts > 1:
            steps = self.levels(group.parts)
            for i in layers:
                nbytes = share * table.routed_bytes[i] / part.tensor
                seconds = levels_price_s("all-to-all", steps, options.experts, nbytes)
                forward[i] += seconds
                backward[i] += seconds
        passing = [0.0] * len(forward)
        if sizes.passing_bytes:
            passing = [share * e + o for e, o in zip(sizes.passing_bytes, sizes.passing_once_bytes)]
        kept = [
            share * (s - (r * (1 - 1 / part.tensor) if options.sequence else 0.0))
            for s, r in zip(sizes.stored_bytes, sizes.replicated_bytes)
        ]
        if options.recompute:
            backward = [b + f for b, f in zip(backward, forward)]
            passing = [p + k for p, k in zip(passing, kept)]
            split = part.tensor if options.sequence else 1
            kept = [share * table.output_bytes[max(0, i - 1)] / split for i in layers]
        if options.sharding == "all":
            steps = self.levels(group.parts)
            for i in layers:
                gather_s = levels_price_s("all-gather", steps, replicas, parameter * mine[i])
                scatter_s = levels_price_s("reduce-scatter", steps, replicas, gradient * mine[i])
                forward[i] = max(forward[i], gather_s)
                backward[i] = max(backward[i], gather_s + scatter_s)
            # Two layers' parameters are whole at a time: the one in use and the next.
            passing = [p + 2 * parameter * n for p, n in zip(passing, mine)]
        return PartTable(
            prefix([f + b for f, b in zip(forward, backward)]), prefix(forward), prefix(update),
            prefix(state), prefix(kept), tuple(passing),
            USABLE * self.problem.cluster.kind(pool.kind).memory_bytes,
            prefix(sizes.updating_bytes) if sizes.updating_bytes else None,
        )  # fmt: skip


def _allowed(costs: PipelineCosts, warmups: Sequence[int]) -> tuple[int, ...]:
    """Returns warm-ups cut to what memory allows; a stage that waits for more than reach it would wait for ever."""
    return tuple(itertools.accumulate(map(min, warmups, costs.max_in_flight or warmups), min))


def _window(costs: PipelineCosts) -> int:
    """Returns how many microbatches fill a pipeline and its links well."""
    waits = 2 * sum(costs.link_s) / shortest_period_s(costs)
    return costs.num_stages + math.ceil(waits) + 8


def _shortened(costs: PipelineCosts, m: int) -> PipelineCosts:
    limits = costs.max_in_flight
    return dataclasses.replace(
        costs, num_microbatches=m, max_in_flight=limits and tuple([min(m, k) for k in limits])
    )


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.bandwidth_bytes_s)
