"""Metadata of a saved tree in orbax's own types, for tools that read `item_metadata`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from hetjax.eccheck.manifest import Manifest
from hetjax.eccheck.snapshot import from_python_value, named_dtype, path_name
from hetjax.eccheck.trees import nest, saved_sharding


@dataclass(frozen=True)
class ItemMetadata:
    """What an item holds: orbax metadata of each leaf, in dictionaries and lists.

    Attributes:
      tree: ArrayMetadata, ScalarMetadata or StringMetadata per leaf.
      custom_metadata: what the user gave at the save.
    """

    tree: Any
    custom_metadata: Any = None

    def __getitem__(self, key: str | int) -> Any:
        return self.tree[key]

    def __contains__(self, key: object) -> bool:
        return key in self.tree

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a child, or the default."""
        return self.tree.get(key, default)

    def keys(self) -> Any:
        """Returns the keys of the top level."""
        return self.tree.keys()

    def values(self) -> Any:
        """Returns the children of the top level."""
        return self.tree.values()

    def items(self) -> Any:
        """Returns keys and children of the top level."""
        return self.tree.items()


def tree_metadata(manifest: Manifest, directory: pathlib.Path) -> ItemMetadata:
    """Returns the metadata of all leaves; reads no array."""
    where = epath.Path(directory)
    leaves = []
    for leaf in manifest.leaves:
        name = path_name(leaf["p"])
        if leaf["t"] in ("jax", "np", "key"):
            sharding = saved_sharding(leaf) if leaf["t"] == "jax" else None
            meta: Any = ocp.metadata.ArrayMetadata(
                name, where, tuple(leaf["s"]),
                ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
                if sharding is not None else None,
                named_dtype(leaf["d"]),
            )
        elif leaf["t"] == "py":
            value = from_python_value(leaf["v"])
            meta = (
                ocp.metadata.StringMetadata(name, where) if isinstance(value, str)
                else ocp.metadata.ScalarMetadata(name, where, dtype=np.asarray(value).dtype)
            )
        elif leaf["t"] == "none":
            meta = None
        else:
            continue
        leaves.append((leaf["p"], meta))
    return ItemMetadata(nest(leaves), manifest.extra.get("custom_metadata"))
