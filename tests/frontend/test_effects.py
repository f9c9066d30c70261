"""Prints, callbacks and NaN checks inside a step: they happen, in order, and say what plain jit's would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

import hetjax
from hetjax.errors import LoweringError, MicrobatchError

WIDTH = 8


def inputs():
    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.standard_normal((WIDTH, WIDTH)), jnp.float32) for _ in range(3)]
    return w, {"x": rng.standard_normal((8, WIDTH)).astype(np.float32)}


def step_with(inside=lambda h: None, after=lambda loss, grads: None):
    def step(w, batch):
        def loss(w):
            h = jnp.tanh(batch["x"] @ w[0])
            inside(h)
            return jnp.mean(jnp.square(jnp.tanh(h @ w[1]) @ w[2]))

        value, grads = jax.value_and_grad(loss)(w)
        after(value, grads)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    return step


def run(step, **options):
    w, batch = inputs()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, **options)
    out = jax.block_until_ready(parallel(w, batch))
    parallel.block_until_ready()
    jax.effects_barrier()
    return out


@pytest.mark.parametrize("mesh", ["1,1", "2,1"])
def test_callbacks_get_the_whole_batch_once_a_step(mesh):
    def told(log):
        def tell(name):
            return lambda *values: log.append((name, *map(np.asarray, values)))

        return step_with(
            lambda h: jax.debug.callback(tell("hidden"), h),
            lambda loss, grads: (jax.debug.callback(tell("loss"), loss), jax.debug.callback(tell("norm"), jnp.linalg.norm(grads[0]))),
        )

    ours, plain = [], []
    run(told(ours), mesh=mesh)
    jax.block_until_ready(jax.jit(told(plain))(*inputs()))
    jax.effects_barrier()
    assert sorted(entry[0] for entry in plain) == sorted(entry[0] for entry in ours) == ["hidden", "loss", "norm"]
    by_name = {entry[0]: entry[1] for entry in plain}
    for name, value in ours:
        np.testing.assert_allclose(value, by_name[name], rtol=1e-5, atol=1e-7)


def test_ordered_callbacks_keep_their_order():
    def told(log):
        def tell(name):
            return lambda *values: log.append((name, *map(np.asarray, values)))

        def later(loss, grads):
            jax.debug.callback(tell("loss"), loss, ordered=True)
            jax.debug.callback(tell("norm"), jnp.linalg.norm(grads[0]), ordered=True)
            jax.debug.callback(tell("last"), jnp.linalg.norm(grads[2]), ordered=True)

        return step_with(lambda h: jax.debug.callback(tell("hidden"), h, ordered=True), later)

    ours, plain = [], []
    run(told(ours), mesh="1,1")
    jax.block_until_ready(jax.jit(told(plain))(*inputs()))
    jax.effects_barrier()
    assert [name for name, _ in ours] == [name for name, _ in plain] == ["hidden", "loss", "norm", "last"]
    for (_, value), (_, expected) in zip(ours, plain):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(LoweringError, match=r"order of callbacks on one alone: 'debug_callback' at .*test_effects.py:\d+.*mesh='1,1'"):
        run(told([]), mesh="2,1")


@pytest.mark.parametrize("mesh", ["1,1", "2,1"])
def test_a_callback_that_gives_a_value_runs_once(mesh):
    def step_of(log):
        def draw(x):
            log.append(float(x))
            return np.float32(x) * 2

        def step(w, batch):
            rate = io_callback(draw, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0.5), ordered=mesh == "1,1")
            value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jnp.tanh(batch["x"] @ w[0]) @ w[1] @ w[2])) * rate)(w)
            scale = io_callback(draw, jax.ShapeDtypeStruct((), jnp.float32), value, ordered=mesh == "1,1")
            return jax.tree.map(lambda a, g: a - 0.1 * g * scale, w, grads), scale

        return step

    ours, plain = [], []
    w, batch = inputs()
    got = hetjax.parallelize(step_of(ours), num_stages=2, num_microbatches=1, mesh=mesh)(w, batch)
    want = jax.jit(step_of(plain))(w, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.effects_barrier()
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
    with pytest.raises(MicrobatchError, match=r"io_callback.*test_effects.py:\d+.*num_microbatches=1"):
        hetjax.parallelize(step_of([]), num_stages=2, num_microbatches=2, mesh=mesh).plan_for(w, batch)


def test_prints_are_those_of_plain_jit(capfd):
    step = step_with(lambda h: jax.debug.print("rows {}", h.shape[0]), lambda loss, grads: jax.debug.print("loss {:.4f}", loss))
    jax.block_until_ready(jax.jit(step)(*inputs()))
    jax.effects_barrier()
    plain = capfd.readouterr().out
    run(step)
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(plain.splitlines())


def test_checkify_reports_the_same_error():
    def step(w, batch):
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jnp.tanh(batch["x"] @ w[0]) @ w[1]) @ w[2]))(w)
        checkify.check(value > 1e9, "the loss is {loss}", loss=value)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    checked = checkify.checkify(step, errors=checkify.user_checks)
    w, batch = inputs()
    error, (_, value) = hetjax.parallelize(checked, num_stages=2, num_microbatches=2)(w, batch)
    want, _ = jax.jit(checked)(w, batch)
    assert "the loss is" in error.get() and "the loss is" in want.get()
    np.testing.assert_allclose(float(error.get().split("loss is ")[1].split()[0]), value, rtol=1e-5)
