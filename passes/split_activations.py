"""Sequence parallelism for any step: what tensor parallelism leaves whole is split on another dimension than examples.

    x   in parts of the sequence                     x   whole on every device
    y = norm x          parts                        y = norm x          the same on every device
    w = gather y        whole
    h = dot w A         parts of the columns         h = dot y A         parts of the columns
    s = dot h B         sums of parts, scattered     s = dot h B         sums of parts, on every device
    z = add x s         parts                        z = add x s         the same on every device

No layer is known by name. Shardy says which values tensor parallelism splits; ops that touch one of them, or a
split weight, are its regions. Between the regions the split is propagated, by Shardy again, from the values that
go from one layer to the next. A region's ops read gathered values, and what they leave whole is scattered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hetjax.ir.errors import LoweringError
from hetjax.ir.graph import Aval, Op, Ref
from hetjax.ir.program import Fragment, Spec, StageMesh
from hetjax.passes.constraint_ops import constraint_op
from hetjax.passes.partition import partition

_AXIS = "model"
# Dimensions that are tried: of those that divide, the first ones.
TRIED = 3
_MOVED_TWICE = "all-reduce"


def is_split(spec: Spec | None) -> bool:
    """Returns whether tensor parallelism splits a value."""
    return spec is not None and any(_AXIS in dim for dim in spec)


def splittable(spec: Spec, shape: Sequence[int], batch_axis: int | None, size: int) -> list[int]:
    """Returns the dimensions of a whole value that tensor-parallel devices can share, but that of examples."""
    if is_split(spec):
        return []
    return [d for d, n in enumerate(shape) if d != batch_axis and not spec[d] and n > 1 and n % size == 0][:TRIED]


def with_dim(spec: Spec, dim: int) -> Spec:
    """Returns a spec with one dimension split over tensor-parallel devices."""
    return tuple((_AXIS,) if d == dim else axes for d, axes in enumerate(spec))


@dataclasses.dataclass(frozen=True)
class Regions:
    """A fragment under tensor parallelism alone.

    Attributes:
      fragment: its ports have specs.
      mesh: its stage's.
      plain: how Shardy splits each value.
      fixed: values that cannot be split: state, batch leaves, what is made of nothing.
    """

    fragment: Fragment
    mesh: StageMesh
    plain: Mapping[Ref, Spec]
    fixed: frozenset[Ref]

    def inside(self, op: Op) -> bool:
        """Returns whether an op is tensor-parallel."""
        return any(is_split(self.plain.get(r)) for r in (*op.refs, *op.outputs))


def regions_of(fragment: Fragment, mesh: StageMesh, avals: Sequence[Aval], fixed: frozenset[Ref]) -> Regions:
    """Returns what tensor parallelism alone makes of a fragment.

    Args:
      fragment: its ports have specs.
      mesh: its stage's.
      avals: type of each ref.
      fixed: refs that cannot be split.

    Raises:
      LoweringError: the ops cannot be lowered, or Shardy refuses the shardings.
    """
    inputs = {p.ref: p.spec for p in fragment.inputs}
    outputs: dict[Ref, Spec | None] = {r: None for op in fragment.ops for r in op.outputs if avals[r].ndim}
    outputs |= {p.ref: p.spec for p in fragment.outputs if p.ref in outputs}
    found = partition(fragment.ops, avals, inputs, outputs, mesh.axes)
    return Regions(
        fragment, mesh, inputs | dict(zip(outputs, found.results)), fixed | _of_nothing(fragment.ops)
    )


def split_values(regions: Regions, avals: Sequence[Aval], seeds: Mapping[Ref, Spec | None]) -> dict[Ref, Spec]:
    """Returns the values between the regions that are split, and how, from those that are so by decision.

    Args:
      regions: of a fragment.
      avals: type of each ref.
      seeds: decided; None leaves a port open.
    """
    fragment, plain = regions.fragment, regions.plain
    between = [op for op in fragment.ops if not regions.inside(op)]
    made = {r for op in between for r in op.outputs}
    ports: dict[Ref, Spec | None] = {p.ref: p.spec for p in (*fragment.inputs, *fragment.outputs)}
    ports |= seeds
    # What a region leaves whole, and what comes in.
    given = {p.ref for p in fragment.inputs}
    given |= {r for op in fragment.ops for r in op.outputs if r not in made and not is_split(plain.get(r))}
    read = {r for op in between for r in op.refs}
    inputs = {r: ports.get(r) for r in sorted(given & (read | set(seeds)))}
    outputs = {r: ports.get(r) for r in sorted(made | set(inputs)) if avals[r].ndim}
    found = partition(between, avals, inputs, outputs, regions.mesh.axes)
    return {
        r: spec for r, spec in zip(outputs, found.results)
        if is_split(spec) and not is_split(plain.get(r)) and (seeds.get(r) or r not in regions.fixed)
    }


def constrained(
    regions: Regions, avals: Sequence[Aval], split: Mapping[Ref, Spec], value: Callable[[Ref], Ref]
) -> Fragment:
    """Returns the fragment with its values gathered before the regions and scattered after them.

    Args:
      regions: of a fragment.
      avals: type of each ref.
      split: from `split_values`.
      value: makes a new ref like another.
    """
    fragment, axes = regions.fragment, regions.mesh.axes
    read_whole = {r for op in fragment.ops if regions.inside(op) for r in op.refs if r in split}
    gathered: dict[tuple[Ref, bool], Ref] = {}
    ops: list[Op] = []
    for op in fragment.ops:
        if op.eqn is None:
            raise LoweringError(f"{fragment.name}: {op.primitive} came from text; its values cannot be split")
        inside, read = regions.inside(op), list(op.inputs)
        for k, r in enumerate(read):
            if inside and isinstance(r, int) and r in split:
                # Forward and backward gather anew, or what is gathered would be kept in between.
                key = (r, op.region == "backward")
                if key not in gathered:
                    gathered[key] = value(r)
                    ops.append(constraint_op(avals[r], r, gathered[key], regions.plain[r], axes, op))
                read[k] = gathered[key]
        outputs, after = list(op.outputs), []
        for k, r in enumerate(outputs):
            if r in split and (inside or r in read_whole):
                outputs[k] = value(r)
                after.append(constraint_op(avals[r], outputs[k], r, split[r], axes, op))
        changed = tuple(read) != op.inputs or after
        ops.append(dataclasses.replace(op, inputs=tuple(read), outputs=tuple(outputs)) if changed else op)
        ops += after
    return dataclasses.replace(fragment, ops=tuple(ops))


def moved_bytes(fragment: Fragment, mesh: StageMesh, avals: Sequence[Aval], specs: Mapping[Ref, Spec]) -> float:
    """Returns the bytes that the devices of a fragment exchange in one call, sums counted twice."""
    at = lambda ports: {p.ref: specs.get(p.ref, p.spec) for p in ports}  # noqa: E731
    found = partition(fragment.ops, avals, at(fragment.inputs), at(fragment.outputs), mesh.axes)
    return sum(c.nbytes * (2 if c.kind == _MOVED_TWICE else 1) for c in found.collectives)


def _of_nothing(ops: Sequence[Op]) -> frozenset[Ref]:
    """Returns the values that are made of numbers alone: every device has them anyway."""
    out: set[Ref] = set()
    for op in ops:
        if all(r in out for r in op.refs):
            out.update(op.outputs)
    return frozenset(out)
