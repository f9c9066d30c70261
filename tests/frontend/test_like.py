"""Functions of the state on a training plan: evaluation, norms, averages; gather, place, init."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from tests.support import assert_same, copy_tree, make_linen


@pytest.fixture(scope="module")
def trained():
    step, state, batch = make_linen(tx=optax.adam(1e-3))
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1;2,2")
    plain = jax.jit(step)
    theirs = copy_tree(state)
    for _ in range(2):
        state, _ = parallel(state, batch)
        theirs, _ = plain(theirs, batch)
    return parallel, state, theirs, batch


def test_plain_functions_of_the_whole_state_cannot_work_without_it(trained):
    parallel, state, _, _ = trained
    with pytest.raises(ValueError, match="incompatible devices"):
        optax.tree.norm(state.params)


def test_global_norm(trained):
    parallel, state, theirs, _ = trained
    norm = hetjax.parallelize(optax.tree.norm, like=parallel)
    np.testing.assert_allclose(norm(state.params), optax.tree.norm(theirs.params), rtol=1e-5)
    assert norm.stats()["bytes_between_stages"] < 200  # scalars, no parameter


def test_an_evaluation_sends_one_activation(trained):
    parallel, state, theirs, batch = trained

    def evaluate(state, batch):
        logits = state.apply_fn({"params": state.params}, batch["tokens"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return {"loss": loss.mean(), "predictions": logits.argmax(-1)}

    on_plan = hetjax.parallelize(evaluate, like=parallel)
    out, expected = on_plan(state, batch), jax.jit(evaluate)(theirs, batch)
    np.testing.assert_allclose(out["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_array_equal(out["predictions"], expected["predictions"])
    assert on_plan.stats()["bytes_between_stages"] == 8 * 6 * 16 * 4
    # Stage 1 keeps its parameters split over its model axis.
    split = [leaf for leaf in jax.tree.leaves(state) if not leaf.sharding.is_fully_replicated]
    assert f"following: {len(split)} leaves of the state are kept split over" in on_plan.explain()
    moved = int(re.search(r"a stage: (\d+) bytes a call are exchanged", on_plan.explain())[1])
    assert moved >= 8 * 6 * 16 * 4  # at the least one sum of activations that the two halves of a product add up to


def test_a_moving_average_stays_where_the_parameters_are(trained):
    parallel, state, _, _ = trained
    average = hetjax.parallelize(
        lambda old, new: jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new), like=parallel
    )
    mixed = average(state.params, state.params)
    for a, b in zip(jax.tree.leaves(mixed), jax.tree.leaves(state.params)):
        assert a.sharding.device_set == b.sharding.device_set
    assert average.stats()["bytes_between_stages"] == 0


def test_gather_then_place_brings_back_the_same_shardings(trained):
    parallel, state, theirs, _ = trained
    together = hetjax.gather(state.params)
    np.testing.assert_allclose(optax.tree.norm(together), optax.tree.norm(theirs.params), rtol=1e-5)
    back = hetjax.place(together, like=parallel)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state.params)):
        assert a.sharding == b.sharding
    assert_same(back, state.params, rtol=0, atol=0)


def test_init_gives_the_same_state_in_place(trained):
    parallel, state, _, _ = trained
    fresh = hetjax.init(lambda: make_linen(tx=optax.adam(1e-3))[1].replace(apply_fn=state.apply_fn, tx=state.tx), like=parallel)
    assert_same(fresh.params, make_linen()[1].params, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(state)):
        assert jnp.shape(a) == jnp.shape(b)
        if a.ndim:
            assert a.sharding == b.sharding


def test_abstract_state_names_shardings_for_a_checkpointer(trained):
    parallel, state, _, _ = trained
    abstract = parallel.abstract_state()
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(state)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.shape:
            assert a.sharding == b.sharding


def test_following_before_there_is_a_plan_says_what_to_do():
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step, num_stages=2)
    with pytest.raises(hetjax.errors.PlanError, match="plan_for"):
        hetjax.parallelize(optax.tree.norm, like=parallel)(state.params)


def test_a_function_that_only_hands_a_part_of_the_state_back(trained):
    parallel, state, _, _ = trained
    params = hetjax.parallelize(lambda state: state.params, like=parallel)(state)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)
