"""The simulator: hand-made cases, the golden makespans, and the quick path equal to the event queue."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ir.errors import VerifyError
from hetjax.ir.program import Task
from hetjax.passes.schedules import PipelineCosts, check_schedule, schedule, split_stages
from hetjax.passes.schedules.flush import warmup_lists
from hetjax.passes.schedules.samples import GOLDEN, random_pipeline
from hetjax.passes.simulator import Transfer, prefetch_depths, simulate, with_step_tasks
from hetjax.passes.simulator_fast import decode, encode, makespan_s


def starts(timeline, device):
    return [(str(s.task), s.start_s, s.end_s) for s in timeline.spans[device]]


@pytest.mark.quick
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.name)
def test_golden_makespans(case):
    for name, expected in (("gpipe", case.gpipe), ("1f1b", case.one_f_one_b), ("eager-1f1b", case.eager)):
        lists = schedule(name, case.costs)
        assert simulate(lists, case.costs).makespan_s == expected
        assert makespan_s(lists, case.costs) == expected


def test_latency_is_pipelined_and_serialisation_is_not():
    """Two microbatches over a link of 4: latency delays each by 4, serialisation the second by 8."""
    for latency, serialisation, second in ((4.0, 0.0, 6.0), (0.0, 4.0, 9.0)):
        costs = PipelineCosts((1.0, 1.0), (1.0, 1.0), 2, (latency,), (serialisation,))
        line = simulate(schedule("gpipe", costs), costs)
        assert [s for s in starts(line, 1) if s[0] == "F1"] == [("F1", second, second + 1)]


def test_full_duplex_half_duplex_and_shared_uplink():
    costs = PipelineCosts((1.0, 1.0), (1.0, 1.0), 8, (0.0,), (2.0,))
    lists = warmup_lists(costs, (4, 1))
    full = simulate(lists, costs).makespan_s
    half = simulate(lists, costs.replace(lines=(("wan", "wan"),))).makespan_s
    # One line must carry 8 activations and 8 gradients between F0 and B7 of stage 0.
    assert full < 1 + 16 * 2 + 1 <= half
    four = PipelineCosts((1.0,) * 3, (1.0,) * 3, 6, (0.0, 0.0), (2.0, 2.0))
    shared = four.replace(lines=(("up", "down"), ("up", "down")))
    lists = schedule("gpipe", four)
    # The uplink carries 12 activations of 2 s; alone, each boundary would carry its 6 at the same time.
    assert simulate(lists, shared).makespan_s >= 1 + 12 * 2
    assert simulate(lists, shared).makespan_s > simulate(lists, four).makespan_s
    ups = [t for t in simulate(lists, shared).transfers if t.place == "line up"]
    assert all(b.start_s >= a.start_s + 2 for a, b in itertools.pairwise(ups))


def test_sync_overlaps_the_drain_and_updates_wait_for_it():
    costs = PipelineCosts((1.0,) * 3, (2.0,) * 3, 4, sync_s=(0.0, 5.0, 3.0), update_s=(1.0, 1.0, 1.0))
    plain = schedule("1f1b", costs)
    lists = with_step_tasks(plain, costs)
    line = simulate(lists, costs)
    last = [max(e for n, _, e in starts(simulate(plain, costs), d)) for d in range(3)]
    updates = [next(s for n, s, _ in starts(line, d) if n == "update") for d in range(3)]
    assert updates == [last[0], last[1] + 5, last[2] + 3]
    assert updates[2] < last[0] + 1  # the last stage updates while the first still runs
    assert line.makespan_s == last[1] + 6
    check_schedule(lists, 4)


def test_memory_over_time_in_bytes():
    costs = PipelineCosts((1.0,) * 3, (2.0,) * 3, 4)
    line = simulate(schedule("1f1b", costs), costs, activation_bytes=(10.0, 20.0, 30.0), static_bytes=(1.0, 2.0, 3.0))
    assert line.peak_in_flight == (3, 2, 1)
    assert line.peak_bytes == (31.0, 42.0, 33.0)
    assert line.held_bytes[2][:4] == ((0.0, 3.0), (2.0, 33.0), (5.0, 3.0), (5.0, 33.0))


def test_exposed_communication_is_the_part_nobody_hides():
    costs = PipelineCosts((1.0, 1.0), (1.0, 1.0), 1, (3.0,), (2.0,))
    line = simulate(schedule("1f1b", costs), costs)
    # Nothing to do but wait: 5 on the way there for device 1, 5 on the way back for device 0.
    assert line.makespan_s == 14
    assert line.exposed_comm_s == (5.0, 5.0)
    # GPipe: device 0 stands still from 8 to 20, but B0 is under way only from 15 to 20.
    many = costs.replace(num_microbatches=8, latency_s=(5.0,), serialisation_s=(0.0,))
    assert simulate(schedule("gpipe", many), many).exposed_comm_s == (5.0, 5.0)
    # B0 leaves at 8, as device 0 runs out of forwards; then one gradient comes every 2 and takes 1.
    assert simulate(warmup_lists(many, (8, 1)), many).exposed_comm_s == (5.0 + 7.0, 5.0)


def test_explicit_sends_as_a_program_has_them():
    costs = PipelineCosts((1.0, 1.0), (2.0, 2.0), 2)
    prices = {"x": Transfer(("up",), 1.0, 0.5), "dx": Transfer(("down",), 0.0, 0.5)}
    lists = (
        (Task("F", 0, 0), Task("send", 0, 0, "x"), Task("F", 0, 1), Task("send", 0, 1, "x"),
         Task("recv", 0, 0, "dx"), Task("B", 0, 0), Task("recv", 0, 1, "dx"), Task("B", 0, 1)),
        (Task("recv", 1, 0, "x"), Task("recv", 1, 1, "x"), Task("F", 1, 0), Task("B", 1, 0),
         Task("send", 1, 0, "dx"), Task("F", 1, 1), Task("B", 1, 1), Task("send", 1, 1, "dx")),
    )
    line = simulate(lists, costs, transfers=prices)
    assert starts(line, 1) == [("F0", 2.5, 3.5), ("B0", 3.5, 5.5), ("F1", 5.5, 6.5), ("B1", 6.5, 8.5)]
    assert starts(line, 0)[2:] == [("B0", 6.0, 8.0), ("B1", 9.0, 11.0)]
    same = costs.replace(latency_s=(0.5,), serialisation_s=(1.0,))
    implicit = simulate(tuple(tuple(t for t in items if t.kind in "FB") for items in lists), same)
    assert starts(implicit, 1) == starts(line, 1)
    with pytest.raises(VerifyError, match="no cost is given for 'dx'"):
        simulate(lists, costs, transfers={"x": prices["x"]})


def test_prefetch_depth_grows_with_the_link():
    """A link of two stages' time has two microbatches and more on it before the first is read."""
    near = PipelineCosts((1.0, 1.0), (2.0, 2.0), 12)
    assert prefetch_depths(simulate(schedule("1f1b", near), near)) == {(1, "F"): 1, (0, "B"): 1}
    far = near.replace(latency_s=(6.0,))
    depths = prefetch_depths(simulate(warmup_lists(far, (6, 1)), far))
    # F0 to F5 leave at 1 to 6 and F0 is read at 7; gradients leave every 3 and are 6 on the way.
    assert depths == {(1, "F"): 6, (0, "B"): 2}
    split = PipelineCosts((1.0, 1.0), (2.0, 2.0), 4)
    assert set(prefetch_depths(simulate(schedule("zb-h1", split), split))) == {(1, "F"), (0, "B")}


def test_deadlock_names_the_circle():
    costs = PipelineCosts((1.0, 1.0), (1.0, 1.0), 2)
    lists = (
        (Task("F", 0, 0), Task("B", 0, 0), Task("F", 0, 1), Task("B", 0, 1)),
        (Task("F", 1, 0), Task("F", 1, 1), Task("B", 1, 0), Task("B", 1, 1)),
    )
    for run in (simulate, makespan_s):
        with pytest.raises(VerifyError, match=r"deadlock: .*s0/B0 waits for s1/B0|deadlock: .*s1/F1 waits for s0/F1"):
            run(lists, costs)


def _random_lists(rng, costs, split):
    """Returns any valid order: at each step some device takes some task whose inputs are there."""
    m, stages = costs.num_microbatches, costs.num_stages
    lists = [[] for _ in range(costs.num_devices)]
    done = {(kind, s): 0 for kind in "FBW" for s in range(stages)}
    while sum(map(len, lists)) < stages * m * (3 if split else 2):
        can = [("F", s) for s in range(stages) if done["F", s] < (done["F", s - 1] if s else m)]
        can += [("B", s) for s in range(stages)
                if done["B", s] < (done["B", s + 1] if s < stages - 1 else done["F", s])]
        can += [("W", s) for s in range(stages) if split and done["W", s] < done["B", s]]
        kind, s = rng.choice(can)
        name = "I" if kind == "B" and split else kind
        lists[costs.device_of[s]].append(Task(name, s, done[kind, s]))
        done[kind, s] += 1
    return tuple(map(tuple, lists))


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from(["line", "loop", "vee", "shared"]))
def test_quick_path_returns_the_same_float(rng, split, layout):
    """Any valid order, any placement, any link: not one bit of difference."""
    costs = random_pipeline(rng).replace(num_microbatches=rng.randint(1, 9), weight_share=rng.random())
    if layout in ("loop", "vee"):
        costs = split_stages(costs, 2, layout)
    if layout == "shared":
        names = [rng.choice(("wan", "lan", ("a", "wan"), ("a", "b"))) for _ in costs.latency_s]
        costs = costs.replace(lines=tuple((n, rng.choice((n, "back"))) for n in names))
    lists = _random_lists(rng, costs, split)
    check_schedule(lists, costs.num_microbatches)
    line = simulate(lists, costs)
    assert makespan_s(lists, costs) == line.makespan_s
    assert decode(*encode(lists, costs)) == lists
    # And the timeline keeps its own rules.
    for device, spans in enumerate(line.spans):
        assert tuple(s.task for s in spans) == lists[device]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_balanced_pipelines_follow_the_closed_form():
    rng = random.Random(4)
    for _ in range(20):
        p, m, f, b = rng.randint(1, 8), rng.randint(8, 30), rng.randint(1, 5), rng.randint(1, 9)
        costs = PipelineCosts((float(f),) * p, (float(b),) * p, m)
        for name in ("gpipe", "1f1b", "eager-1f1b"):
            line = simulate(schedule(name, costs), costs)
            assert line.makespan_s == (m + p - 1) * (f + b)
            assert line.bubble == pytest.approx((p - 1) / (m + p - 1))


def test_a_transfer_holds_each_line_for_its_own_share():
    """Stage 1 gets x over one slow link and y over another; both end at its port, which either holds for a moment."""
    costs = PipelineCosts((1.0,) * 2, (1.0,) * 2, 1)
    sends = [Task("F", 0, 0), Task("send", 0, 0, "x"), Task("send", 0, 0, "y")]
    lists = [sends, [Task("recv", 1, 0, "x"), Task("recv", 1, 0, "y"), Task("F", 1, 0)]]
    shared = {"x": Transfer(("a", "port"), 10.0, 0.0), "y": Transfer(("b", "port"), 10.0, 0.0)}
    assert simulate(lists, costs, transfers=shared).makespan_s == 1 + 20 + 1
    own = {"x": Transfer(("a", "port"), 10.0, 0.0, (10.0, 0.5)), "y": Transfer(("b", "port"), 10.0, 0.0, (10.0, 0.5))}
    line = simulate(lists, costs, transfers=own)
    assert line.makespan_s == 1 + 0.5 + 10 + 1
    assert {t.place for t in line.transfers} == {"line a", "line b"}
