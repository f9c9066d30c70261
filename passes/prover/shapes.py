"""Rules for ops that move, repeat, join or cut values without computing on them."""

from __future__ import annotations

import math

from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import (
    REPLICATED,
    Index,
    NeedsWhole,
    Site,
    Type,
    Untypable,
    batch_axis,
    join,
    live,
    rule,
)


@rule("broadcast_in_dim", varies=("shape",), index_aware=True)
def broadcast_in_dim(site: Site) -> list[Type]:
    t, dims = site.types[0], tuple(site.params["broadcast_dimensions"])
    axis = site.out_axis()
    if t.kind == "Z":
        return [t]
    if isinstance(t, Index):
        return [_broadcast_index(site, t, dims, axis)]
    if t.axis is not None:
        return [site.sliced(t.power, dims[t.axis])]
    if axis is None:
        return [t]
    if t.kind == "S":
        raise Untypable("it gives a sum or mean over the batch back to every example")
    # Each example gets the same copy: the operand has no extent along the new batch axis.
    if axis in dims and site.ins[0].shape[dims.index(axis)] != 1:
        raise Untypable("it lines up an ordinary axis with the batch axis")
    return [BatchType("B", t.power, axis)]


def _broadcast_index(site: Site, t: Index, dims: tuple[int, ...], axis: int | None) -> Type:
    if axis != dims[t.axis]:
        raise NeedsWhole("it moves positions along the batch")
    last_in, last_out = len(site.ins[0].shape) - 1, len(site.outs[0].shape) - 1
    same_last = dims[last_in] == last_out and (
        last_in == t.axis or site.ins[0].shape[-1] == site.outs[0].shape[-1]
    )
    if t.columns is not None and not same_last:
        raise NeedsWhole("it moves positions along the batch")
    return Index(dims[t.axis], t.columns, t.role)


@rule("reshape", varies=("new_sizes",), index_aware=True)
def reshape(site: Site) -> list[Type]:
    t = site.types[0]
    if t.kind == "Z":
        return [t]
    full, micro = site.ins[0].shape, site.micro_ins[0].shape
    if (order := site.params.get("dimensions")) is not None:
        full, micro = tuple(full[i] for i in order), tuple(micro[i] for i in order)
    axis_in, axis = batch_axis(full, micro, site.num_microbatches), site.out_axis()
    if axis_in is None:
        return [site.like(t)]
    # Row-major order keeps a slice of the batch one slice, wherever it is merged into or split from
    # the axes after it; the axes before it must stay the same number of blocks.
    if axis is None or math.prod(full[:axis_in]) != math.prod(site.outs[0].shape[:axis]):
        raise Untypable(
            f"reshaping {list(full)} to {list(site.outs[0].shape)} interleaves the examples of "
            "different microbatches"
        )
    if isinstance(t, Index):
        # A longer axis after the merge counts elements, not examples.
        same_size = full[axis_in] == site.outs[0].shape[axis]
        same_last = t.columns is None or full[-1] == site.outs[0].shape[-1]
        if not (same_size and same_last and t.role == "index"):
            raise NeedsWhole("it reshapes positions along the batch")
        return [Index(axis, t.columns)]
    return [site.sliced(t.power, axis)]


@rule("transpose")
def transpose(site: Site) -> list[Type]:
    t, order = site.types[0], list(site.params["permutation"])
    return [site.like(t, None if t.axis is None else order.index(t.axis))]


@rule("squeeze", index_aware=True)
def squeeze(site: Site) -> list[Type]:
    t, rank = site.types[0], len(site.ins[0].shape)
    gone = {d % rank for d in site.params["dimensions"]}
    if isinstance(t, Index):
        if t.axis in gone or (t.columns is not None and rank - 1 in gone):
            raise NeedsWhole("it drops an axis of positions along the batch")
        return [Index(t.axis - sum(d < t.axis for d in gone), t.columns, t.role)]
    if t.axis is None:
        return [site.like(t)]
    if t.axis in gone:
        raise Untypable("it drops the batch axis")
    return [site.sliced(t.power, t.axis - sum(d < t.axis for d in gone))]


@rule("rev")
def rev(site: Site) -> list[Type]:
    t = site.types[0]
    if t.kind == "B" and t.axis in site.params["dimensions"]:
        raise Untypable("it reverses the order of the examples in the batch")
    return [site.like(t, t.axis)]


@rule("slice", varies=("start_indices", "limit_indices", "strides"))
def slice_(site: Site) -> list[Type]:
    t = site.types[0]
    if t.kind == "Z":
        return [t]
    axis = site.in_axis(0)
    for d, (full, micro) in enumerate(zip(_bounds(site, False), _bounds(site, True))):
        if d == axis:
            if full != (0, site.ins[0].shape[d], 1) or micro != (0, site.micro_ins[0].shape[d], 1):
                raise Untypable("it takes some examples of the batch and leaves the others")
        elif full != micro:
            raise Untypable("which elements it takes depends on the batch size")
    return [site.like(t, t.axis)]


def _bounds(site: Site, micro: bool) -> list[tuple[int, int, int]]:
    p = site.micro_params if micro else site.params
    strides = p.get("strides") or (1,) * len(p["start_indices"])
    return [(int(a), int(b), int(c)) for a, b, c in zip(p["start_indices"], p["limit_indices"], strides)]


@rule("split", varies=("sizes",))
def split(site: Site) -> list[Type]:
    t, axis = site.types[0], site.in_axis(0)
    if axis == site.params["axis"]:
        raise Untypable("it splits the batch in parts")
    if tuple(site.params["sizes"]) != tuple(site.micro_params["sizes"]):
        raise Untypable("how it splits depends on the batch size")
    return [site.like(t, t.axis, k) for k in range(len(site.outs))]


@rule("unstack")
def unstack(site: Site) -> list[Type]:
    t, at = site.types[0], site.params["axis"] % len(site.ins[0].shape)
    if site.in_axis(0) == at:
        raise Untypable("it takes the batch apart, example by example")
    if t.axis is None:
        return [site.like(t, None, k) for k in range(len(site.outs))]
    return [site.sliced(t.power, t.axis - (t.axis > at), k) for k in range(len(site.outs))]


@rule("concatenate", index_aware=True)
def concatenate(site: Site) -> list[Type]:
    at, axis = site.params["dimension"], site.out_axis()
    if axis is not None and axis == at:
        raise Untypable("it joins several batches along the batch axis, which interleaves microbatches")
    if any(t.kind == "I" for t in site.types):
        return [_concatenate_index(site, at, axis)]
    t = join(site.types, "joins")
    if t.kind == "Z":
        return [t]
    return [site.like(t) if axis is None else site.sliced(t.power, axis)]


def _concatenate_index(site: Site, at: int, axis: int | None) -> Type:
    """Columns of an index array: some are positions in the batch, some ordinary indices."""
    columns, offset = set(), 0
    if axis is None or at != len(site.outs[0].shape) - 1:
        raise NeedsWhole("it joins positions along the batch")
    for t, aval in zip(site.types, site.ins):
        if isinstance(t, Index):
            if t.role != "index" or t.axis != axis:
                raise NeedsWhole("it joins positions along the batch")
            inner = range(aval.shape[-1]) if t.columns is None else t.columns
            columns.update(offset + c for c in inner)
        elif t.power:
            raise NeedsWhole("it joins positions along the batch with scaled values")
        offset += aval.shape[-1]
    return Index(axis, frozenset(columns))


@rule("stack")
def stack(site: Site) -> list[Type]:
    at, axis = site.params["axis"] % len(site.outs[0].shape), site.out_axis()
    t = join(site.types, "joins")
    if t.kind == "Z":
        return [t]
    if axis is None:
        return [site.like(t)]
    for b in live(site.types):
        if b.kind != "B" or b.axis is None or b.axis + (b.axis >= at) != axis:
            raise Untypable("it lines up the batch axis with another axis")
    return [site.sliced(t.power, axis)]


@rule("tile", varies=("reps",))
def tile(site: Site) -> list[Type]:
    t, axis = site.types[0], site.out_axis()
    reps, micro_reps = tuple(site.params["reps"]), tuple(site.micro_params["reps"])
    if t.axis is not None:
        # Repeating whole batches end to end puts a microbatch's copies apart.
        if reps != micro_reps or len(reps) != len(site.ins[0].shape) or reps[t.axis] != 1:
            raise Untypable("it repeats the whole batch")
        return [site.sliced(t.power, t.axis)]
    if axis is not None and t.kind == "R":
        # Every microbatch's slice holds a whole number of copies.
        return [BatchType("B", t.power, axis)]
    return [site.like(t)]


@rule("pad", varies=("padding_config",))
def pad(site: Site) -> list[Type]:
    operand, value = site.types
    axis = site.in_axis(0)
    for d, (full, micro) in enumerate(zip(site.params["padding_config"], site.micro_params["padding_config"])):
        if tuple(full) != tuple(micro):
            raise Untypable("how it pads depends on the batch size")
        if d == axis and tuple(full) != (0, 0, 0):
            raise Untypable("it pads the batch axis")
    t = join([operand, value], "pads with")
    if t.kind == "Z":
        return [t]
    if value.kind == "S" and axis is not None:
        raise Untypable("it pads single examples with a sum over the batch")
    return [site.like(t) if axis is None else site.sliced(t.power, axis)]


@rule("iota", varies=("shape",))
def iota(site: Site) -> list[Type]:
    axis = site.out_axis()
    if axis is None:
        return [REPLICATED]
    if axis != site.params["dimension"]:
        return [BatchType("B", 0, axis)]
    return [Index(axis)] if not site.outs[0].is_inexact else _positions()


def _positions() -> list[Type]:
    raise Untypable("it numbers the examples of the batch")
