"""jax_debug_nans on a parallel step: the same errors as plain jit's, told by op, line, stage and microbatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import NanFault

WIDTH = 8


def inputs(bad_row=None):
    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.standard_normal((WIDTH, WIDTH)), jnp.float32) for _ in range(3)]
    x = rng.standard_normal((8, WIDTH)).astype(np.float32)
    if bad_row is not None:
        x[bad_row] = -100.0
    return w, {"x": x}


def step(w, batch):
    def loss(w):
        h = jnp.tanh(batch["x"] @ w[0])
        with jax.named_scope("middle"):
            h = jax.checkpoint(lambda h: jnp.log(1e-9 + jnp.abs(h @ w[1])))(h)
        risky = jnp.sqrt(batch["x"].sum(-1) + 400 + 0 * h.sum(-1))  # the line to blame
        return jnp.mean(jnp.square(h @ w[2]).mean(-1) + 0 * risky)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def by_scan(w, batch):
    def loss(w):
        out, _ = jax.lax.scan(lambda h, k: (jnp.sqrt(h @ w[1] - k), None), batch["x"] @ w[0], jnp.asarray([-1e4, 0.0, 1e6]))
        return jnp.mean(out @ w[2])

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def test_a_nan_is_told_by_op_line_stage_and_microbatch():
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2)
    w, bad = inputs(bad_row=5)
    with jax.debug_nans(True):
        good = parallel(*inputs())
        with pytest.raises(NanFault, match=r"'sqrt'.* gave nan \(.*test_nans.py:\d+\).*microbatch 1") as caught:
            parallel(w, bad)
        with pytest.raises(FloatingPointError):
            jax.jit(step)(w, bad)
    assert isinstance(caught.value, FloatingPointError)
    for a, b in zip(jax.tree.leaves(good), jax.tree.leaves(jax.jit(step)(*inputs())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_nan_inside_a_loop_is_told_by_its_own_line():
    w, batch = inputs()
    with jax.debug_nans(True), pytest.raises(NanFault, match=r"'sqrt'.* gave nan \(.*test_nans.py:\d+\)"):
        hetjax.parallelize(by_scan, num_microbatches=2)(w, batch)


def test_infinities_are_looked_for_where_asked():
    def step(w, batch):
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.exp(batch["x"] @ w[0]) @ w[1]))(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    w, batch = inputs()
    w[0] = w[0] * 1e4
    with jax.debug_infs(True), pytest.raises(NanFault, match=r"'exp'.* gave inf"):
        hetjax.parallelize(step, num_microbatches=2)(w, batch)
