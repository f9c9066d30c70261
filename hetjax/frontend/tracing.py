"""Traces a call at any batch size, from types alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.frontend.calls import (
    Returned,
    Structure,
    flat_function,
    leaf_paths,
    parameter_names,
)
from hetjax.frontend.roles import find_arguments, find_results, find_updates
from hetjax.ir import _jax
from hetjax.ir.graph import Argument, Aval, Graph
from hetjax.ir.importer import aval_of, import_jaxpr


@dataclasses.dataclass(frozen=True)
class Traced:
    """A call traced at full batch.

    Attributes:
      graph: its graph, calls not yet inlined.
      returned: the shape of its value.
      retrace: traces it again with the batch divided by a number.
    """

    graph: Graph
    returned: Returned
    retrace: Callable[[int], Graph]


def abstract_leaf(leaf: Any) -> Any:
    """Returns an unsharded ShapeDtypeStruct of an array, struct or Python scalar, weak type kept."""
    import jax

    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _jax.shaped(leaf)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def trace_call(
    fn: Callable[..., Any], structure: Structure, leaves: Sequence[Any], *, name: str,
    batch_argnums: Sequence[int] | None = None,
    known_state: Callable[[Sequence[str], Sequence[Aval]], set[int]] | None = None,
) -> Traced:
    """Returns the traced call; neither arguments nor devices are touched.

    Args:
      fn: the user's function.
      structure: of the call.
      leaves: arrays or structs.
      name: of the graph.
      batch_argnums: which arguments carry the batch, None to find out.
      known_state: says, from paths and types, which leaves belong to a state that does not come back,
        so that they are not taken for the batch.

    Raises:
      PlanError: roles cannot be told, or the step changes the structure of an nnx object.
    """
    structs = [abstract_leaf(x) for x in leaves]
    paths = leaf_paths(structure, parameter_names(fn))
    try:
        closed, returned = _trace(fn, structure, structs)
    except Exception as error:
        _name_leaves(error, paths)
        raise
    inputs = [aval_of(v.aval) for v in closed.jaxpr.invars]
    outputs = [aval_of(v.aval) for v in closed.jaxpr.outvars]
    updates = find_updates(structure, returned, inputs, outputs, batch_argnums)
    arguments = find_arguments(
        structure, paths, inputs, set(updates.values()), batch_argnums,
        kept=known_state(paths, inputs) if known_state else frozenset(),
    )
    results = find_results(structure, returned, paths, updates)
    graph = import_jaxpr(closed, name=name, arguments=arguments, results=results)

    def retrace(divisor: int) -> Graph:
        smaller = [_divide(s, a, divisor) for s, a in zip(structs, arguments)]
        again, _ = _trace(fn, structure, smaller)
        return import_jaxpr(again, name=name, arguments=arguments, results=results)

    return Traced(graph, returned, retrace)


def _name_leaves(error: Exception, paths: Sequence[str]) -> None:
    """Adds to a tracing error which arguments JAX means: it sees the call as flat leaves."""
    import jax

    named = sorted({int(k) for k in re.findall(r"\bleaves\[(\d+)\]", str(error))})
    known = [f"leaves[{k}] is {paths[k]}" for k in named if k < len(paths)]
    if known:
        error.add_note("hetjax: " + "; ".join(known))
    if known and isinstance(error, jax.errors.ConcretizationTypeError):
        error.add_note(
            "hetjax: Python code cannot branch on an argument; where it is a setting rather than data, bind it "
            "with functools.partial, or jit the step with static_argnames"
        )


def _divide(struct: Any, argument: Argument, divisor: int) -> Any:
    import jax

    if argument.role != "batch" or argument.batch_axis is None:
        return struct
    shape = list(struct.shape)
    shape[argument.batch_axis] //= divisor
    return jax.ShapeDtypeStruct(tuple(shape), struct.dtype, weak_type=struct.weak_type)


def _trace(fn: Callable[..., Any], structure: Structure, structs: Sequence[Any]) -> tuple[Any, Returned]:
    import jax

    recorded: list[Returned] = []
    closed = jax.make_jaxpr(flat_function(fn, structure, recorded))(*structs)
    return closed, recorded[-1]


def leaf_types(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Returns what a plan depends on in each leaf: shape, dtype as JAX would hold it, weak type."""
    import jax

    canonical = jax.dtypes.canonicalize_dtype
    out: list[tuple[Any, ...]] = []
    for x in leaves:
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            out.append((x.shape, x.dtype, bool(getattr(x, "weak_type", False))))
        elif hasattr(x, "dtype"):
            out.append((x.shape, canonical(x.dtype), False))
        else:
            out.append(((), canonical(type(x)), not isinstance(x, bool)))
    return tuple(out)


def leaf_marks(leaves: Sequence[Any]) -> list[Any]:
    """Returns something per leaf that is equal only if its type is; far cheaper than `leaf_types`.

    The arrays that a compiled call returns share their avals from call to call, so that comparing
    them is comparing identities.
    """
    return [
        x.aval if hasattr(x, "aval") else (x.shape, x.dtype) if hasattr(x, "dtype") else type(x)
        for x in leaves
    ]
