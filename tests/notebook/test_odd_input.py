"""What is odd, huge or of another type draws or says what is wrong: no page grows without end, none breaks."""

from __future__ import annotations

import json
import math

import click
import pytest

import hetjax
from hetjax import notebook
from hetjax.cli.plan import _write_search
from hetjax.demo.session import CLUSTER
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import ClusterError, ParseError, PlanError
from hetjax.ir.graph import Argument, Aval, Cost, Graph, Op, Result
from hetjax.ir.plan import Cut, Plan, StagePlan
from hetjax.notebook.dumps import read_dumps
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.simulator import Timeline, simulate
from tests.notebook.test_reprs import shown

ODD = "<script>alert(1)</script>\"'&]]>\x00\ud800"
A = Aval("f32", (2,))
STAGE = StagePlan((0,), ODD, ODD, ((ODD, 1),), None, (ODD,))


def plan(**changes) -> Plan:
    facts = dict(name="p", cluster="c", cluster_hash="", num_microbatches=1, batch_size=1, schedule="gpipe")
    return Plan(**{**facts, "stages": (STAGE,), **changes})


def small(html: str) -> None:
    assert len(html.encode()) < 300_000


def test_names_of_control_characters_and_markup_broke_the_page():
    graph = Graph(ODD, (Argument(0, ODD),), (Op(ODD, (0,), (1,), (), ODD, ODD),), (Result(1, ODD),), (A, A))
    for value in (graph, plan(name=ODD, sources=((ODD, ODD),)), STAGE, Bundle(notes=((ODD, ODD),))):
        html, _ = shown(value)
        assert "\x00" not in html and "&lt;script&gt;" in html
        small(html)


def test_a_graph_of_thousands_of_unlike_modules_was_a_page_of_900_kb():
    ops = tuple(Op(f"add{i}", (i, i), (i + 1,), (), "forward", f"m{i}/" * 20) for i in range(3000))
    html, _ = shown(Graph("g", (Argument(0, "x" * 10_000),), ops, (), (A,) * 3001))
    assert "… and 2,880 groups more, 2,880 ops" in html
    small(html)


def test_plans_and_bundles_of_many_rows_were_pages_of_a_megabyte():
    stage = StagePlan(tuple(range(1000)), "s", "k", (("data", 1000),), Cut("b"), ("b" * 400, "c" * 400))
    specs = tuple((f"{'x' * 500}{i}", (("model",),)) for i in range(3000))
    for value in (plan(stages=(stage,) * 600, state_specs=specs), Bundle(notes=(("t", "w" * 200),) * 5000)):
        small(shown(value)[0])


def test_flops_beyond_floats_raised_in_a_repr():
    op = Op("add", (0, 0), (0,), (), cost=Cost(10**400, 1, 1))
    html, _ = shown(Graph("g", (Argument(0, "x"),), (op,), (), (Aval("f32", (10**400,)),)))
    assert "over 1e300 FLOP" in html


def test_timelines_without_devices_or_of_the_least_seconds_raised_in_a_repr():
    costs = PipelineCosts((5e-324,) * 2, (5e-324,) * 2, 3, (5e-324,))
    least = simulate(schedule("1f1b", costs), costs)
    shown(least)
    shown(Timeline(0.0, (), (), (), (), (), ()))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_microbatches": "2"}, {"num_microbatches": 2.0}, {"schedule": None}, {"stages": (1, 2)}, {"warmups": 5},
        {"state_specs": 5}, {"sources": 5}, {"predicted_s": math.nan}, {"stage": [1]}, {"stage": {"0": {}}},
        {"stage": {1.0: {}}}, {"stage": {0: None}}, {"stage": {0: {1: 2}}}, {"stage": {0: {"mesh": 5}}},
        {"stage": {0: {"mesh": ("a", "b")}}}, {"stage": {0: {"devices": ("a",)}}}, {"stage": {0: {"axes": 5}}},
        {"stage": {0: {"first": 5}}}, {"spec": "x"}, {"spec": {5: None}}, {"spec": {"kernel": 5}},
    ],
    ids=str,
)  # fmt: skip
def test_changes_of_another_type_were_raw_tracebacks(changes):
    with pytest.raises(PlanError, match=r"the plan cannot be changed so:\n.* must be "):
        plan().with_(**changes)


@pytest.mark.parametrize("prices", [5, {"fast": None}, {"fast": math.nan}, {"fast": -1.0}], ids=str)
def test_prices_that_are_none_raised_in_a_repr(prices):
    with pytest.raises(PlanError, match="prices"):
        hetjax.rehearse(lambda x: x, str(CLUSTER), 1.0, prices=prices)


@pytest.mark.parametrize("line", ["5", "[]", '{"pass": ""}', json.dumps({"pass": "", "file": 5}), '{"pass": "", "file": "a"}'])
def test_a_log_of_another_kind_was_a_raw_traceback(tmp_path, line):
    (tmp_path / "trace.jsonl").write_text(line + "\n")
    with pytest.raises(ParseError, match="is no log of passes"):
        read_dumps(tmp_path)


@pytest.mark.parametrize("value", [[1], [("a", 1)], [("a", "b", "c")], [("a", math.inf, 1.0)], [("a", 5e-324, 1e308)]], ids=str)
def test_what_is_no_triple_was_a_raw_traceback(value):
    with pytest.raises(PlanError, match="compare takes"):
        notebook.compare(value)


@pytest.mark.parametrize("value", [None, 5, []], ids=str)
def test_what_is_no_search_and_no_folder_was_a_raw_traceback(value, tmp_path):
    with pytest.raises(PlanError, match="is no search"):
        notebook.search(value)
    with pytest.raises(PlanError, match="is no search"):
        notebook.save_dot(value, tmp_path / "x.dot")
    with pytest.raises(PlanError, match="is no folder of a dump"):
        notebook.stepper(value)


@pytest.mark.parametrize("name", ["x.html", "x.dot"])
def test_a_search_that_cannot_be_written_was_called_our_fault(found, tmp_path, name):
    with pytest.raises(click.UsageError, match="cannot be written"):
        _write_search(found, tmp_path / "no folder" / name)


@pytest.mark.parametrize("cluster", [None, 3])
def test_a_rehearsal_without_a_cluster_is_refused(cluster):
    with pytest.raises(ClusterError, match="give a Cluster"):
        hetjax.rehearse(lambda x: x, cluster, 1.0)
