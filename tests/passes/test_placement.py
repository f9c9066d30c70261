"""Regions, cut places and stages of real traced steps; odd steps keep their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.frontend.calls import flatten_call
from hetjax.frontend.tracing import trace_call
from hetjax.ir.bundle import Bundle
from hetjax.passes.cutting import best_cuts, cheap_places, cut_candidates
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.pipeline import analyse
from tests.support import assert_same, copy_tree, make_linen


def analysed(step, *args):
    leaves, structure = flatten_call(args, {}, True)
    return analyse(Bundle(graph=trace_call(step, structure, leaves, name="step").graph)).graph


@pytest.fixture(scope="module")
def graph():
    step, state, batch = make_linen(tx=optax.adamw(1e-3))
    return analysed(step, state, batch)


def test_regions_come_in_order_and_gradients_feed_the_update(graph):
    regions = [op.region for op in graph.ops]
    assert {"forward", "backward", "update"} <= set(regions)
    assert max(i for i, r in enumerate(regions) if r == "forward") < min(
        i for i, r in enumerate(regions) if r == "backward"
    )


def test_blocks_are_module_paths(graph):
    blocks = {op.block for op in graph.ops if op.region == "forward"}
    assert {"Model/embed", "Model/block_0/up", "Model/block_1/norm", "Model/head"} <= blocks


def test_roles_of_a_train_state_step(graph):
    roles = {a.path: a.role for a in graph.inputs}
    assert roles["batch/tokens"] == "batch"
    assert roles["state/params/block_0/up/kernel"] == "state"
    assert roles["state/step"] == "state"
    assert {r.path for r in graph.outputs if r.updates is None} == {"out/1/loss", "out/1/accuracy"}


def test_every_block_boundary_is_a_place_to_cut_with_one_value(graph):
    candidates = cut_candidates(graph, one_microbatch(graph))
    single = [c for c in candidates.places if c.num_values == 1 and c.nbytes == 8 * 6 * 16 * 4]
    assert {c.cut.block for c in single} >= {"Model/block_0/norm", "Model/block_1/norm"}
    assert best_cuts(candidates, [1.0, 1.0])[0].cut.block == "Model/block_1/norm"
    assert {c.cut.block for c in cheap_places(candidates, 2)} < {c.cut.block for c in candidates.places}


def test_a_fast_stage_gets_more_work():
    step, state, batch = make_linen(blocks=4)
    graph = analysed(step, state, batch)
    candidates = cut_candidates(graph, one_microbatch(graph))
    total = candidates.total_flops
    even = best_cuts(candidates, [1.0, 1.0])[0].flops_before / total
    uneven = best_cuts(candidates, [3.0, 1.0])[0].flops_before / total
    assert 0.35 < even < 0.65
    assert uneven > even


def check(step, state, batch, steps=2, **options):
    parallel, plain = hetjax.parallelize(step, **options), jax.jit(step)
    ours, theirs = state, copy_tree(state)
    for _ in range(steps):
        ours, out = parallel(ours, batch)
        theirs, expected = plain(theirs, batch)
    assert_same((ours, out), (theirs, expected))
    return parallel


def two_networks(state, batch):
    """Two gradients in one step, the second through parameters that the first has updated."""
    x = batch["x"]

    def critic_loss(critic, maker):
        made = jnp.tanh(x @ maker["a"]) @ maker["b"]
        return (jax.nn.softplus(made @ critic["c"]) - (x[:, :4] @ critic["c"])).mean()

    def maker_loss(maker, critic):
        made = jnp.tanh(x @ maker["a"]) @ maker["b"]
        return -(made @ critic["c"]).mean()

    critic_value, critic_grad = jax.value_and_grad(critic_loss)(state["critic"], state["maker"])
    critic = jax.tree.map(lambda p, g: p - 0.1 * g, state["critic"], critic_grad)
    maker_value, maker_grad = jax.value_and_grad(maker_loss)(state["maker"], critic)
    maker = jax.tree.map(lambda p, g: p - 0.1 * g, state["maker"], maker_grad)
    return {"critic": critic, "maker": maker}, (critic_value, maker_value)


def make_networks():
    rng = np.random.default_rng(0)
    array = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
    state = {"critic": {"c": array(4, 1)}, "maker": {"a": array(6, 8), "b": array(8, 4)}}
    return state, {"x": array(8, 6)}


def test_two_gradients_in_one_step_run_on_two_stages_with_one_microbatch():
    state, batch = make_networks()
    parallel = check(two_networks, state, batch, num_stages=2, num_microbatches=1, mesh="2,1")
    assert parallel.plan.num_stages == 2


def test_two_gradients_in_one_step_are_refused_with_more_microbatches():
    state, batch = make_networks()
    with pytest.raises(hetjax.errors.MicrobatchError):
        hetjax.parallelize(two_networks, num_stages=2, num_microbatches=2, mesh="1,1")(state, batch)


def test_an_average_of_the_parameters_and_a_gradient_norm_metric():
    state, batch = make_networks()
    state = {"p": state["maker"], "ema": state["maker"], "count": jnp.int32(0)}

    def step(state, batch):
        def loss_fn(p):
            return ((jnp.tanh(batch["x"] @ p["a"]) @ p["b"]) ** 2).sum(-1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["p"])
        p = jax.tree.map(lambda a, g: a - 0.1 * g, state["p"], grads)
        ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["ema"], p)
        return {"p": p, "ema": ema, "count": state["count"] + 1}, (loss, optax.tree.norm(grads))

    check(step, state, batch, num_stages=2, num_microbatches=2, mesh="2,1")


def test_per_example_outputs_are_concatenated_in_order():
    state, batch = make_networks()

    def step(p, batch):
        def loss_fn(p):
            y = jnp.tanh(batch["x"] @ p["a"]) @ p["b"]
            return (y**2).mean(), y

        (loss, y), grads = jax.value_and_grad(loss_fn, has_aux=True)(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), (y, y.argmax(-1), loss)

    check(step, state["maker"], batch, num_stages=2, num_microbatches=4, mesh="1,1")
