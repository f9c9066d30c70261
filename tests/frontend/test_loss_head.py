"""Losses that couple examples: the head runs once on the whole batch, the stages before it pipeline."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import MicrobatchError
from hetjax.ir.parser import parse_bundle
from hetjax.ir.text import print_bundle
from hetjax.passes.insert_reshards import find_reshards
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


def test_a_head_that_a_tied_embedding_pulls_to_the_first_stage_is_sent_back_in_slices():
    w, batch = inputs()

    def step(p, batch):
        def loss(p):
            x = body(p["w"], p["table"][batch["token"]])
            return -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ p["table"][batch["token"]].T)))

        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p)), None

    state = {"w": w, "table": w[0]}
    batch = {"token": np.arange(BATCH) * 5 % WIDTH}
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2)
    assert_same(parallel(state, batch)[0], jax.jit(step)(state, batch)[0])
    program = parallel._in_use().program
    slices = {r.ref for r in program.reshards if r.form == "micro" and (r.source, r.target) == (0, 1)}
    assert slices & parallel._in_use().bundle.microbatching.resliced

    # Where a later update reads the same value whole, it crosses a second time, under a name of its own.
    ref = min(slices & parallel._in_use().bundle.microbatching.resliced)

    def with_whole(ports):
        whole = [dataclasses.replace(p, form="step") for p in ports if (p.ref, p.form) == (ref, "micro")]
        return (*ports, *whole)

    fragments = tuple(
        dataclasses.replace(f, inputs=with_whole(f.inputs), outputs=with_whole(f.outputs)) for f in program.fragments
    )
    crossing = [r for r in find_reshards(program.replace(fragments=fragments)) if r.ref == ref]
    assert sorted((r.name, r.form) for r in crossing) == [(f"x{ref}.step:s0>s1", "step"), (f"x{ref}:s0>s1", "micro")]
