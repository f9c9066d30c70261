"""Sharding constraints in a user's step, on the mesh of the stage they run on.

A constraint never changes a value, so what cannot be honoured may be left open: a dimension split over an
axis that a stage has no counterpart of, or that does not divide, is for hetjax and XLA to shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetjax.ir import _jax

# What a stage's two axes are called in other people's meshes.
DATA_AXES = frozenset({"data", "batch", "dp", "replica", "fsdp", "data_parallel"})
MODEL_AXES = frozenset({"model", "tensor", "tp", "mp", "tensor_parallel", "model_parallel"})


def on_stage(closed: Any, mesh: Any) -> Any:
    """Returns a closed jaxpr whose sharding constraints are on `mesh`; the same object without any."""
    jaxpr = _rewritten(closed.jaxpr, mesh)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def stage_spec(spec: Sequence[Any], shape: Sequence[int], sizes: dict[str, int]) -> tuple[Any, ...]:
    """Returns, per dimension, the stage's axis, None for "on every device", or `UNCONSTRAINED`.

    Args:
      spec: of the user's constraint.
      shape: of the value on this stage: a microbatch's, where it is split.
      sizes: devices along the stage's axes, by name.
    """
    import jax

    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    out: list[Any] = []
    for k, size in enumerate(shape):
        entry = spec[k] if k < len(spec) else None
        if entry is None or entry is free:
            out.append(entry)
            continue
        names = (entry,) if isinstance(entry, str) else tuple(entry)
        meant = {"data" if n in DATA_AXES else "model" if n in MODEL_AXES else "" for n in names}
        axis = meant.pop() if len(meant) == 1 else ""
        fits = axis in sizes and axis not in out and size % sizes[axis] == 0
        out.append((axis if sizes[axis] > 1 else None) if fits else None if not names else free)
    return tuple(out)


def _rewritten(jaxpr: Any, mesh: Any) -> Any:
    eqns = [_equation(eqn, mesh) for eqn in jaxpr.eqns]
    return jaxpr if all(a is b for a, b in zip(eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


def _equation(eqn: Any, mesh: Any) -> Any:
    if eqn.primitive.name == "sharding_constraint":
        return _constraint(eqn, mesh)
    return _jax.with_inner_jaxprs(eqn, lambda inner: _rewritten(inner, mesh))


def _constraint(eqn: Any, mesh: Any) -> Any:
    import jax

    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    shape = eqn.invars[0].aval.shape
    spec = getattr(eqn.params["sharding"], "spec", None)
    found = (free,) * len(shape) if spec is None else stage_spec(spec, shape, dict(mesh.shape))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*found))
    open_dims = frozenset(k for k, entry in enumerate(found) if entry is free)
    return eqn.replace(params={**eqn.params, "sharding": sharding, "layout": None, "unconstrained_dims": open_dims})
