"""`hetjax schedule`: its answers, its files, its refusals."""

import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from hetjax.cli.main import cli, main
from hetjax.ir.program import Task
from hetjax.passes.schedules import SCHEDULES, PipelineCosts, check_schedule
from hetjax.passes.simulator import simulate
from hetjax.render.gantt import read_gantt

CASE = "--forward 1,1,.5,.5 --backward 2,2,1,1 --latency 0,2,0 --serialisation 0,0,0 --microbatches 32"


def run(line):
    return CliRunner().invoke(cli, ["schedule", *line.split()], standalone_mode=False)


@pytest.mark.quick
def test_json_of_virtual_1f1b():
    facts = json.loads(run(f"virtual-1f1b {CASE} --json").stdout)
    assert (facts["ok"], facts["makespan"], facts["lower_bound"]) == (True, 99, 99)
    assert facts["peak_in_flight"] == [9, 8, 2, 1]
    assert facts["bubble"] == pytest.approx(1 - 32 * 9 / (4 * 99))
    # The lists stand by themselves: simulated again, they start and end as printed.
    lists = tuple(tuple(Task(k, s, i) for k, i, _, _ in rows) for s, rows in enumerate(facts["tasks"]))
    assert check_schedule(lists, 32) == (9, 8, 2, 1)
    again = simulate(lists, PipelineCosts((1, 1, 0.5, 0.5), (2, 2, 1, 1), 32, (0, 2, 0)))
    assert [[s.start_s, s.end_s] for s in again.spans[2]] == [row[2:] for row in facts["tasks"][2]]


def test_memory_limit_split_backward_and_auto():
    facts = json.loads(run(f"virtual-1f1b {CASE} --max-in-flight 6,5,2,1 --json").stdout)
    assert all(a <= b for a, b in zip(facts["peak_in_flight"], (6, 5, 2, 1)))
    assert facts["lower_bound"] <= facts["makespan"]
    halves = json.loads(run(f"zb-h1 {CASE} --weight-share .25 --json").stdout)
    assert {row[0] for row in halves["tasks"][0]} == {"F", "I", "W"}
    assert halves["tasks"][0][-1][3] - halves["tasks"][0][-1][2] == 0.5  # a quarter of 2
    best = json.loads(run(f"auto {CASE} --json").stdout)
    others = [json.loads(run(f"{n} {CASE} --json").stdout) for n in SCHEDULES if n not in ("auto", "zb-v", "interleaved-1f1b")]
    assert best["makespan"] == min(o["makespan"] for o in others)
    assert best["chosen"] in SCHEDULES


def test_chunks():
    facts = json.loads(run("interleaved-1f1b --forward 2,2 --microbatches 4 --json").stdout)
    assert facts["device_of"] == [0, 1, 0, 1] and len(facts["tasks"]) == 4
    assert facts["peak_in_flight_per_device"] == [5, 3]
    vee = json.loads(run("zb-v --forward 2,2 --microbatches 4 --json").stdout)
    assert vee["device_of"] == [0, 1, 1, 0]


def test_chart_svg_and_trace(tmp_path):
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    result = run(f"1f1b --forward 1,1,1 --latency 1,0 --microbatches 4 --width 40 --svg {svg} --trace {trace}")
    assert "makespan 22, lower bound 20" in result.stdout
    assert "device 2  ...0aa1bb2cc..3dd" in result.stdout
    ET.fromstring(svg.read_text())
    boxes = read_gantt(svg.read_text())
    assert len([b for b in boxes if b.kind in ("F", "B")]) == 3 * 8
    assert len([b for b in boxes if b.kind == "transfer"]) == 2 * 2 * 4
    assert (1.0, 2.0) in [(b.start, b.end) for b in boxes if b.row == "device 0" and b.microbatch == 1]
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 3 * 8 + 2 * 2 * 4  # tasks; transfers over two boundaries both ways
    assert {"name": "s0/F1", "ts": 1e6, "dur": 1e6}.items() <= next(e for e in spans if e["name"] == "s0/F1").items()


def test_list_names_them_all():
    assert [row["name"] for row in json.loads(run("--list --json").stdout)["schedules"]] == list(SCHEDULES)
    assert all(n in run("--list").stdout for n in SCHEDULES)


@pytest.mark.parametrize(("line", "words"), [
    ("gpip --forward 1,1 --microbatches 2", "did you mean gpipe"),
    ("1f1b --forward 1,x --microbatches 2", "entry 1 is 'x', not a number"),
    ("1f1b --forward 1,1 --latency 1,1 --microbatches 2", "latency_s has 2 entries, expected 1"),
    ("1f1b --forward 1,-1 --microbatches 2", "forward_s[1] is -1.0"),
    ("gpipe --forward 1,1 --microbatches 4 --max-in-flight 2,2", "device 1 would hold 4 activations, its limit is 2"),
    ("1f1b --microbatches 2", "--forward missing"),
    ("interleaved-1f1b --forward 1,1 --microbatches 3", "use 2 or 4"),
    ("1f1b --forward 1,1 --microbatches 2 --svg /nowhere/x.svg", "'/nowhere/x.svg' cannot be written"),
    ("1f1b --forward 1,1 --microbatches 2 --trace /nowhere/x.json", "'/nowhere/x.json' cannot be written"),
    ("1f1b --forward 1,5e307 --microbatches 2", "more than a float can hold"),
])
def test_bad_input_exits_with_1(line, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["schedule", *line.split()])
    assert exit_.value.code == 1
    assert words in capsys.readouterr().err


def test_json_says_no_in_json():
    result = run("gpipe --forward 1,1 --microbatches 4 --max-in-flight 2,2 --json")
    assert result.return_value == 1
    facts = json.loads(result.stdout)
    assert facts["ok"] is False and "does not fit in memory" in facts["error"]
