"""Lower bounds against the truth: exhaustive search over every order of small pipelines."""

import itertools
import random

import pytest

from hetjax.passes.bounds import lower_bound
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.schedules.samples import GOLDEN, budget_1f1b, random_pipeline
from hetjax.passes.simulator import simulate, with_step_tasks
from hetjax.passes.simulator_fast import makespan_of, makespan_s, tables


def orders(stage, stages, m, cap):
    """Yields every order of one stage's forwards and backwards that holds at most `cap`."""
    def grow(items, f, b):
        if b == m:
            yield items
        if f < m and f - b < cap:
            yield from grow([*items, stage * m + f], f + 1, b)
        if b < f:
            yield from grow([*items, (stages + stage) * m + b], f, b + 1)

    return list(grow([], 0, 0))


def optimum(costs):
    """Returns the shortest makespan over all orders: ascending microbatches lose nothing, they are alike."""
    stages, m = costs.num_stages, costs.num_microbatches
    table = tables(costs, False)
    caps = costs.max_in_flight or (m,) * stages
    found = (
        makespan_of(list(lists), table)
        for lists in itertools.product(*[orders(s, stages, m, caps[s]) for s in range(stages)]))
    return min(x for x in found if x is not None)


SIZES = {2: 6, 3: 4, 4: 3}


@pytest.mark.parametrize("limited", [False, True], ids=["unlimited", "1f1b-memory"])
def test_bound_is_below_and_search_is_at_the_true_optimum(limited):
    rng = random.Random(3)
    ratios = []
    for _ in range(14):
        costs = random_pipeline(rng, stages=(2, 4))
        costs = costs.replace(num_microbatches=SIZES[costs.num_stages])
        if limited:
            costs = costs.replace(max_in_flight=budget_1f1b(costs, rng.randint(0, 1)))
        best, bound = optimum(costs), lower_bound(costs)
        assert bound.lower_s <= best * (1 + 1e-12)
        assert bound.window_s <= bound.memory_s * (1 + 1e-12)
        assert makespan_s(schedule("virtual-1f1b", costs), costs) == pytest.approx(best, rel=1e-9)
        ratios.append(best / bound.lower_s)
    assert min(ratios) == pytest.approx(1)  # the bound is reached, so it is not slack by construction


@pytest.mark.nightly
def test_bound_and_search_against_the_optimum_at_length():
    rng = random.Random(8)
    for i in range(300):
        costs = random_pipeline(rng, stages=(2, 4))
        costs = costs.replace(num_microbatches=SIZES[costs.num_stages])
        if i % 2:
            costs = costs.replace(max_in_flight=budget_1f1b(costs, rng.randint(0, 1)))
        best = optimum(costs)
        assert lower_bound(costs).lower_s <= best * (1 + 1e-12)
        assert makespan_s(schedule("virtual-1f1b", costs), costs) <= best * 1.005


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.name)
def test_golden_bounds(case):
    assert lower_bound(case.costs).lower_s == case.lower


def test_memory_bound_by_hand():
    """Two stages, one activation each: every microbatch goes there and back alone."""
    costs = PipelineCosts((1.0, 1.0), (2.0, 2.0), 5, (4.0,), max_in_flight=(1, 1))
    assert lower_bound(costs).memory_s == 5 * (6 + 8)
    assert makespan_s(schedule("virtual-1f1b", costs), costs) == 70


def test_what_binds_is_named():
    costs = PipelineCosts((1.0, 2.0, 1.0), (2.0, 4.0, 2.0), 8, (0.0, 1.0), (0.0, 1.0))
    bound = lower_bound(costs)
    assert bound.binding == "the work of device 1"
    assert bound.devices_s == (24.0, 51.0, 5 + 24 + 8)
    assert lower_bound(costs.replace(serialisation_s=(0.0, 9.0))).binding == "line 1>2"
    assert lower_bound(costs.replace(num_microbatches=1)).binding == "one microbatch all the way"
    assert lower_bound(costs.replace(max_in_flight=(1, 1, 1))).binding == "the memory limit"
    line, time = lower_bound(costs).lines_s[0]
    # F0 F1, eight transfers, then there and back for the last: latency, F2 B2, the way back, B1 B0.
    assert (line, time) == ("1>2", 3 + 8 + 1 + 3 + 2 + 6)


def test_sync_and_update_count():
    costs = PipelineCosts((1.0,) * 3, (2.0,) * 3, 8, sync_s=(9.0, 0.0, 0.0), update_s=(1.0, 1.0, 1.0))
    bound = lower_bound(costs)
    assert (bound.lower_s, bound.sync_s) == (30 + 10, 10.0)
    lists = with_step_tasks(schedule("virtual-1f1b", costs), costs)
    assert simulate(lists, costs).makespan_s == 40


def test_bounds_hold_for_every_schedule_and_placement():
    from hetjax.ir.errors import PlanError
    from hetjax.passes.schedules import SCHEDULES, split_stages

    rng = random.Random(5)
    for n in range(8):
        base = random_pipeline(rng, stages=(2, 4)).replace(num_microbatches=8, weight_share=rng.random())
        base = base.replace(
            sync_s=tuple(rng.uniform(0, 9) for _ in base.forward_s), update_s=(0.5,) * base.num_stages)
        if n % 3 == 2:
            base = base.replace(lines=(("wan", "wan back"),) * (base.num_stages - 1))
        for costs in (base, split_stages(base, 2), split_stages(base, 2, "vee")):
            for name, info in SCHEDULES.items():
                if costs.placement not in info.placements:
                    continue
                try:
                    lists = schedule(name, costs)
                except PlanError:
                    continue
                time = simulate(with_step_tasks(lists, costs), costs).makespan_s
                assert lower_bound(costs, split=info.split).lower_s <= time * (1 + 1e-12), (name, costs)
