"""Honest baselines under the same judge: what the tree search is measured against.

  exhaustive     every plan that `moves` leads to; small problems only. Beyond `FINE` examples these are not
                 all legal plans, and local refinement may find a better one.
  random         plans put together by drawing every decision evenly; or the devices of their stages only
  greedy         the likeliest decision by the principles, each time; once per division of the batch
  dynamic        the dynamic program of `hetjax.passes.search.dynamic`
  single site    the search itself, on the devices of one site (`on_site`)
  uniform        one grid of (pipeline, data, tensor) degrees for all devices, layers in equal numbers

Each takes an evaluator and leaves its best plan there.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from hetjax.ir.errors import PlanError
from hetjax.passes.search.evaluator import Cutter, Evaluator, Stopped
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import Groups, Moves, with_options
from hetjax.passes.search.space import Group, Micro, Part, Problem, placeable
from hetjax.passes.search.sweep import structures
from hetjax.passes.search.view import View

# Draws in a row without a new plan after which random search takes the space for known.
_STALE = 500


def count_plans(problem: Problem, known: Callable[[Group], bool], most: int) -> int:
    """Returns how many plans the space has, or a number above `most` where these are more than that."""
    moves, total = Moves(problem, known), 0
    for _, groups in structures(moves):
        total += moves.num_options(groups) * moves.num_edges(len(groups))
        if total > most:
            break
    return total


def exhaustive(evaluator: Evaluator, most: int = 1_000_000) -> None:
    """Judges every plan.

    Raises:
      PlanError: there are more than `most`.
    """
    evaluator.source = "exhaustive"
    problem, known = evaluator.problem, evaluator.judge.known
    if count_plans(problem, known, most) > most:
        raise PlanError(f"this problem has more than {most} plans; exhaustive search is for small ones")
    moves = Moves(problem, known)
    cuts = {s: list(moves.edges(s)) for s in range(1, problem.stage_limit + 1)}
    for micro, groups in structures(moves):
        for outfit in moves.options(groups):
            for edges in cuts[len(groups)]:
                evaluator.value(micro.num_microbatches, outfit, edges)


def randomly(evaluator: Evaluator, seed: int, *, cut: bool = False) -> None:
    """Draws plans until the budget is spent or hardly any is new: every decision evenly among the legal ones.

    Args:
      evaluator: judges.
      seed: of what is drawn.
      cut: whether only the batch's division and the devices of the stages are drawn, and options and edges are
        those that the search would take for them.
    """
    evaluator.source = "random"
    rng, problem = random.Random(seed), evaluator.problem
    moves, cutter = Moves(problem, evaluator.judge.known), Cutter(evaluator)
    before, stale = 0, 0
    while stale < _STALE:
        evaluator.check()
        stale = stale + 1 if evaluator.evaluations == before else 0
        before = evaluator.evaluations
        micro = rng.choice(moves.micros)
        groups: Groups = ()
        for _ in range(rng.randint(1, problem.stage_limit)):
            drawn = moves.draw(rng, micro, groups, rng.random() < 0.5) or moves.draw(rng, micro, groups, False)
            if drawn is None:
                break
            groups = (*groups, drawn)
        if not groups:
            continue
        if cut:
            for outfit, edges in cutter.plans(micro.num_microbatches, groups):
                evaluator.value(micro.num_microbatches, outfit, edges)
            continue
        choice = rng.choice((*problem.options, None))
        if choice is not None:
            groups = tuple(with_options(problem, g, choice) for g in groups)
        inner = sorted(rng.sample(range(1, problem.num_layers), len(groups) - 1))
        evaluator.value(micro.num_microbatches, groups, (0, *inner, problem.num_layers))


def greedy(evaluator: Evaluator) -> None:
    """Takes the likeliest decision each time, for one division of the batch after another."""
    evaluator.source = "greedy"
    view = View(evaluator)
    from hetjax.passes.search.moves import State

    for micro in sorted(view.moves.micros, key=lambda m: -view.weigh("micro", m)[0]):
        groups: Groups = ()
        best = INF
        while len(groups) < evaluator.problem.stage_limit:
            evaluator.check()
            state = State(micro, groups)
            weighed = [
                (view.weigh_group(g)[0] * view.weigh_next(state, g)[0], g)
                for mixed in (False, True)
                for g in view.moves.groups(micro, groups, mixed)
            ]
            weight, group = max(weighed, key=lambda w: w[0], default=(0.0, None))  # the first of equal ones
            if group is None or weight <= 0:
                break
            groups = (*groups, group)
            value = view.look(micro, groups, 0.0, INF)
            if value > best:
                break
            best = min(best, value)


def uniform(evaluator: Evaluator) -> None:
    """Judges grids as frameworks with one process grid have them: equal degrees, equal numbers of layers.

    Devices are taken pool after pool, a stage within one kind where that goes, in the cluster's order.
    """
    evaluator.source = "uniform"
    problem, judge = evaluator.problem, evaluator.judge
    moves = Moves(problem, judge.known)
    tensors = sorted({t for p in problem.pools for t in problem.table.tensors(p.kind)})
    cutter = View(evaluator, without=("work-by-speed",)).cutter
    for stages in range(1, problem.stage_limit + 1):
        for tensor in tensors:
            for replicas in range(1, problem.device_limit // (stages * tensor) + 1):
                for micro in moves.micros:
                    evaluator.check()
                    groups = _grid(problem, micro, stages, tensor, replicas)
                    if groups is None or not all(map(judge.known, groups)):
                        continue
                    if placeable(problem, groups):
                        for outfit, edges in cutter.plans(micro.num_microbatches, groups):
                            evaluator.value(micro.num_microbatches, outfit, edges)


def _grid(problem: Problem, micro: Micro, stages: int, tensor: int, replicas: int) -> Groups | None:
    """Returns the groups of one grid, or None where the devices or the batch do not allow it."""
    if micro.replicas not in (0, replicas) or micro.examples % replicas:
        return None
    share = micro.examples // replicas
    left = [p.devices // tensor for p in problem.pools]
    groups = []
    for _ in range(stages):
        parts, missing = [], replicas
        for pool, free in enumerate(left):
            n = min(free, missing)
            if n:
                parts.append(Part(pool, tensor, n, share))
                left[pool] -= n
                missing -= n
        if missing:
            return None
        groups.append(Group(tuple(parts)))
    return tuple(groups)


def sites(problem: Problem) -> list[str]:
    """Returns the names of the sites that have devices."""
    return list(dict.fromkeys(p.site for p in problem.pools))


def on_site(problem: Problem, site: str) -> Problem:
    """Returns the problem with the devices of one site only."""
    return dataclasses.replace(problem, pools=tuple(p for p in problem.pools if p.site == site))


def stopped(run: Callable[[], None]) -> bool:
    """Runs a baseline; returns whether its budget ended it."""
    try:
        run()
    except Stopped:
        return True
    return False
