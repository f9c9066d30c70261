"""Types for a step that is accepted per microbatch: statistics of the batch become the microbatch's own.

No equality is claimed here. What is kept is scale: a mean over the microbatch stands for the mean over
the batch, so that losses and gradients come out as averages over microbatches and not as sums. A value
that each microbatch has for itself is typed S,p+1, "the whole is the average"; to the ops that read it
it is as good as replicated, R,p.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.ir.graph import Aval
from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import Index, Type, Untypable
from hetjax.passes.prover.dispatch import Typer
from hetjax.passes.prover.pairs import Line

_ADDS_POWERS = frozenset({"mul", "dot_general", "conv_general_dilated"})
_SUMS = frozenset({"reduce_sum", "cumsum", "scatter-add", "reduce_window_sum", *_ADDS_POWERS})
# f(c*x) carries no power of c, or one that depends on x.
_FORGETS = frozenset({
    "exp", "log", "tanh", "logistic", "sin", "cos", "erf", "sign", "eq", "ne", "lt", "le", "gt", "ge",
    "argmax", "argmin", "is_finite", "and", "or", "not", "exp2", "log1p", "expm1",
})  # fmt: skip


def local_types(
    typer: Typer, line: Line, types: Sequence[Type], avals: Sequence[Aval], micro: Sequence[Aval]
) -> list[Type]:
    """Returns types of an op's results where each microbatch goes by its own statistics.

    Args:
      typer: applies the rules.
      line: the op.
      types: types of its inputs.
      avals: the program's avals at the whole batch, by ref.
      micro: the same at one microbatch.
    """
    own = [_as_replicated(t) for t in types]
    if pairs_examples(line, avals, micro):
        return _by_scale(line, own, avals, micro)
    try:
        out = typer.line(line, own, avals, micro)
    except Untypable:
        return _by_scale(line, own, avals, micro)
    return [_averaged(t) if t.kind == "R" else t for t in out]


def pairs_examples(line: Line, avals: Sequence[Aval], micro: Sequence[Aval]) -> bool:
    """Whether a value of the op has two batch axes, one entry per pair; the rules know of one."""
    refs = [a for a in (*line.inputs, *line.outputs) if isinstance(a, int)]
    return any(len(_batch_axes(avals[r], micro[r])) > 1 for r in refs)


def whole_to_local(full: Aval, micro: Aval) -> BatchType:
    """Returns the type of a value with no slices (a mask of all pairs) that each microbatch makes anew."""
    return BatchType("B", 0, _batch_axes(full, micro)[0])


def _as_replicated(t: Type) -> Type:
    if t.kind == "S":
        return BatchType("R", t.power - 1)
    if isinstance(t, Index):
        return BatchType("B", 0, t.axis)
    return t


def _averaged(t: Type) -> BatchType:
    return BatchType("S", t.power + 1)


def _by_scale(line: Line, types: Sequence[Type], avals: Sequence[Aval], micro: Sequence[Aval]) -> list[Type]:
    """Counts powers of M only: each batch axis that is summed away takes one."""
    power = _power(line, types, avals, micro)
    out: list[Type] = []
    for r in line.outputs:
        axes = _batch_axes(avals[r], micro[r])
        out.append(BatchType("B", power, axes[0]) if axes else _averaged(BatchType("R", power)))
    return out


def _power(line: Line, types: Sequence[Type], avals: Sequence[Aval], micro: Sequence[Aval]) -> int:
    name, powers = line.primitive, [t.power for t in types if t.kind != "Z"]
    if name in _FORGETS or not powers:
        return 0
    if name in _ADDS_POWERS:
        power = sum(powers)
    elif name == "div":
        power = types[0].power - types[1].power
    elif name in ("square", "integer_pow"):
        power = types[0].power * (2 if name == "square" else line.params["y"])
    else:
        power = max(powers, key=abs)
    if name in _SUMS:
        power -= _summed_axes(line, avals, micro)
    return power


def _summed_axes(line: Line, avals: Sequence[Aval], micro: Sequence[Aval]) -> int:
    """How many batch axes the op sums away."""
    axes = [_batch_axes(avals[a], micro[a]) if isinstance(a, int) else [] for a in line.inputs]
    if line.primitive == "reduce_sum":
        return sum(d in line.params["axes"] for d in axes[0])
    if line.primitive == "dot_general":
        (left, _), _ = line.params["dimension_numbers"]
        return sum(d in left for d in axes[0])
    kept = max((len(_batch_axes(avals[r], micro[r])) for r in line.outputs), default=0)
    return max(0, max(map(len, axes), default=0) - kept)


def _batch_axes(full: Aval, micro: Aval) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(full.shape, micro.shape)) if a != b]
