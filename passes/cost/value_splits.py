"""Which mesh axes split the values inside a fragment, as far as its border, its products and its constraints tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hetjax.ir.graph import Op, Ref
from hetjax.ir.program import Port, Spec, StageMesh
from hetjax.passes.constraint_ops import constrained_spec

# Ops that keep what is known of a value's sharding.
_LAYOUT = ("transpose", "convert_element_type", "copy", "stop_gradient", "optimization_barrier")


@dataclasses.dataclass(frozen=True)
class Splits:
    """What is known of a fragment's values.

    Attributes:
      axes: by ref, the axes that split the value.
      specs: by ref, how exactly, where that is known.
      summed: by position of a product, the axes over which each device has a part of its sums.
    """

    axes: Mapping[Ref, frozenset[str]]
    specs: Mapping[Ref, Spec]
    summed: Mapping[int, frozenset[str]]


def value_splits(ops: Sequence[Op], inputs: Sequence[Port], mesh: StageMesh) -> Splits:
    """Returns how the values of a fragment are split.

    A value is taken to be split over the axes that split what it is made of. A product that contracts a split
    dimension is summed over that axis, and whole; replicas gather a weight instead.

    Args:
      ops: in order.
      inputs: ports with specs.
      mesh: the fragment's.
    """
    specs: dict[Ref, Spec] = {p.ref: p.spec for p in inputs}
    axes = {r: frozenset(a for dim in spec for a in dim) for r, spec in specs.items()}
    summed: dict[int, frozenset[str]] = {}
    for i, op in enumerate(ops):
        found = frozenset().union(*(axes.get(r, frozenset()) for r in op.refs))
        said = constrained_spec(op, mesh.axes)
        if said is not None:
            specs[op.outputs[0]] = said
            found = frozenset(a for dim in said for a in dim if mesh.axis_size(a) > 1)
        elif op.primitive in _LAYOUT and op.refs and op.refs[0] in specs:
            spec, order = specs[op.refs[0]], op.param("permutation")
            specs[op.outputs[0]] = spec if order is None else tuple(spec[d] for d in order)
        elif op.primitive == "dot_general":
            contracting, _ = op.param("dimension_numbers", (((), ()), ((), ())))
            over = frozenset(
                axis
                for operand, dims in zip(op.inputs, contracting)
                if isinstance(operand, int) and specs.get(operand)
                for d in dims
                for axis in specs[operand][d]
                if axis != "data"
            )
            if over:
                summed[i] = over
                found -= over
        for r in op.outputs:
            axes[r] = found
    return Splits(axes, specs, summed)
