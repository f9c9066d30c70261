"""Where the blocks of a sharded value lie, as arrays."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from hetjax.ir.errors import PlanError
from hetjax.ir.program import Spec, StageMesh


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The blocks of one value on one mesh.

    Attributes:
      devices: [blocks, replicas] the devices that hold each block, in mesh order.
      start, stop: [blocks, dimensions] bounds of each block in the whole value; blocks of a dimension
        that does not divide are of the rounded-up size, the last ones shorter or empty.
    """

    devices: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def num_blocks(self) -> int:
        return len(self.devices)

    @property
    def num_replicas(self) -> int:
        return self.devices.shape[1]


@functools.lru_cache(maxsize=1024)
def layout(mesh: StageMesh, spec: Spec, shape: tuple[int, ...]) -> Layout:
    """Returns where the blocks of a value of `shape` lie on a mesh; a spec of () splits nothing.

    Raises:
      PlanError: the spec has another number of dimensions than the value, or names an axis that the
        mesh has not, or one twice.
    """
    sizes = dict(mesh.axes)
    spec = spec or ((),) * len(shape)
    used = [a for axes in spec for a in axes]
    names = [a for a, _ in mesh.axes]
    if len(spec) != len(shape):
        raise PlanError(
            f"mesh {mesh.name}: the spec {spec} has {len(spec)} entries for a value of {len(shape)} "
            f"dimensions {shape}; give one entry a dimension, () where it is not split"
        )
    unknown, twice = [a for a in used if a not in sizes], [a for a in sizes if used.count(a) > 1]
    if unknown or twice:
        what = f"has no axis {unknown[0]!r}" if unknown else f"can split one dimension by {twice[0]!r}, not several"
        raise PlanError(f"mesh {mesh.name} {what} (spec {spec}); its axes are {dict(mesh.axes)}")
    grid = np.array(mesh.devices).reshape([n for _, n in mesh.axes])
    free = [a for a in names if a not in used]
    # Axes that split come first, in the order of the dimensions: a row is then a block.
    grid = grid.transpose([names.index(a) for a in (*used, *free)])
    replicas = math.prod(sizes[a] for a in free)
    parts = [math.prod(sizes[a] for a in axes) for axes in spec]
    index = np.indices(parts).reshape(len(parts), math.prod(parts)).T
    extent = np.array(shape, dtype=np.int64)
    size = np.array([-(-n // p) for n, p in zip(shape, parts)], dtype=np.int64)
    start = np.minimum(index * size, extent)
    return Layout(grid.reshape(-1, replicas), start, np.minimum(start + size, extent))
