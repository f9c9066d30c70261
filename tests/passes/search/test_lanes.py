"""Searches over processes: the same plan whatever their number; nothing is left behind; errors come home."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetjax.ir.errors import HetjaxError, PlanError
from hetjax.passes.search.evaluator import Evaluator, Objective
from hetjax.passes.search.lane_process import LaneProcess
from hetjax.passes.search.lanes import Order, Setting
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.result import search
from hetjax.passes.search.samples import random_problem

ROOT = Path(__file__).resolve().parents[3]
# Searches for long, over two processes, and says which the other is; tells what it has when it is interrupted.
# A shell's background jobs ignore SIGINT, and so would what they start.
SCRIPT = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.result import search
from hetjax.passes.search.samples import random_problem
def say(found):
    for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
        print("child", child, flush=True)
problem = random_problem(3, devices=24, layers=12)
found = search(OwnJudge(problem), budget_s=60, without=["bounds"], processes=2, on_improvement=say)
print("found", found.stopped, found.report.seconds, found.value, flush=True)
"""


def many(seed: int = 3):
    return random_problem(seed, devices=24, layers=12)


def test_the_number_of_processes_changes_nothing_in_the_plan():
    found = [search(OwnJudge(many()), seed=2, max_evaluations=260, processes=n) for n in (1, 2, 4)]
    assert {f.evaluations for f in found} == {260}
    assert found[0].lower_bound > 0
    for other in found[1:]:
        assert other.lower_bound == found[0].lower_bound
        assert other.outline == found[0].outline
        assert other.simulations == found[0].simulations
        assert other.tree == found[0].tree
        assert [(i.evaluations, i.outline) for i in other.improvements] == [
            (i.evaluations, i.outline) for i in found[0].improvements
        ]
    assert any(i.found_by == "refinement" for i in found[0].improvements)


def begun():
    """Returns a search in a process of its own, and a handle on the other process it searches with."""
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    word, child = parent.stdout.readline().split()
    assert word == "child"
    return parent, os.pidfd_open(int(child))


def ended(handle: int, within_s: float = 20.0) -> bool:
    return bool(select.select([handle], [], [], within_s)[0])


def test_a_killed_search_leaves_no_process_behind():
    parent, child = begun()
    parent.kill()
    parent.communicate()
    assert ended(child)
    os.close(child)


def test_an_interrupted_search_keeps_the_best_plan():
    parent, child = begun()
    parent.send_signal(signal.SIGINT)
    try:
        out, _ = parent.communicate(timeout=40)
    finally:
        parent.kill()
    word, stopped, seconds, value = out.splitlines()[-1].split()
    assert (word, stopped, parent.returncode) == ("found", "interrupted", 0)
    assert 0 < float(seconds) == float(value)
    assert ended(child)
    os.close(child)


def test_errors_of_a_process_come_home():
    order = Order(1, 1, None, 0.0, None, ())
    evaluator = Evaluator(OwnJudge(many()))
    for without, orders, kind, words in (
        (("nonsense",), [order], PlanError, "unknown principle 'nonsense'"),
        ((), [None], HetjaxError, "a process of the search failed:\nTraceback.*AttributeError"),
    ):
        child = LaneProcess(Setting(evaluator.judge, Objective(), without, 0, (0,)))
        try:
            child.order(orders)  # type: ignore[arg-type]
            with pytest.raises(kind, match="(?s)" + words):
                child.done(evaluator)
        finally:
            child.close()


def test_a_process_that_was_killed_is_told():
    child = LaneProcess(Setting(OwnJudge(many()), Objective(), (), 0, (0,)))
    try:
        child._process.kill()
        with pytest.raises(HetjaxError, match=r"ended \(exit code -9\).*Search with fewer processes"):
            child.order([Order(1, 1, None, 0.0, None, ())])
            child.done(Evaluator(OwnJudge(many())))
    finally:
        child.close()


@pytest.mark.quick
def test_a_judge_that_cannot_travel_is_refused_and_one_that_can_is_the_same():
    problem = many()
    problem.table.hook = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="searched in one process only"):
        search(OwnJudge(problem), max_evaluations=10, processes=2)
    judge = OwnJudge(many(), sync_each=True)
    again = pickle.loads(pickle.dumps(judge))
    assert again.sync_each
    first, second = (search(j, max_evaluations=60) for j in (judge, again))
    assert first.outline == second.outline
    assert first.value == second.value
