"""Two traces of one program, side by side: what the analysis walks.

Both a `Graph` and a nested jaxpr become a `Pair`: straight-line code over integer refs, with the
avals and parameters of either trace. Literals are typed here, by their two values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetjax.ir.graph import Aval, Graph, Literal
from hetjax.ir.importer import aval_of
from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import REPLICATED, ZERO, Type, Unscaled, Untypable


@dataclasses.dataclass(frozen=True, slots=True)
class PairLiteral:
    """A literal of both traces.

    Attributes:
      type: R with the power of M between the two values, Z, or `Unscaled`.
      value: at the whole batch.
      aval: at the whole batch.
    """

    type: Type
    value: Any
    aval: Aval


PairAtom = int | PairLiteral


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One op of both traces; `effects` says whether it does more than return values."""

    primitive: str
    params: Mapping[str, Any]
    micro_params: Mapping[str, Any]
    inputs: tuple[PairAtom, ...]
    outputs: tuple[int, ...]
    effects: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One program, at the whole batch and at one microbatch."""

    inputs: tuple[int, ...]
    consts: tuple[int, ...]
    const_types: tuple[Type, ...]
    lines: tuple[Line, ...]
    outputs: tuple[PairAtom, ...]
    avals: Sequence[Aval]
    micro_avals: Sequence[Aval]


class Mismatch(Exception):
    """The traces are not the same program; `position` is the first op that differs, if one does."""

    def __init__(self, reason: str, position: int | None = None):
        super().__init__(reason)
        self.reason, self.position = reason, position


# f32(1/6) and f32(1/3) are each rounded once, so their ratio is off by at most one unit.
_ULP = {"f16": 2.0**-10, "bf16": 2.0**-7, "f64": 2.0**-52, "c128": 2.0**-52}


def literal_type(full: Any, micro: Any, aval: Aval, num_microbatches: int) -> Type:
    """Returns how a literal's value at one microbatch follows from that at the whole batch."""
    if full == micro or (full != full and micro != micro):
        return ZERO if full == 0 else REPLICATED
    changed = Unscaled(
        f"the constant {full!r} becomes {micro!r} at one microbatch: it is computed from the batch size"
    )
    if isinstance(full, (bool, complex)) or isinstance(micro, (bool, complex)) or not full:
        return changed
    ratio = micro / full
    if not ratio > 0 or math.isinf(ratio):
        return changed
    power = round(math.log(ratio, num_microbatches))
    if not aval.is_inexact:
        a, b = (full * num_microbatches**power, micro) if power > 0 else (full, micro * num_microbatches**-power)
        return BatchType("R", power) if a == b else changed
    close = abs(ratio / float(num_microbatches) ** power - 1) <= _ULP.get(aval.dtype, 2.0**-23)
    return BatchType("R", power) if close else changed


def pair_graphs(full: Graph, micro: Graph, num_microbatches: int) -> Pair:
    """Returns the two graphs side by side.

    Raises:
      Mismatch: they are not the same program.
    """
    if len(full.inputs) != len(micro.inputs):
        raise Mismatch(f"it takes {len(full.inputs)} arrays at the whole batch and {len(micro.inputs)} at one microbatch")
    lines = []
    for i, (a, b) in enumerate(zip(full.ops, micro.ops)):
        if a.primitive != b.primitive or a.outputs != b.outputs or len(a.inputs) != len(b.inputs):
            raise Mismatch(f"'{a.primitive}' at the whole batch, '{b.primitive}' at one microbatch", i)
        atoms = tuple(_graph_atom(x, y, num_microbatches, i) for x, y in zip(a.inputs, b.inputs))
        p, q = _params(a), _params(b)
        lines.append(Line(a.primitive, p, q, atoms, a.outputs, bool(a.eqn is not None and a.eqn.effects)))
    if len(full.ops) != len(micro.ops):
        at = min(len(full.ops), len(micro.ops))
        raise Mismatch(
            f"{len(full.ops)} operations at the whole batch, {len(micro.ops)} at one microbatch",
            at if at < len(full.ops) else None,
        )
    if len(full.outputs) != len(micro.outputs):
        raise Mismatch(f"it returns {len(full.outputs)} arrays at the whole batch and {len(micro.outputs)} at one microbatch")
    outputs = tuple(
        _graph_atom(x.atom, y.atom, num_microbatches, None) for x, y in zip(full.outputs, micro.outputs)
    )
    refs = tuple(a.ref for a in full.inputs)
    return Pair(refs, (), (), tuple(lines), outputs, full.avals, micro.avals)


def _params(op: Any) -> Mapping[str, Any]:
    return op.eqn.params if op.eqn is not None else dict(op.params)


def _graph_atom(a: Any, b: Any, num_microbatches: int, position: int | None) -> PairAtom:
    if isinstance(a, Literal) and isinstance(b, Literal):
        return PairLiteral(literal_type(a.value, b.value, a.aval, num_microbatches), a.value, a.aval)
    if isinstance(a, Literal) or isinstance(b, Literal) or a != b:
        raise Mismatch("the two traces connect their operations differently", position)
    return a


def pair_jaxprs(full: Any, micro: Any, num_microbatches: int) -> Pair:
    """Returns two nested jaxprs (closed or open) side by side.

    Raises:
      Untypable: they are not the same program.
    """
    (jf, cf), (jm, cm) = _open(full), _open(micro)
    if len(jf.eqns) != len(jm.eqns) or len(jf.invars) != len(jm.invars):
        raise Untypable("its body has another structure at one microbatch")
    avals: list[Aval] = []
    micro_avals: list[Aval] = []
    ref_of: dict[Any, int] = {}
    micro_ref_of: dict[Any, int] = {}

    def define(a: Any, b: Any) -> int:
        ref_of[a] = micro_ref_of[b] = len(avals)
        avals.append(aval_of(a.aval))
        micro_avals.append(aval_of(b.aval))
        return len(avals) - 1

    def atom(a: Any, b: Any) -> PairAtom:
        if hasattr(a, "val") and hasattr(b, "val"):
            aval = aval_of(a.aval)
            if aval.shape or np.ndim(b.val):
                return PairLiteral(_const_type(a.val, b.val), None, aval)
            full, micro = np.asarray(a.val).item(), np.asarray(b.val).item()
            return PairLiteral(literal_type(full, micro, aval, num_microbatches), full, aval)
        if hasattr(a, "val") or hasattr(b, "val") or ref_of[a] != micro_ref_of[b]:
            raise Untypable("its body has another structure at one microbatch")
        return ref_of[a]

    consts = tuple(define(a, b) for a, b in zip(jf.constvars, jm.constvars))
    const_types = tuple(_const_type(a, b) for a, b in zip(cf, cm))
    inputs = tuple(define(a, b) for a, b in zip(jf.invars, jm.invars))
    lines = []
    for i, (e, g) in enumerate(zip(jf.eqns, jm.eqns)):
        if e.primitive is not g.primitive or len(e.invars) != len(g.invars) or len(e.outvars) != len(g.outvars):
            raise Untypable("its body has another structure at one microbatch", ((0, i),))
        atoms = tuple(atom(a, b) for a, b in zip(e.invars, g.invars))
        outs = tuple(define(a, b) for a, b in zip(e.outvars, g.outvars))
        lines.append(Line(e.primitive.name, e.params, g.params, atoms, outs, bool(e.effects)))
    outputs = tuple(atom(a, b) for a, b in zip(jf.outvars, jm.outvars))
    return Pair(inputs, consts, const_types, tuple(lines), outputs, avals, micro_avals)


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, getattr(jaxpr, "consts", ())


def _const_type(a: Any, b: Any) -> Type:
    if a is b or (np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a) == np.asarray(b)))):
        return REPLICATED
    return Unscaled("an array captured by its body depends on the batch size")

