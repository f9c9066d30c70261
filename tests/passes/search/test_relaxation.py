"""The relaxation's bound: no plan below it, whoever finds the plan, and above the simple bound where that is loose."""

from __future__ import annotations

import dataclasses

import pytest

from hetjax.passes.search import relaxation
from hetjax.passes.search.baselines import (
    count_plans,
    exhaustive,
    greedy,
    randomly,
    stopped,
    uniform,
)
from hetjax.passes.search.dynamic import dynamic
from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import FINE, ROOT
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.relaxation import Relaxation
from hetjax.passes.search.result import search
from hetjax.passes.search.samples import random_problem
from hetjax.passes.search.view import View


@pytest.fixture(autouse=True)
def looks_far(monkeypatch):
    """Lets the bound be as large as the relaxation can show, so that a mistake in it would come to light."""
    monkeypatch.setattr(relaxation, "_FURTHEST", 30.0)


def bound_of(problem) -> float:
    return Relaxation(View(Evaluator(OwnJudge(problem)))).bound_s()


def test_no_plan_of_small_problems_is_below_the_bound():
    checked = raised = 0
    for seed in range(40):
        problem = random_problem(seed)
        problem = dataclasses.replace(problem, batch=min(problem.batch, FINE))
        if not 30 <= count_plans(problem, OwnJudge(problem).known, 800) <= 800:
            continue
        whole = Evaluator(OwnJudge(problem))
        exhaustive(whole)
        if whole.best == INF:
            continue
        bound, simple = bound_of(problem), View(Evaluator(OwnJudge(problem))).bound(ROOT)
        assert bound <= whole.best * (1 + 1e-9), seed
        checked += 1
        raised += bound > 1.02 * simple
    assert checked >= 10
    assert raised >= 4


def test_no_plan_that_search_or_baselines_find_is_below_the_bound():
    for seed in (3, 11, 12, 21):
        problem = random_problem(seed, devices=24, layers=12)
        bound = bound_of(problem)
        for run in (greedy, uniform, dynamic, lambda e: randomly(e, 0)):
            evaluator = Evaluator(OwnJudge(problem), max_evaluations=100)
            stopped(lambda run=run, evaluator=evaluator: run(evaluator))
            assert bound <= evaluator.best, (seed, run)
        found = search(OwnJudge(problem), max_evaluations=100)
        assert bound <= found.value
        # What the search reports is no less than what its tree knows.
        assert View(Evaluator(OwnJudge(problem))).bound(ROOT) <= found.lower_bound <= found.value


@pytest.mark.quick
def test_classes_of_shares_hold_every_share_once():
    held = [e for low, high in relaxation._classes(1, 500) for e in range(low, high + 1)]
    assert held == list(range(1, 501))


@pytest.mark.quick
def test_more_devices_or_a_longer_look_never_lower_what_fewer_can_do(monkeypatch):
    problem = next(p for p in map(random_problem, range(100)) if p.num_devices == 8)
    assert bound_of(problem) <= bound_of(dataclasses.replace(problem, max_devices=4))
    far = bound_of(problem)
    monkeypatch.setattr(relaxation, "_FURTHEST", 1.01)
    assert bound_of(problem) <= far * (1 + relaxation._CLOSE)
