"""A search in rounds: the tree, and lanes that climb, in one process or in several.

The tree alone looks at every division of the batch first. From then on every round gives each lane so many
evaluations, and the tree as many walks and evaluations together; see `hetjax.passes.search.lanes`.
"""

from __future__ import annotations

from hetjax.passes.search.evaluator import Evaluator, Stopped
from hetjax.passes.search.lane_process import LaneProcess
from hetjax.passes.search.lanes import NUM_LANES, Done, Lane, Offers, Order, Setting, lanes_of
from hetjax.passes.search.relaxation import lower_bound_of
from hetjax.passes.search.tree import TreeSearch

# Walks and evaluations of the tree, and evaluations of each lane, in a round.
_ROUND = 24
# After so many rounds in which nothing was judged the search ends.
_MOST_IDLE = 64


class Rounds:
    """The rounds of one search.

    Args:
      tree: it draws plans, and offers them.
      offers: where it does.
      setting: of all lanes.
      processes: over how many the tree and the lanes are divided, this one included; more than there are tree and
        lanes are not used.
    """

    def __init__(self, tree: TreeSearch, offers: Offers, setting: Setting, processes: int):
        self.tree, self.offers = tree, offers
        self.evaluator: Evaluator = tree.evaluator
        self._most = self.evaluator.max_evaluations
        self._children: list[LaneProcess] = []
        units = 1 + NUM_LANES
        home = [i * min(processes, units) // units for i in range(units)][1:]
        self._here = tuple(n for n in range(NUM_LANES) if not home[n])
        self._setting = setting
        try:
            for process in sorted({h for h in home if h}):
                numbers = tuple(n for n in range(NUM_LANES) if home[n] == process)
                self._children.append(LaneProcess(_with_lanes(setting, numbers)))
        except BaseException:
            self.close()
            raise
        self._lanes: list[Lane] = []

    def close(self) -> None:
        """Ends the children."""
        for child in self._children:
            child.close()

    def run(self, *, bound: bool) -> None:
        """Searches until the tree is settled or the budget is spent.

        Args:
          bound: whether a lower bound by relaxation is wanted, which is left with the evaluator.

        Raises:
          Stopped: the budget is spent.
        """
        tree, evaluator = self.tree, self.evaluator
        self._begin(bound)
        self._lanes = lanes_of(_with_lanes(self._setting, self._here), tree.view)
        idle = 0
        while not tree.settled and idle < _MOST_IDLE:
            evaluator.max_evaluations = self._most
            evaluator.check()
            before = evaluator.looked_at
            try:
                self._round()
            except KeyboardInterrupt:
                for lane in self._lanes:
                    if lane.evaluator.outline is not None:
                        evaluator.adopt(lane.evaluator.best, lane.evaluator.outline)
                raise
            idle = idle + 1 if evaluator.looked_at == before else 0

    def _begin(self, bound: bool) -> None:
        """Lets the tree draw its first plans, while a child works out the bound, where there is one."""
        tree, evaluator = self.tree, self.evaluator
        simple = float(evaluator.lower_bound)
        if bound and self._children:
            self._children[0].ask_bound(simple)
        elif bound:
            evaluator.lower_bound = lower_bound_of(tree.view, simple)
        stopped: Stopped | None = None
        try:
            while not tree.settled and not tree.warm:
                tree.advance()
        except Stopped as stop:
            stopped = stop
        late = evaluator.stop or (evaluator.left_s is not None and evaluator.left_s <= 0)
        if bound and self._children and not late:
            evaluator.lower_bound = self._children[0].bound(evaluator)
        if stopped is not None:
            raise stopped

    def _round(self) -> None:
        evaluator = self.evaluator
        wanted, most = self._quotas()
        best = None if evaluator.outline is None else (evaluator.best, evaluator.outline)
        offers = self.offers.taken()
        orders = [
            Order(wanted[1 + n], most[1 + n], evaluator.left_s, evaluator.elapsed_s, best, offers)
            for n in range(NUM_LANES)
        ]
        for child in self._children:
            child.order([orders[n] for n in child.lanes])
        stopped = not self._draw(wanted[0], most[0])
        done: dict[int, Done] = {n: lane.work(orders[n]) for n, lane in zip(self._here, self._lanes)}
        for child in self._children:
            done.update(zip(child.lanes, child.done(evaluator)))
        for n in range(NUM_LANES):
            evaluator.count(done[n].evaluations, done[n].simulations, done[n].found)
        if stopped:
            evaluator.max_evaluations = self._most
            evaluator.check()

    def _draw(self, wanted: int, most: int) -> bool:
        """Lets the tree draw; returns whether it may go on."""
        # A walk down the tree takes its time where it meets no plan worth judging, too.
        begin, walks = self.evaluator.evaluations, 0
        # The count of all, not of the tree alone, is what the evaluator compares with its most.
        self.evaluator.max_evaluations = self.evaluator.looked_at + most
        try:
            while walks + self.evaluator.evaluations - begin < wanted and not self.tree.settled:
                self.tree.advance()
                walks += 1
        except Stopped:
            return False
        return True

    def _quotas(self) -> tuple[list[int], list[int]]:
        """Returns the evaluations of a round, and the most, of the tree and of each lane; all together fit the budget."""
        units = 1 + NUM_LANES
        if self._most is None:
            return [_ROUND] * units, [1 << 40] * units
        left = self._most - self.evaluator.looked_at
        if left >= units * _ROUND:
            return [_ROUND] * units, [_ROUND + (left - units * _ROUND) // units] * units
        share = [left // units + (i < left % units) for i in range(units)]
        return share, share


def _with_lanes(setting: Setting, lanes: tuple[int, ...]) -> Setting:
    return Setting(setting.judge, setting.objective, setting.without, setting.seed, lanes, setting.forest)
