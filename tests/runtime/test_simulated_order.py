"""What the simulator says runs, in what order on each mesh, is what the runtime runs, in that order."""

import itertools

import pytest

import hetjax
from hetjax.ir.verify import verify_program
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.schedule_tasks import schedule_tasks
from hetjax.passes.simulator_program import simulate_program
from hetjax.runtime.instructions import Run, merge_tasks
from tests.support import make_batch, make_linen

KINDS = ["gpipe", "1f1b", "eager-1f1b", "virtual-1f1b", "zb-h1", "zb-h2", "auto"]


@pytest.fixture(scope="module")
def compiled():
    """A step on three stages with split backwards, compiled, and its flat arguments."""
    from hetjax.frontend.calls import flatten_call

    step, state, _ = make_linen(loss="masked", tied=True, blocks=3)
    batch = make_batch(10)
    parallel = hetjax.parallelize(step, num_stages=3, num_microbatches=5, mesh="1,1", schedule="zb-h1")
    parallel(state, batch)
    return parallel._latest, flatten_call((state, batch), {}, False)[0]


def with_schedule(compiled, kind):
    """Returns the compiled step with another schedule's lists, ready to run."""
    from hetjax.frontend.entry import Entry

    old, _ = compiled
    program = old.program.replace(tasks=schedule_tasks(old.program, kind, [1.0, 2.0, 1.0]), schedule=kind)
    verify_program(program)
    entry = Entry(old.bundle.replace(program=program), old.structure, old.returned)
    entry.adopt(old)
    return entry


def simulated(entry):
    """Returns the simulator's timeline of an entry's program on its cluster."""
    prices = estimate_program(entry.bundle).fragments
    return simulate_program(entry.program, entry.bundle.cluster, {n: p.seconds for n, p in prices.items()})


def order_of(entry, spans):
    """Returns the tasks of simulated spans in order, without those that do nothing at all.

    A first stage has no input gradient to hand on: where its backward is split, that half is empty.
    """
    fragments = {f.name: f for f in entry.program.fragments}
    empty = [s for s in spans if not fragments[s.task.work].outputs]
    assert all(s.start_s == s.end_s and not fragments[s.task.work].ops for s in empty)
    return [s.task for s in spans if s not in empty]


def of_lanes(times, num_lanes, *, sends):
    """Returns the recorded tasks per lane, transfers in order of posting, others in order of starting."""
    out = []
    for lane in range(num_lanes):
        mine = [t for t in times if t.lane == lane and (t.task.kind == "send") == sends]
        mine.sort(key=lambda t: t.posted_s if sends else t.start_s)
        # Accumulators are made under the name of the task that first adds to them.
        out.append([task for task, _ in itertools.groupby(t.task for t in mine)])
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_run_what_the_simulator_ran_in_its_order(compiled, kind):
    entry = with_schedule(compiled, kind)
    entry.run(compiled[1], watched=True)
    timeline, times = simulated(entry), entry.executor.times
    lanes = len(entry.program.tasks)
    computed = of_lanes(times, lanes, sends=False)
    assert computed == [order_of(entry, spans) for spans in timeline.spans]
    # Nothing is left out, nothing runs twice.
    listed = [[t for t in tasks if t.kind not in ("send", "recv")] for tasks in entry.program.tasks]
    fragments = {f.name: f for f in entry.program.fragments}
    runs = [[t for t in tasks if fragments[t.work].outputs] for tasks in listed]
    assert [sorted(map(str, c)) for c in computed] == [sorted(map(str, r)) for r in runs]
    posted = [[] for _ in range(lanes)]
    for span in sorted(timeline.transfers, key=lambda s: s.posted_s):
        posted[span.device].append(span.task)
    assert of_lanes(times, lanes, sends=True) == posted


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_one_dispatcher_launches_each_mesh_in_the_simulators_order(compiled, kind):
    entry = with_schedule(compiled, kind)
    entry.run(compiled[1])
    launched = [i.task for i in entry.executor._instructions if isinstance(i, Run) and i.call is not None]
    for s, spans in enumerate(simulated(entry).spans):
        mine = [task for task, _ in itertools.groupby(t for t in launched if t.stage == s)]
        assert mine == order_of(entry, spans)
    assert sorted(map(str, merge_tasks(entry.program))) == sorted(str(t) for tasks in entry.program.tasks for t in tasks)


def test_lists_in_another_order_are_told_apart(compiled):
    """The comparison above would notice: two schedules do not record the same order."""
    orders = []
    for kind in ("gpipe", "1f1b"):
        entry = with_schedule(compiled, kind)
        entry.run(compiled[1], watched=True)
        orders.append(of_lanes(entry.executor.times, 3, sends=False))
    assert orders[0] != orders[1]
    assert [sorted(map(str, a)) for a in orders[0]] == [sorted(map(str, b)) for b in orders[1]]
