"""The tree search: Monte Carlo tree search over the decisions of `moves`, guided by the principles.

Every step of the search walks down the tree, to the child with the largest

  q + c * (prior + bonus) * sqrt(visits) / (1 + visits of the child)

q is the mean of the rewards seen below it and the best of them, each half, between the least and the most
seen among its siblings; a reward is the best value known over the value found. The bonus is what a forest of the
plans judged so far is unsure of, where there is one (`forest_bonus`). Where the walk leaves the
tree, the rest of the plan is drawn by the principles' weights, cut and judged. Children come into play one by
one, largest prior first, as their parent is visited (progressive widening). Two paths that differ by an
exchange of pools which may change places lead to the same node (transposition).

What a principle forbids is looked at when all else at its node is settled. A node whose lower bound is no
better than the best plan, or all of whose children are closed, is closed. When the root is closed, the best plan is proved to be one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Iterator

from hetjax.passes.search.judge import INF
from hetjax.passes.search.lanes import Offers
from hetjax.passes.search.moves import MOST_EDGES, MOST_OPTIONS, ROOT, State, canonical
from hetjax.passes.search.refine import Refiner
from hetjax.passes.search.space import Group, Micro, Problem
from hetjax.passes.search.sweep import Sweep
from hetjax.passes.search.view import View

# Why a node is closed that neither the bound nor a principle closed.
SETTLED = "all below is settled"
_EXPLORATION = 1.0
# Of n visits, so many children are in play: _WIDEN * n ** _WIDEN_POWER, and one more.
_WIDEN, _WIDEN_POWER = 1.5, 0.6
# Plans drawn before the refinement begins, and how many evaluations it has for each one after.
_FIRST_VISITS, _REFINEMENT = 60, 3
# Evaluations of the sweep for each one of the tree.
_SWEEP = 4
# After so many walks that met no plan worth judging the search ends.
_MOST_IDLE = 3_000
# So many divisions of the batch are looked at before any a second time.
_DIVISIONS = 12
# How often a drawn stage is one of unlike replicas.
_MIXED = 0.15


class Node:
    """What the search knows of a state.

    Attributes:
      state: what is decided.
      bound: no plan below has a smaller value.
      visits, total, best: how often it was passed, the sum of the rewards, the best value.
      children: the decisions that may follow, once they were asked for; `more` where the unlikely ones
        are still to be added; `live` those of them that may be open, `ruled_out` those that a
        principle is against.
      closed, why: whether nothing is left to do below, and why.
    """

    __slots__ = ("best", "bound", "children", "closed", "live", "more", "ruled_out", "state", "total", "visits", "why")

    def __init__(self, state: State, bound: float):
        self.state = state
        self.bound = bound
        self.visits = 0
        self.total = 0.0
        self.best = INF
        self.children: list[Child] | None = None
        self.live: list[Child] = []
        self.ruled_out: list[Child] = []
        self.more = False
        self.closed = False
        self.why = ""


@dataclasses.dataclass(slots=True)
class Child:
    """A decision that may be taken at a node."""

    label: str
    prior: float
    state: State
    node: Node | None = None
    why: str = ""  # what principle is against it
    fit: int = 0  # which of the forests, and
    spread: float = 0.0  # how unsure it was


class TreeSearch:
    """One search; see the module's text.

    Args:
      view: the problem.
      seed: of all that is drawn.
      refiner: what improves the plans drawn.
      sweep: what settles the structures of small problems one by one.
    """

    def __init__(self, view: View, seed: int, refiner: Refiner | Offers | None = None, sweep: Sweep | None = None):
        self.view = view
        self.evaluator = view.evaluator
        self.random = random.Random(seed)
        self.refiner = refiner
        self.sweep = sweep
        self.nodes: dict[State, Node] = {}
        self._visits = self._idle = 0
        self._first_visits = min(_FIRST_VISITS, 2 * len(view.moves.micros))
        self._seen: set[Micro] = set()
        self._twins = view.judge.twins()
        self._best_of: dict[Micro, float] = {}
        self._wheels: dict[int, tuple[tuple[Group, ...], list[Group], list[float]]] = {}
        self.root = self._node(ROOT)

    def run(self) -> None:
        """Searches until the root is closed, or nothing new turns up for long.

        Raises:
          Stopped: the budget is spent.
        """
        while not self.settled:
            self.advance()

    @property
    def settled(self) -> bool:
        """Returns whether the root is closed, or nothing new turned up for long."""
        return self.root.closed or self._idle > _MOST_IDLE

    @property
    def warm(self) -> bool:
        """Returns whether the first plans are drawn, after which the refinement begins."""
        return self._visits > self._first_visits

    def advance(self) -> None:
        """Walks down once, and lets sweep and refinement work.

        Raises:
          Stopped: the budget is spent.
        """
        self.evaluator.check()
        before = self.evaluator.evaluations
        self._visits += 1
        self.step()
        self._idle = 0 if self.evaluator.evaluations > before else self._idle + 1
        if self._idle > _MOST_IDLE:
            return
        drawn = self.evaluator.evaluations - before
        if self.sweep is not None:
            self.sweep.work(_SWEEP * (1 + drawn))
            if self.sweep.done:
                self.root.closed, self.root.why = True, SETTLED
        if self.refiner is not None and self.warm:
            self.refiner.work(_REFINEMENT * (1 + drawn))

    def step(self) -> None:
        """Walks down once."""
        path = [self.root]
        node = self.root
        while True:
            if node.children is None:
                self._expand(node)
            child = self._select(node)
            if child is None:
                node.closed = True
                value = INF
                break
            fresh = child.node is None
            if child.node is None:
                child.node = self._node(child.state)
            node = child.node
            path.append(node)
            if fresh or node.closed:
                value = self._rollout(node.state) if not node.closed else INF
                break
        for n in path:
            n.visits += 1
            n.best = min(n.best, value)
            n.total += self._reward(value)
        for n in reversed(path):
            self._close(n)

    def _reward(self, value: float) -> float:
        best = self.evaluator.best
        return best / value if 0 < value < INF else 0.0

    # Nodes.

    def _node(self, state: State) -> Node:
        key = canonical(self._twins, state)
        node = self.nodes.get(key)
        if node is None:
            node = self.nodes[key] = Node(state, self.view.bound(state))
            self._close(node)
        return node

    def _close(self, node: Node) -> None:
        if node.closed:
            return
        if self.view.prunes_by_bound and node.bound >= self.evaluator.best:
            node.closed = True
            node.why = f"bounds: no plan below takes less than {node.bound:.6g}"
        elif node.children is not None and not node.more and not self._in_play(node, 1):
            node.closed = True
            node.why = node.why or SETTLED

    def _expand(self, node: Node, mixed: bool = False) -> None:
        decisions = self._mixed(node.state) if mixed else self._decisions(node.state)
        found = [Child(label, weight, state, None, why) for weight, why, label, state in decisions]
        found.sort(key=lambda c: -c.prior)
        state = node.state
        stages = state.micro is not None and state.pending is None and not state.finished
        node.more = stages and not mixed and self.view.problem.mixed
        if mixed and node.children is not None:
            found = node.children + found
        # Priors of what comes later are small beside these, and need not add up with them.
        total = sum(c.prior for c in found) or 1.0
        if node.children is None:
            for c in found:
                c.prior /= total
        node.children = found
        node.live = [c for c in found if not c.why and _open(c)]
        node.ruled_out = [c for c in found if c.why and _open(c)]

    def _decisions(self, state: State) -> Iterator[tuple[float, str, str, State]]:
        """Yields (weight, reason where it is 0, name, the state after it) of the decisions that may follow."""
        view, micro, groups = self.view, state.micro, state.groups
        if micro is None:
            for m in view.moves.micros:
                yield *view.weigh("micro", m), micro_label(m), State(m)
        elif state.pending is not None:
            for n in range(1, view.moves.counts(groups, state.pending) + 1):
                yield *view.weigh("count", state, n), f"x{n}", State(micro, (*groups, *[state.pending] * n))
        elif not state.finished:
            if groups:
                yield *view.weigh("finish", state), "no more", State(micro, groups, None, True)
            yield from self._stages(state, False)
        elif not state.optioned:
            for outfit in view.moves.options(groups, MOST_OPTIONS):
                after = State(micro, outfit, None, True, True)
                yield *view.weigh("options", state, outfit), options_label(outfit), after
        elif state.edges is None and view.moves.num_edges(len(groups)) <= MOST_EDGES:
            for edges in view.moves.edges(len(groups)):
                after = dataclasses.replace(state, edges=edges)
                yield *view.weigh("edges", state, edges), " ".join(map(str, edges)), after

    def _mixed(self, state: State) -> Iterator[tuple[float, str, str, State]]:
        yield from self._stages(state, True)

    def _stages(self, state: State, mixed: bool) -> Iterator[tuple[float, str, str, State]]:
        view, micro, groups = self.view, state.micro, state.groups
        if micro is None or len(groups) >= view.problem.stage_limit:
            return
        for g in view.moves.groups(micro, groups, mixed):
            if groups and g == groups[-1]:
                continue
            weight, why = view.weigh_group(g)
            if weight:
                after, why = view.weigh_next(state, g)
                weight *= after
            yield weight * (_MIXED if mixed else 1.0), why, group_label(view.problem, g), State(micro, groups, g)

    def _select(self, node: Node) -> Child | None:
        in_play = 1 + int(_WIDEN * node.visits**_WIDEN_POWER)
        if node is self.root and node.children is not None:
            # The likeliest divisions are each looked at once, by the plan that a sketch gives.
            fresh = [c for c in node.children[:_DIVISIONS] if c.node is None]
            if fresh:
                return fresh[0]
        found = self._in_play(node, in_play)
        if node.more and len(found) < in_play:
            self._expand(node, mixed=True)
            found = self._in_play(node, in_play)
        if len(found) < 2:
            return found[0] if found else None
        best = self.evaluator.best
        low, high, qs = INF, 0.0, []
        for c in found:
            n = c.node
            if n is None or not n.visits:
                qs.append(None)
                continue
            # Half the mean of the rewards, half the best of them.
            q = 0.5 * n.total / n.visits + 0.5 * (best / n.best if n.best > 0 else 0.0)
            qs.append(q)
            low, high = min(low, q), max(high, q)
        span = max(high - low, 1e-9)
        root = _EXPLORATION * math.sqrt(node.visits + 1)
        bonus = self._bonus(found)
        chosen, best_score = found[0], -INF
        for c, q, more in zip(found, qs, bonus):
            visits = c.node.visits if c.node is not None else 0
            score = (0.5 if q is None else (q - low) / span) + (c.prior + more) * root / (1 + visits)
            if score > best_score:
                chosen, best_score = c, score
        return chosen

    def _bonus(self, found: list[Child]) -> list[float]:
        """Returns what is added to the priors of children: their parts of the forest's spread."""
        forest = self.view.forest
        if forest is None or not forest.fits or not forest.bonus:
            return [0.0] * len(found)
        stale = [c for c in found if c.fit != forest.fits]
        for c, spread in zip(stale, forest.spreads([c.state for c in stale])):
            c.fit, c.spread = forest.fits, spread
        total = sum([c.spread for c in found])
        return [forest.bonus * c.spread / total if total else 0.0 for c in found]

    @staticmethod
    def _in_play(node: Node, most: int) -> list[Child]:
        """Returns the first open children, and forgets the closed ones before them.

        Those that a principle rules out come into play when no other is open.
        """
        if not node.live and node.ruled_out and not node.more:
            node.live, node.ruled_out = node.ruled_out, []
        found: list[Child] = []
        at = 0
        live = node.live
        while at < len(live) and len(found) < most:
            if _open(live[at]):
                found.append(live[at])
            at += 1
        if len(found) < at:
            node.live = found + live[at:]
        if not found and node.ruled_out and not node.more:
            return TreeSearch._in_play(node, most)
        return found

    # Rollouts.

    def _rollout(self, state: State) -> float:
        """Returns the value of the best plan on one way to complete a state by the principles.

        Stages are drawn one after another; each time, the plan that stops there is judged, and a plan that
        got worse twice is not drawn on.
        """
        view, micro, groups, pending = self.view, state.micro, state.groups, state.pending
        if micro is None:
            micro = self._draw([(m, view.weigh("micro", m)[0]) for m in view.moves.micros])
            if micro is None:
                return INF
        if not groups and pending is None and micro not in self._seen:
            self._seen.add(micro)
            return self._likeliest(micro)
        if state.edges is not None:
            return self.evaluator.value(micro.num_microbatches, groups, state.edges)
        if state.finished:
            return self.complete(micro, groups)
        best, worse = INF, 0
        while worse < 2:
            now = State(micro, groups, pending)
            if pending is not None:
                most = view.moves.counts(groups, pending)
                n = self._draw([(n, view.weigh("count", now, n)[0]) for n in range(1, most + 1)])
                groups, pending = (*groups, *[pending] * (n or 1)), None
                value = self.complete(micro, groups)
                worse = worse + 1 if value >= best < INF else 0
                best = min(best, value)
                continue
            if len(groups) >= view.problem.stage_limit:
                break
            pending = self._draw_group(now)
            if pending is None:
                break
        return best

    def _likeliest(self, micro: Micro) -> float:
        """Returns the value of the plans that a division suggests: one stage across pools, and the sketch's.

        The pools of the sketch come in the likeliest order.
        """
        best, groups = INF, ()
        wide = [g for g in self.view.moves.groups(micro, (), False) if len(g.parts) > 1 and self.view.weigh_group(g)[0]]
        if wide:
            best = self.complete(micro, (max(wide, key=self.view.rates.rate),))
        waiting = list(self.view.sketch(micro, memory=True).fillings)
        while waiting:
            state = State(micro, groups)
            likely = max(waiting, key=lambda f: self.view.weigh_next(state, f[0])[0])
            waiting.remove(likely)
            groups = (*groups, *[likely[0]] * likely[1])
            best = min(best, self.complete(micro, groups))
        return best

    def _draw_group(self, state: State) -> Group | None:
        """Returns the devices of a next stage, drawn by their weights."""
        mixed = self.view.problem.mixed and self.random.random() < _MIXED
        for kind in (mixed, not mixed):
            groups, sums = self._wheel(state, kind)
            for _ in range(20 if groups else 0):
                group = groups[bisect_left(sums, self.random.random() * sums[-1])]
                # By itself it was drawn by its weight; after the others it is kept by the rest of it.
                if state.groups and group == state.groups[-1]:
                    continue
                if self.random.random() < self.view.weigh_next(state, group)[0]:
                    return group
        return None

    def _wheel(self, state: State, mixed: bool) -> tuple[list[Group], list[float]]:
        """Returns the groups that the next stage may have, and running sums of their weights."""
        assert state.micro is not None
        groups = self.view.moves.groups(state.micro, state.groups, mixed)
        found = self._wheels.get(id(groups))
        if found is None or found[0] is not groups:
            weighed = [(g, self.view.weigh_group(g)[0]) for g in groups]
            weighed = [(g, w) for g, w in weighed if w > 0]
            sums = list(itertools.accumulate(w for _, w in weighed))
            found = self._wheels[id(groups)] = (groups, [g for g, _ in weighed], sums)
        return found[1], found[2]

    def _draw(self, choices):
        """Returns one of (choice, weight) pairs, or None where no weight is positive."""
        sums = list(itertools.accumulate(w for _, w in choices))
        if not sums or sums[-1] <= 0:
            return None
        return choices[min(len(sums) - 1, bisect_left(sums, self.random.random() * sums[-1]))][0]

    def complete(self, micro: Micro, groups: tuple[Group, ...]) -> float:
        """Returns the value of the best plan with these groups that is worth a look."""
        best, before = self.evaluator.best, self._best_of.get(micro, INF)
        # The first plans are looked at in passing: they only show which divisions are worth more.
        climb_below = 1.1 * best if self._visits > self._first_visits else 0.0
        value = self.view.look(micro, groups, climb_below, best)
        if value < before:
            self._best_of[micro] = value
        # A plan is worth a climb when it leads its division of the batch.
        if self.refiner is not None and value <= before:
            self.refiner.offer(micro, groups, value)
        return value


def _open(child: Child) -> bool:
    return child.node is None or not child.node.closed


def micro_label(micro: Micro) -> str:
    """Returns a division of the batch in a few characters."""
    replicas = f", {micro.replicas} replica{'s' * (micro.replicas > 1)}" if micro.replicas else ""
    m = micro.num_microbatches
    return f"{m} microbatch{'es' * (m > 1)} of {micro.examples}{replicas}"


def group_label(problem: Problem, group: Group) -> str:
    """Returns a group in a few characters: 16 x 2 v100-16g in oslo."""
    parts = []
    for p in group.parts:
        pool = problem.pools[p.pool]
        parts.append(f"{p.replicas} x {p.tensor} {pool.kind} in {pool.site}, {p.share} each")
    return " + ".join(parts)


def options_label(groups: tuple[Group, ...]) -> str:
    """Returns the options of stages in a few characters."""
    words = []
    for g in groups:
        o = g.options
        named = [
            "recompute" * o.recompute, f"{o.sharding} sharded" * (o.sharding != "none"),
            "sequence" * o.sequence, f"{o.experts} experts apart" * (o.experts > 1),
            "compressed" * (o.exchange == "compressed"),
        ]  # fmt: skip
        words.append(" ".join(filter(None, named)) or "plain")
    return words[0] if len(set(words)) == 1 else ", ".join(words)
