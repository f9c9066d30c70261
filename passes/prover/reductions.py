"""Rules for ops that reduce, scan, sort or pool along axes."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import (
    Site,
    Type,
    Untypable,
    no_powers,
    no_sums,
    rule,
)


def _kept(axis: int, gone: Sequence[int]) -> int:
    return axis - sum(d < axis for d in gone)


@rule("reduce_sum")
def reduce_sum(site: Site) -> list[Type]:
    return [_sum(site, 0, site.params["axes"])]


def _sum(site: Site, k: int, axes: Sequence[int]) -> Type:
    t = site.types[k]
    if t.kind != "B":
        return site.like(t, k=k)
    assert t.axis is not None
    if t.axis in axes:
        return site.like(BatchType("S", t.power), k=k)
    return site.sliced(t.power, _kept(t.axis, axes), k)


@rule("psum")
def psum(site: Site) -> list[Type]:
    # Axes given by position come from vmap and are plain sums; named ones belong to pmap or shard_map.
    axes = site.params["axes"]
    if not all(isinstance(a, int) for a in axes) or site.params["axis_index_groups"] is not None:
        raise Untypable(f"it sums over the named axes {list(axes)}, which are not bound here")
    return [_sum(site, k, axes) for k in range(len(site.types))]


_OVER_BATCH = {
    "reduce_max": "the maximum", "reduce_min": "the minimum", "reduce_prod": "the product",
    "reduce_and": "'all'", "reduce_or": "'any'", "reduce_xor": "the parity",
    "argmax": "the position of the maximum", "argmin": "the position of the minimum",
}  # fmt: skip


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin")
def reduce_other(site: Site) -> list[Type]:
    (t,), name, axes = site.types, site.primitive, site.params["axes"]
    no_sums([t], f"{_OVER_BATCH[name]} of")
    if name in ("reduce_prod", "reduce_and", "reduce_or", "reduce_xor"):
        no_powers([t], f"{_OVER_BATCH[name]} of")
    power = t.power if name in ("reduce_max", "reduce_min") else 0
    axis = site.in_axis(0)
    if axis is None:
        return [site.like(BatchType("R", power))]
    if axis in axes:
        raise Untypable(f"{_OVER_BATCH[name]} over the batch is not the sum of the microbatches'")
    return [site.sliced(power, _kept(axis, axes))]


@rule("reduce")
def reduce(site: Site) -> list[Type]:
    no_sums(site.types, "reducing")
    no_powers(site.types, "reducing")
    axes = site.params["dimensions"]
    out: list[Type] = []
    for k in range(len(site.outs)):
        axis = site.in_axis(k)
        if axis in axes:
            raise Untypable("it reduces the batch with a function of its own")
        out.append(site.like(BatchType("R"), k=k) if axis is None else site.sliced(0, _kept(axis, axes), k))
    return out


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(site: Site) -> list[Type]:
    t, name = site.types[0], site.primitive
    if t.kind == "B" and t.axis == site.params["axis"]:
        raise Untypable(f"'{name}' along the batch makes each example depend on those before it")
    if name != "cumsum":
        no_sums([t], f"'{name}' of")
    if name in ("cumprod", "cumlogsumexp"):
        no_powers([t], f"'{name}' of")
        if t.kind == "Z":
            t = site.resolved(0)
    return [site.like(t, t.axis)]


@rule("sort")
def sort(site: Site) -> list[Type]:
    no_sums(site.types, "sorting")
    types = [site.resolved(k) for k in range(len(site.types))]
    axis = site.in_axis(0)
    if axis == site.params["dimension"]:
        raise Untypable("it sorts or shuffles the examples of the batch")
    # A factor M^p > 0 changes no order, so the values come out with the factor they went in with.
    return [site.like(t, axis, k) for k, t in enumerate(types)]


@rule("top_k", "approx_top_k")
def top_k(site: Site) -> list[Type]:
    if site.primitive == "approx_top_k" and site.in_axis(0) is not None:
        raise Untypable("which elements it keeps depends on how the batch is laid out")
    no_sums(site.types, "the largest elements of")
    t, last = site.resolved(0), len(site.ins[0].shape) - 1
    axis = site.in_axis(0)
    if axis is not None and axis == site.params.get("axis", last):
        raise Untypable("it picks the examples of the batch with the largest values")
    indices = BatchType(t.kind, 0, axis)
    return [site.like(t, axis, 0), site.like(indices, axis, 1)]


def _no_window_over(site: Site, axis: int | None) -> None:
    if axis is None:
        return
    neutral = {
        "window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1,
        "padding": (0, 0),
    }  # fmt: skip
    for name, value in neutral.items():
        given = site.params.get(name)
        if given is None:
            continue
        got = tuple(given[axis]) if name == "padding" else given[axis]
        if got != value:
            raise Untypable("its window covers several examples of the batch")


@rule("reduce_window_sum")
def reduce_window_sum(site: Site) -> list[Type]:
    axis = site.in_axis(0)
    _no_window_over(site, axis)
    return [site.like(site.types[0], axis)]


@rule("reduce_window_max", "reduce_window_min")
def reduce_window_max(site: Site) -> list[Type]:
    no_sums(site.types, "the window's maximum or minimum of")
    axis = site.in_axis(0)
    _no_window_over(site, axis)
    return [site.like(site.resolved(0), axis)]


@rule("reduce_window")
def reduce_window(site: Site) -> list[Type]:
    no_sums(site.types, "reducing windows of")
    no_powers(site.types, "reducing windows of")
    axis = site.in_axis(0)
    _no_window_over(site, axis)
    t = BatchType("R") if axis is None else BatchType("B", 0, axis)
    return [site.like(t, axis, k) for k in range(len(site.outs))]


@rule("select_and_scatter_add", "select_and_gather_add")
def select_by_window(site: Site) -> list[Type]:
    """Linear in the first input; the second only says which element of each window is chosen."""
    no_sums(site.types[1:], "choosing by")
    axis = site.in_axis(1)
    _no_window_over(site, axis)
    t, chooser = site.types[0], site.resolved(1)
    if t.kind == "Z":
        return [t]
    if t.kind == "S" and chooser.kind == "B":
        raise Untypable("it gives each example its own choice of a sum over the batch")
    return [site.like(t, axis)]


@rule("fft")
def fft(site: Site) -> list[Type]:
    t = site.types[0]
    axis = site.in_axis(0)
    if axis is not None and axis >= len(site.ins[0].shape) - len(site.params["fft_lengths"]):
        raise Untypable("it transforms along the batch axis")
    return [site.like(t, axis)]


# Factorisations and their kin: they act on the last two axes, each matrix alone.
MATRIX = (
    "cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "geqrf", "geqp3", "ormqr", "lu_pivots_to_permutation", "tridiagonal",
)  # fmt: skip


@rule(*MATRIX)
def matrix(site: Site) -> list[Type]:
    what = f"'{site.primitive}' of"
    no_sums(site.types, what)
    no_powers(site.types, what)
    # householder_product and ormqr also take a vector per matrix; its own axis is never the batch.
    core = 1 if site.primitive == "lu_pivots_to_permutation" else 2
    axes = {site.in_axis(k) for k in range(len(site.types))} - {None}
    if any(a is not None and a >= len(site.ins[0].shape) - core for a in axes) or len(axes) > 1:
        raise Untypable("it factorises a matrix with the examples of the batch as rows or columns")
    if axes and any(site.in_axis(k) is None for k in range(len(site.types))):
        raise Untypable("it mixes values of single examples with values of none")
    axis = axes.pop() if axes else None
    t = BatchType("R") if axis is None else BatchType("B", 0, axis)
    return [site.like(t, axis, k) for k in range(len(site.outs))]


@rule("triangular_solve")
def triangular_solve(site: Site) -> list[Type]:
    a, b = site.types
    no_sums([a], "solving with")
    axis = site.in_axis(1)
    if axis is not None and axis >= len(site.ins[1].shape) - 2:
        raise Untypable("it solves for all examples of the batch at once")
    if site.in_axis(0) != axis:
        raise Untypable("it solves one system for values of single examples")
    if b.kind == "Z":
        return [b]
    power = b.power - a.power
    if site.params.get("unit_diagonal"):
        no_powers([a], "solving with")
    if b.kind == "S":
        if a.kind != "R":
            raise Untypable("it solves for a sum over the batch with values of single examples")
        return [site.like(BatchType("S", power))]
    return [site.like(BatchType("R" if axis is None else "B", power, axis), axis)]

