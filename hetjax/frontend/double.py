"""A step in double precision: the same equations on wider floats, for plain jit and for hetjax alike.

In half precision, or where a sum cancels, two compilations of one step already differ by more than any
bound that would still find a mistake. In double precision rounding is out of the way: what then differs is
a fault of how the step was split. Integers, keys and random bits stay what they are, so that dropout masks
and token ids are those of the step; tracing it anew under `enable_x64` would draw others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax.ir import _jax

# Ops whose meaning is tied to the width of their operands: they run as traced, between casts.
_NARROW = frozenset({"bitcast_convert_type", "nextafter", "random_gamma", "reduce_precision"})


def in_double(step: Callable[..., Any], *examples: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a pure step that takes and gives 64-bit floats, and what widens its arguments.

    Both are for use under `jax.enable_x64(True)`.

    Args:
      step: a pure function of pytrees.
      examples: its arguments as they are, whose dtypes it is traced with.
    """
    import jax

    with jax.enable_x64(False):
        narrow = [jax.tree.map(lambda x: jax.typeof(jax.numpy.asarray(x)), a) for a in examples]

    def widen(k: int, tree: Any) -> Any:
        return jax.tree.map(lambda x, aval: _wide(_cast(jax.numpy.asarray(x), aval.dtype)), tree, narrow[k])

    def wide(*args: Any) -> Any:
        structs = [
            jax.tree.map(lambda x, a: jax.ShapeDtypeStruct(x.shape, a.dtype, weak_type=a.weak_type), tree, avals)
            for tree, avals in zip(args, narrow, strict=True)
        ]
        with jax.enable_x64(False):
            closed, shapes = jax.make_jaxpr(step, return_shape=True)(*structs)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return wide, widen


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return _wide(np.asarray(atom.val)) if _jax.is_literal(atom) else env[atom]

    env.update((v, _wide(c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
    env.update((v, _wide(a)) for v, a in zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        with _jax.names_of(eqn):  # forward and backward are told apart by them
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
        with _jax.without_names():
            retraced = jax.make_jaxpr(functools.partial(_flat, jaxpr, consts))(*structs)
        return retraced if isinstance(value, _jax.ClosedJaxpr) else retraced.jaxpr
    if isinstance(value, tuple) and any(_jax.as_jaxpr(v) is not None for v in value):
        return tuple(map(_wide_param, value))
    return _wide_dtype(value) if isinstance(value, np.dtype) else value


def _flat(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    return _evaluate(jaxpr, consts, args)


def _wide_dtype(dtype: Any) -> Any:
    import jax.numpy as jnp

    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _wide(value: Any) -> Any:
    return _cast(value, _wide_dtype(value.dtype))


def _cast(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else value.astype(dtype)
