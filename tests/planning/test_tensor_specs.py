"""Tensor-parallel specs are found by propagation, for layers that nobody named; what stays on a stage stays split."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

import hetjax
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.pipeline import analyse
from hetjax.planning.traced_table import TracedTable
from tests.support import assert_same, copy_tree, make_linen

CLUSTER = Cluster.parse("""
name = "node"
[[sites]]
name = "here"
[[sites.nodes]]
kind = "a100-80g"
devices = 8
""")


class Part(nn.Module):
    """Attention and an MLP under other names than anybody's transformer."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="mix")(x, x)
        return x + nn.Dense(256, name="shrink")(nn.gelu(nn.Dense(1024, name="grow")(x)))


class Attends(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Part(name=f"part_{i}")(x)
        return x


@pytest.fixture(scope="module")
def table():
    model, x = Attends(), jax.ShapeDtypeStruct((8, 64, 256), jnp.float32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.ones((1, 64, 256)))["params"])
    state = jax.eval_shape(
        lambda p: train_state.TrainState.create(apply_fn=model.apply, params=p, tx=optax.adam(1e-3)), params
    )

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads), loss

    traced = hetjax.parallelize(step, num_stages=1, num_microbatches=1).lower(state, x)._entry.graph
    graph = analyse(Bundle(graph=traced)).graph
    return TracedTable(Bundle(graph=graph, microbatching=one_microbatch(graph)), CLUSTER)


def test_heads_columns_and_rows_are_found_with_two_sums_a_block(table):
    specs = {path: spec for path, (_, spec) in table.tensor_specs(4).items()}
    for i in range(2):
        for name in ("query", "key", "value"):  # [256, heads, 64]
            assert specs[f"state/params/part_{i}/mix/{name}/kernel"] == ((), ("model",), ())
        assert specs[f"state/params/part_{i}/grow/kernel"] == ((), ("model",))
        assert specs[f"state/params/part_{i}/shrink/kernel"] == (("model",), ())
        assert specs[f"state/opt_state/0/mu/part_{i}/grow/kernel"] == ((), ("model",))  # moments follow
    degree = table._degree(4)
    summed = [n for work in degree.works for kind, nbytes, n in work.ahead if kind == "all-reduce" and nbytes >= 64 * 256 * 4]
    # One sum after each attention, one after each MLP, and nothing else of an activation's size is exchanged.
    assert sum(summed) == 4
    assert all(nbytes < 64 * 256 * 4 for work in degree.works for kind, nbytes, _ in work.ahead if kind != "all-reduce")


def test_a_higher_degree_computes_and_holds_less(table):
    one, four = table.times("a100-80g", 1, 4096), table.times("a100-80g", 4, 4096)
    assert sum(four.forward_s) < 0.6 * sum(one.forward_s)
    held = [sum(table.sizes(t).parameters) for t in (1, 4)]
    assert held[1] < 0.4 * held[0]
    kept = [sum(table.sizes(t).stored_bytes) for t in (1, 4)]
    assert kept[1] < 0.75 * kept[0]  # residuals stay split between forward and backward


def test_residuals_that_stay_split_leave_the_numbers_as_they_are():
    step, state, batch = make_linen(blocks=1)
    parallel = hetjax.parallelize(step, num_stages=1, num_microbatches=2, mesh="1,2")
    ours, _ = parallel(copy_tree(state), batch)
    theirs, _ = jax.jit(step)(state, batch)
    assert_same(ours, theirs)
    (forward,) = [f for f in parallel._latest.program.fragments if f.phase == "forward"]
    assert any("model" in dim for p in forward.outputs for dim in p.spec)
