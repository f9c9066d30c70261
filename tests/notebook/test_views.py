"""The views of a planned step say what the program, the estimate and the clock say."""

from __future__ import annotations

import json
import statistics
from xml.etree import ElementTree

import pytest

from hetjax import notebook
from hetjax.emit.chrome import read_trace
from hetjax.ir.errors import HetjaxError, ParseError, PlanError
from hetjax.ir.plan import Plan
from hetjax.notebook.subject import subject_of
from hetjax.notebook.views import predicted_and_measured
from hetjax.render.gantt import read_gantt


def elements(picture, attribute):
    return [
        e.attrib
        for e in ElementTree.fromstring(f"<div>{picture.body}</div>").iter()
        if attribute in e.attrib
    ]


def test_the_gantt_of_a_program_is_its_estimate(rehearsal):
    boxes = read_gantt(notebook.gantt(rehearsal).body)
    timeline, program = rehearsal.estimate.timeline, rehearsal.bundle.program
    tasks = [b for b in boxes if b.kind not in ("idle", "transfer")]
    assert sorted((b.start, b.end) for b in tasks) == sorted(
        (s.start_s, s.end_s) for row in timeline.spans for s in row
    )
    moved = [b for b in boxes if b.kind == "transfer"]
    sent = sum(t.kind == "send" for tasks in program.tasks for t in tasks)
    assert len(moved) == sent == len(timeline.transfers)
    size = {r.name: r.nbytes for r in program.reshards}
    assert sum(b.nbytes for b in moved) == sum(size[t.task.work] for t in timeline.transfers)


def test_measured_times_are_those_of_the_clock(ran):
    boxes = [
        b for b in read_gantt(notebook.gantt(ran).body) if b.run == "measured" and b.kind != "idle"
    ]
    times = ran._in_use().executor.times
    assert sorted((b.start, b.end) for b in boxes) == sorted((t.start_s, t.end_s) for t in times)
    # Transfers are drawn on the wire that the simulator has them on.
    rows = {b.row for b in boxes if b.kind == "transfer"}
    assert rows == {t.place for t in subject_of(ran).estimate.timeline.transfers}
    pairs = dict((n, (p, m)) for n, p, m in predicted_and_measured(subject_of(ran)))
    forward = [t.end_s - t.start_s for t in times if t.task.work == "s1/forward"]
    assert pairs["s1/forward"] == (
        ran._in_use().executor.emulation.work_s["s1/forward"],
        statistics.median(forward),
    )
    assert len(elements(notebook.compare(ran), "data-predicted")) == len(pairs)


def test_memory_is_that_of_the_simulator(rehearsal):
    rows = elements(notebook.memory(rehearsal), "data-points")
    for row, held, m in zip(
        rows, rehearsal.estimate.timeline.held_bytes, rehearsal.estimate.memory
    ):
        points = tuple(tuple(map(float, p.split(","))) for p in row["data-points"].split())
        assert points == held and float(row["data-static"]) == m.static_bytes


def test_a_value_that_crosses_is_drawn_at_both_ends(rehearsal):
    program = rehearsal.bundle.program
    reshard = program.reshards[0]
    picture = notebook.sharding(rehearsal, f"%{reshard.ref}")
    arrow = elements(picture, "data-arrow")[0]
    assert arrow["data-arrow"] == reshard.name and int(arrow["data-bytes"]) == reshard.nbytes
    assert int(arrow["data-times"]) == program.num_microbatches
    assert [e["data-stage"] for e in elements(picture, "data-stage")] == ["s0", "s1"]


def test_a_parameter_is_drawn_split_as_the_program_has_it(rehearsal):
    path = "state/params/block_1/down/kernel"
    picture = notebook.sharding(rehearsal, "params/block_1/down/kernel")
    tiles = elements(picture, "data-devices")
    graph, program = rehearsal.bundle.graph, rehearsal.bundle.program
    feed = next(f for f in program.feeds if graph.inputs[f.argument].path == path)
    assert len(tiles) == 2 and feed.spec == (("model",), ())
    assert {d for t in tiles for d in t["data-devices"].split()} == set(
        map(str, program.meshes[1].devices)
    )
    assert (
        f"{path}: f32[32,16], s1, dimension 0 over model, 1.0 KiB a device"
        in notebook.shardings(rehearsal, stage=1).text
    )
    with pytest.raises(PlanError, match="no value 'params/nothing'"):
        notebook.sharding(rehearsal, "params/nothing")


def test_stages_on_the_map(rehearsal):
    used = [e["data-stage"] for e in elements(notebook.cluster_map(rehearsal), "data-stage")]
    assert used == ["0", "0", "1", "1", "1", "1"]


def test_the_roofline_has_every_fragment_under_its_roof(rehearsal):
    points = elements(notebook.roofline(rehearsal), "data-flops")
    cluster, program = rehearsal.cluster, rehearsal.bundle.program
    busy = {p["data-name"]: p for p in points}
    assert set(busy) == {
        f.name for f in program.fragments if any(op.cost and op.cost.flops for op in f.ops)
    }
    for name, p in busy.items():
        kind = cluster.kind(program.meshes[program.fragment(name).stage].kind)
        flops, nbytes, seconds = (float(p[f"data-{k}"]) for k in ("flops", "bytes", "seconds"))
        assert flops / seconds <= min(
            kind.peak("f32"), kind.memory_bandwidth_bytes_s * flops / nbytes
        )


def test_stages_say_what_explain_says(rehearsal):
    text = notebook.stages(rehearsal).text
    assert "s0  2 x fast at near  data 2 x model 1" in text
    assert f"bubble {rehearsal.estimate.bubble:.1%}" in text and 0.5 < rehearsal.estimate.bubble < 0.9


def test_a_trace_of_both_runs_opens_beside_others(ran, tmp_path):
    path = tmp_path / "trace.json"
    notebook.save_trace(ran, path)
    events = json.loads(path.read_text())["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["predicted: near", "predicted: far", "measured: near", "measured: far"]
    subject = subject_of(ran)
    assert sum(e["ph"] == "X" for e in events) == sum(
        len(row)
        for t in (subject.estimate.timeline, subject.measured)
        for row in (*t.spans, t.transfers)
    )
    sent = [e for e in events if e["ph"] == "X" and e["cat"] == "send"]
    assert {e["args"]["bytes"] for e in sent} == set(subject.nbytes.values())
    back = read_trace(path, "measured")
    assert back.makespan_s == pytest.approx(subject.measured.makespan_s)
    for got, want in zip(back.spans, subject.measured.spans):
        assert [(s.task, s.start_s) for s in got] == [
            (s.task, pytest.approx(s.start_s)) for s in want
        ]
    with pytest.raises(ParseError, match="holds no later run"):
        read_trace(path, "later")


def test_the_stepper_has_every_pass_with_its_difference(dump):
    picture = notebook.stepper(dump)
    passes = [e["data-pass"] for e in elements(picture, "data-pass")]
    log = [json.loads(line) for line in next(dump.glob("*/trace.jsonl")).read_text().splitlines()]
    assert passes == [e["pass"] for e in log if e["pass"]]
    assert "cut-stages" in passes and 'class="ins"' in picture.body
    with pytest.raises(HetjaxError, match="holds no dump"):
        notebook.stepper(dump / "nothing")


def test_what_leads_nowhere_is_said(rehearsal, small_step):
    import hetjax

    with pytest.raises(PlanError, match="came without its step"):
        notebook.gantt(Plan.from_json(rehearsal.plan.to_json()))
    with pytest.raises(PlanError, match="a str leads to no planned step"):
        notebook.memory("plan")
    with pytest.raises(PlanError, match=r"call train_step.measure"):
        notebook.compare(rehearsal)
    with pytest.raises(PlanError, match="no plan yet"):
        notebook.gantt(hetjax.parallelize(small_step[0]))
