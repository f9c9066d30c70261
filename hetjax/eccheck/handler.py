"""The orbax handler: the user's CheckpointManager calls stay as they are.

    with ocp.CheckpointManager(path, options=..., handler_registry=handler_registry()) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))

The step directory gets a manifest of some kilobytes; the arrays go to the agents. Where no agent
answers, and for steps that were written without this handler, orbax's own handlers do the work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pathlib
import re
import time
from collections.abc import Coroutine
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import future as ocp_future

from hetjax.eccheck import spill, together, wishes
from hetjax.eccheck.client import new_oid
from hetjax.eccheck.config import Config
from hetjax.eccheck.fallback import outline_of, rebuild
from hetjax.eccheck.manifest import Manifest, parse_manifest
from hetjax.eccheck.snapshot import Snapshot, merge_leaves
from hetjax.eccheck.tier import Tier, item_name, tier_of
from hetjax.eccheck.together import ToDisk
from hetjax.eccheck.treemeta import tree_metadata
from hetjax.eccheck.trees import restore_tree
from hetjax.ir.errors import CheckpointError

MANIFEST_FILE = "hetjax_eccheck.json"
_TEMPORARY = ".orbax-checkpoint-tmp"
_log = logging.getLogger("hetjax.eccheck")
_known: dict[tuple[str, int], tuple[int, str]] = {}


def split_directory(directory: Any) -> tuple[str, str, int]:
    """Returns root, item and step of an item's directory.

    Orbax saves into ROOT/STEP.orbax-checkpoint-tmp/ITEM and renames STEP at the end. The step is
    the last number in its name, whatever the name format; 0 where there is none.
    """
    path = pathlib.PurePosixPath(str(directory))
    step_name = path.parent.name.partition(_TEMPORARY)[0]
    numbers = re.findall(r"\d+", step_name)
    return str(path.parent.parent), path.name.partition(_TEMPORARY)[0], int(numbers[-1]) if numbers else 0


def live_objects(root: str, item: str) -> tuple[list[str], list[str]]:
    """Returns the objects that finished steps of a directory refer to, and the newest of them."""
    base = pathlib.Path(root)
    steps = [s for s in (base.iterdir() if base.is_dir() else ()) if _TEMPORARY not in s.name]
    found = sorted(k for s in steps if (k := _step_and_object(s / item / MANIFEST_FILE)) is not None)
    return [oid for _, oid in found], [oid for _, oid in found[-1:]]


def _step_and_object(path: pathlib.Path) -> tuple[int, str] | None:
    """Returns what a manifest file refers to; a finished one never changes, so it is read once."""
    try:
        key = (str(path), path.stat().st_mtime_ns)
    except OSError:
        return None
    if key not in _known:
        try:
            manifest = read_manifest(path.parent)
        except CheckpointError as error:
            _log.warning("left out: %s", error)
            return None
        if manifest is None:
            return None
        _known[key] = manifest.step, manifest.oid
    return _known[key]


def read_manifest(directory: Any) -> Manifest | None:
    """Returns the manifest of an item's directory, or None where orbax wrote the arrays itself."""
    path = pathlib.Path(str(directory)) / MANIFEST_FILE
    try:
        return parse_manifest(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def commit_item(
    tier: Tier, snapshot: Snapshot, directory: Any, extra: dict[str, Any] | None = None
) -> None:
    """Saves a snapshot as the item of this directory and writes its manifest there."""
    root, item, step = split_directory(directory)
    name = item_name(root, item)
    live, newest = live_objects(root, item)
    try:
        saved = tier.save(snapshot, name=name, step=step, live=live, protect=newest, extra=extra)
    except ToDisk as problem:
        data = _spill(tier, snapshot, directory, name, step, extra or {}, problem.box)
        tier.note(f"step {step} of {name} was written to disk only: {problem}")
    else:
        data = saved.data
    if data:
        pathlib.Path(str(directory), MANIFEST_FILE).write_bytes(data)


def _spill(
    tier: Tier, snapshot: Snapshot, directory: Any, name: str, step: int, extra: dict[str, Any],
    box: str,
) -> bytes:
    """Writes a save to disk, each process its part; returns the manifest, in the first process.

    Raises:
      CheckpointError: a process could not write its part; all are told.
    """
    number, count, _ = tier.writers()
    wait_s = tier.config.bulk_timeout_s(snapshot.total_bytes * count)
    trouble = ""
    try:
        spill.write_part(directory, snapshot, number)
    except CheckpointError as error:
        trouble = str(error)
    together.post(f"{box}/part{number}", trouble)
    told = [together.wait(f"{box}/part{i}", wait_s) for i in range(count)]
    if any(told):
        raise CheckpointError("; ".join(t for t in told if t))
    if number:
        return b""
    parts = [spill.leaves_of(directory, i) for i in range(count)]
    return Manifest(
        f"disk-{new_oid()}", tier.config.job, name, step, 0, time.time(), (), (),
        merge_leaves(parts), {**extra, spill.SPILLED: count},
    ).to_bytes()


def restore_item(tier: Tier, directory: Any, manifest: Manifest, target: Any, wish: Any) -> Any:
    """Returns the tree of an item.

    Raises:
      CheckpointError: it is not in the agents' memory, or the target does not fit it.
    """
    tier.tell()
    reader = (
        spill.SpillReader(directory, manifest) if spill.SPILLED in manifest.extra
        else tier.open(manifest.oid, manifest.name, manifest.step)
    )
    return restore_tree(reader, target, wish)


class TreeHandler(ocp.handlers.AsyncCheckpointHandler):
    """Keeps the leaves of a tree in the agents' memory and a manifest in the step directory.

    Args:
      tier: the in-memory tier.
    """

    def __init__(self, tier: Tier):
        self._tier = tier
        self._standard = ocp.StandardCheckpointHandler()
        self._pytree = ocp.PyTreeCheckpointHandler()

    def _stock(self, args: Any) -> Any:
        standard = isinstance(args, (ocp.args.StandardSave, ocp.args.StandardRestore))
        return self._standard if standard else self._pytree

    async def async_save(self, directory: Any, *positional: Any, args: Any = None, **_: Any) -> Any:
        """Takes the state and returns a future for the rest."""
        if positional or args is None:
            raise CheckpointError("call save with args=ocp.args.StandardSave(tree) or PyTreeSave(tree)")
        if not self._tier.agree():
            if isinstance(args, TreeSave):
                args = ocp.args.StandardSave(args.item, args.save_args, args.custom_metadata)
            return await self._stock(args).async_save(directory, args=args)
        tree = wishes.cast_for_save(args.item, args.save_args)
        snapshot, outline = self._tier.snapshot(tree), outline_of(tree)
        del tree  # on an accelerator it would be held until the end of the save
        arguments = dataclasses.replace(args, item=None)
        extra = {"custom_metadata": args.custom_metadata} if args.custom_metadata else {}

        def commit_or_write() -> None:
            try:
                commit_item(self._tier, snapshot, directory, extra)
            except CheckpointError as error:
                if not self._tier.may_go_to_disk(error):
                    raise
                self._write(dataclasses.replace(arguments, item=rebuild(snapshot, outline)), directory, error)

        async def commit() -> None:
            await asyncio.to_thread(commit_or_write)

        return [ocp_future.CommitFutureAwaitingContractedSignals(commit(), name="hetjax-eccheck")]

    def _write(self, args: Any, directory: Any, problem: CheckpointError) -> None:
        """Has orbax's handler write what the agents could not take."""
        if isinstance(args, TreeSave):
            args = ocp.args.StandardSave(args.item, args.save_args, args.custom_metadata)
        try:
            self._stock(args).save(directory, args=args)
        except Exception as error:
            raise CheckpointError(f"{problem}; and on disk: {error}") from error
        root, item, step = split_directory(directory)
        self._tier.note(f"step {step} of {item_name(root, item)} was written to disk only: {problem}")

    def save(self, directory: Any, *positional: Any, **keywords: Any) -> None:
        """Saves and waits."""

        async def both() -> None:
            for item in await self.async_save(directory, *positional, **keywords) or ():
                item.result()

        _run(both())

    def restore(self, directory: Any, *positional: Any, args: Any = None, **_: Any) -> Any:
        """Returns the tree: from the agents, or from disk where orbax wrote it."""
        manifest = read_manifest(directory)
        if manifest is None:
            if isinstance(args, TreeRestore):
                args = ocp.args.StandardRestore(args.item, args.strict)
            return self._stock(args).restore(directory, args=args)
        if args is None:
            args = ocp.args.StandardRestore()
        if isinstance(args, (ocp.args.StandardRestore, TreeRestore)):
            wish = wishes.of_target(args.fallback_sharding, args.strict)
            return restore_item(self._tier, directory, manifest, args.item, wish)
        if args.transforms is not None or args.legacy_transform_fn is not None:
            raise CheckpointError(
                "transforms are not supported for checkpoints in the agents' memory; restore the "
                "tree as it was saved and transform it afterwards"
            )
        target = args.item if args.item is not None else args.restore_args
        if target is not None and args.restore_args is None:
            wish = wishes.as_saved
        elif target is not None:
            wish = wishes.of_restore_args(args.restore_args, wishes.of_target())
        else:
            wish = None
        return restore_item(self._tier, directory, manifest, target, wish)

    def metadata(self, directory: Any) -> Any:
        """Returns orbax's tree metadata."""
        manifest = read_manifest(directory)
        if manifest is None:
            return self._standard.metadata(directory)
        return tree_metadata(manifest, pathlib.Path(str(directory)))

    def finalize(self, directory: Any) -> None:
        """Lets orbax merge its files where it wrote them."""
        if read_manifest(directory) is None:
            self._standard.finalize(directory)

    def close(self) -> None:
        """Closes orbax's handlers; the tier is shared and stays."""
        self._tier.tell()
        self._standard.close()
        self._pytree.close()


@ocp.args.register_with_handler(TreeHandler, for_save=True)
@dataclasses.dataclass
class TreeSave(ocp.args.CheckpointArgs):
    """Arguments of a save that names this handler; StandardSave does the same.

    Attributes:
      item: the tree.
      save_args: tree of orbax SaveArgs, or None.
      custom_metadata: a JSON value that comes back with the item's metadata.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@ocp.args.register_with_handler(TreeHandler, for_restore=True)
@dataclasses.dataclass
class TreeRestore(ocp.args.CheckpointArgs):
    """Arguments of a restore; what orbax makes up itself where the user gives none.

    Attributes:
      item: the tree wanted, or None for all as it was saved.
      strict: shapes must be those that were saved.
      fallback_sharding: for leaves that name no sharding of devices that are here.
    """

    item: Any = None
    strict: bool = True
    fallback_sharding: Any = None


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
        return
    import threading

    error: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(coroutine)
        except BaseException as caught:
            error.append(caught)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if error:
        raise error[0]


def handler_registry(config: Config | str | None = None, *, items: tuple[str, ...] = ()) -> Any:
    """Returns an orbax handler registry that sends trees to the agents.

    StandardSave, StandardRestore, PyTreeSave and PyTreeRestore of every item are served; other
    arguments keep orbax's handlers.

    Args:
      config: a Config, the path of a TOML file, or None for the environment (see `load_config`).
      items: names of items to bind as well, for orbax versions that look items up by name only.

    Raises:
      CheckpointError: the configuration is wrong.
    """
    handler = TreeHandler(tier_of(config))
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in (None, *items):
        for kind in (ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.PyTreeSave,
                     ocp.args.PyTreeRestore, TreeSave, TreeRestore):
            registry.add(item, kind, handler)
    return registry
