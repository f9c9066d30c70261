"""A plain Flax train step on eight workers: the numbers, the bytes, checkpoints, other worker counts."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import hetjax
from hetjax import PerWorker, data_parallel_step, slamb, slamb_average
from hetjax.ir.errors import HetjaxError
from hetjax.optim.hlo_collectives import collectives_in

FEATURES, CLASSES, BATCH = 12, 5, 32


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(40)(x))
        return nn.Dense(CLASSES)(x)


def loss_fn(params, batch):
    logits = Mlp().apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits


def train_step(state, batch):
    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
    correct = jnp.sum(logits.argmax(-1) == batch["y"])
    return state.apply_gradients(grads=grads), {"loss": loss, "correct": correct, "logits": logits}


def optimizer(axis_name="data", learning_rate=0.02, **kw):
    return slamb(learning_rate, axis_name, **{
        "min_size": 100, "sync_every": 5, "weight_decay": 0.01, "bound_direction": True, **kw})


@functools.lru_cache(None)
def first_parameters():
    return Mlp().init(jax.random.key(0), jnp.ones((1, FEATURES)))["params"]


def new_state(tx=None):
    return TrainState.create(apply_fn=Mlp().apply, params=first_parameters(), tx=tx or optimizer())


@functools.lru_cache(None)
def batch_of(t, size=BATCH):
    rng = np.random.default_rng(t)
    x = rng.normal(size=(size, FEATURES)).astype(np.float32)
    return {"x": x, "y": (x[:, :CLASSES] + 0.1 * x[:, CLASSES : 2 * CLASSES]).argmax(1)}


@functools.lru_cache(None)
def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(kind,), devices=jax.devices()[:n])


@functools.lru_cache(None)
def eight():
    return data_parallel_step(train_step, mesh_of(8), donate=False)


@functools.lru_cache(None)
def four():
    return data_parallel_step(train_step, mesh_of(4), donate=False)


@functools.lru_cache(None)
def at_37():
    """Eight workers after 37 steps: amid H = 5 and C = 10. Not donated, so tests may share it."""
    state = new_state()
    for t in range(1, 38):
        state, _ = eight()(state, batch_of(t))
    return state


def leaves_equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def reference(steps, n=8):
    """The same workers written out: one worker's step under vmap, no mesh."""
    state = new_state()

    def floating(a):
        return jnp.issubdtype(jnp.result_type(a), jnp.floating)

    axes = jax.tree.map(lambda a: 0 if floating(a) else None, state)

    def one(state, batch):
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        state = state.apply_gradients(grads=grads)
        params = slamb_average(state.params, state.opt_state, "data")
        return state.replace(params=params), loss

    step = jax.jit(jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0), axis_name="data"))
    state = jax.tree.map(
        lambda a: jnp.broadcast_to(a, (n, *jnp.shape(a))) if floating(a) else a, state)
    for t in range(1, steps + 1):
        batch = jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), batch_of(t))
        state, loss = step(state, batch)
    return state, loss.mean()


@pytest.mark.quick
def test_every_worker_has_the_numbers_of_a_loop_written_out():
    step, state = eight(), new_state()
    for t in range(1, 9):
        state, metrics = step(state, batch_of(t))
    expected, loss = reference(8)
    assert isinstance(state, PerWorker)
    assert state.num_workers == 8
    for a, b in zip(jax.tree.leaves(state.value), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, atol=1e-6)
    assert int(state.step) == int(expected.step) == 8


def test_reading_averages_and_metrics_are_of_the_whole_batch():
    step, state = eight(), new_state()
    for t in range(1, 4):
        state, metrics = step(state, batch_of(t))
    kernel = state.value.params["Dense_0"]["kernel"]
    assert kernel.shape == (8, FEATURES, 40)
    assert float(jnp.ptp(kernel, axis=0).max()) > 0
    np.testing.assert_allclose(
        state.params["Dense_0"]["kernel"], np.asarray(kernel).mean(0), atol=1e-7)
    assert state.params["Dense_0"]["kernel"].shape == (FEATURES, 40)
    assert state.average().opt_state[0].mu["Dense_1"]["bias"].shape == (CLASSES,)
    assert metrics["logits"].shape == (BATCH, CLASSES)
    correct = np.sum(np.asarray(metrics["logits"]).argmax(-1) == batch_of(3)["y"])
    assert int(metrics["correct"]) == correct
    assert "TrainState of 8 workers" in repr(state)


@pytest.mark.nightly
def test_it_trains():
    step, state = eight(), new_state()
    for t in range(1, 61):
        state, metrics = step(state, batch_of(t))
        if t == 1:
            first = float(metrics["loss"])
    assert float(metrics["loss"]) < 0.5 * first


@pytest.mark.quick
def test_one_all_reduce_and_the_averaging_branch_are_all_there_is():
    step = data_parallel_step(train_step, mesh_of(8))
    text = step.lower(new_state(), batch_of(1)).as_text()
    shapes = [a.shape for a in jax.tree.leaves(new_state().params)]
    formula = hetjax.slamb_bytes(shapes, min_size=100)
    assert [(c.kind, c.payload_bytes) for c in collectives_in(text)] == [
        ("all-reduce", formula.step_bytes), ("all-reduce", formula.average_bytes)]


@pytest.mark.parametrize("kind", [
    pytest.param(AxisType.Auto, marks=pytest.mark.nightly), AxisType.Explicit])
def test_a_mesh_may_have_other_axes_of_either_kind(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    states = []
    for step in (data_parallel_step(train_step, mesh), four()):
        state = new_state()
        for t in range(1, 4):
            state, _ = step(state, batch_of(t))
        states.append(state)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


# ---- checkpoints and other numbers of workers


@pytest.mark.parametrize("options", [
    {}, pytest.param(dict(exchange="direction", comm_dtype=jnp.float8_e4m3fn, compress_ratio=1 / 3),
                     marks=pytest.mark.nightly)])
def test_a_checkpoint_in_mid_cycle_resumes_bit_for_bit(tmp_path, options):
    import orbax.checkpoint as ocp

    step, state = eight(), at_37()
    if options:
        state = new_state(optimizer(**options))
        for t in range(1, 38):
            state, _ = step(state, batch_of(t))
        held = jax.tree.leaves(state.value.opt_state[0].held)
        assert all(np.array_equal(h, np.broadcast_to(h[:1], h.shape)) for h in map(np.asarray, held))
    assert int(state.opt_state[0].count) == 37
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "at_37", state.value)
        saver.wait_until_finished()
        template = step.spread(new_state(optimizer(**options)))
        restored = PerWorker(saver.restore(tmp_path / "at_37", template.value))
    assert leaves_equal(restored, state)
    for t in range(38, 58):
        state, _ = step(state, batch_of(t))
        restored, _ = step(restored, batch_of(t))
    assert leaves_equal(restored, state)


def test_eight_workers_become_four_by_the_mean():
    state = at_37()
    with pytest.raises(HetjaxError, match=r"8 workers .* has 4; pass it through resize"):
        four()(state, batch_of(38))
    smaller = four().resize(state)
    assert smaller.num_workers == 4
    assert int(smaller.opt_state[0].count) == 37
    for name in ("mu", "nu"):
        old = getattr(state.value.opt_state[0], name)["Dense_0"]["kernel"]
        new = getattr(smaller.value.opt_state[0], name)["Dense_0"]["kernel"]
        np.testing.assert_allclose(new, np.broadcast_to(np.asarray(old).mean(0), new.shape), atol=1e-7)
    whole, measure = batch_of(99, 512), jax.jit(loss_fn)
    before = float(measure(state.params, whole)[0])
    assert float(measure(smaller.params, whole)[0]) < 1.05 * before
    for t in range(38, 48):
        smaller, metrics = four()(smaller, batch_of(t))
    assert float(measure(smaller.params, whole)[0]) < 1.05 * before
    assert np.isfinite(metrics["loss"])


# ---- with optax's wrappers, other states, other dtypes


def test_accumulates_and_injects_inside_the_mesh():
    tx = optax.MultiSteps(
        optax.inject_hyperparams(
            slamb, static_args=("axis_name", "compress_ratio", "min_size", "sync_every", "seed",
                                "finite_vote", "nu_ratio", "bound_direction"))(
            learning_rate=0.02, axis_name="data", min_size=100, sync_every=2), every_k_schedule=4)
    state, step = new_state(tx), data_parallel_step(train_step, mesh_of(4))
    for t in range(1, 9):
        state, _ = step(state, batch_of(t))
    (inner,) = hetjax.optim._slamb.slamb_states(state.value.opt_state)
    assert int(inner.count) == 2  # real steps only


def test_a_dict_state_with_statistics_keys_and_bfloat16():
    tx = optimizer()
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), new_state().params)
    state = {"params": params, "opt": tx.init(params), "batch_stats": {"mean": jnp.zeros(FEATURES)},
             "count": jnp.int32(0)}

    def step(state, batch, key):
        noise = jax.random.normal(jax.random.fold_in(key, state["count"]), ())
        grads = jax.grad(lambda p: loss_fn(p, batch)[0])(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt,
                "batch_stats": {"mean": batch["x"].mean(0)}, "count": state["count"] + 1}, noise

    step = data_parallel_step(step, mesh_of(8))
    stats = []
    for t in range(1, 3):
        state, noise = step(state, batch_of(t), jax.random.key(3))
        stats.append(np.asarray(state.value["batch_stats"]["mean"]))
    assert np.ptp(stats[0], axis=0).max() == 0.0  # step 1 averages
    np.testing.assert_allclose(stats[0][0], batch_of(1)["x"].mean(0), atol=1e-6)
    assert np.ptp(stats[1], axis=0).max() > 0.0
    assert {a.dtype for a in jax.tree.leaves(state.value["params"])} == {jnp.dtype(jnp.bfloat16)}
    expected = jax.random.normal(jax.random.fold_in(jax.random.key(3), 1), ())
    np.testing.assert_allclose(noise, expected, rtol=1e-6)


def test_a_flax_nnx_model_in_functional_form():
    from flax import nnx

    tx = optimizer()
    model = nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(model)
    state = {"model": weights, "opt": tx.init(weights)}

    def step(state, batch):
        def loss(weights):
            logits = nnx.merge(graph, weights)(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(state["model"])
        updates, opt = tx.update(grads, state["opt"], state["model"])
        return {"model": optax.apply_updates(state["model"], updates), "opt": opt}, value

    step = data_parallel_step(step, mesh_of(8), params=lambda s: s["model"])
    losses = []
    for t in range(1, 31):
        state, value = step(state, batch_of(t))
        losses.append(float(value))
    assert losses[-1] < losses[0]


# ---- errors


def test_a_step_without_slamb_is_refused():
    step = data_parallel_step(train_step, mesh_of(8))
    with pytest.raises(HetjaxError, match=r"holds no state of hetjax\.slamb"):
        step(new_state(optax.adam(0.1)), batch_of(1))


def test_batches_that_do_not_divide_are_named_with_the_nearest():
    with pytest.raises(HetjaxError, match=r"(?s)batch\['x'\] \[30, 12\].*24, 32"):
        eight()(new_state(), batch_of(1, 30))


def test_an_axis_the_mesh_lacks_is_named():
    with pytest.raises(HetjaxError, match="no axis 'dp'; its axes are data of 8"):
        data_parallel_step(train_step, mesh_of(8), "dp")


def test_a_state_without_params_asks_for_them():
    with pytest.raises(HetjaxError, match="type tuple has no `params`"):
        data_parallel_step(lambda s, b: s, mesh_of(8))((jnp.ones(2),), batch_of(1))


def test_integers_that_come_to_differ_by_worker_are_refused():
    def step(state, batch):
        new, metrics = train_step(state, batch)
        return new.replace(step=new.step + jnp.sum(batch["y"])), metrics

    with pytest.raises(HetjaxError, match=r"(?s)differ by worker.*state\.step"):
        data_parallel_step(step, mesh_of(8))(new_state(), batch_of(1))


@pytest.mark.parametrize("vote", [True, False])
def test_an_axis_that_slamb_was_not_given_is_asked_for(vote):
    step = data_parallel_step(train_step, mesh_of(8))
    with pytest.raises(HetjaxError, match=r"(?s)\.count int32.*give it axis_name='data'"):
        step.lower(new_state(optimizer(None, finite_vote=vote)), batch_of(1))


def test_a_wrapper_by_which_workers_decide_apart_is_refused():
    """A worker that leaves the step alone does not join the exchange, and the others wait for it."""
    tx = optax.apply_if_finite(optimizer(), 3)
    with pytest.raises(HetjaxError, match=r"apply_if_finite.*Leave the wrapper out"):
        data_parallel_step(train_step, mesh_of(8)).lower(new_state(tx), batch_of(1))


def test_a_step_that_returns_something_else_is_refused():
    with pytest.raises(HetjaxError, match="must return a state of the structure"):
        data_parallel_step(lambda s, b: s.params, mesh_of(8))(new_state(), batch_of(1))


def test_an_empty_batch_is_refused_by_name():
    step = data_parallel_step(lambda state, batch: state, jax.make_mesh((8,), ("data",)))
    with pytest.raises(HetjaxError, match="the batch holds no array"):
        step({"params": jnp.ones(2)}, {})
