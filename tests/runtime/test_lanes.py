"""One thread per mesh: the same numbers, the same faults, the same settings; modelled time and links."""

import gc
import itertools
import select
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import PlanError, RuntimeFault, VerifyError
from hetjax.frontend.calls import flatten_call, rebuild_result
from hetjax.frontend.entry import Entry
from hetjax.frontend.realtime import run_lists
from hetjax.ir.cluster import Cluster
from hetjax.ir.program import Task
from hetjax.passes.schedules import PipelineCosts, schedule, split_stages
from hetjax.passes.simulator import Transfer, simulate, with_step_tasks
from hetjax.runtime.dispatch import Lanes
from hetjax.runtime.executor import Emulation
from hetjax.runtime.instructions import Move, Run
from hetjax.runtime.links import EmulatedLinks, LocalLinks, Parcel
from tests.support import assert_same, copy_tree, make_batch, make_linen


@pytest.fixture(scope="module")
def trained():
    step, state, _ = make_linen(tied=True, blocks=1)
    batch = make_batch(8)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=4, mesh="1,1")
    parallel(state, batch)
    theirs, _ = jax.jit(step)(copy_tree(state), batch)
    return parallel, state, batch, theirs


def entry_like(parallel, **options):
    old = parallel._latest
    entry = Entry(old.bundle, old.structure, old.returned)
    entry.adopt(old, **options)
    return entry


def step_of(entry, state, batch, watched=False):
    leaves, _ = flatten_call((state, batch), {}, False)
    new, _ = rebuild_result(entry.structure, entry.returned, entry.run(leaves, watched), (state, batch), {})
    return new


def test_threads_give_the_numbers_of_plain_jit(trained):
    parallel, state, batch, theirs = trained
    entry = entry_like(parallel, threads=True)
    for _ in range(3):
        assert_same(step_of(entry, state, batch), theirs)
    assert entry.executor.counters.transfers == 3 * parallel.stats()["transfers"] > 0


def test_modelled_time_and_links_leave_the_numbers_alone(trained):
    parallel, state, batch, theirs = trained
    program = parallel._latest.program
    work_s = {f.name: 0.004 if f.per_microbatch else 0.0 for f in program.fragments}
    lines = {r.name: Transfer(("up" if r.source else "down",), 0.001, 0.01) for r in program.reshards}
    entry = entry_like(parallel, emulation=Emulation(work_s, lines))
    assert_same(step_of(entry, state, batch), theirs)
    times = {(t.task.work, t.task.microbatch): t for t in entry.executor.times}
    for r in program.reshards:
        if r.form == "micro":
            for m in range(4):
                sent = times[r.name, m]
                assert sent.end_s - sent.start_s >= 0.011 - 1e-9
                assert sent.start_s >= sent.posted_s
    for lane in (0, 1):
        mine = sorted((t.start_s, t.end_s) for t in entry.executor.times if t.lane == lane and t.task.kind in "FB")
        assert len(mine) == 8
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(mine))
        assert all(b - a >= 0.004 - 1e-9 for a, b in mine)


def test_a_fault_on_a_thread_names_stage_microbatch_and_module():
    _, state, batch = make_linen()
    calls = []

    def broken(x):
        calls.append(1)
        if len(calls) > 3:
            raise ValueError("the probe broke")
        return np.asarray(x)

    @jax.custom_jvp
    def through(x):
        return jax.pure_callback(broken, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    through.defjvp(lambda primals, tangents: (through(*primals), tangents[0]))

    def step(state, batch):
        def loss_fn(params):
            with jax.named_scope("probe"):
                return (through(state.apply_fn({"params": params}, batch["tokens"])) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1", per_microbatch=True)
    with pytest.raises(RuntimeFault, match=r"stage 1, microbatch \d.*Model/.*the probe broke"):
        for _ in range(10):
            parallel.measure(state, batch)


def test_threads_have_the_settings_of_their_caller():
    seen = []

    def look():
        seen.append((jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, jnp.zeros(()).dtype))
        return ()

    lanes = Lanes([[Run(Task("F", 0, 0), look)]], LocalLinks(1))
    with jax.enable_x64(True), jax.default_matmul_precision("float32"):
        lanes.run([])
    lanes.run([])
    assert seen[0] == (True, "float32", jnp.dtype("float64"))
    assert seen[1][:2] == (False, None)


def test_threads_end_with_their_executor(trained):
    parallel, state, batch, _ = trained
    before = set(threading.enumerate())
    entry = entry_like(parallel, threads=True)
    step_of(entry, state, batch)
    started = set(threading.enumerate()) - before
    assert len(started) == 4  # two lanes, two links
    del entry
    gc.collect()
    for thread in started:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_measured_step_fills_the_statistics(trained):
    parallel, state, batch, theirs = trained
    before = parallel.stats()
    assert "bubble" not in before
    new, _ = parallel.measure(state, batch)
    assert_same(new, theirs)
    parallel(state, batch)
    stats = parallel.stats()
    assert 0 <= stats["bubble"] < 1
    assert stats["bytes/s0>s1"] + stats["bytes/s1>s0"] == stats["bytes_between_stages"]
    assert stats["tokens_per_s"] == pytest.approx(6 * stats["examples_per_s"])
    assert stats["step_s"] == pytest.approx(8 / stats["examples_per_s"])
    assert all(stats[f"stage_s/s{s}"] > 0 and stats[f"exposed_comm_s/s{s}"] >= 0 for s in (0, 1))
    assert stats["measured_step_s"] >= max(4 * stats[f"stage_s/s{s}"] for s in (0, 1)) * 0.3
    assert any(k.startswith("mfu/") for k in stats)
    assert all(isinstance(v, (int, float, str)) for v in stats.values())


def test_a_stage_that_takes_longer_than_predicted_is_named(trained):
    from hetjax.frontend.statistics import warn_of_drift

    parallel, state, batch, _ = trained
    program = parallel._latest.program
    work_s = {f.name: 0.003 if f.per_microbatch else 0.0 for f in program.fragments}
    lines = {r.name: Transfer((r.name,), 0.0, 0.0) for r in program.reshards}
    entry = entry_like(parallel, emulation=Emulation(work_s, lines))
    step_of(entry, state, batch)
    entry.executor.emulation = Emulation({**work_s, "s1/forward": 0.001}, lines)  # as if that had been promised
    with pytest.warns(UserWarning, match=r"stage 1 on 1 x .* took .* predicted were 0.004 s \(\+"):
        warn_of_drift(entry)


COSTS = PipelineCosts((0.004, 0.004, 0.002, 0.002), (0.008, 0.008, 0.004, 0.004), 6, (0.0, 0.012, 0.0), (0.0, 0.001, 0.0))


@pytest.mark.parametrize("kind", ["1f1b", "virtual-1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_lists_without_values_run_in_real_time_as_simulated(kind):
    costs = COSTS
    if kind in ("zb-v", "interleaved-1f1b"):
        costs = PipelineCosts((0.004,) * 2, (0.008,) * 2, 6, (0.003,))
        costs = split_stages(costs, 2, "vee" if kind == "zb-v" else "loop")
    lists = schedule(kind, costs)
    told, seen = simulate(lists, costs), run_lists(lists, costs)
    # Threads may be late, never early; what the model forbids does not happen.
    assert seen.makespan_s >= told.makespan_s - 1e-9
    assert [[str(s.task) for s in spans] for spans in seen.spans] == [[str(t) for t in items] for items in lists]
    for spans, expected in zip(seen.spans, told.spans):
        assert all(s.start_s >= e.start_s - 1e-9 for s, e in zip(spans, expected))
    assert len(seen.transfers) == len(told.transfers)


def test_synchronisation_overlaps_and_stages_start_on_the_next_step_when_they_have_updated():
    costs = PipelineCosts((0.004,) * 3, (0.008,) * 3, 4, sync_s=(0.005,) * 3, update_s=(0.002,) * 3)
    lists = with_step_tasks(schedule("1f1b", costs), costs)
    seen = run_lists(lists, costs, steps=2)
    one = simulate(lists, costs).makespan_s
    updates = {(s.task.stage, s.task.microbatch): s for spans in seen.spans for s in spans if s.task.kind == "update"}
    syncs = {(s.task.stage, s.task.microbatch): s for s in seen.transfers if s.task.kind == "sync"}
    for key, update in updates.items():
        assert update.start_s >= syncs[key].end_s - 1e-9
    forwards = {(s.task.stage, s.task.microbatch): s for spans in seen.spans for s in spans if s.task.kind == "F"}
    # The last stage has updated before the first one has: the drain of one step covers it.
    assert updates[2, 0].end_s < updates[0, 0].start_s
    assert forwards[0, 4].start_s >= updates[0, 0].end_s - 1e-9
    assert forwards[2, 4].start_s >= updates[2, 0].end_s - 1e-9
    assert one == pytest.approx(simulate(lists, costs).makespan_s)


def test_lists_that_wait_for_each_other_do_not_start():
    lists = ((Task("B", 0, 0), Task("F", 0, 0)), (Task("F", 1, 0), Task("B", 1, 0)))
    with pytest.raises(VerifyError, match="wait"):
        run_lists(lists, PipelineCosts((0.1,) * 2, (0.1,) * 2, 1))




def test_a_rehearsal_takes_the_time_of_the_cluster_it_stands_for():
    def step(state, batch):
        def loss_fn(state):
            hidden = jnp.tanh(batch @ state["first"])
            return (jnp.tanh(hidden @ state["second"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = {"first": jnp.full((3, 4), 0.3), "second": jnp.full((4, 2), 0.2)}
    batch = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    with pytest.raises(PlanError, match="rehearse is 'slow'; it may be"):
        hetjax.parallelize(step, rehearse="slow")
    parallel = hetjax.parallelize(
        step, cluster=Cluster.local(), num_stages=2, num_microbatches=2, mesh="1,1", rehearse="timed"
    )
    ours, _ = parallel(state, batch)
    theirs, _ = jax.jit(step)(state, batch)
    assert_same(ours, theirs)
    stats = parallel.stats()
    assert stats["measured_step_s"] > 0
    assert {"predicted_over_measured/s0", "predicted_over_measured/s1"} <= set(stats)


def test_emulated_links_hold_each_line_for_its_own_share():
    """Two transfers of 0.3 s over links of their own, through one port for 1 ms each: they travel together."""
    prices = {n: Transfer((n, "port"), 0.3, 0.0, (0.3, 0.001)) for n in ("a", "b")}
    links, there, arrived = EmulatedLinks(prices), [], threading.Semaphore(0)

    def deliver(move, arrays, started_s, arrived_s):
        there.append((started_s, arrived_s))
        arrived.release()

    now = time.perf_counter()
    for name in prices:
        links.post(Parcel(Move([Task("send", 0, 0, name)], [], [], None, 0), [], now, deliver, lambda *_: None), 0)
    for _ in prices:
        assert arrived.acquire(timeout=30)
    links.close()
    (first, end), (second, last) = sorted(there)
    assert end - first == pytest.approx(0.3) and last - second == pytest.approx(0.3)
    assert second - first == pytest.approx(0.001)


def test_steps_of_several_callers_reach_every_lane_in_one_order():
    class Recorder:
        def __init__(self):
            self.seen = []

        def put(self, step):
            if step is not None:
                self.seen.append(step)
                select.select([], [], [], 0)  # lets another caller run
                step.finish()

    lanes = Lanes([[], []], LocalLinks(2))
    first, second = Recorder(), Recorder()
    for waiting in lanes._queues:
        waiting.put(None)
    lanes._queues[:] = [first, second]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        callers = [
            threading.Thread(target=lambda: [lanes.run([]) for _ in range(200)]) for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        sys.setswitchinterval(interval)
        lanes.close()
    assert len(first.seen) == 800 and first.seen == second.seen


def test_threads_have_ended_when_their_lanes_are_closed():
    """A thread left inside XLA while the interpreter goes away ends the process with "exception not rethrown"."""
    def ours():
        return {t for t in threading.enumerate() if t.name.startswith("hetjax-")}

    before = ours()
    costs = PipelineCosts((0.01,) * 2, (0.01,) * 2, 2, latency_s=(0.01,))
    run_lists(schedule("1f1b", costs), costs)
    assert ours() <= before
    links = LocalLinks(2)
    assert len(ours() - before) == 2
    links.close()
    assert ours() <= before
