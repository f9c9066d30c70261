"""A traced step evaluated in double precision: what it gives almost without rounding.

The same equations on wider floats. Integers, keys and random bits stay what they are, so that dropout
masks and token ids are those of the step; tracing the step again under `enable_x64` would draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax.ir import _jax

# Ops whose meaning is tied to the width of their operands: they run as traced, between casts.
_NARROW = frozenset({"bitcast_convert_type", "nextafter", "random_gamma", "reduce_precision"})


def in_double(closed: Any) -> Callable[..., list[Any]]:
    """Returns a function of flat arrays that evaluates a jaxpr with floats of 64 bits.

    Call it under `jax.enable_x64(True)`; results are wide too.

    Args:
      closed: the step, traced.
    """
    def call(*args: Any) -> list[Any]:
        # Under x64 the caller's int64 would stay one; the step was traced for JAX's int32.
        given = [_cast(np.asarray(a) if np.isscalar(a) else a, v.aval.dtype) for a, v in zip(args, closed.jaxpr.invars)]
        return _evaluate(closed.jaxpr, closed.consts, given)

    return call


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return _wide(np.asarray(atom.val)) if _jax.is_literal(atom) else env[atom]

    env.update((v, _wide(c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
    env.update((v, _wide(a)) for v, a in zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _apply(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _apply(eqn: Any, values: list[Any]) -> list[Any]:
    body = eqn.params.get(_jax.CALLS.get(eqn.primitive.name))
    if body is not None:
        inner, consts = _jax.as_jaxpr(body) or (body, ())
        return _evaluate(inner, consts, values)
    params = eqn.params
    if eqn.primitive.name in _NARROW:
        values = [_cast(x, a.aval.dtype) for x, a in zip(values, eqn.invars)]
    else:
        params = {name: _wide_param(value) for name, value in params.items()}
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return [_wide(x) for x in (out if eqn.primitive.multiple_results else [out])]


def _wide_param(value: Any) -> Any:
    import jax

    held = _jax.as_jaxpr(value)
    if held is not None:
        jaxpr, consts = held
        structs = [jax.ShapeDtypeStruct(v.aval.shape, _wide_dtype(v.aval.dtype)) for v in jaxpr.invars]
        retraced = jax.make_jaxpr(lambda *args: _evaluate(jaxpr, consts, args))(*structs)
        return retraced if isinstance(value, _jax.ClosedJaxpr) else retraced.jaxpr
    if isinstance(value, tuple) and any(_jax.as_jaxpr(v) is not None for v in value):
        return tuple(map(_wide_param, value))
    return _wide_dtype(value) if isinstance(value, np.dtype) else value


def _wide_dtype(dtype: Any) -> Any:
    import jax.numpy as jnp

    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _wide(value: Any) -> Any:
    return _cast(value, _wide_dtype(value.dtype))


def _cast(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else value.astype(dtype)
