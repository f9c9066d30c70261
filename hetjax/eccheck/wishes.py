"""What orbax's restore arguments ask for, leaf by leaf, as `trees.Wish`."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax.eccheck.snapshot import path_of
from hetjax.eccheck.trees import Wish, plain_key


def as_saved(keys: Any, leaf: Any) -> Wish:
    """Wants a leaf as it was saved."""
    return Wish("any")


def of_target(fallback_sharding: Any = None, strict: bool = True) -> Callable[[Any, Any], Wish]:
    """Returns (key path, target leaf) -> Wish: the leaf itself says how it is wanted."""

    def wish(keys: Any, leaf: Any) -> Wish:
        import jax

        if isinstance(leaf, np.generic):
            return Wish("any", dtype=leaf.dtype)
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or (
            hasattr(leaf, "sharding") and hasattr(leaf, "shape")
        ):
            return Wish(
                "jax", sharding=getattr(leaf, "sharding", None) or fallback_sharding,
                dtype=leaf.dtype, shape=tuple(leaf.shape), truncate=not strict,
            )
        if isinstance(leaf, np.ndarray) or hasattr(leaf, "shape"):
            return Wish("np", dtype=leaf.dtype, shape=tuple(leaf.shape), truncate=not strict)
        if isinstance(leaf, numbers.Number) and not isinstance(leaf, bool):
            return Wish("scalar")
        return Wish("any")

    return wish


def of_restore_args(restore_args: Any, fallback: Callable[[Any, Any], Wish]) -> Callable[[Any, Any], Wish]:
    """Returns (key path, target leaf) -> Wish from a tree of orbax RestoreArgs."""
    import jax
    import orbax.checkpoint as ocp

    def is_args(x: Any) -> bool:
        return isinstance(x, ocp.RestoreArgs)

    flat, _ = jax.tree_util.tree_flatten_with_path(restore_args, is_leaf=is_args)
    args_of = {plain_key(path_of(keys)): args for keys, args in flat if is_args(args)}

    def wish(keys: Any, leaf: Any) -> Wish:
        args = args_of.get(plain_key(path_of(keys)))
        if args is None:
            return fallback(keys, leaf)
        return one(args)

    return wish


def one(args: Any) -> Wish:
    """Returns what one orbax RestoreArgs asks for."""
    import jax
    import orbax.checkpoint as ocp

    restore_type = args.restore_type
    if isinstance(args, ocp.ArrayRestoreArgs):
        sharding: Any = args.sharding
        if sharding is None and args.mesh is not None and args.mesh_axes is not None:
            sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
        if sharding is not None and hasattr(sharding, "to_jax_sharding"):
            sharding = sharding.to_jax_sharding()
        if restore_type is np.ndarray:
            return Wish("np", dtype=args.dtype, shape=args.global_shape, truncate=not args.strict)
        return Wish("jax", sharding=sharding, dtype=args.dtype, shape=args.global_shape,
                    truncate=not args.strict)
    if restore_type is np.ndarray:
        return Wish("np", dtype=args.dtype)
    if restore_type is jax.Array:
        return Wish("jax", dtype=args.dtype)
    if restore_type in (int, float, bool):
        return Wish("scalar", dtype=args.dtype)
    return Wish("any", dtype=args.dtype)


def cast_for_save(tree: Any, save_args: Any) -> Any:
    """Returns the tree with the dtypes that orbax SaveArgs ask for."""
    import jax

    if save_args is None:
        return tree
    # A None among the arguments means "nothing special", so it must count as a leaf.
    flat, treedef = jax.tree_util.tree_flatten(tree)
    args: Sequence[Any] = jax.tree_util.tree_leaves(
        save_args, is_leaf=lambda x: x is None or hasattr(x, "dtype")
    )
    if len(args) != len(flat):
        return tree
    cast = [
        x.astype(a.dtype) if getattr(a, "dtype", None) is not None and hasattr(x, "astype") else x
        for x, a in zip(flat, args)
    ]
    return jax.tree_util.tree_unflatten(treedef, cast)
