"""From ops back to a closed jaxpr, equation by equation, so that JAX lowers exactly what it traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetjax.ir import _jax
from hetjax.ir.dtypes import is_key, long_dtype
from hetjax.ir.errors import LoweringError
from hetjax.ir.graph import Atom, Aval, Literal, Op, Ref


def numpy_dtype(short: str) -> np.dtype:
    """Returns the NumPy dtype of a short name; keys and float0 have none of their own.

    Raises:
      LoweringError: the name stands for no array dtype.
    """
    import ml_dtypes

    name = long_dtype(short)
    if hasattr(ml_dtypes, name):
        return np.dtype(getattr(ml_dtypes, name))
    try:
        return np.dtype(name)
    except TypeError:
        raise LoweringError(f"dtype {short!r} is not that of an array") from None


def jax_avals(ops: Sequence[Op]) -> dict[Ref, Any]:
    """Returns the JAX aval of every ref that the ops define or read, taken from their equations."""
    found: dict[Ref, Any] = {}
    for op in ops:
        if op.eqn is None:
            continue
        for atom, var in zip(op.inputs, op.eqn.invars, strict=True):
            if not isinstance(atom, Literal):
                found.setdefault(atom, var.aval)
        for ref, var in zip(op.outputs, op.eqn.outvars, strict=True):
            found[ref] = var.aval
    return found


def export_jaxpr(
    name: str, ops: Sequence[Op], inputs: Sequence[Ref], outputs: Sequence[Atom],
    avals: Mapping[Ref, Aval] | Sequence[Aval],
) -> Any:
    """Returns a closed jaxpr without consts that computes `outputs` from `inputs`.

    Args:
      name: shown by profilers and in XLA's module name.
      ops: in order; each must carry its equation.
      inputs: refs, in the order of the jaxpr's inputs.
      outputs: refs or literals, in the order of its outputs.
      avals: types by ref.

    Raises:
      LoweringError: an op came from text and has no equation, or reads what nothing defines.
    """
    lost = [op for op in ops if op.eqn is None]
    if lost:
        names = ", ".join(sorted({op.primitive for op in lost}))
        raise LoweringError(
            f"{name}: {len(lost)} ops ({names}) came from text and cannot be lowered; trace the "
            "function again instead of loading its graph"
        )
    known = jax_avals(ops)
    env: dict[Ref, Any] = {}

    def var_of(ref: Ref) -> Any:
        aval = known.get(ref)
        return _jax.new_var(aval if aval is not None else to_jax_aval(avals[ref]))

    def read(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return _jax.make_literal(
                atom.value, numpy_dtype(atom.aval.dtype), to_jax_aval(atom.aval)
            )
        if atom not in env:
            raise LoweringError(f"{name}: reads %{atom}, which neither its inputs nor its ops define")
        return env[atom]

    invars = []
    for ref in inputs:
        env[ref] = var_of(ref)
        invars.append(env[ref])
    eqns = []
    used = {r for op in ops for r in op.refs} | {a for a in outputs if not isinstance(a, Literal)}
    for op in ops:
        ins = [
            var if isinstance(atom, Literal) and _jax.is_literal(var) else read(atom)
            for atom, var in zip(op.inputs, op.eqn.invars, strict=True)
        ]
        outs = []
        for ref in op.outputs:
            if ref in used:
                env[ref] = var_of(ref)
                outs.append(env[ref])
            else:
                outs.append(_jax.drop_var(known[ref]))
        eqns.append(op.eqn.replace(invars=ins, outvars=outs))
    return _jax.build_jaxpr(name, invars, [read(a) for a in outputs], eqns)


def to_jax_aval(aval: Aval) -> Any:
    """Returns the JAX aval of a type.

    Raises:
      LoweringError: the dtype is a key of an unknown generator.
    """
    if is_key(aval.dtype):
        return _jax.key_aval(aval.dtype, aval.shape)
    if aval.dtype == "float0":
        import jax

        return _jax.shaped_array(aval.shape, jax.dtypes.float0, aval.weak_type)
    return _jax.shaped_array(aval.shape, numpy_dtype(aval.dtype), aval.weak_type)
