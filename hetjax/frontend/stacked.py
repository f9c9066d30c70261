"""A leaf of stacked layers whose rows live on several meshes, as one array of the user's and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


class Stack:
    """Puts the pieces of a leaf together and takes them apart.

    Where all pieces have as many rows and their meshes have one form, the whole is an array over the
    devices of all of them, each holding the rows it holds anyway: nothing moves. Else the pieces are
    brought to the first mesh, since JAX has no sharding with parts of different sizes; they go back
    when the step next runs.

    Args:
      edges: the first row of each piece, and the number of rows.
      homes: the sharding of each piece.

    Attributes:
      sharding: of the whole.
    """

    def __init__(self, edges: Sequence[int], homes: Sequence[Any]):
        self.edges, self.homes = tuple(edges), tuple(homes)
        self._even = _even(self.edges, self.homes)
        self.sharding = self._even if self._even is not None else homes[0]
        self._slice: Any = None
        self._join: Any = None

    def whole(self, pieces: Sequence[Any]) -> Any:
        """Returns the leaf, given its pieces at their homes."""
        import jax
        import jax.numpy as jnp

        if self._even is None:
            moved = jax.device_put(list(pieces), self.sharding)
            if self._join is None:
                self._join = jax.jit(lambda *xs: jnp.concatenate(xs), out_shardings=self.sharding)
            return self._join(*moved)
        shape = (self.edges[-1], *pieces[0].shape[1:])
        shards = [s.data for piece in pieces for s in piece.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, self._even, shards)

    def pieces(self, leaf: Any) -> list[Any]:
        """Returns the pieces of a leaf: at their homes where it is one that `whole` returned."""
        import jax

        if self._even is not None and getattr(leaf, "sharding", None) == self._even:
            held = {s.device: s.data for s in leaf.addressable_shards}
            rows = self.edges[1]
            return [
                jax.make_array_from_single_device_arrays(
                    (rows, *leaf.shape[1:]), home, [held[d] for d in home.mesh.devices.flat]
                )
                for home in self.homes
            ]
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(leaf)
            return [leaf[a:b] for a, b in zip(self.edges, self.edges[1:])]
        if self._slice is None:
            edges = self.edges
            self._slice = jax.jit(lambda x: [x[a:b] for a, b in itertools.pairwise(edges)])
        return self._slice(leaf)


def _even(edges: Sequence[int], homes: Sequence[Any]) -> Any:
    """Returns one sharding over all homes' devices that keeps every row where it is, or None."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    first = homes[0]
    sizes = {b - a for a, b in itertools.pairwise(edges)}
    same = all((h.mesh.axis_names, h.mesh.devices.shape, h.spec) == (first.mesh.axis_names, first.mesh.devices.shape, first.spec) for h in homes)
    apart = len({d for h in homes for d in h.mesh.devices.flat}) == sum(h.mesh.devices.size for h in homes)
    rows = first.spec[0] if len(first.spec) else None
    if len(sizes) > 1 or not same or not apart or rows not in (None, ()) or "layers" in first.mesh.axis_names:
        return None
    mesh = jax.sharding.Mesh(
        np.stack([h.mesh.devices for h in homes]), ("layers", *first.mesh.axis_names), axis_types=(jax.sharding.AxisType.Auto,) * (1 + len(first.mesh.axis_names))
    )
    return NamedSharding(mesh, PartitionSpec("layers", *first.spec[1:]))


