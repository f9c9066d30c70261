"""Sharding constraints in a user's step hold on the stages' meshes; shard_map is refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax.errors import PlanError
from hetjax.ir import _jax
from hetjax.runtime.constraints import on_stage, stage_spec

FREE = P.UNCONSTRAINED


def mesh(shape, names):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


@pytest.mark.quick
def test_axes_are_those_of_the_stage():
    sizes = {"data": 2, "model": 4}
    assert stage_spec(P("batch", None, "tensor"), (4, 3, 8), sizes) == ("data", None, "model")
    assert stage_spec(P(("replica", "fsdp"), "expert"), (4, 8), sizes) == ("data", FREE)
    assert stage_spec(P("data"), (3, 8), sizes) == (FREE, None)  # 3 rows over 2 devices
    assert stage_spec(P("data", "batch"), (4, 4), sizes) == ("data", FREE)
    assert stage_spec(P(FREE, "tp"), (4, 8), {"data": 2, "model": 1}) == (FREE, None)


@pytest.mark.quick
def test_constraints_inside_loops_move_to_the_stage_too():
    wide, stage = mesh((8,), ("data",)), mesh((2, 1), ("data", "model"))

    def layer(c, _):
        return jax.checkpoint(lambda c: jax.lax.with_sharding_constraint(jnp.tanh(c), NamedSharding(wide, P("data"))))(c), None

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(layer, x, None, length=2)[0])(jnp.ones((8, 4)))
    moved = _jax.first_inside(on_stage(closed, stage).eqns[-1], "sharding_constraint")
    assert moved.params["sharding"] == NamedSharding(stage, P("data", None))
    plain = jax.make_jaxpr(jnp.tanh)(1.0)
    assert on_stage(plain, stage) is plain


def step(w, batch, hidden=lambda h: h):
    def loss(w):
        return jnp.mean(jnp.square(jnp.tanh(hidden(jnp.tanh(batch["x"] @ w[0])) @ w[1]) @ w[2]))

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def inputs():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(3)], {"x": rng.standard_normal((8, 8)).astype(np.float32)}


def test_a_step_with_constraints_for_eight_devices_runs_on_two_stages():
    wide = mesh((4, 2), ("data", "model"))

    def constrained(w, batch):
        return step(w, batch, lambda h: jax.lax.with_sharding_constraint(h, NamedSharding(wide, P("data", "model"))))

    w, batch = inputs()
    got = hetjax.parallelize(constrained, num_stages=2, num_microbatches=2, mesh="2,2")(w, batch)
    want = jax.jit(step)(w, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_shard_map_is_refused_by_name():
    wide = mesh((4,), ("data",))

    def mapped(w, batch):
        return step(w, batch, lambda h: jax.shard_map(lambda a: a * 2, mesh=wide, in_specs=P("data"), out_specs=P("data"))(h))

    with pytest.raises(PlanError, match=r"shard_map over the mesh axes 'data' at .*test_user_shardings.py:\d+"):
        hetjax.parallelize(mapped, num_stages=2)(*inputs())
