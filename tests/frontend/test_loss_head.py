"""Losses that couple examples: the head runs once on the whole batch, the stages before it pipeline."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import MicrobatchError
from hetjax.ir.parser import parse_bundle
from hetjax.ir.text import print_bundle
from tests.support import assert_same

WIDTH, BATCH = 32, 8


def inputs():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 6, jnp.float32)  # noqa: E731
    return [draw(WIDTH, WIDTH) for _ in range(4)] + [draw(WIDTH, 4)], {"x": np.asarray(draw(BATCH, WIDTH))}


def body(w, x):
    for matrix in w[:4]:
        x = x + jnp.tanh(x @ matrix)
    return x


def contrastive(z):
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    rows = jnp.arange(z.shape[0])
    return -jnp.mean(jax.nn.log_softmax(5 * z @ z.T)[rows, (rows + 1) % z.shape[0]])


def normalised(z):
    z = (z - z.mean(0)) * jax.lax.rsqrt(z.var(0) + 1e-5)
    return jnp.mean(jnp.square(z - 0.1) * jnp.arange(4))


def step_of(head, body=body):
    def step(w, batch):
        loss = lambda w: head(body(w, batch["x"]) @ w[4])  # noqa: E731
        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    return step


@pytest.mark.parametrize(("head", "stages", "num", "mesh", "sums"), [
    (contrastive, 3, 4, "1,1", ""), (normalised, 2, 2, "2,1", "whole"),
    (lambda z: jnp.sqrt(jnp.mean(jnp.square(z - 0.5))), 2, 2, "2,2", ""),
])  # fmt: skip
def test_a_head_that_couples_examples_runs_once(head, stages, num, mesh, sums):
    step = step_of(head)
    parallel = hetjax.parallelize(step, num_stages=stages, num_microbatches=num, mesh=mesh, sums=sums)
    w, batch = inputs()
    assert_same(parallel(w, batch), jax.jit(step)(w, batch))
    assert parallel.plan.num_stages == stages and parallel.plan.num_microbatches == num
    assert "once on the whole batch, between all forwards and all backwards" in parallel.explain()
    last = [(t.kind, t.microbatch) for t in parallel._in_use().program.tasks[-1] if t.kind in ("F", "B", "update")]
    forwards, backwards = [("F", m) for m in range(num)], [("B", m) for m in range(num)]
    assert last == [*forwards, ("update", None), *backwards, ("update", None)]
    micro = parallel._in_use().bundle.microbatching
    again = parse_bundle(print_bundle(parallel._in_use().bundle)).microbatching
    assert micro is not None and again is not None and again.resliced == micro.resliced != frozenset()


def test_what_couples_examples_early_is_no_head():
    early = lambda w, x: body(w, (x - x @ w[0]) - (x @ w[0]).mean(0))  # noqa: E731
    w, batch = inputs()
    with pytest.raises(MicrobatchError, match="single examples of the same batch"):
        hetjax.parallelize(step_of(contrastive, early), num_stages=2, num_microbatches=2).plan_for(w, batch)
