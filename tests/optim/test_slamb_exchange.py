"""What SLAMB puts on the wire, read off program text, and what it does when a number is not finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hetjax import average_params, scale_by_slamb, slamb, slamb_average, slamb_bytes
from hetjax.optim.hlo_collectives import Collective, collectives_in

AXIS, WORKERS = "data", 8
WIDTH, HIDDEN, CLASSES = 256, 1024, 64


def mlp_shapes(layers):
    layer = {"w1": (WIDTH, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, WIDTH), "b2": (WIDTH,),
             "scale": (WIDTH,)}
    return {**{f"l{i}": layer for i in range(layers)}, "out": (WIDTH, CLASSES)}


def shapes(layers):
    return jax.tree.leaves(mlp_shapes(layers), is_leaf=lambda x: isinstance(x, tuple))


# Elements all-reduced of one moment of the MLP of one layer at a ratio of a tenth, and of all of it.
SENT, WHOLE = 2 * 26_215 + 1024 + 2 * 256 + 1639, 2 * 262_144 + 1024 + 2 * 256 + 16_384


def loss(params, x, y):
    h = x
    for i in range(len(params) - 1):
        layer = params[f"l{i}"]
        z = h / (jnp.std(h, axis=-1, keepdims=True) + 1e-5) * layer["scale"]
        h = h + jax.nn.gelu(z @ layer["w1"] + layer["b1"]) @ layer["w2"] + layer["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], y).mean()


@functools.lru_cache(None)
def mesh():
    return jax.make_mesh((WORKERS,), (AXIS,), axis_types=(AxisType.Auto,))


def lower(tx, average=None, worker_axis=True, layers=1):
    """The lowered step of 8 workers on an MLP, of 2,119,680 parameters with 4 layers; none is computed."""
    def abstract(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)
    params = jax.tree.map(abstract, mlp_shapes(layers), is_leaf=lambda x: isinstance(x, tuple))
    state = jax.eval_shape(tx.init, params)

    def has_axis(a):
        return worker_axis and jnp.issubdtype(a.dtype, jnp.floating)

    def stack(tree):
        return jax.tree.map(
            lambda a: abstract((WORKERS, *a.shape), a.dtype) if has_axis(a) else a, tree)

    def spec(tree):
        return jax.tree.map(lambda a: P(AXIS) if has_axis(a) else P(), tree)

    # Integers have no worker axis: they are the same everywhere, and typed so.
    def strip(tree):
        return jax.tree.map(
            lambda a: a[0] if jnp.issubdtype(a.dtype, jnp.floating) and worker_axis else a, tree)

    def dress(tree):
        return jax.tree.map(
            lambda a: a[None] if jnp.issubdtype(a.dtype, jnp.floating) and worker_axis else a, tree)

    def step(params, state, x, y):
        params, state = strip(params), strip(state)
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
        if average == "always":
            params = average_params(params, AXIS)
        elif average == "when due":
            params = slamb_average(params, state, AXIS)
        return dress(params), dress(state)

    mapped = jax.shard_map(
        step, mesh=mesh(), in_specs=(spec(params), spec(state), P(AXIS), P(AXIS)),
        out_specs=(spec(params), spec(state)))
    return jax.jit(mapped).lower(
        stack(params), stack(state), abstract((64, WIDTH)), abstract((64,), jnp.int32))


# ---- 3. bytes


@pytest.mark.parametrize("ratio,vote,step_bytes", [
    (0.1, False, 870_012), (0.1, True, 870_016),
    pytest.param(0.5, False, 4_251_648, marks=pytest.mark.nightly),
    pytest.param(1.0, False, 8_478_720, marks=pytest.mark.nightly),
    pytest.param(0.05, False, 447_312, marks=pytest.mark.nightly)])
def test_one_step_is_one_all_reduce_of_the_formulas_bytes(ratio, vote, step_bytes):
    lowered = lower(
        slamb(1e-3, AXIS, compress_ratio=ratio, weight_decay=0.01, finite_vote=vote), layers=4)
    expected = slamb_bytes(shapes(4), compress_ratio=ratio, finite_vote=vote)
    assert expected.step_bytes == step_bytes
    assert [(c.kind, c.payload_bytes) for c in collectives_in(lowered.as_text())] == [
        ("all-reduce", step_bytes)]


def test_no_dense_reduction_creeps_in_when_xla_compiles_it():
    compiled = lower(slamb(1e-3, AXIS, weight_decay=0.01)).compile()
    assert [(c.kind, c.payload_bytes) for c in collectives_in(compiled.as_text())] == [
        ("all-reduce", 4 * (SENT + 1))]


@pytest.mark.parametrize("compensation", ["local", "held"])
def test_two_moments_in_bfloat16_are_the_bytes_of_one_in_float32(compensation):
    tx = slamb(1e-3, AXIS, compensation=compensation, nu_ratio=0.1, comm_dtype=jnp.bfloat16)
    assert collectives_in(lower(tx).as_text()) == [
        Collective("all-reduce", 2 * (2 * SENT + 1), (f"bf16[{2 * SENT + 1}]",))]
    assert slamb_bytes(shapes(1), nu_ratio=0.1, comm_itemsize_bytes=2).step_bytes == 2 * (2 * SENT + 1)


@pytest.mark.parametrize("nu_ratio,of_dense", [(0.0, 0.103), (0.1, 0.206)])
def test_an_averaging_step_adds_the_parameters_exactly(nu_ratio, of_dense):
    lowered = lower(slamb(1e-3, AXIS, nu_ratio=nu_ratio), average="always")
    formula = slamb_bytes(shapes(1), nu_ratio=nu_ratio)
    assert [c.payload_bytes for c in collectives_in(lowered.as_text())] == [
        formula.step_bytes, 4 * WHOLE]
    assert formula.average_bytes == formula.dense_bytes == 4 * WHOLE
    assert formula.of_dense(0) <= of_dense
    assert formula.of_dense(100) <= of_dense + 0.0101


def test_averaging_when_due_is_a_branch_of_the_same_program():
    text = lower(slamb(1e-3, AXIS), average="when due").as_text()
    assert [c.payload_bytes for c in collectives_in(text)] == [4 * (SENT + 1), 4 * WHOLE]
    assert text.index("stablehlo.case") < text.rindex("stablehlo.all_reduce")


@pytest.mark.parametrize("dtype,name", [
    (jnp.bfloat16, "bf16"), pytest.param(jnp.float16, "f16", marks=pytest.mark.nightly)])
def test_a_half_size_payload_halves_the_bytes(dtype, name):
    (only,) = collectives_in(lower(slamb(1e-3, AXIS, comm_dtype=dtype)).as_text())
    assert only == Collective("all-reduce", 2 * (SENT + 1), (f"{name}[{SENT + 1}]",))
    assert slamb_bytes(shapes(1), comm_itemsize_bytes=2).step_bytes == only.payload_bytes


def test_a_third_in_eight_bits_is_a_twelfth_of_the_bytes():
    """Directions have no unit, so eight bits hold them; moments of any size would vanish."""
    tx = slamb(1e-3, AXIS, compress_ratio=1 / 3, comm_dtype=jnp.float8_e4m3fn, exchange="direction")
    sent = 2 * 87_382 + 1024 + 2 * 256 + 5462 + 1
    assert collectives_in(lower(tx).as_text()) == [
        Collective("all-reduce", sent, (f"f8e4m3fn[{sent}]",))]
    formula = slamb_bytes(shapes(1), compress_ratio=1 / 3, comm_itemsize_bytes=1)
    assert formula.step_bytes == sent
    assert formula.of_dense(40) <= 0.12


def test_stages_hold_one_all_reduce_each_and_run_one():
    text = lower(slamb(1e-3, AXIS, compress_ratio=((0, 0.5), (100, 0.1)))).as_text()
    assert [c.payload_bytes for c in collectives_in(text)] == [
        4 * (262_144 + 1024 + 2 * 256 + 8192 + 1), 4 * (SENT + 1)]
    assert text.count("stablehlo.case") == 1


def test_the_reader_sees_collectives_of_all_kinds():
    def body(x):
        gathered = jax.lax.all_gather(x, AXIS)
        return jax.lax.ppermute(gathered.sum(0), AXIS, [(0, 1)]) + jax.lax.psum_scatter(
            jnp.tile(x, (WORKERS,)), AXIS, tiled=True)

    lowered = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=P(AXIS), out_specs=P(AXIS))).lower(
        jax.ShapeDtypeStruct((WORKERS * 3,), jnp.float32))
    expected = {("all-gather", 96), ("collective-permute", 12), ("reduce-scatter", 12)}
    assert {(c.kind, c.payload_bytes) for c in collectives_in(lowered.as_text())} == expected
    assert {(c.kind, c.payload_bytes)
            for c in collectives_in(lowered.compile().as_text())} == expected


# ---- the silent way to lose everything


def test_gradients_of_replicated_parameters_are_refused():
    with pytest.raises(ValueError, match="already summed, densely") as error:
        lower(slamb(1e-3, AXIS), worker_axis=False)
    assert "['l0']['w1'] float32[256, 1024]" in str(error.value)
    assert "pcast" in str(error.value)


def test_the_same_parameters_cast_to_varying_are_accepted():
    params = {"w": jnp.ones((4, 3))}
    tx = slamb(0.1, AXIS)

    def step(params, x):
        params = jax.lax.pcast(params, AXIS, to="varying")
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
        updates, _ = tx.update(grads, tx.init(params), params)
        return jax.tree.map(lambda a: a[None], updates)

    mapped = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(AXIS)), out_specs=P(AXIS)))
    assert [c.kind for c in collectives_in(mapped.lower(params, jnp.ones((8, 4))).as_text())] == [
        "all-reduce"]


# ---- 9. a number that is not finite


def one_bad_worker(tx, poison, steps=4, bad_step=3, value=jnp.nan):
    """States before and after each step of 4 workers; worker 2's gradient is poisoned once."""
    params = {"w": np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32),
              "b": np.ones(3, np.float32)}
    start = tx.init(params)

    def floating(a):
        return jnp.issubdtype(a.dtype, jnp.floating)

    axes = jax.tree.map(lambda a: 0 if floating(a) else None, start)

    def stack(tree):
        return jax.tree.map(
            lambda a: np.broadcast_to(a, (4, *a.shape)) if floating(a) else a, tree)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS))
    params, state = stack(params), stack(start)
    yield params, state
    for t in range(1, steps + 1):
        grads = jax.tree.map(
            lambda a, t=t: np.random.default_rng(t).normal(size=a.shape).astype(np.float32), params)
        if t == bad_step:
            grads["w"][2, 0, 0] = value
        updates, state = step(grads, state, params)
        params = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), params, updates)
        yield params, state


@pytest.mark.quick
@pytest.mark.parametrize("value", [
    jnp.nan, pytest.param(jnp.inf, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("ratio,compensation", [
    (0.1, "local"), (((0, 0.5), (2, 0.1)), "held"),
    (0.1, "direction"), pytest.param(0.1, "held", marks=pytest.mark.nightly)])
def test_a_bad_gradient_on_one_worker_skips_the_step_on_all(value, ratio, compensation):
    eight_bits = dict(exchange="direction", comm_dtype=jnp.float8_e4m3fn)
    tx = scale_by_slamb(AXIS, compress_ratio=ratio, min_size=0, **(
        eight_bits if compensation == "direction" else dict(compensation=compensation)))
    steps = list(one_bad_worker(tx, True, value=value))
    (params_2, state_2), (params_3, state_3), (params_4, state_4) = steps[2:]
    for before, after in ((params_2, params_3), (state_2.mu, state_3.mu), (state_2.nu, state_3.nu),
                          (state_2.held, state_3.held)):
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
            assert np.array_equal(a, b)
    assert (int(state_3.count), int(state_3.skipped)) == (2, 1)
    assert not bool(state_3.sync_due)
    assert (int(state_4.count), int(state_4.skipped)) == (3, 1)
    assert all(np.all(np.isfinite(a)) for a in map(np.float32, jax.tree.leaves((params_4, state_4))))
    assert any(not np.array_equal(a, b)
               for a, b in zip(jax.tree.leaves(params_3), jax.tree.leaves(params_4)))


def test_without_the_vote_a_nan_is_everywhere_at_once():
    tx = scale_by_slamb(AXIS, min_size=0, compress_ratio=1.0, finite_vote=False)
    *_, (params, state) = one_bad_worker(tx, True)
    assert np.all(np.isnan(np.asarray(params["w"])).any(axis=(1, 2)))
    assert int(state.skipped) == 0


def test_an_overflow_of_the_payload_dtype_skips_too():
    """The sum of four momenta of 6e4 is not finite in float16, though each gradient is."""
    tx = scale_by_slamb(AXIS, min_size=0, compress_ratio=1.0, comm_dtype=jnp.float16, b1=0.0)
    steps = list(one_bad_worker(tx, True, value=1e5))
    assert (int(steps[3][1].count), int(steps[3][1].skipped)) == (2, 1)
    assert np.array_equal(steps[2][0]["w"], steps[3][0]["w"])


def test_one_worker_skips_as_well():
    tx = slamb(0.1)
    params = {"w": jnp.ones((2, 2))}
    updates, state = jax.jit(tx.update)({"w": jnp.full((2, 2), jnp.nan)}, tx.init(params), params)
    assert np.all(np.asarray(updates["w"]) == 0)
    assert (int(state[0].count), int(state[0].skipped)) == (0, 1)
