"""What crosses between stages in fewer bits: bytes, rounding, text, plans; nothing where it is not asked for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

import hetjax
from hetjax.errors import PlanError, VerifyError
from hetjax.ir.exporter import export_jaxpr
from hetjax.ir.graph import Aval
from hetjax.ir.parser import parse_bundle
from hetjax.ir.plan import Plan
from hetjax.ir.text import print_bundle
from hetjax.passes.compress_crossings import _coder
from hetjax.passes.manager import run_pipeline
from tests.support import assert_same

MICROBATCHES, BATCH, WIDTH = 2, 16, 64


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(x)))
        return x


def make_step():
    model = Blocks()
    rng = np.random.default_rng(0)
    batch = tuple(rng.normal(size=(BATCH, WIDTH)).astype(np.float32) for _ in range(2))
    params = model.init(jax.random.key(0), batch[0])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def step(state, batch):
        x, y = batch

        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, state, batch


def distance(actual, expected) -> float:
    """Returns the largest difference of any leaf over the leaf's largest element."""
    return max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(np.asarray(b))))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))


@pytest.fixture(scope="module")
def runs():
    step, state, batch = make_step()
    expected = jax.jit(step)(state, batch)
    out = {}
    for dtype in (None, "bfloat16", "float8_e4m3fn"):
        parallel = hetjax.parallelize(step, num_stages=2, mesh="2,1", num_microbatches=MICROBATCHES, crossing_dtype=dtype)
        out[dtype] = parallel, parallel(state, batch)
    return expected, out


def test_bytes_between_stages_shrink_by_the_width_of_the_type(runs):
    _, out = runs
    sent = {dtype: parallel.stats()["bytes_between_stages"] for dtype, (parallel, _) in out.items()}
    values = 2 * MICROBATCHES  # there and back
    assert sent[None] == values * (BATCH // MICROBATCHES) * WIDTH * 4
    assert sent["bfloat16"] == sent[None] // 2
    assert sent["float8_e4m3fn"] == sent[None] // 4 + 2 * 4 * values  # and a scale to each of two devices


def test_momenta_differ_from_plain_jit_by_the_rounding_and_no_more(runs):
    expected, out = runs
    assert_same(out[None][1][0].params, expected[0].params)
    off = {dtype: distance(state.opt_state, expected[0].opt_state) for dtype, (_, (state, _)) in out.items()}
    # A few roundings of 2^-9 or 2^-4, and not none: what crosses is rounded.
    assert 1e-4 < off["bfloat16"] < 0.02 and 1e-3 < off["float8_e4m3fn"] < 0.3, off


def test_values_that_the_type_holds_cross_unchanged():
    def step(weights, batch):
        def loss_fn(weights):
            x = batch @ weights[0]
            return jnp.sum(x @ weights[1])

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss_fn)(weights))

    rng = np.random.default_rng(1)
    weights = [rng.integers(-1, 2, (32, 32)).astype(np.float32) for _ in range(2)]
    batch = np.eye(32, dtype=np.float32)[rng.integers(0, 32, 16)]  # every sum over a row has one term
    expected = jax.jit(step)(weights, batch)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, crossing_dtype="bfloat16")
    assert_same(parallel(weights, batch), expected)
    assert any(r.ref >= len(parallel.lower(weights, batch)._entry.graph.avals) for r in parallel.lower(weights, batch)._entry.program.reshards)


def test_a_value_that_two_stages_read_crosses_narrow_to_both():
    def step(weights, batch):
        def loss_fn(weights):
            first = batch @ weights[0]  # nothing of its own stage reads it
            second = jnp.tanh(first @ weights[1])
            third = jnp.tanh(second @ weights[2])
            return jnp.mean((jnp.tanh((third + first) @ weights[3]) + first) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    rng = np.random.default_rng(2)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(4)]
    batch = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    expected, _ = jax.jit(step)(weights, batch)
    options = {"num_stages": 3, "mesh": "1,1", "num_microbatches": MICROBATCHES}
    plain = hetjax.parallelize(step, **options)
    plain(weights, batch)
    skips = {(r.ref, r.target) for r in plain._in_use().program.reshards if r.form == "micro" and r.source == 0}
    assert len(skips) > len({ref for ref, _ in skips})  # a value that goes to two stages
    narrow = hetjax.parallelize(step, crossing_dtype="bfloat16", **options)
    got, _ = narrow(weights, batch)
    assert distance(jax.tree.map(np.subtract, got, weights), jax.tree.map(np.subtract, expected, weights)) < 0.03
    assert narrow.stats()["bytes_between_stages"] * 2 == plain.stats()["bytes_between_stages"]


def test_explain_and_program_text_say_what_crosses(runs):
    _, out = runs
    parallel, _ = out["float8_e4m3fn"]
    entry = parallel._in_use()
    assert "values cross in float8_e4m3fn by choice" in parallel.explain()
    assert all(entry.program.micro_avals[r.ref].dtype in ("f8e4m3fn", "f32") for r in entry.program.reshards)
    text = print_bundle(entry.bundle)
    again = parse_bundle(text)
    assert print_bundle(again) == text
    assert run_pipeline(again, "verify") is again
    assert run_pipeline(entry.bundle, "compress-crossings{dtype=float8_e4m3fn}") is entry.bundle  # the scales are small


def test_the_choice_is_kept_in_the_plan(runs):
    _, out = runs
    plan = out["bfloat16"][0].plan
    assert Plan.from_json(plan.to_json()) == plan and plan.crossing_dtype == "bfloat16"
    other = plan.with_(crossing_dtype="")
    rows = {row.what: row for row in other.delta.costs}
    assert rows["bytes between stages"].after == 2 * rows["bytes between stages"].before
    with pytest.raises(VerifyError, match="crossing_dtype is 'bfloat17'; did you mean 'bfloat16'"):
        plan.with_(crossing_dtype="bfloat17")
    with pytest.raises(PlanError, match="crossing_dtype: activations cannot cross in 'f8'"):
        Plan.from_json(plan.to_json().replace('"bfloat16"', '"f8"'))
    with pytest.raises(PlanError, match="crossing_dtype is 'f16'; it may be bfloat16"):
        hetjax.parallelize(lambda s, b: s, crossing_dtype="f16")


@functools.cache
def coder(what: str, dtype: str):
    graph = _coder(what, Aval("f32", (64,)), dtype)
    closed = export_jaxpr(what, graph.ops, [a.ref for a in graph.inputs], [r.atom for r in graph.outputs], graph.avals)
    return jax.jit(jaxpr_as_fun(closed))


def coded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns what arrives of 64 elements that cross in a type."""
    return np.asarray(coder("widen", dtype)(*coder("narrow", dtype)(x))[0])


@pytest.mark.parametrize(("dtype", "mantissa"), [("bf16", 7), ("f8e4m3fn", 3), ("f8e5m2", 2)])
@settings(max_examples=25, deadline=None)
@given(exponent=st.integers(-30, 30), seed=st.integers(0, 2**16), zeros=st.booleans())
def test_every_element_arrives_within_half_a_step_of_the_type(dtype, mantissa, exponent, seed, zeros):
    x = (np.random.default_rng(seed).normal(size=(64,)) * 2.0**exponent).astype(np.float32)
    x[::3] = 0 if zeros else x[::3]
    got = coded(x, dtype)
    # Elements far below the largest lie under the narrow type's smallest normal number: 2^-6 under 2^8, 2^-14 under 2^15.
    floor = np.max(np.abs(x)) * {"bf16": 0.0, "f8e4m3fn": 2.0**-14, "f8e5m2": 2.0**-29}[dtype]
    assert np.all(np.abs(got - x) <= np.maximum(np.abs(x), floor) * 2.0 ** -(mantissa + 1) * 1.001)
    assert np.all(got[x == 0] == 0)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3fn", "f8e5m2"])
def test_nan_and_infinity_are_not_hidden_and_zero_stays_zero(dtype):
    x = np.ones(64, np.float32)
    for odd in (np.nan, np.inf, -np.inf):
        x[5] = odd
        assert not np.isfinite(coded(x, dtype)[5])
    assert np.all(coded(np.zeros(64, np.float32), dtype) == 0)
