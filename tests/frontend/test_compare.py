"""The one tolerance: what it lets through, and what it must not."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.frontend.compare import (
    Tolerance,
    compare_step,
    host_leaves,
    lowest_precision,
    worst,
)

RNG = np.random.default_rng(0)


def judge(reference, result, before=None, *, out=({}, {}), **options):
    """Returns the differences by path, of two states (and outputs) after a step."""
    before = reference if before is None else before
    differences = compare_step(
        host_leaves(before), (host_leaves(reference), host_leaves(out[0])),
        (host_leaves(result), host_leaves(out[1])), **options,
    )
    return {d.path: d for d in differences}


def verdict(reference, result, before=None, **options):
    return all(d.ok for d in judge(reference, result, before, **options).values())


def adam_step(params, grads, learning_rate=1e-2):
    """Returns {params, opt} after one Adam step."""
    tx = optax.adam(learning_rate)
    updates, opt = tx.update(grads, tx.init(params), params)
    return {"params": optax.apply_updates(params, updates), "opt": opt}


@pytest.mark.quick
@given(
    rtol=st.sampled_from([1e-6, 1e-4, 1e-2]), scale=st.floats(1e-6, 1e6), over=st.sampled_from([0.9, 1.1])
)
@settings(max_examples=40, deadline=None)
def test_the_rule_of_one_leaf_is_where_it_says(rtol, scale, over):
    leaf = np.array([scale, -scale / 3, 0.0])
    bound = Tolerance(rtol, rtol / 10)
    moved = leaf + np.array([0.0, 0.0, over * (bound.rtol + bound.atol) * scale])
    assert verdict({"w": leaf}, {"w": moved}, tolerance=bound) == (over < 1)


@pytest.mark.quick
def test_a_leaf_of_noise_is_judged_by_its_tree():
    kernel = RNG.normal(size=(8, 8)).astype(np.float32)
    noise = {"kernel": kernel, "key_bias": np.full(8, 1e-9, np.float32)}
    other = {"kernel": kernel, "key_bias": np.full(8, -1e-9, np.float32)}
    assert verdict({"params": noise}, {"params": other})
    assert not verdict({"params": {"key_bias": noise["key_bias"]}}, {"params": {"key_bias": other["key_bias"]}})


@pytest.mark.quick
def test_outputs_do_not_hide_behind_one_another():
    count, loss = np.float32(1e7), np.float32(3.0)
    got = judge({}, {}, out=({"tokens": count, "loss": loss}, {"tokens": count, "loss": loss * 1.001}))
    assert got["out/tokens"].ok
    assert not got["out/loss"].ok


@pytest.mark.quick
@pytest.mark.parametrize(
    ("a", "b"),
    [(np.int32(3), np.int32(4)), (np.bool_(True), np.bool_(False)), (np.uint32(0), np.uint32(2**31))],
)
def test_integers_and_booleans_are_exact(a, b):
    assert verdict({"x": a}, {"x": a})
    assert not verdict({"x": a}, {"x": b})


@pytest.mark.quick
def test_keys_are_exact():
    assert verdict({"k": jax.random.key(0)}, {"k": jax.random.key(0)})
    got = judge({"k": jax.random.key(0)}, {"k": jax.random.key(1)})
    assert got["state/k"].rule == "exact"
    assert not got["state/k"].ok


@pytest.mark.quick
def test_structure_is_exact():
    x = jnp.ones(3)
    got = judge(
        {"a": x, "b": x, "c": x, "d": jnp.asarray(1.0)},
        {"a": x.astype(jnp.bfloat16), "b": x[:2], "d": jnp.float32(1.0), "e": x},
    )
    assert {p: d.note for p, d in got.items()} == {
        "state/a": "dtype bfloat16, plain jit gives float32",
        "state/b": "shape (2,), plain jit gives (3,)",
        "state/c": "missing: plain jit returns this leaf",
        "state/d": "weak type False, plain jit gives True",
        "state/e": "unexpected: plain jit returns no such leaf",
    }
    assert not any(d.ok for d in got.values())


@pytest.mark.quick
def test_not_finite_equals_only_itself():
    a = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    same = judge({"x": a}, {"x": a.copy()})["state/x"]
    assert same.ok
    assert "3 of 4 elements of plain jit are not finite" in same.note
    for i, value in ((0, 0.0), (1, np.nan), (2, np.inf), (3, np.nan)):
        b = a.copy()
        b[i] = value
        assert not verdict({"x": a}, {"x": b})


def gradients(noise):
    """Gradients with a leaf at noise level: attention's key bias, and one ordinary leaf."""
    kernel = RNG.normal(size=(16, 16)).astype(np.float32)
    return {"kernel": kernel, "key_bias": RNG.normal(size=16).astype(np.float32) * noise}


@pytest.mark.quick
def test_adam_amplifies_noise_and_is_not_blamed_for_it():
    params = {"kernel": np.ones((16, 16), np.float32), "key_bias": np.zeros(16, np.float32)}
    grads = gradients(1e-8)
    other = {"kernel": grads["kernel"] * (1 + 3e-7), "key_bias": -grads["key_bias"]}
    before = {"params": params, "opt": optax.adam(1e-2).init(params)}
    reference, result = adam_step(params, grads), adam_step(params, other)
    moved = np.abs(reference["params"]["key_bias"] - result["params"]["key_bias"]).max()
    assert moved > 1e-3, "the case must show the amplification it is about"
    got = judge(reference, result, before)
    assert got["state/params/key_bias"].rule == "normalised"
    assert all(d.ok for d in got.values())


@pytest.mark.quick
@pytest.mark.parametrize("wrong", ["update of one element", "one leaf not decayed", "learning rate"])
def test_adam_parameters_are_still_watched(wrong):
    params = {"kernel": RNG.normal(size=(16, 16)).astype(np.float32), "key_bias": np.zeros(16, np.float32)}
    before = {"params": params, "opt": optax.adam(1e-2).init(params)}
    reference = adam_step(params, gradients(1e-8))
    result = jax.tree.map(np.array, reference)
    kernel = result["params"]["kernel"]
    if wrong == "update of one element":
        kernel[3, 4] = params["kernel"][3, 4]
    elif wrong == "one leaf not decayed":
        kernel -= 1e-2 * 1e-2 * params["kernel"]
    else:
        kernel += 1e-3 * (kernel - params["kernel"])
    got = judge(reference, result, before)
    assert not got["state/params/kernel"].ok
    assert got["state/opt/0/mu/kernel"].ok


@pytest.mark.quick
def test_a_wrong_moment_is_seen_where_parameters_hide_it():
    params = {"kernel": np.ones((16, 16), np.float32), "key_bias": np.zeros(16, np.float32)}
    grads = gradients(1e-8)
    doubled = jax.tree.map(lambda g: 2 * g, grads)  # Adam divides a factor of the gradient away
    before = {"params": params, "opt": optax.adam(1e-2).init(params)}
    got = judge(adam_step(params, grads), adam_step(params, doubled), before)
    assert not got["state/opt/0/mu/kernel"].ok


@pytest.mark.quick
def test_groups_follow_the_optimizer_through_labels_and_nested_states():
    params = {"l0": {"w": np.ones(3, np.float32)}, "l1": {"w": np.ones(3, np.float32)}}
    tx = optax.multi_transform({"t": optax.adam(1e-2), "m": optax.sgd(1e-2, momentum=0.9)}, {"l0": "t", "l1": "m"})
    state = {"params": params, "opt_state": tx.init(params)}
    groups = {p: (d.group, d.rule) for p, d in judge(state, state).items()}
    inner = "state/opt_state/inner_states"
    assert groups["state/params/l0/w"] == ("state/params", "normalised")
    assert groups["state/params/l1/w"] == ("state/params", "leaf")
    assert groups[f"{inner}/t/inner_state/0/mu/l0/w"] == (f"{inner}/t/inner_state/0/mu", "moment")
    assert groups[f"{inner}/m/inner_state/0/trace/l1/w"] == (f"{inner}/m/inner_state/0/trace", "moment")


@pytest.mark.quick
def test_a_parameter_named_like_a_moment_is_a_parameter():
    params = {"decoder": {"mu": {"kernel": np.ones(3, np.float32)}, "nu": {"kernel": np.ones(3, np.float32)}}}
    state = {"params": params, "trace": {"mean": np.float32(1)}}
    got = judge(state, state)
    assert {d.rule for p, d in got.items() if p.startswith("state/params")} == {"leaf"}


@pytest.mark.quick
def test_low_precision_is_allowed_in_what_was_computed_not_in_what_was_there():
    low = lowest_precision([np.float32, ml_dtypes.bfloat16, np.int32])
    assert low == Tolerance(1e-3, 1e-4)
    old = np.full(4, 100.0, np.float32)
    new = old + np.float32(0.01)
    off = old + np.float32(0.02)
    assert not verdict({"params": {"w": new}}, {"params": {"w": off}}, {"params": {"w": old}}, computed_in=low)
    near = {"loss": np.float32(3.0)}, {"loss": np.float32(3.002)}
    assert verdict({}, {}, out=near, computed_in=low)
    assert not verdict({}, {}, out=near)


@pytest.mark.quick
def test_a_low_precision_leaf_may_differ_in_its_last_place():
    a = np.array([1.0, 200.0], ml_dtypes.bfloat16)
    one, two = a.copy(), a.copy()
    one[1], two[1] = 201.0, 204.0
    assert verdict({"w": a}, {"w": one})
    assert not verdict({"w": a}, {"w": two})


@pytest.mark.quick
def test_precision_of_the_narrowest_float_counts():
    assert lowest_precision([np.float32, np.float64, np.int32]) is None
    assert lowest_precision([np.float16, np.float32]) == Tolerance(1e-4, 1e-5)
    assert lowest_precision([]) is None


@pytest.mark.quick
def test_worst_leaves_come_first():
    a = {"x": np.float32(1), "y": np.float32(1), "z": np.float32(1)}
    b = {"x": np.float32(1), "y": np.float32(1.1), "z": np.float32(1.01)}
    got = [d.path for d in worst(tuple(judge(a, b, tolerance=Tolerance(1e-6, 0)).values()), 2)]
    assert got == ["state/y", "state/z"]


@pytest.mark.quick
def test_a_state_may_be_a_single_array():
    got = judge(np.float32(1), np.float32(1.1), out=(np.int32(3), np.int32(3)))
    assert {p: d.ok for p, d in got.items()} == {"state": False, "out": True}
