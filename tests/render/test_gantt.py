"""The Gantt says what the simulator says: every number is read back from the drawing."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.ir.program import Task
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.simulator import Transfer, simulate, with_step_tasks
from hetjax.render.gantt import MAX_BOXES, Run, gantt, predicted, read_gantt
from hetjax.render.picture import standalone_svg

SEVERAL = {
    "gpipe": PipelineCosts((1, 1, 0.5), (2, 2, 1), 4, (0.5, 2), (0.1, 0.3)),
    "1f1b": PipelineCosts((0.1, 1 / 3, 0.7), (0.2, 2 / 3, 1.1), 5, (0.05, 0.0), (0.01, 0.0)),
    "zb-h1": PipelineCosts(
        (1, 1, 1), (2, 2, 2), 6, weight_share=0.4, sync_s=(0.5, 0.4, 0), update_s=(0.3,) * 3
    ),
    "virtual-1f1b": PipelineCosts((1, 1, 0.5, 0.5), (2, 2, 1, 1), 12, (0, 2, 0)),
}


def timeline_of(name):
    costs = SEVERAL[name]
    return simulate(with_step_tasks(schedule(name, costs), costs), costs)


@pytest.mark.quick
@pytest.mark.parametrize("name", SEVERAL)
def test_what_is_drawn_is_what_was_simulated(name):
    timeline = timeline_of(name)
    names = [f"device {d}" for d in range(len(timeline.spans))]
    boxes = read_gantt(gantt([predicted(timeline)], names, name).body)
    for device, spans in zip(names, timeline.spans):
        drawn = sorted(
            (b.start, b.end, b.kind, b.stage, b.microbatch)
            for b in boxes
            if b.row == device and b.kind != "idle"
        )
        assert drawn == sorted(
            (s.start_s, s.end_s, s.task.kind, s.task.stage, s.task.microbatch) for s in spans
        )
    crossing = sorted((b.row, b.start, b.end, b.microbatch) for b in boxes if b.row not in names)
    assert crossing == sorted(
        (t.place, t.start_s, t.end_s, t.task.microbatch) for t in timeline.transfers
    )
    assert {b.kind for b in boxes if b.row not in names} == {
        "sync" if t.task.kind == "sync" else "transfer" for t in timeline.transfers
    }


@pytest.mark.quick
@pytest.mark.parametrize("name", SEVERAL)
def test_idle_time_and_the_title_are_the_bubble(name):
    timeline = timeline_of(name)
    names = [f"d{d}" for d in range(len(timeline.spans))]
    picture = gantt([predicted(timeline)], names, name)
    idle = sum(b.end - b.start for b in read_gantt(picture.body) if b.kind == "idle")
    assert idle == pytest.approx(timeline.bubble * timeline.makespan_s * len(names), abs=1e-9)
    heading = re.search(r'class="h">([^<]*)<', picture.body)
    assert heading is not None and f"bubble {timeline.bubble:.1%}" in heading[1]
    assert f"bubble {timeline.bubble:.1%}" in picture.text.splitlines()[0]


@pytest.mark.quick
def test_transfers_of_a_program_bear_their_bytes():
    lists = (
        (
            Task("F", 0, 0, "s0/forward"),
            Task("send", 0, 0, "x1:s0>s1"),
            Task("recv", 0, 0, "x2:s1>s0"),
            Task("B", 0, 0, "s0/backward"),
        ),
        (
            Task("recv", 1, 0, "x1:s0>s1"),
            Task("F", 1, 0, "s1/forward"),
            Task("B", 1, 0, "s1/backward"),
            Task("send", 1, 0, "x2:s1>s0"),
        ),
    )
    prices = {"x1:s0>s1": Transfer(("0>1",), 0.25, 1.0), "x2:s1>s0": Transfer(("1>0",), 0.5, 1.0)}
    timeline = simulate(lists, PipelineCosts((1, 1), (2, 2), 1), transfers=prices)
    picture = gantt(
        [predicted(timeline)], ["s0", "s1"], "step", nbytes={"x1:s0>s1": 4096, "x2:s1>s0": 1 << 20}
    )
    sizes = {b.row: b.nbytes for b in read_gantt(picture.body) if b.kind == "transfer"}
    assert sizes == {"line 0>1": 4096, "line 1>0": 1 << 20}
    # What a person reads when pointing at it: microbatch, time, bytes.
    assert "transfer of x1:s0&gt;s1; microbatch 0; 1.25 s, 1 s to 2.25 s; 4.0 KiB" in picture.body


@pytest.mark.quick
def test_measured_below_predicted_and_modelled_times_marked():
    timeline = timeline_of("1f1b")
    slower = [
        tuple(dataclasses.replace(s, start_s=1.1 * s.start_s, end_s=1.1 * s.end_s) for s in row)
        for row in timeline.spans
    ]
    measured = dataclasses.replace(
        timeline,
        makespan_s=1.1 * timeline.makespan_s,
        spans=tuple(slower),
        busy_s=tuple(1.1 * b for b in timeline.busy_s),
    )
    modelled = frozenset(s for s in slower[0] if s.task.kind == "F")
    picture = gantt(
        [predicted(timeline), Run("measured", measured, modelled)], ["a", "b", "c"], "step"
    )
    boxes = read_gantt(picture.body)
    for run, line in (("predicted", timeline), ("measured", measured)):
        drawn = sorted(
            (b.start, b.end) for b in boxes if b.run == run and b.row == "b" and b.kind != "idle"
        )
        assert drawn == sorted((s.start_s, s.end_s) for s in line.spans[1])
    assert picture.body.count('class="task modelled"') == 1 and "modelled time" in picture.body
    assert "modelled" not in gantt([predicted(timeline)], ["a", "b", "c"], "step").body


@pytest.mark.quick
def test_colour_is_not_needed():
    picture = gantt([predicted(timeline_of("zb-h1"))], ["a", "b", "c"], "step")
    patterns = dict(re.findall(r'<pattern id="\w+-(\w+)".*?(d="[^"]*"|</pattern>)', picture.body))
    assert (
        {"F", "I", "W", "update", "sync", "transfer", "idle"}
        >= set(patterns)
        >= {"F", "I", "W", "update", "sync", "idle"}
    )
    assert len(set(patterns.values())) == len(patterns)
    assert ">F0<" in picture.body and ">I0<" in picture.body


def test_very_many_tasks_are_drawn_in_columns_and_say_so():
    costs = PipelineCosts((1.0,) * 8, (2.0,) * 8, 200, (0.1,) * 7)
    timeline = simulate(schedule("1f1b", costs), costs)
    assert sum(map(len, timeline.spans)) > MAX_BOXES
    picture = gantt([predicted(timeline)], [f"d{i}" for i in range(8)], "long")
    assert len(picture.body) < 300_000
    assert "each column shows what took most of it" in picture.body
    assert read_gantt(picture.body) == []
    kinds = set(re.findall(r'data-kind="(\w+)"', picture.body))
    assert {"F", "B", "idle"} <= kinds


@pytest.mark.quick
def test_names_of_users_do_not_break_out():
    picture = gantt([predicted(timeline_of("gpipe"))], ["<b>&", '"', "'"], 'step "<x>"')
    assert read_gantt(standalone_svg(picture.body))
    assert "<b>" not in picture.body and "<x>" not in picture._repr_html_()


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_read_back_of_any_pipeline(stages, microbatches, data):
    number = st.floats(1e-9, 1e9, allow_nan=False)
    times = data.draw(st.lists(number, min_size=stages, max_size=stages))
    costs = PipelineCosts(tuple(times), tuple(2 * t for t in times), microbatches)
    timeline = simulate(schedule("gpipe", costs), costs)
    names = [f"d{d}" for d in range(stages)]
    boxes = read_gantt(gantt([predicted(timeline)], names, "any").body)
    drawn = sorted((b.row, b.start, b.end) for b in boxes if b.kind not in ("idle", "transfer"))
    assert drawn == sorted(
        (names[s.device], s.start_s, s.end_s) for row in timeline.spans for s in row
    )
