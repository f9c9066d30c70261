"""hetjax's own judge: stages by table, links by the cluster, order and memory by the simulator.

What a stage takes and holds are sums over its layers (`part_tables`), what crosses its boundaries is the links'
business (`wires`). Gradients are summed after the last backward, or with every microbatch where the runtime does
so. The order is 1F1B with the warm-ups that hide the links, as far as memory allows, or those of the schedule asked
for (`step_times`).

`bound_s` is the largest of the chain of one microbatch, the busiest stage, the busiest line (`hetjax.passes.bounds`,
without its windows) and the way there and back of all microbatches, as many at a time as a stage's memory holds;
`seconds` runs the task lists.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from hetjax.passes.bounds import lower_bound
from hetjax.passes.cost.collectives import levels_price_s
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.search.judge import INF, Edges, Groups, Report, Room, StageReport
from hetjax.passes.search.part_tables import PartTable, PartTables
from hetjax.passes.search.space import EXCHANGES, Group, Micro, Outline, Problem
from hetjax.passes.search.step_times import WARMUPS, Steps
from hetjax.passes.search.table import prefix
from hetjax.passes.search.wires import Wires

# Up to so many operations of a step its lower bound is asked with all its windows.
_MOST_WINDOWS = 4000


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A stage in numbers; `most` is how many microbatches it can hold, 0 where it does not fit."""

    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    most: int


_UNFIT = Stage(INF, INF, INF, INF, 0)


class OwnJudge:
    """Prices plans as hetjax runs them; see the module's text.

    Args:
      problem: the problem.
      sync_each: whether gradients are summed over replicas with every microbatch.
      schedule: what was asked for. One of `WARMUPS` is priced as it is; with any other (split backwards, several
        stages a device), and with none, plans are priced as virtual-1f1b, and what is lowered is priced anew under its
        own schedule (`estimate_program`).
    """

    name = "own"
    exact = False
    adds_up = False
    fixed_memory = False

    def __init__(self, problem: Problem, *, sync_each: bool = False, schedule: str = ""):
        self.problem = problem
        self.sync_each = sync_each
        self.schedule = schedule if schedule in WARMUPS else ""
        # A schedule with warm-ups of its own holds what it holds.
        self.fixed_memory = bool(self.schedule)
        self.wires = Wires(problem)
        self._tables = PartTables(self.wires, whole_sums=sync_each)
        self._steps = Steps(self.schedule)
        self._step_works: dict[tuple[int, Group, bool], tuple[Sequence[float], ...]] = {}
        self._rooms: dict[tuple[Group, int], tuple[Room, ...]] = {}
        self._stages: dict[tuple[Group, int, int], Stage] = {}

    def __reduce__(self):  # what was worked out is left behind
        return functools.partial(type(self), sync_each=self.sync_each, schedule=self.schedule), (self.problem,)

    # What the search builds on.

    def twins(self) -> tuple[int, ...]:
        return self.problem.twins

    def known(self, group: Group) -> bool:
        return self._tables.of(group) is not None

    def tables(self, group: Group) -> tuple[PartTable, ...] | None:
        """Returns the running sums of a group's parts, or None where there are no numbers."""
        return self._tables.of(group)

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
        whole_s = self.wires.exchange_s(group.parts, sum(dense), options)
        if least and self.problem.compressed:
            both = (dataclasses.replace(options, exchange=e) for e in EXCHANGES)
            whole_s = min(self.wires.exchange_s(group.parts, sum(dense), o) for o in both)
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
        return WARMUPS[self.schedule or "1f1b"](stage, stages, m)

    def floor_s(self, micro: Micro) -> float:
        return 0.0

    def least_crossing_s(self, source: Group, target: Group) -> float:
        crossing = self.wires.crossing(source, target, self._narrowest)
        return 2 * (crossing.serialisation_s + crossing.latency_s)

    def least_line_s(self, source: Group, target: Group) -> float:
        return self.wires.crossing(source, target, self._narrowest).serialisation_s

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
            if not stage.most or stage.most < self._least_held(s, last + 1, m):
                return INF
            stages.append(stage)
        crossings = [self.wires.crossing(groups[s], groups[s + 1], edges[s + 1]) for s in range(last)]
        head, heads = 0.0, []
        for s, stage in enumerate(stages):
            heads.append(head)
            if s < last:
                head += stage.forward_s + crossings[s].serialisation_s + crossings[s].latency_s
        # There and back from the start of a stage's forward to the end of its backward, for one microbatch.
        round_s = 0.0
        rounds = [0.0] * (last + 1)
        for s in range(last, -1, -1):
            round_s += stages[s].forward_s + stages[s].backward_s
            rounds[s] = round_s
            if s:
                round_s += 2 * (crossings[s - 1].serialisation_s + crossings[s - 1].latency_s)
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
            # All microbatches take their time on the stage, and that of their way there and back by as many as it holds.
            busy = m * max(stage.forward_s + stage.backward_s, rounds[s] / min(m, stage.most))
            best = max(best, heads[s] + busy + tail)
        return best

    def _least_held(self, stage: int, stages: int, m: int) -> int:
        """Returns how many activations a stage holds at least."""
        return WARMUPS[self.schedule](stage, stages, m) if self.schedule else 1

    def seconds(self, m: int, groups: Groups, edges: Edges, than: float = INF) -> float:
        costs = self.costs(m, groups, edges)
        if costs is None:
            return INF
        return self._steps.seconds(costs, than)

    def costs(self, m: int, groups: Groups, edges: Edges) -> PipelineCosts | None:
        """Returns a plan as plain numbers, or None where it does not fit."""
        stages = [self._stage_of(g, edges[s], edges[s + 1]) for s, g in enumerate(groups)]
        if not all(s.most and s.most >= self._least_held(i, len(stages), m) for i, s in enumerate(stages)):
            return None
        crossings = [
            self.wires.crossing(a, b, edges[s + 1]) for s, (a, b) in enumerate(itertools.pairwise(groups))
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

    def report(self, outline: Outline) -> Report:
        groups, edges, m = outline.groups, outline.edges, outline.num_microbatches
        costs = self.costs(m, groups, edges)
        seconds, warmups = (INF, ()) if costs is None else self._steps.simulate(costs)
        stages, problems = [], []
        for s, group in enumerate(groups):
            stage = self._stage_of(group, edges[s], edges[s + 1])
            least = self._least_held(s, len(groups), m)
            held = warmups[s] if warmups else least
            needs = [
                (self._needs(t, edges[s], edges[s + 1], held), t.usable, p)
                for t, p in zip(self._tables_of(group), group.parts)
            ]
            need, has, part = max(needs, key=lambda n: n[0] - n[1])
            if stage.most < least:
                kind = self.problem.pools[part.pool].kind
                held_as = f"with the {least} microbatches in flight that {self.schedule} has" if least > 1 else (
                    "even with one microbatch in flight"
                )
                problems.append(
                    f"stage {s} needs {need / 1e9:.4g} GB on each {kind} {held_as}; {has / 1e9:.4g} GB can be used"
                )
            stages.append(
                StageReport(
                    stage.forward_s, stage.backward_s, stage.sync_s, stage.update_s, need, has, held
                )
            )
        crossing_s = [
            c.serialisation_s + c.latency_s
            for c in (self.wires.crossing(a, b, edges[s + 1]) for s, (a, b) in enumerate(itertools.pairwise(groups)))
        ]  # fmt: skip
        bound_s = INF
        if costs is not None:  # its windows take long where there are many
            short = m * len(groups) <= _MOST_WINDOWS
            bound_s = lower_bound(costs).lower_s if short else self.bound_s(m, groups, edges)
        return Report(
            seconds, bound_s, self.schedule or "virtual-1f1b", warmups, tuple(stages), tuple(crossing_s), tuple(problems)
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
        seconds = self.wires.exchange_s(group.parts, sum(sizes.parameters[first:last]) - experts, options)
        if experts:
            sharers = group.replicas // options.experts
            nbytes = self.problem.table.state_bytes[1] * experts / options.experts
            steps = self.wires.levels(group.parts)
            seconds += levels_price_s("all-reduce", steps, sharers, nbytes) if sharers > 1 else 0.0
        return seconds

    def _tables_of(self, group: Group) -> tuple[PartTable, ...]:
        found = self._tables.of(group)
        assert found is not None, "nothing is known of this group"
        return found
