"""Digests of graphs and their parts: equal in every process for equal content, and for no other."""

from __future__ import annotations

import hashlib
import marshal
from typing import Any

from hetjax.ir.graph import Aval, Graph, Handle, Literal, Record, Symbol

# Format 2 of marshal has no references, so that equal values give equal bytes whatever objects they share.
_MARSHAL = 2


class Opaque(Exception):
    """A parameter or captured array whose content cannot be told."""


def digest(content: Any) -> str:
    """Returns 64 hex digits for plain content: nested tuples and lists of what `plain` returns."""
    return hashlib.sha256(marshal.dumps(content, _MARSHAL)).hexdigest()


def graph_digest(graph: Graph) -> str | None:
    """Returns 64 hex digits that stand for everything a graph says, captured arrays and sources included.

    Args:
      graph: of a step, nested graphs and all.

    Returns:
      None if a parameter is a callable, a sharding or another object without a text form, or a
      captured array is a key: two such graphs cannot be told apart from outside.
    """
    try:
        return digest(_graph(graph))
    except Opaque:
        return None


def _graph(graph: Graph) -> tuple[Any, ...]:
    return (
        "graph", graph.name,
        [(a.ref, a.path, a.role, a.batch_axis) for a in graph.inputs],
        [
            (
                op.primitive, [plain(a) for a in op.inputs], op.outputs,
                [(name, plain(value)) for name, value in op.params],
                op.region, op.block, op.source, op.scopes,
            )
            for op in graph.ops
        ],
        [(plain(r.atom), r.path, r.updates) for r in graph.outputs],
        [_aval(a) for a in graph.avals],
        [(ref, _array(value)) for ref, value in graph.consts.items()],
    )


def _aval(aval: Aval) -> tuple[Any, ...]:
    return aval.dtype, aval.shape, aval.weak_type


def plain(value: Any) -> Any:
    """Returns a parameter, literal or type as builtin values that tell its kind and content.

    Raises:
      Opaque: it is a callable, a sharding or another object without a text form.
    """
    # The tags keep values of unlike kinds apart; marshal itself tells True from 1 and -0.0 from 0.0.
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, tuple):
        return ("tuple", [plain(v) for v in value])
    if isinstance(value, Literal):
        return ("literal", repr(value.value), _aval(value.aval))
    if isinstance(value, Symbol):
        return ("symbol", value.name)
    if isinstance(value, Aval):
        return ("aval", _aval(value))
    if isinstance(value, Record):
        return ("record", value.kind, [(name, plain(v)) for name, v in value.fields])
    if isinstance(value, Graph):
        return _graph(value)
    if isinstance(value, Handle) and (found := _abstract(value.value)) is not None:
        return found
    raise Opaque(type(value).__name__ if not isinstance(value, Handle) else value.name)


def _abstract(value: Any) -> Any:
    """Returns a sharding over no devices in particular as builtin values, None for anything else."""
    import jax

    if not isinstance(value, jax.sharding.NamedSharding) or not isinstance(value.mesh, jax.sharding.AbstractMesh):
        return None
    mesh = value.mesh
    entries = [repr(e) if e is jax.sharding.PartitionSpec.UNCONSTRAINED else e for e in value.spec]
    return (
        "sharding", list(mesh.shape.items()), [str(t) for t in mesh.axis_types],
        [list(e) if isinstance(e, tuple) else e for e in entries], value.memory_kind,
    )


def _array(value: Any) -> tuple[Any, ...]:
    import numpy as np

    try:
        array = np.asarray(value)
    except TypeError as error:  # a typed key
        raise Opaque(str(error)) from error
    if array.dtype == object:
        raise Opaque("object array")
    content = np.ascontiguousarray(array).tobytes()
    return str(array.dtype), array.shape, hashlib.sha256(content).digest()
