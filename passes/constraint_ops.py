"""Ops that say how a value is split over the mesh of its stage."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.exporter import to_jax_aval
from hetjax.ir.graph import Aval, Cost, Handle, Op, Ref
from hetjax.ir.importer import encoded_params
from hetjax.ir.program import Spec

# The axes of one dimension; () for "on every device", None for whatever is found best.
Entry = tuple[str, ...] | None
_FREE = Cost(0, 0, 0)
# How a sharding is named in text; see `hetjax.ir.params_text.handle_name`.
_NAMED = re.compile(r"NamedSharding\((.*?);(.*)\)")


def constraint_op(
    aval: Aval, source: Ref, result: Ref, entries: Sequence[Entry], axes: Sequence[tuple[str, int]], near: Op
) -> Op:
    """Returns the op that hands on a value, split as is said.

    Args:
      aval: the value's type.
      source, result: the value before and after it.
      entries: per dimension.
      axes: (name, size) of the stage's mesh.
      near: the op whose place in the user's source it takes; it has an equation.
    """
    var = _jax.new_var(to_jax_aval(aval))
    eqn = constraint_equation(var, _jax.new_var(var.aval), entries, axes, near.eqn)
    return Op(
        eqn.primitive.name, (source,), (result,), tuple(sorted(encoded_params(eqn.params).items())), region=near.region,
        block=near.block, source=near.source, scopes=near.scopes, cost=_FREE, eqn=eqn,
    )


def constraint_equation(
    value: Any, result: Any, entries: Sequence[Entry], axes: Sequence[tuple[str, int]], near: Any
) -> Any:
    """Returns the equation of a constraint; the runtime puts it on the mesh of the stage."""
    template = _template(value.aval, tuple(entries), tuple(axes))
    return template.replace(invars=[value], outvars=[result], source_info=near.source_info)


@functools.lru_cache(maxsize=1024)
def _template(aval: Any, entries: tuple[Entry, ...], axes: tuple[tuple[str, int], ...]) -> Any:
    import jax

    names, sizes = zip(*axes)
    mesh = jax.sharding.AbstractMesh(sizes, names)
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = jax.sharding.PartitionSpec(
        *(free if e is None else None if not e else e[0] if len(e) == 1 else e for e in entries)
    )
    return _jax.constraint_equation(aval, jax.sharding.NamedSharding(mesh, spec))


def constrained_spec(op: Op, axes: Sequence[tuple[str, int]]) -> Spec | None:
    """Returns how an op says that its value is split over a mesh; None where it is no such op or leaves a dimension open.

    Args:
      op: of a fragment.
      axes: (name, size) of the fragment's mesh.
    """
    said = op.param("sharding") if op.primitive == "sharding_constraint" else None
    found = _NAMED.fullmatch(said.name) if isinstance(said, Handle) else None
    if found is None or found[1] != ",".join(f"{name}={size}" for name, size in axes) or "UNCONSTRAINED" in found[2]:
        return None  # the user's own, or one that leaves a dimension to XLA
    entries = found[2].split(",") if found[2] else []
    if op.eqn is not None:  # trailing dimensions may be left out
        entries += ["-"] * (len(op.eqn.invars[0].aval.shape) - len(entries))
    return tuple(() if e == "-" else tuple(e.split("*")) for e in entries)
