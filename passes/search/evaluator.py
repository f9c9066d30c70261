"""Counts, keeps and compares the plans a search looks at."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from hetjax.ir.errors import PlanError
from hetjax.passes.search.cuts import balanced, even
from hetjax.passes.search.judge import INF, Edges, Groups, Judge
from hetjax.passes.search.space import Group, Micro, Outline

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
      found_by: "rollout", "refinement", or a baseline's name.
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
        self.best = INF
        self.outline: Outline | None = None
        self.improvements: list[Improvement] = []
        self.source = "rollout"
        self.stop = False
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

    def check(self) -> None:
        """Raises `Stopped` where the budget is spent."""
        if self.stop:
            raise Stopped
        if self.max_evaluations is not None and self.evaluations >= self.max_evaluations:
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
            value = self.judge.seconds(m, groups, edges) * factor
        self._values[key] = value
        if value < self.best * (1 - _EPS):
            self.best = value
            self.outline = Outline(m, groups, edges)
            found_now = Improvement(
                self.evaluations, self.elapsed_s, value, self.outline, self.source
            )
            self.improvements.append(found_now)
            if self._on_improvement is not None:
                self._on_improvement(found_now)
        return value


class Cutter:
    """Turns micro and groups into a whole plan: cuts, and small shifts of the cuts.

    Args:
      evaluator: judges.
      by_speed: whether stages get work in proportion to their speed; else as many layers each.
    """

    def __init__(self, evaluator: Evaluator, *, by_speed: bool = True):
        self.evaluator = evaluator
        self.by_speed = by_speed
        self._edges: dict[tuple[int, Groups], tuple[Edges | None, float]] = {}

    def cut(self, micro: Micro, groups: Groups) -> tuple[Edges | None, float]:
        """Returns edges that fit, and what the slowest stage needs at least for a microbatch."""
        key = (micro.num_microbatches, groups)
        found = self._edges.get(key)
        if found is None:
            judge = self.evaluator.judge
            found = balanced(judge, micro.num_microbatches, groups)
            self._edges[key] = found
        if not self.by_speed and found[0] is not None:
            edges = even(self.evaluator.problem.num_layers, len(groups))
            if edges is not None:
                return edges, found[1]
        return found

    def climb(self, m: int, groups: Groups, edges: Edges, value: float) -> tuple[Edges, float]:
        """Returns edges that no shift of one edge, or of neighbouring edges together, makes better."""
        improved = True
        while improved:
            improved = False
            for other in shifts(edges):
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
