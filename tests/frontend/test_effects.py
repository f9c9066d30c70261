"""Prints, callbacks and NaN checks inside a step: they happen, in order, and say what plain jit's would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import hetjax

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
