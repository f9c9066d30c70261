"""split-scans: loops over layers in parts, with the numbers of the whole loop; loops over time as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from hetjax.frontend.calls import flatten_call
from hetjax.frontend.tracing import trace_call
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError, PlanError
from hetjax.ir.exporter import export_jaxpr
from hetjax.ir.pieces import leaf_aval, leaves_of
from hetjax.ir.verify import verify_bundle
from hetjax.passes.choose_layer_edges import split_like
from hetjax.passes.layer_stacks import layer_stacks
from hetjax.passes.pipeline import analyse
from hetjax.passes.split_scans import SplitScans, even_edges, split_scans

LAYERS, WIDTH = 5, 4


def layers_step(tx, remat=False, cast=None):
    """A step over `LAYERS` tanh layers in one scan; each layer may draw and is followed by a shared weight."""

    def loss_fn(params, x, key):
        def layer(carry, row):
            w, b, k = row
            keep = jax.random.bernoulli(k, 0.8, carry.shape)
            return jnp.where(keep, jnp.tanh(carry @ w + b), 0) + carry @ params["shared"], carry.mean()

        stack = (params["w"], params["b"]) if cast is None else jax.tree.map(lambda a: a.astype(cast), (params["w"], params["b"]))
        body = jax.checkpoint(layer) if remat else layer
        out, means = lax.scan(body, x, (*stack, jax.random.split(key, LAYERS)))
        return jnp.mean(out**2) + 1e-3 * jnp.sum(params["w"] ** 2) + 0 * means.sum()

    def step(state, x):
        params, opt, key = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, jax.random.fold_in(key, 1))
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt, key), loss

    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    params = {"w": draw(LAYERS, WIDTH, WIDTH), "b": draw(LAYERS, WIDTH), "shared": draw(WIDTH, WIDTH)}
    return step, (params, tx.init(params), jax.random.key(0)), draw(8, WIDTH)


def graph_of(step, *args):
    leaves, structure = flatten_call(args, {}, False)
    traced = trace_call(step, structure, leaves, name="step")
    graph = analyse(Bundle(graph=traced.graph)).graph
    return graph, [*leaves, *(graph.consts[a.ref] for a in graph.inputs if a.ref in graph.consts)]


def evaluate(graph, values):
    """Runs a graph on whole leaves and returns whole results."""
    given = []
    for leaf, value in zip(leaves_of(graph.inputs), values, strict=True):
        given += [value[a:b] for a, b in zip(leaf.edges, leaf.edges[1:])] if leaf.edges else [value]
    closed = export_jaxpr("step", graph.ops, [a.ref for a in graph.inputs], [r.atom for r in graph.outputs], graph.avals)
    found = jax.jit(jax.extend.core.jaxpr_as_fun(closed))(*given)
    out = []
    for leaf in leaves_of(graph.outputs):
        rows = [found[p] for p in leaf.positions]
        out.append(jnp.concatenate(rows) if leaf.edges else rows[0])
    return out


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9), "clip adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2), "lamb": optax.lamb(1e-2),
}  # fmt: skip


@pytest.mark.parametrize(("tx", "edges"), [*((name, (0, 2, 5)) for name in OPTIMIZERS), ("clip adamw", (0, 1, 2, 5))])
def test_parts_give_the_numbers_of_the_whole(tx, edges):
    step, state, x = layers_step(OPTIMIZERS[tx], remat=edges == (0, 2, 5), cast=None if tx != "sgd" else jnp.float32)
    graph, values = graph_of(step, state, x)
    split = split_scans(graph, [edges])
    verify_bundle(Bundle(graph=split))
    assert [op.param("length") for op in split.ops if op.primitive == "scan" and op.region == "forward"] == list(np.diff(edges))
    stacked = [leaf for leaf in leaves_of(split.inputs) if leaf.edges]
    assert {leaf.path.split("/")[-1] for leaf in stacked} >= {"w", "b"}
    assert all(leaf.edges == edges and leaf_aval(split, leaf).shape[0] == LAYERS for leaf in stacked)
    for got, want in zip(evaluate(split, values), evaluate(graph, values), strict=True):
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


def test_an_elementwise_optimizer_never_puts_the_rows_together():
    step, state, x = layers_step(OPTIMIZERS["clip adamw"])
    graph, _ = graph_of(step, state, x)
    split = split_scans(graph, [(0, 2, 5)])
    assert not [op for op in split.ops if op.primitive == "concatenate"]
    sliced = [split.aval(op.inputs[0]).dtype for op in split.ops if op.primitive == "slice"]
    assert set(sliced) == {"key<fry>"}  # the layers' keys are free of parameters and go where they are read
    assert sum(bool(leaf.edges) for leaf in leaves_of(split.inputs)) == 6  # w, b, and both moments of each


@pytest.mark.quick
def test_loops_over_time_stay_whole():
    def step(w, x):
        def loss(w):
            return jnp.mean(lax.scan(lambda c, v: (jnp.tanh(c @ w + v), None), x[:, 0], jnp.moveaxis(x, 1, 0))[0] ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    graph, _ = graph_of(step, jnp.eye(WIDTH), jnp.ones((8, LAYERS, WIDTH)))
    assert sum(op.primitive == "scan" for op in graph.ops) == 2
    assert layer_stacks(graph) == ()
    assert SplitScans(2).apply(Bundle(graph=graph)).graph is graph


@pytest.mark.quick
def test_two_passes_over_the_same_layers_are_one_stack():
    def step(w, x):
        def loss(w):
            through = lambda y: lax.scan(lambda c, v: (jnp.tanh(c @ v), None), y, w)[0]  # noqa: E731
            return jnp.mean(through(through(x)) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    graph, values = graph_of(step, jnp.ones((LAYERS, WIDTH, WIDTH)) / 3, jnp.ones((8, WIDTH)))
    (stack,) = layer_stacks(graph)
    assert (len(stack.forward), len(stack.scans), len(stack.leaves)) == (2, 4, 1)
    for got, want in zip(evaluate(split_scans(graph, [(0, 3, 5)]), values), evaluate(graph, values), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.quick
def test_parts_are_nearly_even_and_wrong_ones_are_refused():
    assert even_edges(5, 2) == (0, 2, 5)
    assert even_edges(3, 8) == (0, 1, 2, 3)
    graph, _ = graph_of(*layers_step(OPTIMIZERS["sgd"]))
    with pytest.raises(PlanError, match=r"loops over \[6\] layers; this step has loops over \[5\]"):
        split_like(graph, ((0, 3, 6),))
    split = SplitScans(5).apply(Bundle(graph=graph))
    assert len(leaves_of(split.graph.inputs)) == len(leaves_of(graph.inputs))
    from hetjax.passes.one_microbatch import one_microbatch

    with pytest.raises(PassError, match="must run before the batch is split"):
        SplitScans(2).apply(Bundle(graph=graph, microbatching=one_microbatch(graph)))
