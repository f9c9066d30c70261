"""State on a plan: create it in place, bring it together, put it back, describe it to a checkpointer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hetjax.frontend.calls import Structure
from hetjax.frontend.following import _tails
from hetjax.ir.errors import PlanError

if TYPE_CHECKING:
    from hetjax.frontend.entry import Entry
    from hetjax.frontend.parallel_function import ParallelFunction


def gather(tree: Any, *, device: Any = None) -> Any:
    """Returns the tree with every array on one device, so that any eager or jitted code takes it.

    nnx objects are updated in place and returned.

    Args:
      tree: state or anything else; leaves that are no arrays pass through.
      device: where to; None is the first local device.
    """
    import jax

    device = device if device is not None else jax.local_devices()[0]
    return _map_arrays(tree, lambda leaves: jax.device_put(leaves, device))


def place(tree: Any, *, like: ParallelFunction) -> Any:
    """Returns the tree with every leaf where the plan of `like` keeps it; leaves it does not know stay.

    nnx objects are updated in place and returned.

    Args:
      tree: state, or a part of it (parameters alone).
      like: a parallel function that has a plan.

    Raises:
      PlanError: it has no plan yet.
    """
    import jax

    entry = _entry_of(like)
    shardings = _shardings_by_path(entry, like.devices)
    paths = _paths(tree)

    def move(leaves: list[Any]) -> list[Any]:
        known = [_find(shardings, path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        moved = iter(
            jax.device_put(
                [x for x, s in zip(leaves, known) if s is not None], [s for s in known if s is not None]
            )
        )
        return [x if s is None else next(moved) for x, s in zip(leaves, known)]

    return _map_arrays(tree, move)


def init(create_state: Callable[..., Any], *args: Any, like: ParallelFunction, **kwargs: Any) -> Any:
    """Returns the state, each leaf created on the devices that keep it, never whole on one device.

    For each stage, `create_state` is compiled for the leaves that live there; what they do not need is
    not computed. nnx objects are created the same way.

    Args:
      create_state: makes the state: a linen TrainState, a pytree, or nnx objects.
      *args, **kwargs: its arguments.
      like: a parallel function that has a plan; `train_step.plan_for(abstract_state, batch)` makes one
        without a state.

    Raises:
      PlanError: `like` has no plan yet.
    """
    import jax

    entry = _entry_of(like)
    shardings = _shardings_by_path(entry, like.devices)
    nnx = sys.modules.get("flax.nnx")
    static: list[Any] = []

    def leaves_of(*a: Any) -> list[Any]:
        made = create_state(*a, **kwargs)
        graphdef = None
        if nnx is not None and _has_objects(made):
            graphdef, made = nnx.split(made)
        leaves, treedef = jax.tree.flatten(made)
        static[:] = [graphdef, treedef]
        return leaves

    shapes = jax.eval_shape(leaves_of, *args)
    graphdef, treedef = static
    paths = _paths(jax.tree.unflatten(treedef, shapes))
    first = _first_mesh_sharding(entry, like.devices)
    where = [_find(shardings, p, s) or first for p, s in zip(paths, shapes, strict=True)]
    groups: dict[Any, list[int]] = {}
    for i, sharding in enumerate(where):
        groups.setdefault(sharding.mesh, []).append(i)
    leaves: list[Any] = [None] * len(shapes)
    for indices in groups.values():
        make = jax.jit(
            lambda *a, indices=tuple(indices): [leaves_of(*a)[i] for i in indices],
            out_shardings=[where[i] for i in indices],
        )
        for i, array in zip(indices, make(*args)):
            leaves[i] = array
    made = jax.tree.unflatten(treedef, leaves)
    return made if graphdef is None else nnx.merge(graphdef, made)  # type: ignore[union-attr]


def _entry_of(like: Any) -> Entry:
    if not hasattr(like, "_in_use"):
        raise PlanError(
            f"like is a {type(like).__name__}; it must be a function that hetjax.parallelize has returned"
        )
    return like._in_use()


def abstract_state(entry: Entry, devices: Sequence[Any]) -> Any:
    """Returns the state arguments as ShapeDtypeStructs with shardings; see ParallelFunction."""
    import jax

    from hetjax.ir import _jax
    from hetjax.ir.exporter import to_jax_aval

    structure = entry.structure
    structs = [
        _jax.shaped(to_jax_aval(aval), sharding)
        for (_, aval), sharding in zip(entry.arguments(), entry.shardings(devices), strict=True)
    ]
    return _state_arguments(structure, entry, structs, jax)


def _state_arguments(structure: Structure, entry: Entry, leaves: list[Any], jax: Any) -> Any:
    found: list[Any] = []
    if structure.objects_def is not None:
        state = jax.tree.unflatten(structure.objects_def, leaves[: structure.num_object_leaves])
        found.append(state)
    rest = list(leaves[structure.num_object_leaves :])
    roles = [a.role for a, _ in entry.arguments()[structure.num_object_leaves :]]
    for i, value in structure.statics:
        rest.insert(i, value)
        roles.insert(i, "static")
    args, kwargs = jax.tree.unflatten(structure.rest_def, rest)
    role_args, role_kwargs = jax.tree.unflatten(structure.rest_def, roles)
    for value, role in [*zip(args, role_args), *((kwargs[k], role_kwargs[k]) for k in kwargs)]:
        if "state" in jax.tree.leaves(role):
            found.append(value)
    if not found:
        raise PlanError(f"{entry.plan.name} keeps no state")
    return found[0] if len(found) == 1 else tuple(found)


# -- leaves and paths ------------------------------------------------------------------------------


def _has_objects(tree: Any) -> bool:
    from hetjax.frontend.calls import _is_object

    return _is_object(tree)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _map_arrays(tree: Any, change: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """Applies `change` to all array leaves at once; nnx objects in place."""
    import jax

    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and _has_objects(tree):
        _, state = nnx.split(tree)
        nnx.update(tree, _map_arrays(state, change))
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [i for i, x in enumerate(leaves) if _is_array(x)]
    for i, array in zip(arrays, change([leaves[i] for i in arrays])):
        leaves[i] = array
    return jax.tree.unflatten(treedef, leaves)


def _paths(tree: Any) -> list[str]:
    """Returns the path of every array leaf, "/"-separated, without an argument's name."""
    import jax

    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and _has_objects(tree):
        _, tree = nnx.split(tree)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if _is_array(leaf)
    ]


def _shardings_by_path(entry: Entry, devices: Sequence[Any]) -> dict[tuple[str, Any], Any]:
    """Returns shardings by (path or end of path, shape); ambiguous ends are left out."""
    out: dict[tuple[str, Any], Any] = {}
    ambiguous: set[tuple[str, Any]] = set()
    for (argument, aval), sharding in zip(entry.arguments(), entry.shardings(devices), strict=True):
        if argument.role != "state":
            continue
        for name in (argument.path, *_tails(argument.path)):
            key = (name, aval.shape)
            if key in out and out[key] != sharding and name != argument.path:
                ambiguous.add(key)
            out[key] = sharding
    return {k: v for k, v in out.items() if k not in ambiguous}


def _find(shardings: dict[tuple[str, Any], Any], path: str, leaf: Any) -> Any:
    shape = tuple(leaf.shape)
    for name in (path, *_tails(path)):
        if (name, shape) in shardings:
            return shardings[name, shape]
    return None


def _first_mesh_sharding(entry: Entry, devices: Sequence[Any]) -> Any:
    from hetjax.runtime.meshes import jax_mesh, named_sharding

    return named_sharding(jax_mesh(entry.program.meshes[0], devices), ())
