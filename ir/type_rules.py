"""Shapes and dtypes of common primitives, checked without JAX so that graphs out of text are too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir.graph import Aval, Literal, Op, Symbol

_Check = Callable[[Op, list[Aval], list[Aval]], str]


def type_problem(op: Op, avals: Sequence[Aval]) -> str:
    """Returns what is wrong with the types of an op, or ""; primitives without a rule pass."""
    check = _CHECKS.get(op.primitive)
    if check is None:
        return ""
    ins = [a.aval if type(a) is Literal else avals[a] for a in op.inputs]  # type: ignore[index]
    outs = [avals[r] for r in op.outputs]
    try:
        return check(op, ins, outs)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):
        return f"{op.primitive} has parameters or operands it cannot have"


def _types(avals: Sequence[Aval]) -> str:
    return ", ".join(map(str, avals))


def _arity(op: Op, ins: list[Aval], outs: list[Aval], n: int) -> str:
    if len(ins) != n or len(outs) != 1:
        return (
            f"{op.primitive} takes {n} operands and gives 1 result, not {len(ins)} and {len(outs)}"
        )
    return ""


def _broadcast_shape(ins: list[Aval]) -> tuple[int, ...] | None:
    """The shape of an elementwise result: JAX lets a scalar, or a dimension of 1, stand beside any other."""
    shape: tuple[int, ...] = ()
    for a in ins:
        if a.shape == shape or not a.shape:
            continue
        if not shape:
            shape = a.shape
        elif len(shape) != len(a.shape) or any(
            m != n and m != 1 and n != 1 for m, n in zip(shape, a.shape)
        ):
            return None
        else:
            shape = tuple(n if m == 1 else m for m, n in zip(shape, a.shape))
    return shape


def _nary(n: int, result: str = "") -> _Check:
    def check(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
        if problem := _arity(op, ins, outs, n):
            return problem
        shape, dtype = outs[0].shape, ins[0].dtype
        same = op.primitive in _MIXED or all(a.dtype == dtype for a in ins)
        if not same or _broadcast_shape(ins) != shape:
            return f"{op.primitive} of {_types(ins)} cannot give {outs[0]}"
        dtype = result or dtype
        if dtype != outs[0].dtype and not (
            op.primitive in _REAL_OF_COMPLEX or op.param("out_dtype")
        ):
            return f"{op.primitive} of {_types(ins)} gives {dtype}, not {outs[0].dtype}"
        return ""

    return check


def _convert(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    new = op.param("new_dtype")
    if problem := _arity(op, ins, outs, 1):
        return problem
    if ins[0].shape != outs[0].shape:
        return f"{op.primitive} changes {ins[0]} to {outs[0]}; only the dtype may change"
    if isinstance(new, Symbol) and new.name != outs[0].dtype:
        return f"{op.primitive} to {new.name} cannot give {outs[0]}"
    return ""


def _shape_is(op: Op, outs: list[Aval], shape: Sequence[int]) -> str:
    if outs[0].shape != tuple(shape):
        return f"{op.primitive} gives shape ({','.join(map(str, shape))}), not {outs[0]}"
    return ""


def _reshape(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    sizes = op.param("new_sizes")
    if math.prod(sizes) != ins[0].size:
        return f"reshape of {ins[0]} ({ins[0].size} elements) to {math.prod(sizes)} elements"
    return _shape_is(op, outs, sizes)


def _broadcast(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    shape, dims = op.param("shape"), op.param("broadcast_dimensions")
    if len(dims) != ins[0].ndim or any(n not in (1, shape[d]) for n, d in zip(ins[0].shape, dims)):
        return f"broadcast_in_dim of {ins[0]} along {dims} cannot give shape {shape}"
    return _shape_is(op, outs, shape)


def _transpose(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    order = op.param("permutation")
    if sorted(order) != list(range(ins[0].ndim)):
        return f"transpose of {ins[0]} by {order}, which is not an order of its dimensions"
    return _shape_is(op, outs, [ins[0].shape[d] for d in order])


def _reduce(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    axes = op.param("axes")
    if any(not 0 <= d < ins[0].ndim for d in axes):
        return f"{op.primitive} over axes {axes} of {ins[0]}"
    return _shape_is(op, outs, [n for d, n in enumerate(ins[0].shape) if d not in axes])


def _squeeze(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    dims = op.param("dimensions")
    if any(ins[0].shape[d] != 1 for d in dims):
        return f"squeeze of {ins[0]} drops a dimension that is not 1"
    return _shape_is(op, outs, [n for d, n in enumerate(ins[0].shape) if d not in dims])


def _concatenate(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    d = op.param("dimension")
    shape = list(ins[0].shape)
    shape[d] = sum(a.shape[d] for a in ins)
    for a in ins:
        if [n for i, n in enumerate(a.shape) if i != d] != [
            n for i, n in enumerate(shape) if i != d
        ]:
            return f"concatenate of {_types(ins)} along dimension {d}"
    return _shape_is(op, outs, shape)


def _select(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    which, *cases = ins
    if not cases or any(
        a.dtype != outs[0].dtype or (a.shape and a.shape != outs[0].shape) for a in cases
    ):
        return f"select_n of {_types(cases)} cannot give {outs[0]}"
    if (which.shape and which.shape != outs[0].shape) or which.dtype not in ("bool", "i32"):
        return f"select_n chooses by {which} among {outs[0]}"
    return ""


def _dot_general(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    (left_sum, right_sum), (left_batch, right_batch) = op.param("dimension_numbers")
    left, right = ins[0].shape, ins[1].shape
    for a, b in (
        *zip(left_sum, right_sum, strict=True),
        *zip(left_batch, right_batch, strict=True),
    ):
        if left[a] != right[b]:
            return (
                f"dot_general of {_types(ins)}: dimension {a} of the left has {left[a]}, "
                f"dimension {b} of the right has {right[b]}"
            )
    free = lambda shape, used: [n for d, n in enumerate(shape) if d not in used]  # noqa: E731
    shape = (
        [left[d] for d in left_batch]
        + free(left, (*left_sum, *left_batch))
        + free(right, (*right_sum, *right_batch))
    )
    return _shape_is(op, outs, shape)


def _iota(op: Op, ins: list[Aval], outs: list[Aval]) -> str:
    dtype: Any = op.param("dtype")
    if isinstance(dtype, Symbol) and dtype.name != outs[0].dtype:
        return f"iota of {dtype.name} cannot give {outs[0]}"
    return _shape_is(op, outs, op.param("shape"))


# Primitives whose result is real where the operand is complex.
_REAL_OF_COMPLEX = frozenset({"abs", "real", "imag"})
# Primitives whose operands may differ in dtype.
_MIXED = frozenset({"pow"})
_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(
        (
            "add",
            "sub",
            "mul",
            "div",
            "max",
            "min",
            "rem",
            "pow",
            "atan2",
            "and",
            "or",
            "xor",
            "nextafter",
            "shift_left",
            "shift_right_logical",
            "shift_right_arithmetic",
            "add_any",
        ),
        _nary(2),
    ),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _nary(2, "bool")),
    **dict.fromkeys(
        (
            "neg",
            "sign",
            "floor",
            "ceil",
            "round",
            "exp",
            "exp2",
            "log",
            "log1p",
            "expm1",
            "tanh",
            "logistic",
            "sin",
            "cos",
            "tan",
            "sqrt",
            "rsqrt",
            "cbrt",
            "abs",
            "not",
            "erf",
            "erfc",
            "erf_inv",
            "lgamma",
            "digamma",
            "square",
            "integer_pow",
            "copy",
        ),
        _nary(1),
    ),
    "is_finite": _nary(1, "bool"),
    "convert_element_type": _convert,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _reduce,
    ),
    "squeeze": _squeeze,
    "concatenate": _concatenate,
    "select_n": _select,
    "dot_general": _dot_general,
    "iota": _iota,
}
