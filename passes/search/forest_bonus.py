"""A random forest learned while the search goes on: what plans like one take, and how little is known of them.

Every plan judged is a row: the features below against log(value / bound), the bound being what the pace of the
slowest stage gives at once. Whenever the rows are half as many again, a forest is trained on them all. Of a plan
not yet judged it gives a mean and, across its trees, a spread. They are used in two ways:

  bonus     a child of the tree gets its part of its siblings' spread on top of its prior: what is unlike
            anything judged so far is explored first (a decision stands for the plan that stops there)
  ranking   the refinement judges a plan's neighbours in the order of mean - spread, not at random

The same rows and seed give the same forest, so the same seed and evaluations still find the same plan. Where
the sweep is at work, which proves small problems plan by plan, there is no forest.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hetjax.ir.errors import PlanError
from hetjax.ir.suggest import nearest
from hetjax.passes.search.judge import INF, pipeline_s
from hetjax.passes.search.moves import State
from hetjax.passes.search.space import Group, Micro

if TYPE_CHECKING:
    import numpy as np

    from hetjax.passes.search.view import View

WAYS = {
    "bonus": "explore decisions first of which a forest of the plans judged so far knows least",
    "ranking": "judge a plan's neighbours in the order of what that forest promises",
}
# What a search uses of these when it is not told.
FOREST: tuple[str, ...] = ()
# The forest is trained when there are so many rows, and each time there are so many times as many.
_FIRST_ROWS, _GROWTH = 32, 1.5
_TREES, _DEPTH, _BINS = 30, 6, 64
# The spread of all siblings together counts as much as their priors together.
_BONUS = 1.0
# So many neighbours of a plan are ranked; the others come after, at random.
RANKED = 100
# Of more pools than these the rest is not told apart.
_POOLS = 8

Plan = tuple[Micro, tuple[Group, ...]]


class PlanForest:
    """What the plans judged so far tell of others.

    Args:
      view: the problem.
      seed: of the forest.
      ways: of `WAYS`, how it is used.
    """

    def __init__(self, view: View, seed: int, ways: Sequence[str]):
        self.view = view
        self.seed = seed
        self.bonus = _BONUS if "bonus" in ways else 0.0
        self.ranks = "ranking" in ways
        self.fits = 0
        self._rows: dict[Plan, tuple[list[float], float]] = {}
        self._next = _FIRST_ROWS
        self._trees: Callable[[np.ndarray], np.ndarray] | None = None

    def observe(self, micro: Micro, groups: tuple[Group, ...], value: float) -> None:
        """Takes note of the best value of the plans with some groups; trains the forest when it is time."""
        if not 0 < value < INF or (micro, groups) in self._rows:
            return
        bound = self._bound(micro, groups)
        if not 0 < bound < INF:
            return
        self._rows[micro, groups] = (_features(self.view, micro, groups), math.log(value / bound))
        if len(self._rows) >= self._next:
            self._next = math.ceil(len(self._rows) * _GROWTH)
            self._train()

    def spreads(self, states: Sequence[State]) -> list[float]:
        """Returns, per state, the standard deviation of log(value) across the trees; 0 where no stage is decided."""
        out = [0.0] * len(states)
        plans = [(s.micro, (*s.groups, s.pending) if s.pending else s.groups) for s in states]
        some = [(i, micro, groups) for i, (micro, groups) in enumerate(plans) if micro is not None and groups]
        if some and self.fits:
            logs = self._logs([(micro, groups) for _, micro, groups in some])
            for (i, _, _), spread in zip(some, logs.std(axis=1)):
                out[i] = float(spread)
        return out

    def ranked(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns plans in the order in which they should be judged; as they are before there is a forest."""
        if not plans or not self.fits:
            return list(plans)
        logs = self._logs(plans)
        promise = logs.mean(axis=1) - logs.std(axis=1)
        for i, plan in enumerate(plans):
            bound = self._bound(*plan)
            promise[i] = promise[i] + math.log(bound) if 0 < bound < INF else INF
        return [plans[i] for i in promise.argsort(kind="stable")]

    def _bound(self, micro: Micro, groups: tuple[Group, ...]) -> float:
        view = self.view
        period_s = view.rates.period_s(micro, groups, ())
        return pipeline_s(view.judge, micro.num_microbatches, period_s, 0.0) * view.evaluator.factor(groups)

    def _logs(self, plans: Sequence[Plan]) -> np.ndarray:
        """Returns [plan, tree] log(value / bound)."""
        import numpy as np

        assert self._trees is not None
        return self._trees(np.array([_features(self.view, *plan) for plan in plans]))

    def _train(self) -> None:
        import numpy as np

        from hetjax.passes.cost.forest import grow

        rows, goal = (np.array(column) for column in zip(*self._rows.values()))
        self._trees = grow(rows, goal, trees=_TREES, depth=_DEPTH, seed=self.seed, bins=_BINS).trees
        self.fits += 1


def make_forest(view: View, seed: int, ways: Sequence[str]) -> PlanForest | None:
    """Returns a forest for a search, None where no way is asked for or xgboost is not installed.

    Raises:
      PlanError: a way is unknown; says the nearest.
    """
    unknown = [f"unknown use of the forest {w!r}{nearest(w, WAYS)}" for w in ways if w not in WAYS]
    if unknown:
        raise PlanError(unknown)
    return PlanForest(view, seed, ways) if ways and forest_there() else None


def forest_there() -> bool:
    """Returns whether a forest can be trained here."""
    return importlib.util.find_spec("xgboost") is not None


def _features(view: View, micro: Micro, groups: tuple[Group, ...]) -> list[float]:
    """Returns the numbers that the forest decides by: of the whole plan, then five of each pool."""
    problem, n = view.problem, len(groups)
    pools = min(_POOLS, len(problem.pools))
    used, first, tensor, replicas, count = ([0.0] * pools for _ in range(5))
    slow = sum(
        view.sites_slow(view.facts(a).sites, view.facts(b).sites) for a, b in itertools.pairwise(groups)
    )
    for s, g in enumerate(groups):
        for p in g.parts:
            i = min(p.pool, pools - 1)
            if not count[i]:
                first[i] = 1 - s / n
            used[i] += p.devices / problem.pools[p.pool].devices
            tensor[i] += math.log2(p.tensor)
            replicas[i] += math.log2(p.replicas)
            count[i] += 1
    rates = [view.rates.rate(g) for g in groups]
    fastest = max(1e-300, *rates)
    out = [
        math.log2(micro.num_microbatches), math.log2(n), n / micro.num_microbatches, float(len(set(groups))), float(slow),
        sum(len(g.parts) > 1 for g in groups) / n,
        sum(g.options.recompute for g in groups) / n, sum(g.options.sharding != "none" for g in groups) / n,
        sum(rates) / max(1e-300, view.speed), min(rates) / fastest, rates[0] / fastest, rates[-1] / fastest,
    ]  # fmt: skip
    for i in range(pools):
        stages = max(1.0, count[i])
        out += (used[i], first[i], tensor[i] / stages, replicas[i] / stages, count[i])
    return out
