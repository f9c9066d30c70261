"""The pictures in the docstrings are what the simulator draws."""

import pytest

from hetjax.passes.schedules import (
    PipelineCosts,
    flush,
    interleaved,
    schedule,
    split_stages,
    virtual,
    zero_bubble,
)
from hetjax.passes.schedules.periodic import offsets
from hetjax.passes.simulator import simulate
from hetjax.passes.simulator_fast import tables
from hetjax.render.text_chart import text_chart

THREE = PipelineCosts((1.0,) * 3, (2.0,) * 3, 4)
TWO = PipelineCosts((2.0,) * 2, (4.0,) * 2, 4)
LINK = PipelineCosts((1.0,) * 4, (2.0,) * 4, 8, (0.0, 3.0, 0.0))


@pytest.mark.parametrize(("text", "name", "costs"), [
    (flush.__doc__, "gpipe", THREE),
    (flush.__doc__, "1f1b", THREE),
    (flush.eager_1f1b.__doc__, "eager-1f1b", THREE.replace(latency_s=(1.0, 1.0))),
    (interleaved.__doc__, "1f1b", TWO),
    (interleaved.__doc__, "interleaved-1f1b", split_stages(TWO, 2)),
    (zero_bubble.__doc__, "1f1b", THREE),
    (zero_bubble.__doc__, "zb-h1", THREE),
    (zero_bubble.__doc__, "zb-h2", THREE),
    (zero_bubble.__doc__, "zb-v", split_stages(TWO, 2, "vee")),
    (virtual.__doc__, "1f1b", LINK),
    (virtual.__doc__, "virtual-1f1b", LINK),
], ids=str)
def test_picture(text, name, costs):
    timeline = simulate(schedule(name, costs), costs)
    shortest = min(s.end_s - s.start_s for spans in timeline.spans for s in spans)
    rows = text_chart(timeline, [f"s{d}" for d in range(costs.num_devices)], 4 + round(timeline.makespan_s / shortest))
    for row in rows.splitlines():
        assert row in text


def test_timetable_of_the_periodic_docstring():
    table = tables(PipelineCosts((1.0,) * 2, (2.0,) * 2, 7, (2.0,)), False)
    assert offsets(table, 3.0) == [0.0, 3.0, 10.0, 4.0]  # F0, F1, B0, B1


def test_numbers_in_the_text():
    slow = THREE.replace(latency_s=(1.0, 1.0))
    times = {n: simulate(schedule(n, slow), slow).makespan_s for n in ("1f1b", "eager-1f1b")}
    assert times == {"1f1b": 26, "eager-1f1b": 22}
