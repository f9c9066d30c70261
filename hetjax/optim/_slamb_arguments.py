"""The arguments of `_slamb.py`, read and refused; `ValueError`, as optax has it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def read_stages(name: str, value) -> tuple[tuple[int, Any], ...]:
    """A number or stages as ((0, value), (first_step, value), ...)."""
    if isinstance(value, jax.Array):
        raise ValueError(
            f"slamb: {name} sets shapes or program structure and must be a Python number or stages, "
            f"got an array. Under optax.inject_hyperparams name in static_args: compress_ratio, "
            "sync_every, min_size, seed, finite_vote, nu_ratio, bound_direction.")
    def plain(x):
        return x.item() if isinstance(x, np.generic) else x

    value = plain(value)
    try:
        stages = ((0, value),) if isinstance(value, (int, float)) else tuple(
            (plain(first), plain(held)) for first, held in value)
    except (TypeError, ValueError):
        stages = ((None, None),)
    if not all(isinstance(first, int) and isinstance(x, (int, float)) for first, x in stages):
        raise ValueError(
            f"slamb: {name} must be a number or stages ((0, value), (first_step, value), …) with whole "
            f"steps; got {value!r}.")
    firsts: list[Any] = [first for first, _ in stages]
    if not stages or firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts)):
        raise ValueError(
            f"slamb: the stages of {name} must start at step 0 and ascend, as in "
            f"((0, {stages[0][1] if stages else 0.5}), (200, …)); got {value!r}.")
    return stages


# name: (least, greatest, whether the greatest itself is allowed, in words)
_RANGES = {
    "b1": (0, 1, False, "lie in [0, 1)"), "b2": (0, 1, False, "lie in [0, 1)"),
    "b3": (0, 1, True, "lie in [0, 1]"), "nu_ratio": (0, 1, True, "lie in [0, 1]"),
    "eps": (0, math.inf, False, "be 0 or more"), "weight_decay": (0, math.inf, False, "be 0 or more"),
    "min_ratio": (0, math.inf, False, "be 0 or more"),
    "max_ratio": (0, math.inf, True, "be 0 or more")}


def check_learning_rate(value) -> None:
    """Refuses what is neither a number nor a schedule; optax would only when the first step runs."""
    if callable(value) or isinstance(value, (jax.Array, np.ndarray)):
        return
    if not _is_number(value) or math.isnan(value):
        raise ValueError(f"slamb: learning_rate must be a number or a schedule, got {value!r}.")


def check_axis_name(value) -> None:
    """Refuses what cannot name a mapped axis."""
    names = value if isinstance(value, tuple) else (value,)
    if not names or any(
            isinstance(x, (list, set, dict, jax.Array, np.ndarray, jax.sharding.Mesh)) for x in names):
        raise ValueError(
            "slamb: axis_name must be the name of a mapped axis, a tuple of names, or None on one worker; "
            f"got {value!r}.")


def check_static(
    ratios, periods, compensation, exchange, comm_dtype, numbers: dict[str, Any], **others
) -> None:
    """Refuses arguments out of range, all at once.

    Args:
      ratios: stages of `compress_ratio`.
      periods: stages of `sync_every`.
      compensation: as given to `slamb`; so are `exchange` and `comm_dtype`.
      numbers: what may be traced, by name; arrays among them are not looked at.
      others: what may not be an array, by name.

    Raises:
      ValueError: naming each that is wrong.
    """
    problems = [
        f"compress_ratio must lie in (0, 1], got {ratio!r}"
        for _, ratio in ratios if not 0 < ratio <= 1]
    problems += [
        f"sync_every must be a whole number of steps, 0 for never, got {every!r}"
        for _, every in periods if not isinstance(every, int) or every < 0]
    problems += [
        f"{name} must be a Python value (name it in static_args of optax.inject_hyperparams), "
        f"got {value!r}"
        for name, value in others.items() if isinstance(value, jax.Array)]
    nu_ratio = others["nu_ratio"]
    for name, value in {**numbers, "nu_ratio": nu_ratio}.items():
        if isinstance(value, (jax.Array, np.ndarray)):
            continue
        low, high, closed, words = _RANGES[name]
        if not _is_number(value) or not (low <= value < high or (closed and value == high)):
            problems.append(f"{name} must {words}, got {value!r}")
    bounds = numbers["min_ratio"], numbers["max_ratio"]
    if all(map(_is_number, bounds)) and bounds[0] > bounds[1]:
        problems.append(f"min_ratio={bounds[0]!r} must not be above max_ratio={bounds[1]!r}")
    problems += [
        f"{name} must be a whole number{' of 0 or more' if name == 'min_size' else ''}, got {value!r}"
        for name, value in others.items() if name in ("min_size", "seed")
        and not isinstance(value, jax.Array)
        and (not isinstance(value, (int, np.integer)) or (name == "min_size" and value < 0))]
    problems += [
        f"{name} must be True or False, got {value!r}"
        for name, value in others.items() if name in ("finite_vote", "bound_direction")
        and not isinstance(value, (bool, np.bool_, jax.Array))]
    if compensation not in ("held", "local"):
        problems.append(f"compensation must be 'held' or 'local', got {compensation!r}")
    if exchange not in ("direction", "momentum"):
        problems.append(f"exchange must be 'direction' or 'momentum', got {exchange!r}")
    elif exchange == "direction" and (compensation == "held" or nu_ratio):
        problems.append("exchange='direction' goes with compensation='local' and nu_ratio=0 only")
    elif comm_dtype is not None and not _is_signed_float(comm_dtype):
        problems.append(
            "comm_dtype must be a floating dtype with a sign, at least eight bits and room for zero, as "
            f"jnp.bfloat16; got {comm_dtype!r}")
    elif exchange == "momentum" and comm_dtype is not None and jnp.dtype(comm_dtype).itemsize < 2:
        problems.append(
            f"comm_dtype={jnp.dtype(comm_dtype).name} has no room for moments, which may be of any "
            "size; give exchange='direction' with it")
    if problems:
        raise ValueError("slamb: " + "; ".join(problems) + ".")


def _is_number(value) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) or (
        # bfloat16 and its like are numbers to jax and not to numpy
        isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating))


def _is_signed_float(dtype) -> bool:
    """Integers would round moments to nothing; e8m0 has neither sign nor zero."""
    try:
        dtype = jnp.dtype(dtype)
        return bool(jnp.issubdtype(dtype, jnp.floating)) and (
            dtype.name.startswith(("float8_e4m3", "float8_e5m2")) or dtype.itemsize > 1)
    except TypeError:
        return False


def check_floating(params) -> None:
    wrong = [
        f"  {jax.tree_util.keystr(path)} {p.dtype}{list(p.shape)}"
        for path, p in jax.tree_util.tree_flatten_with_path(params)[0]
        if not jnp.issubdtype(p.dtype, jnp.floating)]
    if wrong:
        raise ValueError(
            "slamb: parameters must be floating:\n" + "\n".join(wrong) + "\n"
            "Leave the others out with optax.masked or optax.partition.")
