"""Lanes: climbs with draws of their own that go on in rounds, each in whichever process.

At the end of a round the best plan of all, and the plans that
the tree offers to climb from, are made known to every lane. What a lane does in a round depends on its seed and on
what it was told, not on where it runs: the same seed and evaluations give the same plan in one process or in many.
"""

from __future__ import annotations

import contextlib
import dataclasses

from hetjax.passes.search.evaluator import Evaluator, Improvement, Objective, Stopped
from hetjax.passes.search.forest_bonus import make_forest
from hetjax.passes.search.judge import Groups, Judge
from hetjax.passes.search.refine import Refiner
from hetjax.passes.search.space import Micro, Outline
from hetjax.passes.search.view import View

# Where plans are many-staged one climb is a matter of luck: so many lanes, their seeds so far apart.
NUM_LANES, _APART = 3, 1_000_003


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a process must know to have lanes.

    Attributes:
      judge: with the problem.
      objective: what is made small.
      without: principles switched off.
      seed: of the search.
      lanes: which of the lanes are here.
      forest: uses of a forest that each learns (`forest_bonus.WAYS`).
    """

    judge: Judge
    objective: Objective
    without: tuple[str, ...]
    seed: int
    lanes: tuple[int, ...]
    forest: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Order:
    """What a lane is told for a round.

    Attributes:
      evaluations: after which it ends, between two plans; `most` after which it ends at once.
      left_s: seconds until the search ends; None for no limit.
      elapsed_s: since it began.
      best: value and outline of the best plan, None before there is one.
      offers: plans to climb from, with their values.
    """

    evaluations: int
    most: int
    left_s: float | None
    elapsed_s: float
    best: tuple[float, Outline] | None
    offers: tuple[tuple[Micro, Groups, float], ...]


@dataclasses.dataclass(frozen=True)
class Done:
    """What a lane did in a round: its evaluations and simulations, and plans better than it knew of."""

    evaluations: int
    simulations: int
    found: tuple[Improvement, ...]


class Lane:
    """One lane.

    Args:
      setting: of all lanes.
      number: of this one.
      like: a view of the same problem in this process.
    """

    def __init__(self, setting: Setting, number: int, like: View | None = None):
        self.evaluator = Evaluator(setting.judge, setting.objective)
        self.view = View(self.evaluator, setting.without, like=like)
        self.view.forest = make_forest(self.view, setting.seed + number * _APART, setting.forest)
        self._refiner = Refiner(self.view, setting.seed + number * _APART)

    def work(self, order: Order) -> Done:
        """Goes on for a round."""
        e = self.evaluator
        before, simulations, known = e.evaluations, e.simulations, len(e.improvements)
        e.max_evaluations = before + order.most
        e.budget_s = None if order.left_s is None else e.elapsed_s + order.left_s
        later_s = order.elapsed_s - e.elapsed_s
        if order.best is not None:
            e.adopt(*order.best)
        for offer in order.offers:
            self._refiner.offer(*offer)
        with contextlib.suppress(Stopped):
            self._refiner.work(order.evaluations)
        found = tuple(
            dataclasses.replace(i, evaluations=i.evaluations - before, elapsed_s=i.elapsed_s + later_s)
            for i in e.improvements[known:]
        )
        return Done(e.evaluations - before, e.simulations - simulations, found)


class Offers:
    """Keeps the plans that a tree offers to climb from until the round ends; stands where a refiner may."""

    def __init__(self) -> None:
        self._offers: list[tuple[Micro, Groups, float]] = []

    def offer(self, micro: Micro, groups: Groups, value: float) -> None:
        self._offers.append((micro, groups, value))

    def work(self, evaluations: int) -> None:
        """Does nothing: the lanes work."""

    def taken(self) -> tuple[tuple[Micro, Groups, float], ...]:
        """Returns the offers since the last time."""
        offers, self._offers = tuple(self._offers), []
        return offers


def lanes_of(setting: Setting, like: View | None = None) -> list[Lane]:
    """Returns the lanes of a process; they share what they know of the problem."""
    lanes: list[Lane] = []
    for number in setting.lanes:
        lanes.append(Lane(setting, number, like))
        like = like or lanes[0].view
    return lanes
