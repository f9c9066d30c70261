"""nnx steps mutate the same objects in place, on two stages, with plain nnx.jit's numbers."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from tests.support import assert_same, make_nnx


def test_two_stages_equal_nnx_jit_in_place():
    step, (model, optimizer), batch = make_nnx()
    _, (plain_model, plain_optimizer), _ = make_nnx()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1")
    plain = nnx.jit(step)
    kernel = model.blocks[0].up.kernel
    for _ in range(3):
        loss = parallel(model, optimizer, batch)
        expected = plain(plain_model, plain_optimizer, batch)
    assert model.blocks[0].up.kernel is kernel
    assert_same(nnx.state((model, optimizer)), nnx.state((plain_model, plain_optimizer)))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert parallel.stats()["plans"] == 1
    assert any("blocks/1" in block for block in parallel.plan.stages[1].blocks)


def test_a_step_that_is_already_nnx_jitted():
    step, (model, optimizer), batch = make_nnx(dropout=0.0)
    _, (plain_model, plain_optimizer), _ = make_nnx(dropout=0.0)
    hetjax.parallelize(nnx.jit(step), num_stages=2, num_microbatches=2, mesh="1,1")(model, optimizer, batch)
    nnx.jit(step)(plain_model, plain_optimizer, batch)
    assert_same(nnx.state((model, optimizer)), nnx.state((plain_model, plain_optimizer)))


def test_objects_in_a_tuple_and_batch_norm_with_one_microbatch():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(6, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.last = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    def make():
        model = Net(nnx.Rngs(1))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(state, batch):
        model, optimizer = state

        def loss_fn(model):
            return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 6)).astype(np.float32), "y": rng.normal(size=8).astype(np.float32)}
    ours, theirs = make(), make()
    with pytest.raises(hetjax.errors.MicrobatchError, match=r"(?s)norm.*num_microbatches=1"):
        hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1")(ours, batch)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=1, mesh="2,1")
    plain = nnx.jit(step)
    for _ in range(2):
        parallel(ours, batch)
        plain(theirs, batch)
    assert_same(nnx.state(ours), nnx.state(theirs), rtol=2e-6)


def test_a_step_that_changes_an_objects_structure_is_refused_in_words():
    step, (model, optimizer), batch = make_nnx()

    def restless(model, optimizer, batch):
        loss = step(model, optimizer, batch)
        model.extra = nnx.Param(loss)
        return loss

    with pytest.raises(hetjax.errors.PlanError, match="changes the structure of its nnx objects"):
        hetjax.parallelize(restless, num_stages=2)(model, optimizer, batch)


def test_the_model_can_be_called_after_training_and_trains_on():
    step, (model, optimizer), batch = make_nnx(dropout=0.0)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1")
    parallel(model, optimizer, batch)
    evaluate = hetjax.parallelize(lambda model, batch: model(batch["tokens"]), like=parallel)
    on_plan = evaluate(model, batch)
    gathered = hetjax.gather(model)(batch["tokens"])
    np.testing.assert_allclose(on_plan, gathered, rtol=1e-5, atol=1e-6)
    hetjax.place(model, like=parallel)
    parallel(model, optimizer, batch)
    assert parallel.stats()["plans"] == 1


def test_init_creates_objects_where_they_belong():
    step, (model, optimizer), batch = make_nnx()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1")
    parallel(model, optimizer, batch)
    (fresh_model, fresh_optimizer) = hetjax.init(lambda: make_nnx()[1], like=parallel)
    _, (plain_model, plain_optimizer), _ = make_nnx()
    assert_same(nnx.state((fresh_model, fresh_optimizer)), nnx.state((plain_model, plain_optimizer)))
    used = jax.tree.map(lambda x: x.sharding, nnx.state(model))
    made = jax.tree.map(lambda x: x.sharding, nnx.state(fresh_model))
    assert jax.tree.leaves(used) == jax.tree.leaves(made)
