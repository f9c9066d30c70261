"""The forest of plans judged: learned on the way, the same under a seed, absent where xgboost is."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from click.testing import CliRunner

from hetjax.cli.plan import plan as plan_command
from hetjax.ir.errors import PlanError
from hetjax.passes.search import forest_bonus
from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.forest_bonus import PlanForest, make_forest
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import ROOT, State
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.result import search
from hetjax.passes.search.samples import random_problem
from hetjax.passes.search.space import Group, Micro, Problem
from hetjax.passes.search.sweep import Sweep
from hetjax.passes.search.view import View

BOTH = ("bonus", "ranking")


def large_problem() -> Problem:
    """Returns a problem of three pools, with too many structures for the sweep and many groups to learn from."""
    problem = random_problem(20, devices=24, layers=12)
    assert not Sweep(View(Evaluator(OwnJudge(problem)))).active
    return problem


def test_it_learns_what_is_quick_and_knows_what_it_never_saw():
    view = View(Evaluator(OwnJudge(large_problem())))
    forest = PlanForest(view, 0, BOTH)
    plans: list[tuple[Micro, tuple[Group, ...]]] = [
        (m, groups)
        for m in view.moves.micros
        for g, h in itertools.product(view.moves.groups(m, (), False)[:6], repeat=2)
        for groups in {(g,), (g, h)}
    ]
    plans = list(dict.fromkeys(sorted(plans, key=str)))
    seen, new = plans[::2], plans[1::2]
    assert forest.spreads([State(*plans[0])]) == [0.0]
    assert forest.ranked(new) == new

    def value(plan):  # in truth a plan takes longer than its bound, the more the fewer microbatches
        return forest._bound(*plan) * (1 + 4 / plan[0].num_microbatches)

    for plan in seen:
        forest.observe(*plan, value(plan))
        forest.observe(*plan, INF)
    assert len(seen) > 48
    assert forest.fits == len(marks(len(seen)))
    ranked = forest.ranked(new)
    assert sorted(map(new.index, ranked)) == list(range(len(new)))
    values = [value(plan) for plan in ranked]
    # The better half comes first, by far.
    middle = sorted(values)[len(values) // 2]
    assert sum(v <= middle for v in values[: len(values) // 2]) > 0.8 * (len(values) // 2)
    several = (view.moves.micros[0], (plans[0][1][0], plans[-1][1][0]))
    known, unseen = forest.spreads([State(*seen[0]), State(*several)])
    assert 0 <= known < math.inf and unseen > 0
    assert forest.spreads([ROOT]) == [0.0]


def marks(most: int) -> set[int]:
    """Returns after how many rows the forest is trained again."""
    found, at = set(), 32
    while at <= most:
        found.add(at)
        at = math.ceil(at * 1.5)
    return found


def test_the_same_seed_finds_the_same_plan_with_it():
    problem = large_problem()
    runs = [search(OwnJudge(problem), max_evaluations=150, forest=ways) for ways in ((), BOTH, BOTH)]
    plain, first, second = ([(i.evaluations, i.value, i.outline) for i in r.improvements] for r in runs)
    assert first == second
    assert runs[1].tree == runs[2].tree
    assert runs[0].tree != runs[1].tree  # it does steer
    assert plain[0] == first[0]  # before there are rows nothing differs


def test_without_xgboost_the_search_goes_on_without_a_forest(monkeypatch):
    monkeypatch.setattr(forest_bonus, "forest_there", lambda: False)
    problem = large_problem()
    with_, without = (search(OwnJudge(problem), max_evaluations=60, forest=ways) for ways in (BOTH, ()))
    assert with_.tree == without.tree
    listed = CliRunner().invoke(plan_command, ["--principles", "--json"], standalone_mode=False)
    rows = {r["name"]: r["summary"] for r in json.loads(listed.output)}
    assert "as xgboost is not installed; --forest ranking" in rows["forest-ranking"]
    assert "--forest bonus" in rows["forest-bonus"]


@pytest.mark.quick
def test_an_unknown_use_is_refused():
    view = View(Evaluator(OwnJudge(random_problem(63))))
    assert make_forest(view, 0, ()) is None
    with pytest.raises(PlanError, match=r"unknown use of the forest 'rankin'.*ranking"):
        make_forest(view, 0, ("rankin",))
