"""lift-slices: slices that a loop takes of the batch, one part an iteration, are taken before it.

A step that accumulates gradients itself slices its batch by the loop's counter. In a microbatch the
same iteration would slice other examples than in the whole batch: [0, 1, 2, 3 | 4, 5, 6, 7] in two
iterations, split in two microbatches, must become [0, 1 | 4, 5] and [2, 3 | 6, 7]. Taken before the
loop, stacked and scanned over, the slices are values of the whole batch like any other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.exporter import numpy_dtype
from hetjax.ir.graph import Graph, Literal, Op
from hetjax.ir.importer import aval_of, inline_calls
from hetjax.passes.loop_bodies import Body, as_call, copied, flattened, opened, with_bodies, without
from hetjax.passes.prover.needs import is_parameter

# A loop of more iterations walks through time or examples, not through microbatches.
MOST_ITERATIONS = 64


@dataclasses.dataclass(frozen=True)
class LiftSlices:
    """Takes the slices of a loop's constants before the loop, where only its counter says which.

    Before: `%4 = scan %x … { … %c = dynamic_slice %x %i … }`
    After:  `%4 = concatenate %a %b`, slices of %x, and `%5 = scan … %4 { … }`, which reads one each.
    Values that depend on parameters are left alone.
    """

    name: ClassVar[str] = "lift-slices"
    summary: ClassVar[str] = "take the slices of a batch that a loop walks through before it"

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            return bundle
        graph = lift_slices(bundle.graph)
        return bundle if graph is bundle.graph else bundle.replace(graph=graph)


def lift_slices(graph: Graph) -> Graph:
    """Returns the graph with such slices taken early; the same object when there are none."""
    parametric = {a.ref for a in graph.inputs if is_parameter(a, graph.avals[a.ref])}
    ops, changed = [], False
    for op in graph.ops:
        if any(r in parametric for r in op.refs):
            parametric.update(op.outputs)
        call = _rewritten(op, parametric) if op.primitive == "scan" and op.eqn is not None else None
        if call is not None:
            op, changed = dataclasses.replace(op, primitive="closed_call", eqn=call), True
        ops.append(op)
    return inline_calls(graph.replace(ops=tuple(ops))) if changed else graph


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A dynamic slice of the loop's constant number `const`; `starts` has one row per iteration."""

    eqn: Any
    const: int
    starts: np.ndarray


def _rewritten(op: Op, parametric: set[int]) -> Any:
    params = op.eqn.params
    jaxpr, consts = opened(params["jaxpr"])
    if consts or params["length"] > MOST_ITERATIONS:
        return None
    body = flattened(jaxpr, lambda eqn: [eqn])
    free = [k for k in range(params["num_consts"]) if isinstance(op.inputs[k], int) and op.inputs[k] not in parametric]
    slices = _slices(op, body, free)
    return as_call(op.eqn, lambda eqn: _lift(eqn, body, slices)) if slices else None


def _slices(op: Op, body: Body, free: list[int]) -> list[_Slice]:
    """Finds the slices whose place follows from the counter, by counting."""
    operands = {body.invars[k]: k for k in free}
    found = [e for e in body.eqns if e.primitive.name == "dynamic_slice" and e.invars[0] in operands]
    if not found:
        return []
    first = op.eqn.params["num_consts"]
    counters = {
        body.invars[first + k]: op.inputs[first + k].value  # type: ignore[union-attr]
        for k in range(op.eqn.params["num_carry"])
        if isinstance(op.inputs[first + k], Literal) and not op.inputs[first + k].aval.is_inexact  # type: ignore[union-attr]
    }
    while True:  # a counter is a carry that follows from counters alone
        known, eqns = _counted(body, set(counters))
        renewed = dict(zip(body.invars[first:], body.outvars[: op.eqn.params["num_carry"]]))
        still = {c: v for c, v in counters.items() if _jax.is_literal(renewed[c]) or renewed[c] in known}
        if len(still) == len(counters):
            break
        counters = still
    found = [e for e in found if all(_jax.is_literal(a) or a in known for a in e.invars[1:])]
    if not found:
        return []
    places = _count(op.eqn.params["length"], eqns, counters, renewed, [e.invars[1:] for e in found])
    return [_Slice(e, operands[e.invars[0]], p) for e, p in zip(found, places)]


def _counted(body: Body, counters: set[Any]) -> tuple[set[Any], list[Any]]:
    """Returns the scalars that follow from counters and literals, and their equations."""
    known, eqns = set(counters), []
    for eqn in body.eqns:
        scalar = all(not aval_of(v.aval).shape for v in eqn.outvars)
        if scalar and not eqn.effects and all(_jax.is_literal(a) or a in known for a in eqn.invars):
            known.update(eqn.outvars)
            eqns.append(eqn)
    return known, eqns


def _count(
    length: int, eqns: list[Any], counters: dict[Any, Any], renewed: dict[Any, Any], wanted: list[list[Any]]
) -> list[np.ndarray]:
    """Runs the counters through all iterations; returns the starts of each slice."""
    order = list(counters)
    outputs = [renewed[c] for c in order] + [a for row in wanted for a in row]
    function = _jax.jaxpr_function(_jax.build_jaxpr("count", order, outputs, eqns))
    state: list[Any] = [np.asarray(counters[c], numpy_dtype(aval_of(c.aval).dtype)) for c in order]
    rows = []
    for _ in range(length):
        out = function(*state)
        state = out[: len(order)]
        rows.append([int(x) for x in out[len(order) :]])
    table, at, places = np.asarray(rows), 0, []
    for row in wanted:
        places.append(table[:, at : at + len(row)])
        at += len(row)
    return places


def _lift(eqn: Any, body: Body, slices: list[_Slice]) -> list[Any]:
    before: list[Any] = []
    scanned = []
    for piece in slices:
        operand = eqn.invars[piece.const]
        eqns, result = _taken(operand, piece)
        before += eqns
        scanned.append(result)
    new = [_jax.new_var(piece.eqn.outvars[0].aval) for piece in slices]
    rest = without(body, {p.eqn.outvars[0]: v for p, v in zip(slices, new)}, new)
    return [*before, eqn.replace(invars=[*eqn.invars, *scanned], params=with_bodies(eqn, [rest]))]


def _taken(operand: Any, piece: _Slice) -> tuple[list[Any], Any]:
    """Returns equations that stack the slices, and the variable they end in."""
    import jax
    import jax.numpy as jnp

    sizes = piece.eqn.params["slice_sizes"]
    room = np.asarray(operand.aval.shape) - np.asarray(sizes)
    starts = np.clip(piece.starts, 0, room)  # as dynamic_slice itself does
    traced = jax.make_jaxpr(
        lambda x: jnp.stack([jax.lax.slice(x, s, s + np.asarray(sizes)) for s in starts])
    )(jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype))
    flat = flattened(traced.jaxpr, lambda e: [e])
    env = {flat.invars[0]: operand}
    eqns = [e.replace(source_info=piece.eqn.source_info) for e in copied(flat.eqns, env)]
    return eqns, env[flat.outvars[0]]
