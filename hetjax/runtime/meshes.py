"""From stages and specs to JAX meshes and shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetjax.ir.program import Spec, StageMesh


def jax_mesh(mesh: StageMesh, devices: Sequence[Any]) -> Any:
    """Returns the jax Mesh of a stage; its axes are Auto, so that XLA propagates inside.

    Args:
      mesh: the stage's.
      devices: one jax device per cluster device.
    """
    from jax.sharding import AxisType, Mesh

    array = np.array([devices[d] for d in mesh.devices], dtype=object)
    shape = tuple(n for _, n in mesh.axes)
    names = tuple(name for name, _ in mesh.axes)
    return Mesh(array.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def named_sharding(mesh: Any, spec: Spec) -> Any:
    """Returns the NamedSharding of a spec on a jax mesh."""
    from jax.sharding import NamedSharding, PartitionSpec

    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec]
    while entries and entries[-1] is None:  # the canonical form, so that equal shardings compare equal
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))
