"""Which leaves of a call are state, which carry the batch, and what each output updates."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from typing import Any

from hetjax.frontend.calls import Returned, Structure
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Argument, Aval, Result


def _argument_spans(structure: Structure) -> list[tuple[int | str, Any, list[int]]]:
    """Returns (argument, treedef, leaf positions) of every argument that is not an nnx object."""
    import jax

    tree = jax.tree.unflatten(structure.rest_def, range(structure.rest_def.num_leaves))
    static = {i for i, _ in structure.statics}
    position = {}
    for i in range(structure.rest_def.num_leaves):
        if i not in static:
            position[i] = structure.num_object_leaves + len(position)
    args, kwargs = tree
    out = []
    for key, value in [*enumerate(args), *kwargs.items()]:
        if key in structure.object_args:
            continue
        leaves, treedef = jax.tree.flatten(value)
        out.append((key, treedef, [position[i] for i in leaves if i in position]))
    return out


def _candidates(out_def: Any) -> list[tuple[Any, list[int]]]:
    """Returns (treedef, leaf positions) of the value and of its elements, two levels down."""
    import jax

    tree = jax.tree.unflatten(out_def, range(out_def.num_leaves))
    out: list[tuple[Any, list[int]]] = []

    def visit(value: Any, depth: int) -> None:
        leaves, treedef = jax.tree.flatten(value)
        out.append((treedef, leaves))
        if depth < 3:
            if isinstance(value, (tuple, list)):
                for v in value:
                    visit(v, depth + 1)
            elif isinstance(value, dict):
                for v in value.values():
                    visit(v, depth + 1)

    visit(tree, 0)
    return out


def _fits(before: Sequence[Aval], after: Sequence[Aval]) -> bool:
    return len(before) == len(after) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) for a, b in zip(before, after)
    )


def _is_bare_array(treedef: Any, span: Sequence[int], inputs: Sequence[Aval]) -> bool:
    import jax

    return (
        treedef == jax.tree.structure(0)
        and bool(inputs[span[0]].ndim)
        and not inputs[span[0]].dtype.startswith("key")
    )


def find_updates(
    structure: Structure, returned: Returned, inputs: Sequence[Aval], outputs: Sequence[Aval],
    batch_argnums: Sequence[int] | None,
) -> dict[int, int]:
    """Returns, by output leaf, the input leaf that it is the new value of.

    State leaves of nnx objects correspond one to one. For other arguments: the part of the value that
    has an argument's structure and types is that argument's new value.
    """
    n = returned.num_object_leaves
    updates = {i: i for i in range(n)}
    taken: set[int] = set()
    candidates = _candidates(returned.out_def)
    spans = _argument_spans(structure)
    for position, (key, treedef, span) in enumerate(spans):
        if not span or (batch_argnums is not None and key in batch_argnums):
            continue
        if position and position == len(spans) - 1 and _is_bare_array(treedef, span, inputs):
            continue  # a lone array in the last place is data; that a result has its shape is chance
        before = [inputs[i] for i in span]
        for candidate_def, leaves in candidates:
            positions = [n + i for i in leaves]
            if candidate_def != treedef or taken & set(positions):
                continue
            if _fits(before, [outputs[p] for p in positions]):
                updates.update(zip(positions, span))
                taken.update(positions)
                break
    return updates


def find_arguments(
    structure: Structure, paths: Sequence[str], avals: Sequence[Aval], state: set[int],
    batch_argnums: Sequence[int] | None, kept: Collection[int] = frozenset(),
) -> list[Argument]:
    """Returns the role of every input leaf.

    Leaves that are not state (nor `kept`, state that only passes through) and share the commonest size of axis 0 carry the batch, unless
    `batch_argnums` says which arguments do.

    Raises:
      PlanError: leaves of the arguments named by `batch_argnums` have no common size of axis 0.
    """
    spans = _argument_spans(structure)
    if batch_argnums is not None:
        known = [key for key, _, _ in spans]
        lost = [k for k in batch_argnums if k not in known]
        if lost:
            raise PlanError(f"batch_argnums names argument {lost}, but the call's data arguments are {known}")
        eligible = [i for key, _, span in spans if key in batch_argnums for i in span]
    else:
        eligible = [i for _, _, span in spans for i in span]
    size, carriers = _batch_leaves(spans, eligible, avals, state | set(kept))
    out = []
    for i, path in enumerate(paths):
        if i in state:
            out.append(Argument(i, path, "state"))
        elif i in carriers and size > 1:
            out.append(Argument(i, path, "batch", 0))
        else:
            out.append(Argument(i, path, "input"))
    return out


def _batch_leaves(
    spans: Sequence[tuple[int | str, Any, list[int]]], eligible: Sequence[int],
    avals: Sequence[Aval], state: set[int],
) -> tuple[int, set[int]]:
    """Returns the batch size and the leaves that carry it.

    The batch is the argument whose arrays agree best on the size of axis 0 (parameters passed beside
    it, a frozen teacher's say, do not agree); other arguments carry it where all their arrays have it.
    """
    allowed = set(eligible)
    rated: list[tuple[float, int, int, list[int]]] = []  # agreement, leaves, size, leaves of that size
    for _, _, span in spans:
        arrays = [
            i for i in span
            if i in allowed and i not in state and avals[i].ndim and not avals[i].dtype.startswith("key")
        ]
        if arrays:
            sizes = collections.Counter(avals[i].shape[0] for i in arrays)
            size = max(sizes, key=lambda n: (sizes[n], n))
            same = [i for i in arrays if avals[i].shape[0] == size]
            rated.append((len(same) / len(arrays), len(same), size, same))
    if not rated:
        return 0, set()
    _, _, size, carriers = max(rated, key=lambda r: r[:3])
    out = set(carriers)
    for agreement, _, other, same in rated:
        if agreement == 1 and other == size:
            out.update(same)
    return size, out


def find_results(
    structure: Structure, returned: Returned, paths: Sequence[str], updates: dict[int, int]
) -> list[Result]:
    """Returns path and update of every output leaf; atoms are left to the importer."""
    import jax

    tree = jax.tree.unflatten(returned.out_def, range(returned.out_def.num_leaves))
    out = [Result(0, paths[i], i) for i in range(returned.num_object_leaves)]
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        k = returned.num_object_leaves + i
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        out.append(Result(0, paths[updates[k]] if k in updates else f"out/{name}" if name else "out", updates.get(k)))
    return out
