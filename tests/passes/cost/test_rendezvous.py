"""Pipelines with blocking transfers: by hand, against the simulator where nothing travels, and limits."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.passes.cost.rendezvous import rendezvous_1f1b
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.simulator import simulate

times = st.floats(0.1, 3.0)


def end_s(*args) -> float:
    return rendezvous_1f1b(*args)[-1].end_s


@pytest.mark.quick
def test_two_stages_by_hand():
    # F0 a0 | F1 meets B0 of stage 1; each period holds one activation and one gradient: F + B + 2c.
    assert end_s([1, 1], [2, 2], [0.5], [0.5], 1) == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)
    one, many = (end_s([1, 1], [2, 2], [0.5], [0.5], m) for m in (10, 20))
    assert (many - one) / 10 == pytest.approx(1 + 2 + 2 * 0.5)


def test_a_stage_in_the_middle_holds_still_for_four_transfers():
    few, many = (end_s([1] * 4, [2] * 4, [0.25] * 3, [0.25] * 3, m) for m in (10, 20))
    assert (many - few) / 10 == pytest.approx(1 + 2 + 4 * 0.25)


def test_one_stage_does_nothing_but_compute():
    assert end_s([1.5], [2.5], [], [], 7) == pytest.approx(28)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_where_nothing_travels_it_is_1f1b(stages, m):
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    free = [0.0] * (len(stages) - 1)
    costs = PipelineCosts(tuple(forward), tuple(backward), m)
    expected = simulate(schedule("1f1b", costs), costs).makespan_s
    # Meeting for a transfer that takes no time can still make a stage wait for its neighbour.
    assert end_s(forward, backward, free, free, m) >= expected - 1e-9
    if len(set(stages)) == 1:
        assert end_s(forward, backward, free, free, m) == pytest.approx(expected)


@given(
    st.lists(st.tuples(times, times, times, times), min_size=1, max_size=6), st.integers(1, 9)
)
@settings(max_examples=60, deadline=None)
def test_every_task_runs_once_and_no_device_does_two_things(stages, m):
    forward, backward = [x[0] for x in stages], [x[1] for x in stages]
    there, back = [x[2] for x in stages[1:]], [x[3] for x in stages[1:]]
    spans = rendezvous_1f1b(forward, backward, there, back, m)
    count = len(stages)
    assert len(spans) == len({(s.name, s.stage) for s in spans}) == 2 * m * count + 4 * m * (count - 1)
    for stage in range(count):
        mine = sorted((s for s in spans if s.stage == stage), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(mine))
