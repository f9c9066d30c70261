"""Equations for graphs that came from text, so that they can be lowered like traced ones.

The inverse of `hetjax.ir.params_text`. JAX's own shape rules run on every equation rebuilt, so a text
that was changed by hand is checked by them too.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

import numpy as np

from hetjax.ir import _jax
from hetjax.ir.dtypes import is_dtype_name, is_key
from hetjax.ir.errors import LoweringError
from hetjax.ir.exporter import numpy_dtype, to_jax_aval
from hetjax.ir.graph import Atom, Aval, Graph, Handle, Literal, Op, Record, Symbol
from hetjax.ir.program import Program

# Parameters that hold an open jaxpr; all other nested jaxprs are closed.
_OPEN = frozenset(
    {
        ("remat2", "jaxpr"),
        ("checkpoint", "jaxpr"),
        ("scatter", "update_jaxpr"),
        ("scatter-add", "update_jaxpr"),
        ("scatter_add", "update_jaxpr"),
        ("scatter_sub", "update_jaxpr"),
        ("scatter_mul", "update_jaxpr"),
        ("scatter_min", "update_jaxpr"),
        ("scatter_max", "update_jaxpr"),
        ("scatter-sub", "update_jaxpr"),
        ("scatter-mul", "update_jaxpr"),
        ("scatter-min", "update_jaxpr"),
        ("scatter-max", "update_jaxpr"),
        ("shard_map", "jaxpr"),
    }
)


# How a sharding is named; see `hetjax.ir.params_text.handle_name`.
_NAMED_SHARDING = re.compile(r"NamedSharding\(([^;]+);(.*)\)")

# Problems listed one by one in an error.
SHOWN = 12


class _Cannot(Exception):
    """One parameter or op that text does not say enough about."""


class _Nested(Exception):
    """Problems of a nested graph."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("; ".join(problems))


def rebuild_equations(graph: Graph) -> Graph:
    """Returns the graph with an equation on every op; the same object when they all have one.

    Raises:
      LoweringError: ops hold handles, primitives JAX does not know, or types JAX does not give; the
        message lists them.
    """
    problems: list[str] = []
    rebuilt = _rebuild(graph, problems)
    if problems:
        shown = problems[:SHOWN]
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise LoweringError(
            f"{graph.name} came from text, and {len(problems)} of its ops cannot be lowered:\n  "
            + "\n  ".join(shown)
            + more
        )
    return rebuilt


def _rebuild(graph: Graph, problems: list[str]) -> Graph:
    if all(op.eqn is not None for op in graph.ops):
        return graph
    known: dict[int, Any] = {}
    ops = []
    for op in graph.ops:
        if op.eqn is None:
            where = f"{op.primitive}{f' ({op.source})' if op.source else ''}"
            try:
                op = dataclasses.replace(op, eqn=_equation(op, graph, known))
            except _Nested as error:
                problems.extend(f"{where} / {p}" for p in error.problems)
            except (
                _Cannot,
                LoweringError,
                TypeError,
                ValueError,
                AttributeError,
                IndexError,
                KeyError,
            ) as error:
                problems.append(f"{where}: {_first_line(error)}")
        ops.append(op)
    return graph.replace(ops=tuple(ops))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _equation(op: Op, graph: Graph, known: dict[int, Any]) -> Any:
    primitive = _jax.primitive_named(op.primitive)
    if primitive is None:
        raise _Cannot("JAX has no primitive of that name that lowers")
    params = {name: _decode(op.primitive, name, value) for name, value in op.params}
    invars = [_variable(a, graph, known) for a in op.inputs]
    eqn = _jax.new_equation(invars, [_aval(graph.avals[r]) for r in op.outputs], primitive, params)
    known.update(zip(op.outputs, eqn.outvars))
    return eqn


def _aval(aval: Aval) -> Any:
    return to_jax_aval(aval)


def _variable(atom: Atom, graph: Graph, known: dict[int, Any]) -> Any:
    if isinstance(atom, Literal):
        return _jax.make_literal(atom.value, numpy_dtype(atom.aval.dtype), to_jax_aval(atom.aval))
    if atom not in known:
        known[atom] = _jax.new_var(_aval(graph.avals[atom]))
    return known[atom]


def _decode(primitive: str, name: str, value: Any) -> Any:
    """Returns what the equation's parameter held."""
    if isinstance(value, tuple):
        return tuple(_decode(primitive, name, v) for v in value)
    if isinstance(value, Symbol):
        return _decode_symbol(value.name)
    if isinstance(value, Record):
        return _decode_record(primitive, name, value)
    if isinstance(value, Aval):
        return to_jax_aval(value)
    if isinstance(value, Graph):
        return _jaxpr(value, is_open=(primitive, name) in _OPEN)
    if isinstance(value, Handle):
        if value.value is not None:
            return value.value
        if found := _NAMED_SHARDING.fullmatch(value.name):
            return _abstract_sharding(found[1], found[2])
        raise _Cannot(f"its parameter {name} is #{value.name}, which is no text")
    return value


def _abstract_sharding(mesh: str, spec: str) -> Any:
    """Returns the sharding of a constraint that a pass made: the runtime puts it on the devices of its stage."""
    import jax

    axes = [pair.split("=") for pair in mesh.split(",")]
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    entries = [
        None if e == "-" else free if e == repr(free) else tuple(e.split("*")) if "*" in e else e
        for e in (spec.split(",") if spec else ())
    ]
    abstract = jax.sharding.AbstractMesh(tuple(int(n) for _, n in axes), tuple(a for a, _ in axes))
    return jax.sharding.NamedSharding(abstract, jax.sharding.PartitionSpec(*entries))


def _decode_symbol(symbol: str) -> Any:
    import jax

    if is_key(symbol):
        return _jax.key_aval(symbol, ()).dtype
    if symbol == "float0":
        return jax.dtypes.float0
    if is_dtype_name(symbol):
        return numpy_dtype(symbol)
    kind, _, member = symbol.partition(".")
    if symbol == "UnspecifiedValue":
        return _jax.unspecified_sharding()
    if kind in ("Mesh", "AbstractMesh") and member == "empty":
        return _jax.empty_mesh(kind)
    if kind == "PRNG":
        return _prng(member)
    for found in (getattr(jax.lax, kind, None), *_enums_of_jax(kind)):
        if member and found is not None and hasattr(found, member):
            return getattr(found, member)
    raise _Cannot(f"{symbol} names nothing in JAX")


def _enums_of_jax(name: str) -> list[Any]:
    """Returns JAX's enums of that name; several have no public one."""
    kinds = (*enum.Enum.__subclasses__(), *enum.IntEnum.__subclasses__())
    return [
        k
        for k in kinds
        if k.__name__ == name and k.__module__.partition(".")[0] in ("jax", "jaxlib")
    ]


def _prng(name: str) -> Any:
    from jax.extend import random

    for impl in (random.threefry_prng_impl, random.rbg_prng_impl, random.unsafe_rbg_prng_impl):
        if impl.name == name:
            return impl
    raise _Cannot(f"JAX has no generator {name}")


def _decode_record(primitive: str, name: str, record: Record) -> Any:
    import jax

    fields = {k: _decode(primitive, name, v) for k, v in record.fields}
    match record.kind:
        case "PartitionSpec":
            return jax.sharding.PartitionSpec(*fields["partitions"])
        case "slice":
            return slice(fields["start"], fields["stop"], fields["step"])
        case "frozenset" | "set":
            return frozenset(fields["items"])
        case "dict":
            return dict(fields["items"])
        case "array":
            return np.array(fields["data"], fields["dtype"]).reshape(fields["shape"])
    made = getattr(jax.lax, record.kind, None)
    if made is None:
        raise _Cannot(f"its parameter {name} is a {record.kind}, which has no public constructor")
    return made(**fields)


def _jaxpr(graph: Graph, *, is_open: bool) -> Any:
    from hetjax.ir.exporter import export_jaxpr

    lost = [a.path for a in graph.inputs if a.role == "const" and a.ref not in graph.consts]
    if lost and not is_open:
        raise _Cannot(
            f"its graph {graph.name} captures arrays ({', '.join(lost)}) that text does not hold"
        )
    problems: list[str] = []
    graph = _rebuild(graph, problems)
    if problems:
        raise _Nested(problems)
    closed = export_jaxpr(
        graph.name,
        graph.ops,
        [a.ref for a in graph.inputs],
        [r.atom for r in graph.outputs],
        graph.avals,
    )
    return closed.jaxpr if is_open else closed


def rebuild_program(program: Program) -> Program:
    """Returns the program with an equation on every op of every fragment.

    Raises:
      LoweringError: see `rebuild_equations`.
    """
    fragments = []
    for f in program.fragments:
        avals = program.micro_avals if f.per_microbatch else program.avals
        ops = rebuild_equations(Graph(f.name, (), f.ops, (), avals)).ops
        fragments.append(f if ops is f.ops else dataclasses.replace(f, ops=ops))
    return program.replace(fragments=tuple(fragments))
