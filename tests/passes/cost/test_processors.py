"""Work that shares processors: conservation, order, and the step of one process that drives all devices."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetjax
from hetjax.ir.errors import PlanError
from hetjax.passes.cost.estimate import estimate_program, fragment_prices
from hetjax.passes.cost.host import HostTime, host_jobs, host_step_s
from hetjax.passes.cost.judge import Judge
from hetjax.passes.cost.processors import Job, shared_times, work_rate, work_together
from hetjax.passes.cost.store import CallTime, ProfileStore
from hetjax.passes.simulator import Transfer, simulate
from hetjax.passes.simulator_program import pipeline_costs
from tests.support import make_linen


@pytest.mark.quick
def test_jobs_that_want_more_than_there_is_run_slower_together():
    three = [Job(1.0)] * 3
    assert shared_times(three, 2) == [(0.0, 1.5)] * 3
    assert shared_times(three, 3) == shared_times(three, 0) == [(0.0, 1.0)] * 3
    # Two processors that do 1.25 times the work of one: two seconds' work takes 1.6.
    assert shared_times([Job(1.0)] * 2, 2, 1.25) == [(0.0, 1.6)] * 2
    # One that keeps both busy runs as it was measured; what follows it is alone.
    assert shared_times([Job(1.0, 2.0), Job(1.0, 1.0, (0,))], 2, 1.25) == [(0.0, 1.0), (1.0, 2.0)]
    # The short one leaves, and the long one goes on at full speed.
    assert shared_times([Job(1.0), Job(3.0)], 1) == [(0.0, 2.0), (0.0, 4.0)]
    with pytest.raises(ValueError, match="job 0 needs job 1"):
        shared_times([Job(1.0, 1.0, (1,)), Job(1.0)], 2)


@pytest.mark.quick
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.floats(1, 1.9), st.floats(0.01, 1))
def test_what_processors_do_together_is_found_again(processors, cores, share):
    together = 1 + share * (processors - 1)
    times = shared_times([Job(1.0, cores)] * processors, processors, together)
    assert work_together(processors, cores, times[0][1]) == pytest.approx(together, rel=1e-6)


@st.composite
def job_lists(draw):
    jobs = []
    for k in range(draw(st.integers(1, 12))):
        needs = draw(st.sets(st.integers(0, k - 1), max_size=3)) if k else ()
        seconds = draw(st.floats(0, 10)) if draw(st.booleans()) else draw(st.sampled_from([0.0, 1.0]))
        jobs.append(Job(seconds, draw(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0])), tuple(sorted(needs))))
    return jobs


@settings(max_examples=60, deadline=None)
@given(job_lists(), st.integers(1, 3), st.floats(0, 1))
def test_no_work_is_lost_or_made(jobs, processors, share):
    together = 1 + share * (processors - 1)
    times = shared_times(jobs, processors, together)
    free = shared_times(jobs, 0)
    for job, (start, end), (_, soonest) in zip(jobs, times, free):
        assert all(times[n][1] <= start + 1e-9 for n in job.needs)
        assert end - start >= job.seconds * (1 - 1e-9) - 1e-9 and end >= soonest - 1e-9
    makespan = max(end for _, end in times)
    work = sum(j.seconds * work_rate(j.cores, processors, together) for j in jobs)
    assert makespan >= work / together * (1 - 1e-9) - 1e-9
    # Never idle while there is work: no worse than one after the other.
    assert makespan <= sum(j.seconds * max(1.0, j.cores / processors) for j in jobs) + 1e-6


@pytest.fixture(scope="module")
def bundle():
    step, state, batch = make_linen(blocks=3)
    options = {"num_stages": 3, "num_microbatches": 4, "mesh": "1,1", "schedule": "1f1b"}
    return hetjax.parallelize(step, **options).lower(state, batch)._entry.bundle


def test_a_host_that_costs_nothing_takes_what_the_simulator_says(bundle):
    program, prices = bundle.program, fragment_prices(bundle)
    work_s = {n: p.seconds for n, p in prices.items()}
    free = {r.name: Transfer((f"{r.source}>{r.target}",), 0.0, 0.0) for r in program.reshards}
    costs = pipeline_costs(program, bundle.cluster, work_s)
    expected = simulate(program.tasks, costs, transfers=free, work_s=work_s).makespan_s
    assert host_step_s(program, prices, HostTime()) == pytest.approx(expected)


def test_what_the_dispatcher_does_is_paid_and_processors_are_shared(bundle):
    program, prices = bundle.program, fragment_prices(bundle)
    spent = lambda host: host_step_s(program, prices, host)  # noqa: E731
    base = HostTime(processors=2, move_s=1e-9)
    alone = dataclasses.replace(base, processors=1)
    works = [prices[t.work].seconds for tasks in program.tasks for t in tasks if t.work in prices]
    assert spent(alone) == pytest.approx(sum(works), rel=1e-3) and spent(base) < spent(alone)
    assert spent(dataclasses.replace(base, together=1.1)) > spent(base)
    for name in ("launch_s", "launch_array_s", "move_s", "array_s", "byte_s", "step_s", "leaf_s"):
        assert spent(dataclasses.replace(base, **{name: 1e-3})) > spent(base), name
    # Sends that stand together are one hand-over, each array counts.
    jobs = host_jobs(program, prices, HostTime(move_s=1.0, array_s=0.01))
    sends = sum(t.kind == "send" for tasks in program.tasks for t in tasks)
    moved = sum(j.seconds for j in jobs[1:] if 0.009 < j.seconds % 1 < 0.011)
    assert moved == pytest.approx(round(moved) + 0.01 * sends) and 0 < round(moved) <= sends


def test_a_judge_that_knows_the_host_prices_the_step_by_it(bundle):
    calls, kind = {("cpu", 1): CallTime(1e-4, 1e-6)}, bundle.cluster.kind("cpu")
    plain = Judge(ProfileStore(kinds={"cpu": kind}, calls=calls, hosts={"cpu": HostTime(processors=2)}))
    known = HostTime(processors=2, together=1.5, move_s=2e-3, step_s=1e-3)
    judge = Judge(dataclasses.replace(plain.store, hosts={"cpu": known}))
    found, without = estimate_program(bundle, judge=judge), estimate_program(bundle, judge=plain)
    # 3 stages of 4 microbatches hand over 16 times and more.
    assert found.iteration_s > without.iteration_s + 16 * 2e-3
    assert found.iteration_s >= found.lower_bound_s > 0
    again = ProfileStore.from_json(judge.store.to_json())
    assert again == judge.store
    assert ProfileStore.from_json('{"hetjax_profiles": 1, "hosts": {"cpu": 2}}').hosts == {"cpu": HostTime(2)}
    with pytest.raises(PlanError, match=r"hosts.cpu.procesors: unknown field.*processors"):
        ProfileStore.from_json('{"hetjax_profiles": 1, "hosts": {"cpu": {"procesors": 2}}}')
