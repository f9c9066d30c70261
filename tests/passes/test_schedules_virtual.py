"""Every schedule on random pipelines: proved, within its promises, and as quick as claimed."""

import random
import statistics

import pytest

from hetjax.ir.errors import PlanError
from hetjax.passes.bounds import lower_bound
from hetjax.passes.schedules import (
    SCHEDULES,
    PipelineCosts,
    check_schedule,
    peak_in_flight,
    schedule,
    split_stages,
)
from hetjax.passes.schedules.auto import choose
from hetjax.passes.schedules.samples import GOLDEN, budget_1f1b, random_pipeline
from hetjax.passes.schedules.virtual import virtual_quick, virtual_quick_s, virtual_warmups
from hetjax.passes.simulator import simulate, with_step_tasks
from hetjax.passes.simulator_fast import makespan_s, step_s


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.name)
def test_golden_cases(case):
    lists = schedule("virtual-1f1b", case.costs)
    assert simulate(lists, case.costs).makespan_s <= case.best
    # GPipe is as quick for pure latency, but holds everything; brute force over warm-ups found these peaks.
    peaks = {"F": (6, 5, 2, 1), "I": (9, 8, 2, 1)}.get(case.name, virtual_warmups(case.costs))
    assert sum(peak_in_flight(lists)) <= sum(peaks)


def test_warmups_by_hand():
    """The link of 3 in the middle is one virtual stage each way: 6, 5 instead of 4, 3."""
    assert virtual_warmups(GOLDEN[2].costs) == (6, 5, 2, 1)
    assert virtual_warmups(GOLDEN[0].costs) == (4, 3, 2, 1)
    assert virtual_warmups(GOLDEN[7].costs) == (12, 11, 8, 7, 6, 3, 2, 1)
    assert makespan_s(virtual_quick(GOLDEN[7].costs), GOLDEN[7].costs) == 129


def test_quick_estimate_is_the_simulated_time():
    rng = random.Random(12)
    for _ in range(20):
        costs = random_pipeline(rng)
        costs = costs.replace(
            sync_s=tuple(rng.choice((0.0, 5.0)) for _ in costs.forward_s), update_s=tuple(rng.random() for _ in costs.forward_s))
        lists = virtual_quick(costs)
        expected = simulate(with_step_tasks(lists, costs), costs).makespan_s
        assert step_s(lists, costs) == expected
        assert virtual_quick_s(costs) == (expected, virtual_warmups(costs))


@pytest.mark.parametrize("more", [None, 2], ids=["unlimited", "1f1b-plus-2"])
def test_near_the_bound_on_random_pipelines(more):
    """The 500 instances of the benchmark, cut to 60 here; the same generator and seed."""
    rng = random.Random(2026)
    ratios = []
    for _ in range(60):
        costs = random_pipeline(rng)
        if more is not None:
            costs = costs.replace(max_in_flight=budget_1f1b(costs, more))
        lists = schedule("virtual-1f1b", costs)
        check_schedule(lists, costs.num_microbatches, max_in_flight=costs.max_in_flight)
        time = makespan_s(lists, costs)
        assert time <= makespan_s(schedule("1f1b", costs), costs) * (1 + 1e-9)
        ratios.append(time / lower_bound(costs).lower_s)
    ratios.sort()
    assert ratios[0] >= 1 - 1e-9
    assert statistics.median(ratios) <= 1.01
    assert ratios[56] <= (1.06 if more is None else 1.15)


def test_the_same_costs_give_the_same_lists():
    costs = random_pipeline(random.Random(11))
    assert schedule("virtual-1f1b", costs) == schedule("virtual-1f1b", costs.replace())


def test_all_schedules_pass_the_proof_on_random_shapes():
    rng = random.Random(6)
    seen = set()
    for n in range(24):
        base = random_pipeline(rng).replace(num_microbatches=rng.randint(1, 20), weight_share=rng.random())
        costs = base if n % 3 == 0 else split_stages(base, 2 + n % 2 * (n % 3 == 1), "loop" if n % 3 == 1 else "vee")
        if n % 2:
            costs = costs.replace(max_in_flight=tuple(
                len(costs.stages_of(d)) + rng.randint(0, 6) for d in range(costs.num_devices)))
        for name, info in SCHEDULES.items():
            if costs.placement not in info.placements:
                continue
            try:
                lists = schedule(name, costs)
            except PlanError as error:
                assert "memory" in str(error) or "multiple of" in str(error)
                continue
            seen.add(name)
            check_schedule(lists, costs.num_microbatches, max_in_flight=costs.max_in_flight)
            kinds = {t.kind for items in lists for t in items}
            assert kinds <= ({"F", "I", "W", "B"} if name == "auto" else {"F", "I", "W"} if info.split else {"F", "B"})
    assert seen == set(SCHEDULES)


def test_zero_bubble_against_1f1b():
    for p in (2, 4, 8):
        m = 4 * p
        costs = PipelineCosts((1.0,) * p, (2.0,) * p, m)
        plain = simulate(schedule("1f1b", costs), costs)
        h1 = simulate(schedule("zb-h1", costs), costs)
        assert h1.makespan_s - m * 3 == (plain.makespan_s - m * 3) / 3  # (p-1)(F+I-W) for (p-1)(F+B)
        assert h1.bubble <= 0.4 * plain.bubble
        assert max(h1.peak_in_flight) == p
        h2 = simulate(schedule("zb-h2", costs), costs)
        assert h2.bubble_within == pytest.approx(0) and max(h2.peak_in_flight) == 2 * p - 1
        vee = split_stages(costs, 2, "vee")
        zbv = simulate(schedule("zb-v", vee), vee)
        assert zbv.bubble_within <= 0.02 and max(zbv.peak_in_flight) <= 2 * p
        assert zbv.makespan_s < h1.makespan_s


def test_interleaving_halves_the_bubble():
    costs = PipelineCosts((1.0,) * 4, (2.0,) * 4, 16)
    loop = split_stages(costs, 2)
    line = simulate(schedule("interleaved-1f1b", loop), loop)
    assert line.makespan_s - 48 == 9 / 2
    with pytest.raises(PlanError, match="use 8 or 12, or virtual-1f1b"):
        schedule("interleaved-1f1b", loop.replace(num_microbatches=10))
    # With a slow link the fixed order waits; the searched one on the same placement does not.
    slow = split_stages(costs.replace(latency_s=(0.0, 3.0, 0.0)), 2)
    fixed, searched = schedule("interleaved-1f1b", slow), schedule("virtual-1f1b", slow)
    assert makespan_s(searched, slow) < 0.75 * makespan_s(fixed, slow)


def test_split_backward_helps_the_virtual_schedule():
    costs = GOLDEN[3].costs
    whole, halves = schedule("virtual-1f1b", costs), schedule("virtual-zb", costs)
    assert makespan_s(halves, costs) < makespan_s(whole, costs)
    name, lists = choose(costs)
    assert (name, lists) == ("virtual-zb", halves)
    assert choose(costs, split=False)[0] == "virtual-1f1b"
    # Where nothing is gained, the plainest wins.
    assert choose(PipelineCosts((1.0,), (2.0,), 4))[0] == "1f1b"


def test_shared_lines_are_searched_under_their_own_rules():
    costs = PipelineCosts((1.0,) * 4, (2.0,) * 4, 12, serialisation_s=(1.0, 1.0, 1.0), lines=(("up", "down"),) * 3)
    lists = schedule("virtual-1f1b", costs)
    time = simulate(lists, costs).makespan_s
    assert time <= min(simulate(schedule(n, costs), costs).makespan_s for n in ("gpipe", "1f1b", "eager-1f1b"))


def test_wrong_placement_and_impossible_memory():
    costs = PipelineCosts((1.0,) * 3, (2.0,) * 3, 4)
    with pytest.raises(PlanError, match="zb-v needs its stages in a vee, these are in a line"):
        schedule("zb-v", costs)
    with pytest.raises(PlanError, match="needs its stages in a line, these are in a loop"):
        schedule("1f1b", split_stages(costs, 2))
    with pytest.raises(PlanError, match="device 1 runs 2 stages and may hold 1 activation"):
        schedule("virtual-1f1b", split_stages(costs, 2).replace(max_in_flight=(2, 1, 2)))
    tight = schedule("virtual-1f1b", costs.replace(max_in_flight=(1, 1, 1)))
    assert check_schedule(tight, 4) == (1, 1, 1)
