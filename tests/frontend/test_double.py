"""A step in double precision: what is rounding goes away, what is a mistake stays."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hetjax.frontend.check_report import DOUBLE, run_check
from hetjax.frontend.double import in_double
from hetjax.frontend.parity import Case, in_double_precision, side_by_side


def test_floats_are_wide_and_draws_are_the_same():
    def fn(key, w, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        y = lax.scan(lambda c, v: (jnp.tanh(c @ v), c.sum()), jnp.where(keep, x, 0), jnp.stack([w, w]))
        z = jax.checkpoint(lambda a: lax.cond(a.sum() > 0, jnp.sin, jnp.cos, a))(y[0].astype(jnp.bfloat16))
        return keep, y, z, jnp.zeros((3, 4)).at[x.astype(int)[:, 0] % 3].add(x), jnp.arange(3) * x.shape[0]

    rng = np.random.default_rng(0)
    args = jax.random.key(3), rng.standard_normal((4, 4)).astype(np.float32), rng.standard_normal((6, 4)).astype(np.float32)
    plain = jax.tree.leaves(jax.jit(fn)(*args))
    with jax.enable_x64(True):
        step, widen = in_double(fn, *args)
        wide = jax.tree.leaves(jax.jit(step)(*(widen(k, a) for k, a in enumerate(args))))
    np.testing.assert_array_equal(plain[0], wide[0])
    assert [w.dtype for w in wide[1:]] == [np.float64] * 4 + [np.int32]
    for p, w, tol in zip(plain[1:], wide[1:], (1e-6, 1e-6, 2e-2, 1e-6, 0), strict=True):
        np.testing.assert_allclose(np.asarray(p, np.float64), w, atol=tol)
    y = np.where(np.asarray(plain[0]), args[2].astype(np.float64), 0)
    for _ in range(2):
        y = np.tanh(y @ args[1].astype(np.float64))
    np.testing.assert_allclose(wide[1], y, atol=1e-14)


def half_step(w, batch):
    """Gradients of bf16 weights, and of a bias whose gradient is zero but for rounding."""

    def loss(w):
        h = batch["x"].astype(jnp.bfloat16) @ w["a"].astype(jnp.bfloat16) + w["bias"].astype(jnp.bfloat16)
        h = jnp.tanh(h - h.mean(-1, keepdims=True))
        return jnp.mean((h @ w["b"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), {"loss": value}


def half_case():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return {"a": draw(8, 8), "bias": draw(8), "b": draw(8, 8)}, itertools.repeat({"x": np.asarray(draw(16, 8))})


def test_a_step_in_half_precision_is_equal_in_double_precision():
    w, batches = half_case()
    report = run_check(Case(half_step, w, batches, {}), 1, "half", None, {"num_stages": 2, "num_microbatches": 2, "mesh": "2,1"}, double=True)
    facts = report.as_dict()
    assert report.ok and facts["stages"] == 2 and facts["rtol"] == 1e-9, facts
    assert any("double precision" in note for note in facts["notes"])


def test_a_mistake_stays_one():
    w, batches = half_case()

    def off(w, batch):
        new, out = half_step(w, batch)
        return jax.tree.map(lambda old, a: old + (a - old) * (1 + 1e-5), w, new), out

    right, wrong = (in_double_precision(Case(step, w, batches, {})) for step in (half_step, off))
    with jax.enable_x64(True):
        (same,) = side_by_side(right, jax.jit(right.step), 1, tolerance=DOUBLE)
        (other,) = side_by_side(right, jax.jit(wrong.step), 1, tolerance=DOUBLE)
    assert same.ok and not other.ok
