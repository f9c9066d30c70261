"""A linen step on two stages gives what plain jit gives, whatever its loss is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import hetjax
from tests.support import assert_same, copy_tree, make_batch, make_linen

LOSSES = {
    "mean": {},
    "sum": {"loss": "sum", "tx": optax.sgd(0.001, momentum=0.9)},
    "token-weighted mean": {"loss": "masked"},
    "dropout": {"dropout": 0.2},
    "tied": {"tied": True},
    "clip and adamw": {"tx": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))},
}


def run_both(step, state, batch, steps=2, **options):
    parallel = hetjax.parallelize(step, **options)
    plain = jax.jit(step)
    ours, theirs = state, copy_tree(state)
    for _ in range(steps):
        ours, out = parallel(ours, batch)
        theirs, expected = plain(theirs, batch)
    return parallel, ours, out, theirs, expected


@pytest.mark.parametrize("name", LOSSES)
def test_two_stages_two_microbatches_two_shards_equal_plain_jit(name):
    step, state, batch = make_linen(**LOSSES[name])
    parallel, ours, out, theirs, expected = run_both(
        step, state, batch, num_stages=2, num_microbatches=2, mesh="2,1"
    )
    if name == "clip and adamw":  # Adam's first steps amplify rounding in parameters; its moments do not
        assert_same(ours.opt_state, theirs.opt_state, rtol=1e-5)
    else:
        assert_same(ours, theirs)
    assert_same(out, expected)
    assert parallel.plan.num_microbatches == 2
    assert parallel.plan.num_stages == 2


def test_unlike_stages_with_tensor_parallel_axis():
    step, state, batch = make_linen()
    parallel, ours, out, theirs, expected = run_both(
        step, state, batch, num_stages=2, num_microbatches=2, mesh="2,1;2,3"
    )
    assert_same(ours, theirs)
    assert [len(s.devices) for s in parallel.plan.stages] == [2, 6]


def test_a_model_axis_splits_parameters():
    step, state, batch = make_linen()
    parallel, ours, _, theirs, _ = run_both(step, state, batch, num_stages=1, num_microbatches=1, mesh="2,4")
    assert_same(ours, theirs)
    kernel = ours.params["block_0"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (kernel.shape[0], kernel.shape[1] // 4)
    assert ours.opt_state[0].trace["block_0"]["up"]["kernel"].sharding == kernel.sharding


def test_bytes_between_stages_are_one_activation_and_one_cotangent_per_microbatch():
    step, state, batch = make_linen()
    parallel, *_ = run_both(step, state, batch, num_stages=2, num_microbatches=4, mesh="1,1")
    activation = 2 * 6 * 16 * 4  # a microbatch of 2 examples, 6 tokens, 16 features, float32
    assert parallel.stats()["bytes_between_stages"] == 2 * 4 * activation


def test_a_tied_weight_crosses_once_and_its_gradient_once_per_step():
    step, state, batch = make_linen(tied=True)
    parallel, *_ = run_both(step, state, batch, num_stages=2, num_microbatches=4, mesh="1,1")
    activation, embedding = 2 * 6 * 16 * 4, 17 * 16 * 4
    assert parallel.stats()["bytes_between_stages"] == 2 * 4 * activation + 2 * embedding


def test_four_stages_one_device_each():
    step, state, batch = make_linen(blocks=4)
    parallel, ours, _, theirs, _ = run_both(step, state, batch, num_stages=4, num_microbatches=4, mesh="1,1")
    assert_same(ours, theirs)
    activation = 2 * 6 * 16 * 4
    assert parallel.stats()["bytes_between_stages"] == 3 * 2 * 4 * activation


def test_the_returned_tree_has_plain_jits_structure_dtypes_and_weak_types():
    step, state, batch = make_linen()
    parallel, ours, out, theirs, expected = run_both(
        step, state, batch, steps=1, num_stages=2, num_microbatches=2, mesh="1,1"
    )
    assert jax.tree.structure((ours, out)) == jax.tree.structure((theirs, expected))
    for a, b in zip(jax.tree.leaves((ours, out)), jax.tree.leaves((theirs, expected))):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_a_second_call_neither_retraces_nor_recompiles():
    step, state, batch = make_linen()
    traces = []

    def counted(state, batch):
        traces.append(1)
        return step(state, batch)

    parallel = hetjax.parallelize(counted, num_stages=2, num_microbatches=2, mesh="1,1")
    state, _ = parallel(state, batch)
    first = len(traces)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        for seed in range(3):
            state, _ = parallel(state, make_batch(seed=seed))
        assert len(traces) == first
        assert not compiled
        assert parallel.stats()["plans"] == 1
    finally:
        jax.monitoring.clear_event_listeners()


def test_the_callers_state_is_not_consumed_without_donation():
    step, state, batch = make_linen()
    before = copy_tree(state.params)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1")
    placed, _ = parallel(state, batch)
    again, _ = parallel(placed, batch)
    assert_same(state.params, before)
    jax.block_until_ready(again)
    assert not any(x.is_deleted() for x in jax.tree.leaves(placed))


def test_donation_reuses_the_old_state():
    step, state, batch = make_linen()
    theirs = copy_tree(state)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1", donate=True)
    placed, _ = parallel(state, batch)
    again, _ = parallel(placed, batch)
    kernels = [x for x in jax.tree.leaves(placed.params) if x.ndim == 2]
    assert kernels
    assert all(x.is_deleted() for x in kernels)
    plain = jax.jit(step)
    for _ in range(2):
        theirs, _ = plain(theirs, batch)
    assert_same(again, theirs)


def test_jitted_partial_and_bound_steps():
    step, state, batch = make_linen()
    plain, _ = jax.jit(step)(copy_tree(state), batch)

    class Trainer:
        def train(self, state, batch):
            return step(state, batch)

    def scaled(factor, state, batch):
        return step(state, batch)

    for fn in (jax.jit(step), Trainer().train, functools.partial(scaled, 1.0)):
        ours, _ = hetjax.parallelize(fn, num_stages=2, num_microbatches=2, mesh="1,1")(state, batch)
        assert_same(ours, plain)


def test_a_method_decorated_in_its_class():
    step, state, batch = make_linen()

    class Trainer:
        @hetjax.parallelize(num_stages=2, num_microbatches=2, mesh="1,1")
        def train(self, state, batch):
            return step(state, batch)

    ours, _ = Trainer().train(state, batch)
    plain, _ = jax.jit(step)(copy_tree(state), batch)
    assert_same(ours, plain)


def test_a_short_last_batch_gets_a_plan_of_its_own_and_a_warning_names_the_change():
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1")
    state, _ = parallel(state, batch)
    with pytest.warns(UserWarning, match=r"plans and compiles step again.*batch/tokens|batch/mask from"):
        state, _ = parallel(state, make_batch(size=4))
    assert parallel.stats()["plans"] == 2
    state, _ = parallel(state, batch)


def test_disabled_by_the_environment(monkeypatch):
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step, num_stages=2)
    monkeypatch.setenv("HETJAX_DISABLE", "1")
    ours, _ = parallel(state, batch)
    plain, _ = jax.jit(step)(copy_tree(state), batch)
    assert_same(ours, plain, rtol=0, atol=0)
    assert parallel.plan is None


def test_planning_needs_no_arrays_and_explains_itself():
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1")
    assert parallel.plan is None
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), (state, batch))
    plan = parallel.plan_for(*abstract)
    assert plan.num_stages == 2
    assert parallel.plan is plan
    text = parallel.explain()
    assert "block_0" in text
    assert "bytes per step" in text


def test_a_saved_plan_is_used_as_it_is(tmp_path):
    step, state, batch = make_linen()
    first = hetjax.parallelize(step, num_stages=2, num_microbatches=4, mesh="1,1")
    plan = first.plan_for(state, batch)
    plan.save(tmp_path / "plan.json")
    second = hetjax.parallelize(step, plan=tmp_path / "plan.json")
    ours, _ = second(state, batch)
    assert second.plan == plan
    plain, _ = jax.jit(step)(copy_tree(state), batch)
    assert_same(ours, plain)


def test_lower_and_compile_as_with_jit():
    step, state, batch = make_linen()
    lowered = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1").lower(state, batch)
    assert "s1/backward" in lowered.as_text()
    ours, _ = lowered.compile()(state, batch)
    plain, _ = jax.jit(step)(copy_tree(state), batch)
    assert_same(ours, plain)


def test_metrics_of_different_stages_mix():
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1")
    state, out = parallel(state, batch)
    assert float(out["loss"] + out["accuracy"]) == pytest.approx(float(out["loss"]) + float(out["accuracy"]))
    assert len(out["loss"].devices()) == 1


def test_bfloat16_gradients_come_as_near_to_float32_as_plain_jits():
    step, state, batch = make_linen()

    def make(dtype):
        def fn(state, batch):
            def loss_fn(params):
                cast = jax.tree.map(lambda x: x.astype(dtype), params)
                logits = state.apply_fn({"params": cast}, batch["tokens"]).astype(jnp.float32)
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), loss

        return fn

    ours, _ = hetjax.parallelize(make(jnp.bfloat16), num_stages=2, num_microbatches=4, mesh="1,1")(state, batch)
    plain, _ = jax.jit(make(jnp.bfloat16))(state, batch)
    exact, _ = jax.jit(make(jnp.float32))(state, batch)

    def error(tree):
        return jax.tree.map(lambda a, b: np.linalg.norm(a - b), tree.params, exact.params)

    for got, allowed in zip(jax.tree.leaves(error(ours)), jax.tree.leaves(error(plain)), strict=True):
        assert got <= 1.5 * allowed + 1e-7


def test_optimizer_state_of_other_shapes_and_frozen_parts():
    step, state, batch = make_linen()
    tx = optax.multi_transform(
        {"train": optax.adafactor(1e-2, min_dim_size_to_factor=8), "frozen": optax.set_to_zero()},
        {k: "frozen" if k == "embed" else "train" for k in state.params},
    )
    state = train_state.TrainState.create(apply_fn=state.apply_fn, params=state.params, tx=tx)
    _, ours, _, theirs, _ = run_both(step, state, batch, num_stages=2, num_microbatches=2, mesh="2,1")
    assert_same(ours, theirs, rtol=1e-5)
    np.testing.assert_array_equal(ours.params["embed"]["embedding"], state.params["embed"]["embedding"])


def test_per_microbatch_means_the_average_over_microbatches():
    _, state, batch = make_linen()

    def loss_fn(params, tokens):
        logits = state.apply_fn({"params": params}, tokens)
        return ((logits - logits.mean(axis=0)) ** 2).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch["tokens"])
        return state.apply_gradients(grads=grads), loss

    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1", per_microbatch=True)
    ours, loss = parallel(state, batch)
    halves = [jax.value_and_grad(loss_fn)(state.params, t) for t in np.split(batch["tokens"], 2)]
    grads = jax.tree.map(lambda a, b: (a + b) / 2, halves[0][1], halves[1][1])
    assert_same(ours.params, state.apply_gradients(grads=grads).params)
    np.testing.assert_allclose(loss, (halves[0][0] + halves[1][0]) / 2, rtol=1e-6)
    assert parallel.plan.per_microbatch


def test_several_updates_in_one_step_run_on_stages():
    """A second gradient that starts from updated values (a GAN's two players) once ended in a VerifyError."""
    step, state, batch = make_linen()

    def twice(state, batch):
        return step(step(state, batch)[0], batch)

    parallel, ours, out, theirs, expected = run_both(twice, state, batch, num_stages=2, num_microbatches=1)
    assert_same((ours, out), (theirs, expected))
    assert parallel.plan.num_stages == 2
    first = [f for f in parallel._latest.program.fragments if f.phase == "backward"]
    assert {f.stage for f in first} == {0, 1}  # cuts fall into the first forward, not between the two


def test_own_accumulation_over_a_scan_with_relu_is_proved():
    weights = [jax.random.normal(k, (16, 16)) / 4 for k in jax.random.split(jax.random.key(0), 2)]
    batch = jax.random.normal(jax.random.key(1), (8, 16))

    def loss_fn(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return (x**2).mean()

    def step(params, batch):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, part)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = jax.lax.scan(add, zeros, batch.reshape(2, -1, 16))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (batch**2).mean()

    parallel, ours, _, theirs, _ = run_both(step, weights, batch, num_stages=1, num_microbatches=2)
    assert_same(ours, theirs)
    assert parallel.plan.num_microbatches == 2


def test_a_jitted_step_keeps_its_static_arguments():
    step, state, batch = make_linen()

    def repeated(state, batch, times, mode="train"):
        for _ in range(times[0] if mode == "train" else 0):
            state, out = step(state, batch)
        return state, out["loss"]

    jitted = jax.jit(repeated, static_argnums=2, static_argnames="mode")
    parallel = hetjax.parallelize(jitted, num_stages=2, num_microbatches=2, mesh="2,1")
    ours = parallel(state, batch, (1,), mode="train")
    assert_same(ours, jitted(state, batch, (1,), mode="train"))
    assert parallel.plan.num_microbatches == 2
    with pytest.raises(hetjax.errors.PlanError, match="a list, which is neither an array nor hashable"):
        parallel(state, batch, [1])


def test_a_parallel_method_shows_its_plan_through_the_instance():
    step, state, batch = make_linen()

    class Trainer:
        @hetjax.parallelize(num_stages=2, num_microbatches=2)
        def step(self, state, batch):
            return step(state, batch)

    trainer = Trainer()
    assert trainer.step.plan_for(state, batch).num_stages == 2
    trainer.step(state, batch)
    assert trainer.step.plan.num_microbatches == 2
    assert "2 stages" in trainer.step.explain()
    norm = hetjax.parallelize(lambda state: optax.tree.norm(state.params), like=trainer.step)
    assert_same(norm(state), optax.tree.norm(state.params))
