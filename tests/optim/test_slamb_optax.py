"""The checks optax's own contrib tests put to every optimizer, and its wrappers around SLAMB."""

import doctest
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax import slamb, slamb_bytes
from hetjax.optim import _slamb
from hetjax.optim._slamb import ScaleBySlambState, scale_by_slamb

STATIC = ("compress_ratio", "min_size", "sync_every", "seed", "finite_vote", "nu_ratio",
          "bound_direction")


def parabola(dtype=jnp.float32):
    target = jnp.array([1.0, -1.0, 1.0], dtype)
    return jnp.array([-1.0, 10.0, 1.0], dtype), target, lambda p: jnp.sum((p - target) ** 2)


def rosenbrock(dtype=jnp.float32):
    return (jnp.array([0.0, 0.0], dtype), jnp.array([1.0, 1.0], dtype),
            lambda p: (1.0 - p[0]) ** 2 + 100.0 * (p[1] - p[0] ** 2) ** 2)


def matrix_parabola(dtype=jnp.float32):
    target = jnp.array([[3.0, -2.0], [1.0, 4.0]], dtype)
    return jnp.zeros((2, 2), dtype), target, lambda p: jnp.sum((p - target) ** 2)


def mixed(dtype=jnp.float32):
    target = (jnp.array([1.0, -1.0, 2.0], dtype), jnp.array([[1.0, 0.0], [-1.0, 1.0]], dtype))
    start = (jnp.zeros(3, dtype), jnp.zeros((2, 2), dtype))
    return start, target, lambda p: sum(jnp.sum((a - b) ** 2) for a, b in zip(p, target))


def stepper(tx, objective, **extra):
    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(objective)(params), state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


class CompileLog(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        if "Finished XLA compilation" in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.mark.quick
def test_takes_extra_arguments_and_does_not_compile_twice():
    params, _, objective = rosenbrock()
    tx = slamb(1e-3)
    step = stepper(tx, objective, unexpected_argument=1)
    state = tx.init(params)
    log, logger = CompileLog(), logging.getLogger("jax")
    logger.addHandler(log)
    try:
        with jax.log_compiles():
            params, state = step(params, state)
            assert log.messages  # the log works
            log.messages.clear()
            params, state = step(params, state)
            params, state = step(params, state)
    finally:
        logger.removeHandler(log)
    assert not log.messages


@pytest.mark.parametrize("problem", [
    rosenbrock, mixed, pytest.param(parabola, marks=pytest.mark.nightly),
    pytest.param(matrix_parabola, marks=pytest.mark.nightly)])
def test_converges(problem):
    params, target, objective = problem()
    tx = slamb(1e-3, min_size=0)
    step = stepper(tx, objective)
    (params, _), _ = jax.lax.scan(
        lambda carry, _: (step(*carry), None), (params, tx.init(params)), length=30_000)
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(target)):
        np.testing.assert_allclose(got, expected, rtol=3e-2, atol=3e-2)


def test_its_state_can_be_mapped():
    tx = slamb(1e-3)
    state = tx.init({"w": jnp.ones((2, 3)), "b": jnp.ones(2)})
    doubled = optax.tree.map_params(tx, lambda v: v + 2, state)
    assert float(doubled[0].mu["w"][0, 0]) == 2.0
    assert int(doubled[0].count) == 0


@pytest.mark.quick
def test_can_be_wrapped_in_inject_hyperparams():
    kwargs = dict(learning_rate=1e-3, b3=0.9, weight_decay=0.1, min_size=0, compress_ratio=0.5)
    tx, injected = slamb(**kwargs), optax.inject_hyperparams(slamb, static_args=STATIC)(**kwargs)
    params = [jnp.negative(jnp.ones((2, 3))), jnp.ones((2, 5, 2))]
    grads = [jnp.ones((2, 3)), jnp.negative(jnp.ones((2, 5, 2)))]
    state, injected_state = tx.init(params), injected.init(params)
    plain_step, injected_step = jax.jit(tx.update), jax.jit(injected.update)
    for _ in range(3):
        updates, state = plain_step(grads, state, params)
        got, injected_state = injected_step(grads, injected_state, params)
        for a, b in zip(jax.tree.leaves((updates, state)),
                        jax.tree.leaves((got, injected_state.inner_state))):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert {"learning_rate", "b1", "b2", "b3", "eps", "weight_decay", "min_ratio",
            "max_ratio"} <= set(injected_state.hyperparams)


def test_injecting_what_sets_shapes_is_refused_by_name():
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"compress_ratio .*static_args"):
        optax.inject_hyperparams(slamb)(learning_rate=0.1).init(params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_preserves_the_dtype_and_keeps_float32_moments(dtype):
    params = {"w": jnp.ones((3, 2), dtype), "b": jnp.array([1.0, 2.0], dtype)}
    tx = slamb(0.1, min_size=0)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert {m.dtype for m in jax.tree.leaves((state[0].mu, state[0].nu))} == {
        jnp.dtype(jnp.float32)}


def test_the_second_moment_of_bfloat16_parameters_is_not_rounded_away():
    """0.999 is 1 in bfloat16, and a moment kept there would grow without end."""
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    tx = scale_by_slamb(b2=0.999)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(100):
        _, state = update({"w": jnp.full((4, 4), 2.0, jnp.bfloat16)}, state, params)
    np.testing.assert_allclose(state.nu["w"], 4 * (1 - 0.999**100), rtol=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_multi_steps_counts_real_steps_only(dtype):
    params = jnp.array([1.0, 2.0], dtype)
    tx = optax.MultiSteps(slamb(0.1), every_k_schedule=4)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for t in range(1, 9):
        updates, state = update(2 * params, state, params)
        assert np.all(np.asarray(updates) == 0) == (t % 4 != 0)
        assert int(state.inner_opt_state[0].count) == t // 4


@pytest.mark.parametrize("dtype", [
    jnp.bfloat16, jnp.float32, pytest.param(jnp.float16, marks=pytest.mark.nightly),
    pytest.param(jnp.float64, marks=pytest.mark.nightly)])
def test_state_has_one_shape_and_dtype_under_cond(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        params, _, objective = parabola(dtype)
        tx = slamb(1e-3)

        @jax.jit
        def step(params, state, take):
            grads = jax.grad(objective)(params)
            updates, state = jax.lax.cond(
                take, lambda: tx.update(grads, state, params), lambda: (params, state))
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for take in (True, False, True):
            params, new_state = step(params, state, take)
            assert params.dtype == dtype
            state = jax.lax.cond(take, lambda a, b: a, lambda a, b: b, new_state, state)


@pytest.mark.quick
def test_a_constant_schedule_is_the_constant():
    params, _, objective = parabola()
    ends = []
    for learning_rate in (1e-3, optax.constant_schedule(1e-3)):
        tx = slamb(learning_rate)
        state, p = tx.init(params), params
        step = stepper(tx, objective)
        for _ in range(10):
            p, state = step(p, state)
        ends.append(np.asarray(p))
    np.testing.assert_array_equal(*ends)


def test_works_masked_and_partitioned():
    params = {"w": jnp.ones((4, 3)), "table": jnp.ones((5, 2)), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda a: 0.5 * a, params)
    whole = scale_by_slamb(min_size=0, compress_ratio=0.5)
    expected, _ = jax.jit(whole.update)(grads, whole.init(params), params)
    masked = optax.masked(whole, {"w": True, "table": False, "b": True})
    got, state = jax.jit(masked.update)(grads, masked.init(params), params)
    np.testing.assert_array_equal(got["table"], grads["table"])
    for k in ("w", "b"):  # the choice of coordinates goes by path, not by position
        np.testing.assert_array_equal(got[k], expected[k])
    parts = optax.partition(
        {"ours": whole, "sgd": optax.sgd(0.1)}, {"w": "ours", "table": "sgd", "b": "ours"})
    got, state = jax.jit(parts.update)(grads, parts.init(params), params)
    np.testing.assert_allclose(got["table"], -0.05)
    np.testing.assert_array_equal(got["w"], expected["w"])
    (found,) = _slamb.slamb_states(state)
    assert isinstance(found, ScaleBySlambState)
    assert int(found.count) == 1
    empty = optax.masked(whole, {"w": False, "table": False, "b": False})
    got, _ = empty.update(grads, empty.init(params), params)
    np.testing.assert_array_equal(got["w"], grads["w"])


def test_decay_is_masked_by_tree_or_function_and_spares_vectors_by_default():
    params = {"w": jnp.full((4, 3), 2.0), "b": jnp.ones(3)}
    zero = jax.tree.map(jnp.zeros_like, params)
    def moves(**kw):
        return {
            k: bool(np.any(u != 0)) for k, u in (lambda tx: jax.jit(tx.update)(
                zero, tx.init(params), params)[0])(scale_by_slamb(weight_decay=0.1, **kw)).items()}
    assert moves() == {"w": True, "b": False}
    assert moves(weight_decay_mask={"w": False, "b": True}) == {"w": False, "b": True}
    assert moves(weight_decay_mask=lambda p: jax.tree.map(lambda _: True, p)) == {
        "w": True, "b": True}


@pytest.mark.parametrize("kwargs,message", [
    (dict(compress_ratio=0.0), r"compress_ratio must lie in \(0, 1\], got 0.0"),
    (dict(compress_ratio=1.5), "got 1.5"),
    (dict(sync_every=-1), "sync_every must be a whole number"),
    (dict(compress_ratio=((5, 0.5),)), "must start at step 0"),
    (dict(compress_ratio=((0, 0.5), (0, 0.1))), "must start at step 0 and ascend"),
    (dict(seed=jnp.array(3)), "seed must be a Python value"),
    (dict(finite_vote=jnp.array(True)), "finite_vote must be a Python value"),
    (dict(nu_ratio=1.5), r"nu_ratio must lie in \[0, 1\], got 1.5"),
    (dict(compensation="none"), "compensation must be 'held' or 'local', got 'none'"),
    (dict(exchange="gradient"), "exchange must be 'direction' or 'momentum', got 'gradient'"),
    (dict(exchange="direction", nu_ratio=0.1), "goes with compensation='local' and nu_ratio=0"),
    (dict(comm_dtype=jnp.float8_e4m3fn), "float8_e4m3fn has no room .* give exchange='direction'"),
    (dict(compress_ratio=None), "compress_ratio must be a number or stages"),
    (dict(compress_ratio=optax.constant_schedule(0.1)), "compress_ratio must be a number or stages"),
    (dict(compress_ratio=(0, 0.5)), r"stages .* got \(0, 0.5\)"),
    (dict(compress_ratio=((0, 0.5), (2.5, 0.1))), "whole steps"),
    (dict(sync_every="10"), "sync_every must be a number or stages"),
    (dict(comm_dtype=jnp.int32), "comm_dtype must be a floating dtype"),
    (dict(comm_dtype=jnp.int8, exchange="direction"), "comm_dtype must be a floating dtype"),
    (dict(comm_dtype=jnp.float8_e8m0fnu, exchange="direction"), "comm_dtype must be a floating"),
    (dict(comm_dtype="floaty"), "comm_dtype must be a floating dtype .* got 'floaty'"),
    (dict(compress_ratio=2.0, sync_every=-3), "2.0; sync_every"),
    (dict(b1=1.0, b2=-0.1), r"b1 must lie in \[0, 1\), got 1.0; b2 .*, got -0.1"),
    (dict(b3=float("nan")), "b3 must lie .* got nan"),
    (dict(eps="small", weight_decay=-1), "eps must .* got 'small'; weight_decay must .* got -1"),
    (dict(min_ratio=2.0, max_ratio=1.0), "min_ratio=2.0 must not be above max_ratio=1.0"),
    (dict(min_size=-5, seed=1.5), "min_size must be .* got -5; seed must be a whole number, got 1.5"),
    (dict(finite_vote="yes", bound_direction=2), "finite_vote must .* 'yes'; bound_direction must"),
    (dict(axis_name=["data"]), r"axis_name must be the name .* got \['data'\]"),
    (dict(axis_name=()), r"axis_name must be the name .* got \(\)"),
])
def test_arguments_out_of_range_are_refused_together(kwargs, message):
    with pytest.raises(ValueError, match=message):
        slamb(0.1, **kwargs)


@pytest.mark.parametrize("rate", [None, "0.1", float("nan")])
def test_a_learning_rate_that_is_none_is_refused_before_the_first_step(rate):
    with pytest.raises(ValueError, match="learning_rate must be a number or a schedule"):
        slamb(rate)


def test_parameters_are_needed_and_must_be_floating():
    tx = slamb(0.1)
    params = {"w": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"\['ids'\] int32\[3\]"):
        tx.init({"w": jnp.ones(2), "ids": jnp.arange(3)})


@pytest.mark.parametrize("min_size", [0, 9000])
def test_state_keeps_its_sharding_type_under_an_explicit_mesh(min_size):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,))
    whole = jax.random.normal(jax.random.key(0), (4, 6))
    tx = slamb(0.1, min_size=min_size, compress_ratio=0.5)
    expected, _ = jax.jit(tx.update)(whole, tx.init(whole), whole)
    with jax.set_mesh(mesh):
        params = jax.device_put(whole, NamedSharding(mesh, P("model", None)))
        state = tx.init(params)
        updates, new_state = jax.jit(tx.update)(params, state, params)
        assert jax.typeof(updates) == jax.typeof(params)
        assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(_slamb)
    assert result.attempted > 5
    assert result.failed == 0


def test_the_byte_formula_refuses_ratios_out_of_range():
    with pytest.raises(ValueError, match="compress_ratio"):
        slamb_bytes([(3, 4)], compress_ratio=0)
    with pytest.raises(ValueError, match="nu_ratio"):
        slamb_bytes([(3, 4)], nu_ratio=-1)


def test_numbers_of_numpy_are_numbers():
    slamb(np.float32(0.1), compress_ratio=np.float32(0.1), sync_every=((0, 10), (5, np.int64(3))),
          b1=jnp.bfloat16(0.9).item(), b2=np.float32(0.99), eps=0, max_ratio=float("inf"),
          min_size=np.int32(7), weight_decay=jnp.array(0.1), finite_vote=np.bool_(True))


@pytest.mark.parametrize("min_size", [0, 9000])
def test_an_empty_parameter_does_not_stop_the_rest(min_size):
    params = {"none": jnp.zeros((0, 5)), "w": jnp.ones((4, 6))}
    tx = slamb(0.1, min_size=min_size)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["none"].shape == (0, 5)
    assert jnp.all(updates["w"] != 0) and state[0].count == 1


@pytest.mark.parametrize("b1,b2", [(0.95, 0.9), (0.9, 0.0)])
def test_a_direction_without_a_bound_is_left_alone(b1, b2):
    """From b1^2 >= b2 on there is none: the root of a negative number made every parameter NaN."""
    params = {"w": jnp.arange(1.0, 25.0).reshape(4, 6)}
    free, bounded = (
        scale_by_slamb(b1=b1, b2=b2, bound_direction=bound) for bound in (False, True))
    expected, _ = free.update(params, free.init(params), params)
    updates, _ = bounded.update(params, bounded.init(params), params)
    np.testing.assert_array_equal(updates["w"], expected["w"])


def test_a_decay_mask_may_be_a_prefix_and_another_tree_is_named():
    params = {"a": {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}, "c": jnp.ones((2, 2))}

    def updates(mask):
        tx = slamb(0.1, weight_decay=0.1, weight_decay_mask=mask)
        return tx.update(params, tx.init(params), params)[0]

    whole = {"a": {"w": True, "b": True}, "c": False}
    jax.tree.map(np.testing.assert_array_equal, updates({"a": True, "c": False}), updates(whole))
    with pytest.raises(ValueError, match="weight_decay_mask must be a tree of Python bools"):
        updates({"a": True})


def test_an_axis_that_is_not_bound_is_named():
    tx = slamb(0.1, "data")
    params = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="no axis 'data' is bound here"):
        tx.update(params, tx.init(params), params)
