"""A step that accumulates gradients over parts of its own batch, split further into microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hetjax.passes.lift_slices import lift_slices

RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 3))
BATCH = {"x": RNG.standard_normal((16, 4)), "y": RNG.standard_normal((16, 3))}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def by_fori_loop(w, batch):
    """The first part before the loop, the others in it, as vision transformers' trainers do."""
    parts, size = 4, batch["x"].shape[0] // 4

    def add(i, carry):
        x = lax.dynamic_slice(batch["x"], (i * size, 0), (size, 4))
        y = lax.dynamic_slice_in_dim(batch["y"], i * size, size)
        value, grads = jax.value_and_grad(loss)(w, x, y)
        return carry[0] + value, carry[1] + grads

    first = jax.value_and_grad(loss)(w, batch["x"][:size], batch["y"][:size])
    value, grads = lax.fori_loop(1, parts, add, first)
    return w - 0.1 * grads / parts, value / parts


def by_scan_over_numbers(w, batch):
    def add(carry, i):
        x, y = (lax.dynamic_slice_in_dim(v, i * 8, 8) for v in (batch["x"], batch["y"]))
        return carry + jax.grad(loss)(w, x, y), None

    return w - 0.05 * lax.scan(add, jnp.zeros_like(w), jnp.arange(2))[0]


def backwards(w, batch):
    """Parts in reverse order, by a counter that counts down."""
    size = batch["x"].shape[0] // 2

    def add(carry, _):
        i, grads = carry
        x, y = (lax.dynamic_slice_in_dim(v, i * size, size) for v in (batch["x"], batch["y"]))
        return (i - 1, grads + jax.grad(loss)(w, x, y)), None

    return w - lax.scan(add, (1, jnp.zeros_like(w)), None, length=2)[0][1]


@pytest.mark.parametrize("fn", [by_fori_loop, backwards], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_accumulation_is_proved_and_equal_in_numbers(traced, fn, num_microbatches):
    plain = traced(fn, W, BATCH, roles="state batch", num_microbatches=num_microbatches)
    assert plain.refusal is not None or "U" in {t.kind for t in plain.proof.types}
    run = traced(fn, W, BATCH, roles="state batch", num_microbatches=num_microbatches, change=lift_slices)
    assert run.refusal is None and run.disagreements() == []
    scan = next(op for op in run.full.ops if op.primitive == "scan")
    assert {run.proof.types[r].kind for r in scan.outputs} <= {"R", "S"}
    for a, b in zip(jax.tree.leaves(fn(W, BATCH)), run.execute()):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_batch_size_written_into_the_loop_is_refused(traced):
    """Parts of 8 examples at either batch size: half a batch has half as many parts in two iterations."""
    run = traced(by_scan_over_numbers, W, BATCH, roles="state batch", change=lift_slices)
    scan = [op for op in run.full.ops if op.primitive == "scan"]
    assert run.refusal is not None or all(run.proof.types[r].kind == "U" for op in scan for r in op.outputs)


def test_slices_of_parameters_and_by_data_stay(traced):
    def layers(w, batch):
        stack = jnp.stack([w @ w.T, w @ w.T + 1])
        pick = jnp.argmax(batch["y"][0])
        return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ stack[i]) + batch["y"][pick, 0], batch["x"])

    run = traced(layers, W, BATCH, roles="state batch")
    assert lift_slices(run.full) is run.full
