"""What a caller notices while a program runs: asynchrony, faults, counters, order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import LoweringError, RuntimeFault
from hetjax.ir.program import Program, StageMesh, Task
from hetjax.runtime.executor import merge_tasks
from tests.support import make_linen


def with_callback(callback):
    """A step whose last module calls back to the host."""
    _, state, batch = make_linen()

    @jax.custom_jvp
    def through(x):
        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    @through.defjvp
    def _(primals, tangents):
        return through(*primals), tangents[0]

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            with jax.named_scope("probe"):
                logits = through(logits)
            return (logits**2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, state, batch


def test_a_call_returns_before_the_work_ends():
    _, state, batch = make_linen()

    def slow(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            spin = jax.lax.fori_loop(0, 400, lambda _, x: jnp.tanh(x @ x), jnp.eye(300) * 0.5)
            return (logits**2).mean() + 0 * jax.lax.stop_gradient(spin).sum()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    parallel = hetjax.parallelize(slow, num_stages=2, num_microbatches=1, mesh="1,1")
    state, loss = parallel(state, batch)
    jax.block_until_ready((state, loss))
    _, loss = parallel(state, batch)
    assert not loss.is_ready()
    assert np.isfinite(float(loss))


def test_a_fault_names_stage_microbatch_and_module():
    calls = []

    def broken(x):
        calls.append(1)
        if len(calls) > 4:
            raise ValueError("the probe broke")
        return np.asarray(x)

    step, state, batch = with_callback(broken)
    # A callback may couple examples, so that it is split only where the user accepts it.
    parallel = hetjax.parallelize(
        step, num_stages=2, num_microbatches=2, mesh="1,1", per_microbatch=True
    )
    parallel(state, batch)
    parallel.block_until_ready()
    launches = parallel.stats()["launches"]
    with pytest.raises(RuntimeFault, match=r"stage 1, microbatch \d.*Model/.*the probe broke"):
        for _ in range(20):
            state, loss = parallel(state, batch)
            parallel.block_until_ready()
    assert parallel.stats()["launches"] == launches, "a step that failed is counted as if it had run"


def test_tasks_that_wait_for_each_other_are_named():
    mesh = StageMesh("s0", "cpu", "here", (("data", 1),), (0,))
    program = Program(
        "p", 1, "gpipe", (mesh, mesh), (), (), (),
        tasks=(
            (Task("recv", 0, None, "b"), Task("send", 0, None, "a")),
            (Task("recv", 1, None, "a"), Task("send", 1, None, "b")),
        ),
    )
    with pytest.raises(LoweringError, match=r"waits for itself: b\[None\] on s0, a\[None\] on s1"):
        merge_tasks(program)


def test_counters_count_what_ran():
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=4, mesh="1,1")
    for _ in range(3):
        state, _ = parallel(state, batch)
    stats = parallel.stats()
    assert stats["steps"] == 3
    assert stats["transfers"] == 8  # four activations, four cotangents
    assert stats["launches"] >= 2 * 2 * 4


def test_launches_in_flight_are_bounded_on_cpu():
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=4, mesh="1,1")
    for _ in range(8):
        state, loss = parallel(state, batch)
    queues = parallel._latest.executor._in_flight
    assert all(len(q) <= 16 for q in queues)
    assert any(len(q) == 16 for q in queues)
    assert jnp.isfinite(loss["loss"])
