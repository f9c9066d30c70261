"""Rules for gather, scatter and dynamic slices: which example an index may reach.

Three forms keep a microbatch within its own examples: the batch is a batching axis of the op; the
window spans the whole batch axis; the index along the batch is the example's own position
(`logits[jnp.arange(B), labels]`), which `Index` stands for.
"""

from __future__ import annotations

from typing import Any

from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import (
    Index,
    NeedsWhole,
    Site,
    Type,
    Untypable,
    join,
    no_powers,
    no_sums,
    rule,
)


def _mode(site: Site) -> str:
    return str(site.params["mode"]).rpartition(".")[2].upper()


def _check_indices(t: Type) -> None:
    no_sums([t], "indexing by")
    no_powers([t], "indexing by")


def _batch_dims(rank: int, window: Any) -> list[int]:
    """Axes of a gather's result, or of a scatter's updates, that come from the indices' axes."""
    return [d for d in range(rank) if d not in window]


def _column_of(axis: int, t: Index, start_map: tuple[int, ...], width: int) -> bool:
    """Whether `axis` is addressed by the example's own position and nothing else is."""
    columns = set(range(width)) if t.columns is None else set(t.columns)
    return t.role == "index" and columns == {start_map.index(axis)} if axis in start_map else False


@rule("gather", varies=("slice_sizes",), index_aware=True)
def gather(site: Site) -> list[Type]:
    dims, operand, indices = site.params["dimension_numbers"], site.types[0], site.types[1]
    sizes, micro_sizes = tuple(site.params["slice_sizes"]), tuple(site.micro_params["slice_sizes"])
    if operand.kind == "I":
        raise NeedsWhole("it gathers positions along the batch")
    _check_indices(indices)
    axis = None if operand.kind == "Z" and site.in_axis(0) is None else site.in_axis(0)
    if any(a != b for d, (a, b) in enumerate(zip(sizes, micro_sizes)) if d != axis):
        raise Untypable("how much it gathers depends on the batch size")
    if operand.kind == "S" or operand.power:
        _no_constant_fill(site)
    if operand.kind == "Z":
        if _mode(site) == "FILL_OR_DROP":
            operand = site.resolved(0)
        elif not isinstance(indices, Index):
            return [operand]
    index_axis = _axis_of(site, 1)
    outer = _batch_dims(len(site.outs[0].shape), dims.offset_dims)
    if axis is None:
        if isinstance(indices, Index):
            raise NeedsWhole("it looks up positions along the batch in a table")
        if index_axis is None:
            return [site.like(operand)]
        if operand.kind == "S":
            raise Untypable("each example looks up its own part of a sum over the batch")
        if index_axis == len(site.ins[1].shape) - 1:
            raise Untypable("the batch axis holds coordinates of one index")
        return [BatchType("B", operand.power, _at(site, outer[index_axis]))]
    if axis in dims.operand_batching_dims:
        mate = dims.start_indices_batching_dims[dims.operand_batching_dims.index(axis)]
        if index_axis != mate:
            raise Untypable("examples and the indices into them are not aligned")
        if isinstance(indices, Index):
            raise NeedsWhole("it indexes within an example by positions along the batch")
        return [site.sliced(operand.power, outer[mate])]
    whole = (sizes[axis], micro_sizes[axis]) == (site.ins[0].shape[axis], site.micro_ins[0].shape[axis])
    if whole and axis not in dims.start_index_map and axis not in dims.collapsed_slice_dims:
        if index_axis is not None:
            raise Untypable("each example looks up values in all examples of the batch")
        window = [d for d in range(len(sizes)) if d not in (*dims.collapsed_slice_dims, *dims.operand_batching_dims)]
        return [site.sliced(operand.power, dims.offset_dims[window.index(axis)])]
    if isinstance(indices, Index) and axis in dims.collapsed_slice_dims and sizes[axis] == 1 == micro_sizes[axis]:
        width = site.ins[1].shape[-1]
        if index_axis != len(site.ins[1].shape) - 1 and _column_of(axis, indices, tuple(dims.start_index_map), width):
            assert index_axis is not None
            _same_extent(site, 0, axis, 1, index_axis)
            return [site.sliced(operand.power, outer[index_axis])]
    raise Untypable("it picks examples of the batch by an index (a shuffle, or in-batch negatives)")


def _at(site: Site, axis: int) -> int:
    if site.out_axis() != axis:
        raise Untypable("the batch axis is lost or moved in a way this op cannot be split")
    return axis


def _axis_of(site: Site, k: int) -> int | None:
    t = site.types[k]
    return t.axis if isinstance(t, Index) else site.in_axis(k)


def _same_extent(site: Site, k: int, a: int, j: int, b: int) -> None:
    if site.ins[k].shape[a] != site.ins[j].shape[b]:
        raise NeedsWhole("it indexes some examples of the batch only")


def _no_constant_fill(site: Site) -> None:
    if _mode(site) == "FILL_OR_DROP":
        fill = site.params.get("fill_value")
        nan = (fill is None or fill != fill) and site.outs[0].is_inexact
        if not nan and fill != 0:
            raise Untypable("it fills places out of range with a constant, in a value that is a scaled part of the whole")


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", index_aware=True)
def scatter(site: Site) -> list[Type]:
    dims, (operand, indices, updates) = site.params["dimension_numbers"], site.types
    if "I" in (operand.kind, updates.kind):
        raise NeedsWhole("it scatters positions along the batch")
    _check_indices(indices)
    adds, linear = site.primitive in ("scatter-add", "scatter-sub"), site.primitive[7:] in ("", "-add", "-sub")
    if not linear:
        what = f"'{site.primitive}' of"
        no_sums([operand, updates], what)
        no_powers([operand, updates], what)
    axis, index_axis, update_axis = site.in_axis(0), _axis_of(site, 1), site.in_axis(2)
    outer = _batch_dims(len(site.ins[2].shape), dims.update_window_dims)
    if axis is None and update_axis is None:
        if index_axis is not None:
            raise Untypable("each example scatters to its own places, but all scatter the same values")
        t = join([operand, updates], "scatters")
        return [site.like(site.resolved(0) if t.kind == "Z" and not linear else t)]
    if axis is None:
        return [_summed(site, adds, outer, index_axis, update_axis)]
    t = join([operand, updates], "scatters")
    if t.kind == "S" or "R" in (operand.kind, updates.kind):
        raise Untypable("it scatters values that are not per example into values that are")
    if t.kind == "Z" and linear:
        return [t]
    power = t.power
    if axis in dims.operand_batching_dims:
        mate = dims.scatter_indices_batching_dims[dims.operand_batching_dims.index(axis)]
        if isinstance(indices, Index):
            raise NeedsWhole("it indexes within an example by positions along the batch")
        if index_axis != mate or update_axis != outer[mate]:
            raise Untypable("examples and the indices into them are not aligned")
        return [site.sliced(power, axis)]
    window = [d for d in range(len(site.ins[0].shape)) if d not in (*dims.inserted_window_dims, *dims.operand_batching_dims)]
    if axis in window and axis not in dims.scatter_dims_to_operand_dims:
        at = dims.update_window_dims[window.index(axis)]
        if index_axis is None and update_axis == at:
            _same_size(site, 0, axis, 2, at)
            return [site.sliced(power, axis)]
        raise Untypable("it scatters into examples other than the microbatch's own")
    if isinstance(indices, Index) and axis in dims.inserted_window_dims and index_axis != len(site.ins[1].shape) - 1:
        assert index_axis is not None
        width = site.ins[1].shape[-1]
        start_map = tuple(dims.scatter_dims_to_operand_dims)
        if update_axis == outer[index_axis] and _column_of(axis, indices, start_map, width):
            _same_extent(site, 0, axis, 1, index_axis)
            return [site.sliced(power, axis)]
    raise Untypable("it scatters into examples of the batch by an index")


def _summed(site: Site, adds: bool, outer: list[int], index_axis: int | None, update_axis: int | None) -> Type:
    """Examples scattered into a value that has no batch axis: a sum, as an embedding's gradient is."""
    operand, indices, updates = site.types
    if isinstance(indices, Index):
        raise NeedsWhole("it scatters by positions along the batch")
    if not adds:
        raise Untypable("the examples of the batch overwrite each other's values")
    vector = len(site.ins[1].shape) - 1
    if index_axis is None or index_axis == vector or update_axis != outer[index_axis]:
        raise Untypable("examples and the indices they scatter to are not aligned")
    if updates.kind == "Z":
        return site.like(operand)
    return site.like(join([operand, BatchType("S", updates.power)], "scatters"))


@rule("dynamic_slice", varies=("slice_sizes",))
def dynamic_slice(site: Site) -> list[Type]:
    operand, starts = site.types[0], site.types[1:]
    sizes, micro_sizes = site.params["slice_sizes"], site.micro_params["slice_sizes"]
    for t in starts:
        _check_indices(t)
    if operand.kind == "Z":
        return [operand]
    axis = site.in_axis(0)
    for d, (a, b) in enumerate(zip(sizes, micro_sizes)):
        if d == axis:
            # Spanning the whole axis, its start is clamped to zero at either size.
            if (a, b) != (site.ins[0].shape[d], site.micro_ins[0].shape[d]):
                raise Untypable("it takes some examples of the batch and leaves the others")
        elif a != b:
            raise Untypable("how much it takes depends on the batch size")
    return [site.like(operand, axis)]


@rule("dynamic_update_slice")
def dynamic_update_slice(site: Site) -> list[Type]:
    operand, update, starts = site.types[0], site.types[1], site.types[2:]
    for t in starts:
        _check_indices(t)
    t = join([operand, update], "writes")
    if t.kind == "Z":
        return [t]
    axis = site.in_axis(0)
    if axis is None:
        return [site.like(t)]
    if site.in_axis(1) != axis:
        raise Untypable("it writes some examples of the batch only")
    _same_size(site, 0, axis, 1, axis)
    if t.kind != "B":
        raise Untypable("it writes values that are not per example into values that are")
    return [site.sliced(t.power, axis)]


def _same_size(site: Site, k: int, a: int, j: int, b: int) -> None:
    if site.ins[k].shape[a] != site.ins[j].shape[b]:
        raise Untypable("it writes some examples of the batch only")
