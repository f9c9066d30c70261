"""A user's call as flat leaves and back: plain pytrees, linen states, and nnx objects in place."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from hetjax.ir.errors import PlanError


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is static in a call; equal structures share a plan.

    Attributes:
      graphdef: of all nnx objects in the call together (shared references kept), or None.
      objects_def: treedef of their state.
      num_object_leaves: how many leaves that is.
      object_args: which arguments are nnx objects: positions, or names.
      rest_def: treedef of everything else, (args, kwargs) with None where an object was.
      statics: (position among the rest's leaves, value) of leaves that are no arrays.
      num_leaves: arrays in all.
    """

    graphdef: Any
    objects_def: Any
    num_object_leaves: int
    object_args: tuple[int | str, ...]
    rest_def: Any
    statics: tuple[tuple[int, Any], ...]
    num_leaves: int


@dataclasses.dataclass(frozen=True)
class Returned:
    """The shape of what a traced call returned.

    Attributes:
      out_def: treedef of the function's value.
      num_object_leaves: state leaves of nnx objects that come before it.
    """

    out_def: Any
    num_object_leaves: int


def is_in_place(fn: Callable[..., Any]) -> bool:
    """Returns whether nnx objects passed to `fn` are mutated in place.

    They are, unless jax.jit wraps the function: it sees objects as pytrees and returns new ones.
    """
    return type(inspect.unwrap(fn, stop=_is_pjit)).__name__ != "PjitFunction" and not _is_pjit(fn)


def _is_pjit(fn: Any) -> bool:
    return type(fn).__name__ == "PjitFunction"


def _is_object(value: Any) -> bool:
    """Returns whether a pytree holds nnx objects or variables (without importing flax for it)."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    import jax

    kinds = (nnx.Pytree, nnx.Variable)
    # An nnx.State is a pytree of variables that the user handles as data, not an object.
    if isinstance(value, nnx.State):
        return False
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, (*kinds, nnx.State)))
    return any(isinstance(x, kinds) and not isinstance(x, nnx.State) for x in leaves)


def _is_array(leaf: Any) -> bool:
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(
        leaf, (bool, int, float, complex, np.generic)
    )


StaticParameters = tuple[Collection[int], Collection[str]]
_NO_STATICS: StaticParameters = ((), ())


@dataclasses.dataclass(frozen=True)
class _Static:
    """An argument that the user's own jit takes as static: one leaf, whatever it holds."""

    value: Any


def _box_statics(
    args: Sequence[Any], kwargs: dict[str, Any], static: StaticParameters
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions, names = static
    count = len(args)
    at = {p + count if p < 0 else p for p in positions}
    return (
        tuple(_Static(a) if i in at else a for i, a in enumerate(args)),
        {k: _Static(v) if k in names else v for k, v in kwargs.items()},
    )


def flatten_call(
    args: Sequence[Any], kwargs: dict[str, Any], in_place: bool, static: StaticParameters = _NO_STATICS
) -> tuple[list[Any], Structure]:
    """Returns a call's array leaves and its structure.

    Args:
      args, kwargs: of the call.
      in_place: whether nnx objects are mutated.
      static: positions and names of arguments that stay Python values, as a jitted step was told.

    Raises:
      PlanError: a leaf that is no array cannot be hashed, so that it cannot be told apart from others.
    """
    import jax

    if static[0] or static[1]:
        args, kwargs = _box_statics(args, kwargs, static)
    objects: dict[int | str, Any] = {}
    if in_place and "flax.nnx" in sys.modules:
        objects = {k: v for k, v in [*enumerate(args), *kwargs.items()] if _is_object(v)}
    graphdef, objects_def, leaves = None, None, []
    if objects:
        from flax import nnx

        graphdef, state = nnx.split(tuple(objects.values()))
        leaves, objects_def = jax.tree.flatten(state)
    num_object_leaves = len(leaves)
    rest = (
        tuple(None if i in objects else a for i, a in enumerate(args)),
        {k: None if k in objects else v for k, v in kwargs.items()},
    )
    rest_leaves, rest_def = jax.tree.flatten(rest)
    statics = []
    for i, leaf in enumerate(rest_leaves):
        if _is_array(leaf):
            leaves.append(leaf)
        else:
            try:
                hash(leaf)
            except TypeError:
                value = leaf.value if isinstance(leaf, _Static) else leaf
                raise PlanError(
                    f"argument leaf {i} is a {type(value).__name__}, which is neither an array nor "
                    "hashable; pass it through functools.partial or as an array"
                ) from None
            statics.append((i, leaf))
    return leaves, Structure(
        graphdef, objects_def, num_object_leaves, tuple(objects), rest_def, tuple(statics), len(leaves)
    )


def unflatten_call(leaves: Sequence[Any], structure: Structure) -> tuple[list[Any], dict[str, Any], tuple[Any, ...]]:
    """Returns fresh (args, kwargs, nnx objects) that hold the given leaves."""
    import jax

    rest_leaves = list(leaves[structure.num_object_leaves :])
    for i, value in structure.statics:
        rest_leaves.insert(i, value.value if isinstance(value, _Static) else value)
    args_tuple, kwargs = jax.tree.unflatten(structure.rest_def, rest_leaves)
    args, objects = list(args_tuple), ()
    if structure.graphdef is not None:
        from flax import nnx

        state = jax.tree.unflatten(structure.objects_def, leaves[: structure.num_object_leaves])
        objects = nnx.merge(structure.graphdef, state)
        for key, value in zip(structure.object_args, objects):
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value
    return args, kwargs, objects


def leaf_paths(structure: Structure, names: Sequence[str]) -> list[str]:
    """Returns the user's own path of every leaf, e.g. "state/params/block_0/attn/kernel".

    Args:
      structure: of the call.
      names: parameter names of the function, for positional arguments.
    """
    import jax

    def name_of(key: int | str) -> str:
        return (names[key] if key < len(names) else f"arg{key}") if isinstance(key, int) else key

    def tail(path: Any) -> str:
        text = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
        return text.removesuffix("/value")

    out = []
    if structure.objects_def is not None:
        tree = jax.tree.unflatten(structure.objects_def, range(structure.num_object_leaves))
        for path, _ in jax.tree_util.tree_leaves_with_path(tree):
            owner = name_of(structure.object_args[getattr(path[0], "key", getattr(path[0], "idx", 0))])
            out.append("/".join(x for x in (owner, tail(path[1:])) if x))
    count = structure.rest_def.num_leaves
    static = {i for i, _ in structure.statics}
    tree = jax.tree.unflatten(structure.rest_def, range(count))
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        if i in static:
            continue
        head = path[1]
        owner = name_of(getattr(head, "idx", getattr(head, "key", 0)))
        out.append("/".join(x for x in (owner, tail(path[2:])) if x))
    return out


def flat_function(
    fn: Callable[..., Any], structure: Structure, recorded: list[Returned]
) -> Callable[..., list[Any]]:
    """Returns a pure function of the leaves that gives nnx state leaves and then the value's leaves.

    The shape of what it returned is appended to `recorded` when it runs.

    Raises (when run):
      PlanError: the step changes the structure of an nnx object.
    """
    import jax

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs, objects = unflatten_call(leaves, structure)
        out = fn(*args, **kwargs)
        state_leaves: list[Any] = []
        if structure.graphdef is not None:
            from flax import nnx

            graphdef, state = nnx.split(objects)
            state_leaves, state_def = jax.tree.flatten(state)
            if graphdef != structure.graphdef or state_def != structure.objects_def:
                raise PlanError(
                    "the step changes the structure of its nnx objects (it adds or removes variables, "
                    "or sets a static attribute such as train or eval mode); do that before the "
                    "first step"
                )
        value_leaves, out_def = jax.tree.flatten(out)
        if not all(map(_is_array, value_leaves)):
            raise _no_arrays(flat.__name__, out)
        recorded.append(Returned(out_def, len(state_leaves)))
        return [*state_leaves, *value_leaves]

    flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return flat


def _no_arrays(name: str, out: Any) -> PlanError:
    import jax

    lost = [
        f"out{jax.tree_util.keystr(path)} is a {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(out) if not _is_array(leaf)
    ]
    return PlanError(f"{name} returns what is no array: {'; '.join(lost)}; a step can only return arrays and trees of them")


def rebuild_result(
    structure: Structure, returned: Returned, arrays: Sequence[Any], args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Returns the function's value; nnx objects of the call get their new state in place."""
    import jax

    n = returned.num_object_leaves
    if structure.graphdef is not None:
        from flax import nnx

        objects = tuple(args[k] if isinstance(k, int) else kwargs[k] for k in structure.object_args)
        nnx.update(objects, jax.tree.unflatten(structure.objects_def, arrays[:n]))
    return jax.tree.unflatten(returned.out_def, arrays[n:])


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's positional parameters, as far as they can be known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]
