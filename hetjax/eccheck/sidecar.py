"""Items that are no trees travel as the files their own handler writes.

A JSON item, the state of a data iterator, anything with an orbax handler: the handler saves into a
temporary directory in memory while the trainer waits (an iterator moves on), and the files become
part of the same object, under the same commit. To restore, the files of all processes are laid out
again and the handler reads them.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_args

from hetjax.eccheck.reader import ObjectReader, Range
from hetjax.eccheck.snapshot import Path
from hetjax.ir.errors import CheckpointError


def is_tree(args: Any) -> bool:
    """Says whether orbax arguments are about a tree of arrays."""
    from hetjax.eccheck.handler import TreeRestore, TreeSave

    return isinstance(args, (
        ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.PyTreeSave,
        ocp.args.PyTreeRestore, TreeSave, TreeRestore,
    ))


@contextmanager
def _folder() -> Iterator[pathlib.Path]:
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = pathlib.Path(tempfile.mkdtemp(prefix="hetjax-items-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _handler(item: str, args: Any, registry: Any) -> Any:
    if registry is not None and registry.has(item, type(args)):
        return registry.get(item, type(args))
    if registry is not None and registry.has(None, type(args)):
        return registry.get(None, type(args))
    try:
        return checkpoint_args.get_registered_handler_cls(args)()
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"item '{item}' ({type(args).__name__}): {error}") from error


def save_files(items: Mapping[str, Any], registry: Any = None) -> dict[Path, bytes]:
    """Runs the handlers of items and returns the files they wrote, by item and relative path.

    Raises:
      CheckpointError: no handler is registered for an item's arguments.
    """
    files: dict[Path, bytes] = {}
    for item, args in items.items():
        handler = _handler(item, args, registry)
        with _folder() as folder:
            handler.save(epath.Path(folder), args=args)
            if hasattr(handler, "finalize"):
                handler.finalize(epath.Path(folder))
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                relative = path.relative_to(folder).as_posix()
                files[("d", item), ("file", relative)] = path.read_bytes()
    return files


def restore_files(reader: ObjectReader, items: Mapping[str, Any], registry: Any = None) -> dict[str, Any]:
    """Returns what the handlers of items restore from the files in an object.

    Raises:
      CheckpointError: an item is not in the object.
    """
    results = {}
    for item, args in items.items():
        leaves = [
            leaf for leaf in reader.manifest.leaves if leaf["t"] == "file" and leaf["p"][0][1] == item
        ]
        if not leaves:
            raise CheckpointError(f"{reader.manifest.title} has no item '{item}'")
        contents = [np.empty(int(leaf["s"][0]), np.uint8) for leaf in leaves]
        reader.read(
            Range(int(leaf["x"][0][0]), int(leaf["x"][0][1]), out)
            for leaf, out in zip(leaves, contents)
        )
        with _folder() as folder:
            for leaf, out in zip(leaves, contents):
                path = (folder / leaf["p"][1][1]).resolve()
                if not path.is_relative_to(folder.resolve()):
                    raise CheckpointError(f"item '{item}' has a file outside of it: {leaf['p'][1][1]}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(out.tobytes())
            results[item] = _handler(item, args, registry).restore(epath.Path(folder), args=args)
    return results


def item_names(reader: ObjectReader) -> tuple[set[str], set[str]]:
    """Returns the names of the tree items and of the file items of an object."""
    trees, files = set(), set()
    for leaf in reader.manifest.leaves:
        (files if leaf["t"] == "file" else trees).add(str(leaf["p"][0][1]))
    return trees, files
