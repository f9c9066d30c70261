"""What JAX knows of values under mapped axes: over which they vary, and how they are placed."""

from __future__ import annotations

from collections.abc import Hashable

import jax

AxisName = Hashable | tuple[Hashable, ...]


def varying(x) -> frozenset:
    """The manual axes over which shard_map knows a value to vary."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # jax 0.10; `vma` before
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def tracked_axes(axis_name: AxisName | None) -> frozenset:
    """The axes of `axis_name` whose variation JAX tracks here: shard_map with check_vma, not vmap."""
    if axis_name is None:
        return frozenset()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return frozenset(name for name in names if name in varying(jax.lax.axis_index(name)))


def check_bound(axis_name: AxisName | None) -> None:
    if axis_name is None:
        return
    try:
        jax.lax.axis_size(axis_name)
    except NameError as e:
        raise ValueError(
            f"slamb: no axis {axis_name!r} is bound here, so there are no workers to exchange with. Call "
            "update inside jax.shard_map or jax.vmap over that axis (hetjax.data_parallel_step does), "
            "or give axis_name=None on one worker.") from e


def check_varying(grads, axis_name: AxisName | None) -> None:
    tracked = tracked_axes(axis_name)
    summed = [
        f"  {jax.tree_util.keystr(path)} {g.dtype}{list(g.shape)}"
        for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]
        if jax.lax.axis_size(axis_name) > 1 and not tracked <= varying(g)] if tracked else []
    if summed:
        raise ValueError(
            f"slamb: these gradients are the same on all workers of axis {axis_name!r}, so they were "
            "already summed, densely: under shard_map the gradient of a replicated parameter is. "
            "Nothing would be saved and means would be wrong.\n" + "\n".join(summed) + "\n"
            "Differentiate parameters that vary by worker: pass them with a leading worker axis (see "
            f"hetjax.data_parallel_step), or jax.lax.pcast(params, {axis_name!r}, to='varying').")


def as_varying(tree, axis_name: AxisName | None):
    """The tree, typed as varying over the axis, so that all branches and steps have one type."""
    tracked = tracked_axes(axis_name)

    def cast(x):
        missing = tuple(tracked - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying_like(x: jax.Array, others: list[jax.Array]) -> jax.Array:
    """The value, typed as varying over every axis over which one of the others is known to vary."""
    missing = tuple(frozenset().union(*map(varying, others)) - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def placed_like(tree, leaf: jax.Array | None):
    """The tree resharded as `leaf` (None: whole on each device), under a mesh of explicit axes."""
    def place(x):
        have = jax.typeof(x).sharding
        if not any(axis is not None for axis in have.spec) and leaf is None:
            return x
        want = jax.sharding.PartitionSpec() if leaf is None else jax.typeof(leaf).sharding
        return x if leaf is not None and want == have else jax.sharding.reshard(x, want)

    return jax.tree.map(place, tree)
