"""A tree made again from its snapshot, for the disk, when the agents could not take it.

The arrays themselves may have been donated by then; the snapshot still has their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetjax.eccheck.reader import Range
from hetjax.eccheck.snapshot import Snapshot
from hetjax.eccheck.trees import Wish, restore_leaves


@dataclass(frozen=True)
class Outline:
    """What a snapshot does not say of its tree.

    Attributes:
      treedef: its structure, None being a leaf.
      shardings: of each leaf; None where it is no JAX array.
    """

    treedef: Any
    shardings: tuple[Any, ...]


class _SnapshotReader:
    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot

    def read(self, ranges: Iterable[Range]) -> None:
        for item in ranges:
            np.copyto(item.out, self._snapshot.piece(item.offset, len(item.out)))


def outline_of(tree: Any) -> Outline:
    """Returns the structure and the shardings of a tree, without its arrays."""
    import jax

    flat, treedef = jax.tree_util.tree_flatten(tree, is_leaf=lambda x: x is None)
    return Outline(treedef, tuple(x.sharding if isinstance(x, jax.Array) else None for x in flat))


def rebuild(snapshot: Snapshot, outline: Outline) -> Any:
    """Returns the tree of a snapshot that one process took alone.

    Args:
      snapshot: what `take` returned.
      outline: of the same tree.
    """
    import jax

    wanted = [
        (meta, Wish("jax", sharding=sharding) if sharding is not None else Wish())
        for meta, sharding in zip(snapshot.leaves, outline.shardings)
    ]
    leaves = restore_leaves(_SnapshotReader(snapshot), wanted)
    return jax.tree_util.tree_unflatten(outline.treedef, leaves)
