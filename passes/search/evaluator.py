"""Counts, keeps and compares the plans a search looks at."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from hetjax.ir.errors import PlanError
from hetjax.passes.search.cuts import balanced, even
from hetjax.passes.search.judge import INF, Edges, Groups, Judge, pipeline_s
from hetjax.passes.search.moves import dearness, with_options
from hetjax.passes.search.space import PLAIN, Group, Micro, Options, Outline

# Of more shifted edges than these the more promising half of so many are judged.
_NEAR = 24
# A period is as good as without any limit of memory when it is longer by less than this share.
_FREE = 2e-3
# An incumbent must be beaten by more than rounding.
_EPS = 1e-12


class Stopped(Exception):
    """The budget is spent."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is made small.

    Attributes:
      name: "time" or "cost".
      prices: device kind to what an hour of a device costs; for "cost".
    """

    name: str = "time"
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Improvement:
    """A best plan when it was found.

    Attributes:
      evaluations: how many plans had been looked at, this one included.
      elapsed_s: since the search began.
      value: seconds, or the price of a step.
      outline: the plan.
      found_by: "rollout", "refinement", "sweep", or a baseline's name.
    """

    evaluations: int
    elapsed_s: float
    value: float
    outline: Outline
    found_by: str


class Evaluator:
    """The one place where plans are judged during a search.

    A complete plan that is judged for the first time is one evaluation, whether its bound settles it or it
    must be simulated; one that was judged before is none.

    Args:
      judge: the judge.
      objective: what is made small.
      max_evaluations: stop after so many.
      budget_s: stop after so much time, by `clock`.
      on_improvement: told of every new best plan.
      clock: seconds; injected by tests.
    """

    def __init__(
        self,
        judge: Judge,
        objective: Objective | None = None,
        *,
        max_evaluations: int | None = None,
        budget_s: float | None = None,
        on_improvement: Callable[[Improvement], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.judge = judge
        self.problem = judge.problem
        self.objective = objective or Objective()
        self.max_evaluations = max_evaluations
        self.budget_s = budget_s
        self.evaluations = 0
        self.simulations = 0
        self.elsewhere = 0  # evaluations of others that were counted
        self.best = INF
        self.outline: Outline | None = None
        self.improvements: list[Improvement] = []
        self.source = "rollout"
        self.stop = False
        self.lower_bound = 0.0  # of the whole problem, once the search knows it
        self._on_improvement = on_improvement
        self._clock = clock
        self._begin = clock()
        self._values: dict[tuple[int, Groups, Edges], float] = {}
        self._prices = self._prices_per_second()

    def _prices_per_second(self) -> tuple[float, ...] | None:
        if self.objective.name == "time":
            return None
        missing = sorted({p.kind for p in self.problem.pools} - set(self.objective.prices))
        if missing:
            raise PlanError(
                f"no price is given for a device-hour of {', '.join(missing)}; the objective cost needs one "
                "for every kind"
            )
        return tuple(self.objective.prices[p.kind] / 3600 for p in self.problem.pools)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._begin

    @property
    def left_s(self) -> float | None:
        """Returns the seconds left of the budget, None where there is none."""
        return None if self.budget_s is None else self.budget_s - self.elapsed_s

    @property
    def looked_at(self) -> int:
        """Returns how many plans were looked at, here and elsewhere."""
        return self.evaluations + self.elsewhere

    def adopt(self, value: float, outline: Outline) -> bool:
        """Takes a plan judged elsewhere for the best where it is; returns whether it is."""
        if value >= self.best * (1 - _EPS):
            return False
        self.best, self.outline = value, outline
        return True

    def count(self, evaluations: int, simulations: int, found: Sequence[Improvement]) -> None:
        """Takes note of what was judged elsewhere: how many plans, and which were better than others."""
        for i in found:
            if self.adopt(i.value, i.outline):
                last_s = self.improvements[-1].elapsed_s if self.improvements else 0.0
                self._note(dataclasses.replace(
                    i, evaluations=self.looked_at + i.evaluations, elapsed_s=max(last_s, i.elapsed_s)
                ))  # fmt: skip
        self.elsewhere += evaluations
        self.simulations += simulations

    def _note(self, found: Improvement) -> None:
        self.improvements.append(found)
        if self._on_improvement is not None:
            self._on_improvement(found)

    def check(self) -> None:
        """Raises `Stopped` where the budget is spent."""
        if self.stop:
            raise Stopped
        if self.max_evaluations is not None and self.looked_at >= self.max_evaluations:
            raise Stopped
        if self.budget_s is not None and self.elapsed_s >= self.budget_s:
            raise Stopped

    def factor(self, groups: Groups) -> float:
        """Returns what a second of these groups counts."""
        if self._prices is None:
            return 1.0
        return sum(p.devices * self._prices[p.pool] for g in groups for p in g.parts)

    def least_factor(self, groups: Groups) -> float:
        """Returns what a second of these groups, and any more devices, counts at least."""
        return 1.0 if self._prices is None else self.factor(groups)

    def value(self, m: int, groups: Groups, edges: Edges) -> float:
        """Returns what is made small, exact where it might be the best, else no more than it is."""
        key = (m, groups, edges)
        found = self._values.get(key)
        if found is not None:
            return found
        self.check()
        self.evaluations += 1
        factor = self.factor(groups)
        value = self.judge.bound_s(m, groups, edges) * factor
        if value < self.best and not self.judge.exact:
            self.simulations += 1
            value = self.judge.seconds(m, groups, edges, self.best / factor if factor else INF) * factor
        self._values[key] = value
        if value < self.best * (1 - _EPS):
            self.best = value
            self.outline = Outline(m, groups, edges)
            self._note(Improvement(self.looked_at, self.elapsed_s, value, self.outline, self.source))
        return value

    def judged(self) -> Iterator[tuple[Outline, float]]:
        """Yields every plan looked at so far with its value, the first of them first."""
        for key, value in self._values.items():
            yield Outline(*key), value


class Cutter:
    """Turns micro and groups into whole plans: options where memory asks for them, cuts, shifts of cuts.

    Args:
      evaluator: judges.
      by_speed: whether stages get work in proportion to their speed; else as many layers each.
    """

    def __init__(self, evaluator: Evaluator, *, by_speed: bool = True):
        self.evaluator = evaluator
        self.problem = evaluator.problem
        self.by_speed = by_speed
        self._periods: dict[tuple[int, Groups], float] = {}
        self._chains: dict[Groups, float] = {}
        self._plans: dict[tuple[int, Groups], tuple[tuple[Groups, Edges], ...]] = {}
        self._tight = evaluator.judge.fixed_memory and evaluator.judge.exact and not self.problem.options

    def share(self, other: Cutter) -> None:
        """Keeps plans and bounds where another cutter of the same problem keeps its own; none depends on the best plan."""
        self._periods, self._chains, self._plans = other._periods, other._chains, other._plans

    def period_s(self, m: int, groups: Groups) -> float:
        """Returns what a microbatch costs the slowest stage at least, whatever the options and cuts."""
        if self._tight:  # then m changes nothing either
            self.plans(m, groups)
            return self._periods[0, groups]
        plain = tuple(g.with_options(PLAIN) for g in groups)
        found = self._periods.get((m, plain))
        if found is None:
            found = self._periods[m, plain] = balanced(
                self.evaluator.judge, m, tuple((g,) for g in plain), 0
            )[2]
        return found

    def bound(self, micro: Micro, groups: Groups) -> float:
        """Returns a value that no plan with these groups falls below, whatever the options and cuts.

        On its way, a microbatch spends in every layer what it takes on the fastest of the groups, and crosses
        every boundary there and back.
        """
        period_s = self.period_s(micro.num_microbatches, groups)
        chain_s = self._chains.get(groups)
        if chain_s is None:
            judge = self.evaluator.judge
            works = [w for g in distinct(groups) for w in judge.works(g.with_options(PLAIN))[:1]]
            chain_s = sum([
                min([w[i + 1] - w[i] for w in works]) for i in range(self.problem.num_layers)
            ])  # fmt: skip
            chain_s += sum([judge.least_crossing_s(a, b) for a, b in itertools.pairwise(groups)])
            self._chains[groups] = chain_s
        seconds = pipeline_s(self.evaluator.judge, micro.num_microbatches, period_s, chain_s)
        for a, b in itertools.pairwise(groups):
            seconds = max(seconds, micro.num_microbatches * self.evaluator.judge.least_line_s(a, b))
        return (seconds + self.evaluator.judge.floor_s(micro)) * self.evaluator.factor(groups)

    def plans(self, m: int, groups: Groups) -> tuple[tuple[Groups, Edges], ...]:
        """Returns the groups with options, and edges, that are worth a look; none where nothing fits.

        These are the options and edges with the shortest period that leave room for as many activations as
        hide the links, as a pipeline without links wants, and for one; and the same with a compressed
        exchange of gradients. Stages recompute one by one, as their memory asks.
        """
        key = (m, groups)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = tuple(self._make(m, groups))
        return found

    def _make(self, m: int, groups: Groups) -> Iterator[tuple[Groups, Edges]]:
        judge = self.evaluator.judge
        outfits = [tuple((g,) for g in groups)]
        if self.problem.options and all(g.options == PLAIN for g in groups):
            outfits = [tuple(self._alternatives(g, o) for g in groups) for o in self._rests]
        seen = set()
        exchanges = ("dense", "compressed") if len(outfits) > 1 and self.problem.compressed else ("",)
        wanted = (None,) if judge.fixed_memory else (self._hiding(m, groups), None, 1)
        # Nothing is gained by other options, or by less room, once memory costs no time.
        ideal_s = 0.0 if self._tight else self.period_s(m, groups) * (1 + _FREE)
        for exchange in exchanges:
            for in_flight in wanted:
                best: tuple[Groups, Edges] | None = None
                least_s = INF
                for choices in outfits:
                    plain = tuple(c[0] for c in choices)
                    if exchange and not any(o.exchange == exchange for o in self._exchanges(plain)):
                        continue
                    outfit, edges, period_s = balanced(judge, m, choices, in_flight)
                    if self._tight:
                        self._periods[0, groups] = period_s
                    if edges is not None and period_s < least_s * (1 - _EPS):
                        best, least_s = (outfit, edges), period_s
                    if least_s <= ideal_s:
                        break
                if best is None:
                    continue
                outfit, edges = best
                if not self.by_speed:
                    edges = even(self.problem.num_layers, len(groups)) or edges
                if (outfit, edges) not in seen:
                    seen.add((outfit, edges))
                    yield outfit, edges
                if least_s <= ideal_s:
                    break

    def _hiding(self, m: int, groups: Groups) -> tuple[int, ...]:
        """Returns the activations each stage should have room for, so that the links after it are hidden."""
        judge, period_s = self.evaluator.judge, max(1e-12, self.period_s(m, groups))
        held, links_s, stages = [1], 0.0, len(groups)
        for s in range(stages - 2, -1, -1):
            links_s += judge.least_crossing_s(groups[s], groups[s + 1])
            held.append(min(m, stages - s + math.ceil(links_s / period_s - 1e-9)))
        return tuple(reversed(held))

    @staticmethod
    def _exchanges(groups: Groups) -> list[Options]:
        """Returns the options of the groups that have gradients to exchange, or of all where none has."""
        return [g.options for g in groups if g.replicas > 1] or [g.options for g in groups]

    def _alternatives(self, group: Group, options: Options) -> tuple[Group, ...]:
        """Returns a group with options, without and with recomputation, as far as the problem offers it."""
        again = (False, True) if self._recompute else (False,)
        return tuple(
            with_options(self.problem, group, dataclasses.replace(options, recompute=r)) for r in again
        )

    @functools.cached_property
    def _recompute(self) -> bool:
        return any(o.recompute for o in self.problem.options)

    @functools.cached_property
    def _rests(self) -> tuple[Options, ...]:
        """Returns the choices of options, recomputation aside, those that cost least time first."""
        rests = (dataclasses.replace(o, recompute=False) for o in self.problem.options)
        return tuple(sorted(dict.fromkeys((PLAIN, *rests)), key=dearness))

    def climb(self, m: int, groups: Groups, edges: Edges, value: float) -> tuple[Edges, float]:
        """Returns edges that no shift of one edge, or of neighbouring edges together, makes better."""
        works = [self.evaluator.judge.step_works(m, g) for g in groups]
        factor = self.evaluator.factor(groups)
        improved = True
        while improved:
            improved = False
            near = []
            for other in shifts(edges):
                longest = max([
                    w[other[s + 1]] - w[other[s]] for s, work in enumerate(works) for w in work
                ])  # fmt: skip
                if m * longest * factor < value:
                    near.append(other)
            if len(near) > _NEAR:  # long pipelines have many; the closed form tells the promising ones
                bounds = {e: self.evaluator.judge.bound_s(m, groups, e) for e in near}
                near = sorted(near, key=bounds.__getitem__)[: _NEAR // 2]
            for other in near:
                found = self.evaluator.value(m, groups, other)
                if found < value * (1 - _EPS):
                    edges, value, improved = other, found, True
                    break
        return edges, value


def shifts(edges: Edges, reach: int = 1):
    """Yields the edges with runs of neighbouring inner edges moved by up to `reach` layers."""
    inner = len(edges) - 2
    for length in range(1, min(inner, 3) + 1):
        for start in range(1, inner - length + 2):
            for step in range(-reach, reach + 1):
                if not step:
                    continue
                moved = list(edges)
                for i in range(start, start + length):
                    moved[i] += step
                if moved[start - 1] < moved[start] and moved[start + length - 1] < moved[start + length]:
                    yield tuple(moved)


def distinct(groups: Groups) -> list[Group]:
    """Returns the groups without repetition, in order."""
    return list(dict.fromkeys(groups))
