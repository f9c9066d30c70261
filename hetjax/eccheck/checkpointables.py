"""The same tier under orbax's v1 interface (`orbax.checkpoint.experimental.v1`).

    with checkpoint_context():
        with ocp.training.Checkpointer(path) as checkpointer:
            checkpointer.save_async(step, state)

Orbax's own PyTreeHandler is bound to names ("state", "pytree", ...), and a name wins over everything
a local registry adds: a handler added beside it is silently never asked, and a plain checkpoint on
disk is written. So the registry made here starts empty and takes over each entry of the global one,
with the tree handler in the place of PyTreeHandler wherever that stands.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Awaitable
from typing import Any

from orbax.checkpoint.experimental import v1 as ocp

from hetjax.eccheck import wishes
from hetjax.eccheck.config import Config
from hetjax.eccheck.fallback import outline_of, rebuild
from hetjax.eccheck.handler import commit_item, read_manifest, restore_item, split_directory
from hetjax.eccheck.tier import Tier, item_name, tier_of
from hetjax.eccheck.treemeta import tree_metadata
from hetjax.ir.errors import CheckpointError

# Orbax looks for this file before it lets a handler load a tree.
_METADATA_FILE = "_METADATA"


class TreeCheckpointable:
    """Keeps a tree's leaves in the agents' memory; a subclass is bound to its tier.

    Orbax constructs handlers without arguments.
    """

    tier: Tier

    def __init__(self) -> None:
        self._stock = ocp.handlers.PyTreeHandler()

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Takes the state; the awaitable it returns does the rest."""
        if not self.tier.agree():
            return await self._stock.save(directory, checkpointable)
        snapshot, outline = self.tier.snapshot(checkpointable), outline_of(checkpointable)

        async def commit() -> None:
            path = pathlib.Path(str(await directory.await_creation()))
            try:
                await asyncio.to_thread(commit_item, self.tier, snapshot, path)
            except CheckpointError as error:
                if not self.tier.may_go_to_disk(error):
                    raise
                await (await self._stock.save(directory, rebuild(snapshot, outline)))
                root, item, step = split_directory(path)
                self.tier.note(f"step {step} of {item_name(root, item)} was written to disk only: {error}")
                return
            if self.tier.writers()[0] == 0:
                (path / _METADATA_FILE).write_text("{}")

        return commit()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Returns an awaitable of the tree."""
        manifest = read_manifest(directory)
        if manifest is None:
            return await self._stock.load(directory, abstract_checkpointable)
        return asyncio.to_thread(
            restore_item, self.tier, directory, manifest, abstract_checkpointable,
            wishes.of_target(),
        )

    async def metadata(self, directory: Any) -> Any:
        """Returns the metadata of the leaves, as the tree they form."""
        manifest = read_manifest(directory)
        if manifest is None:
            return await self._stock.metadata(directory)
        return tree_metadata(manifest, pathlib.Path(str(directory))).tree

    def is_handleable(self, checkpointable: Any) -> bool:
        """Says whether this is a tree of leaves that can be saved."""
        return self._stock.is_handleable(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Says whether this describes such a tree."""
        return self._stock.is_abstract_handleable(abstract_checkpointable)


def checkpointable_registry(config: Config | str | None = None) -> Any:
    """Returns a v1 registry in which trees go to the agents and all else stays as it was.

    Args:
      config: a Config, the path of a TOML file, or None for the environment.

    Raises:
      CheckpointError: the configuration is wrong, or this orbax binds trees in a way that would
        bypass the handler.
    """
    bound = type("TreeCheckpointable", (TreeCheckpointable,), {
        "tier": tier_of(config), "__module__": __name__, "__qualname__": "TreeCheckpointable",
    })
    stock = ocp.handlers.PyTreeHandler
    registry = ocp.handlers.local_registry(include_global_registry=False)
    replaced = 0
    for handler, name in ocp.handlers.global_registry().get_all_entries():
        ours = isinstance(handler, type) and issubclass(handler, stock)
        replaced += ours
        registry.add(bound if ours else handler, checkpointable_name=name)
    if not replaced:
        raise CheckpointError(
            "this version of orbax registers no PyTreeHandler to take the place of; trees would "
            "silently go to disk. Use the v0 interface (handler_registry) and report the version"
        )
    return registry


def checkpoint_context(config: Config | str | None = None, **options: Any) -> Any:
    """Returns an orbax v1 Context whose trees are kept in the agents' memory.

    Use it as a context manager around unchanged calls, or give it to a Checkpointer.

    Args:
      config: a Config, the path of a TOML file, or None for the environment.
      options: further arguments of orbax's Context.

    Raises:
      CheckpointError: as `checkpointable_registry`.
    """
    context = ocp.Context(**options)
    context.checkpointables.registry = checkpointable_registry(config)
    return context
