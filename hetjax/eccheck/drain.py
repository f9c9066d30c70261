"""The newest committed step goes to a shared file system, by the agents alone.

Each agent writes its own chunks and the manifest; nobody waits for anybody. A reader needs k of the
n files of each group, so agents that did not make it within their grace may be missing, as after
any other loss. Files:

    DIR/JOB/OID/manifest.json
    DIR/JOB/OID/g{group}-p{position}.chunks   64-byte header (magic, JSON length), JSON, sums, chunks

A file is written under another name, synced and renamed: what has its final name is whole.

Each drain ends with a sweep: of every item the two newest saves that can be read from the files
alone stay, with all that is newer, and what is older goes. Two, because a directory may still list
the step before the newest.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import struct
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.eccheck.layout import Layout, place
from hetjax.eccheck.manifest import Manifest, parse_manifest, save_of
from hetjax.eccheck.sources import MappedSource
from hetjax.eccheck.store import COMMITTED, PREPARED, Entry
from hetjax.ir.errors import CheckpointError

if TYPE_CHECKING:
    from hetjax.eccheck.agent import Agent

_MAGIC = b"hetjax-chunks-1\0"
_HEAD = struct.Struct("<16sQ40x")
_PAGE = 4096
_KEPT = 2
_STALE_S = 3600.0  # an unfinished file as old as this has nobody who writes it


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name) or "_"


def _write(path: pathlib.Path, parts: list[Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_entry(agent: Agent, entry: Entry, root: pathlib.Path) -> int:
    """Writes one object's chunks of this agent; returns the bytes."""
    folder = root / _safe(agent.options.job) / entry.oid
    folder.mkdir(parents=True, exist_ok=True)
    head = json.dumps({
        "group": entry.group, "position": entry.position, "state": entry.state,
        "layout": entry.layout.to_json(), "bytes": entry.num_bytes,
    }).encode()
    sums = b"".join(s.tobytes() for s in entry.sums)
    before = _HEAD.size + len(head) + len(sums)
    _write(folder / f"g{entry.group}-p{entry.position}.chunks", [
        _HEAD.pack(_MAGIC, len(head)), head, sums, b"\0" * (-before % _PAGE),
        agent.arena.bytes[entry.offset : entry.offset + entry.num_bytes].data,
    ])
    _write(folder / "manifest.json", [entry.manifest])
    return entry.num_bytes


def drain_agent(
    agent: Agent, directory: str, done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Writes, for every item, the newest committed step and anything prepared after it.

    A prepared object is written too: the coordinator may have died after telling only some agents
    to commit, and the reader decides from all files together. Then the step before, which the newest
    save was not to overwrite: where orbax had not yet renamed the newest step's directory, or another
    item of the step was not committed, that is the step a restart finds.

    Args:
      agent: whose chunks.
      directory: where to.
      done: called once the newest steps are written.

    Returns:
      {"steps": {name: step}, "bytes", "seconds", "dir"}.

    Raises:
      CheckpointError: no directory is given or it cannot be written.
    """
    if not directory:
        raise CheckpointError(
            "no directory to drain to; start the agent with --drain-dir or name one (--to)"
        )
    started, total, steps = time.monotonic(), 0, {}
    root = pathlib.Path(directory)
    with agent.store.lock:
        entries = list(agent.store.entries.values())
    newest: dict[str, int] = {}
    for entry in entries:
        if entry.state == COMMITTED:
            newest[entry.name] = max(newest.get(entry.name, entry.step), entry.step)
    try:
        for entry in entries:
            wanted = newest.get(entry.name, -1)
            if entry.state in (COMMITTED, PREPARED) and entry.step >= wanted and entry.manifest:
                total += write_entry(agent, entry, root)
                if entry.state == COMMITTED:
                    steps[entry.name] = entry.step
        done()
        for entry in entries:
            older = entry.step < newest.get(entry.name, -1) and entry.state == COMMITTED
            if older and save_of(entry.oid) in agent.store.protected.get(entry.name, ()):
                total += write_entry(agent, entry, root)
    except OSError as error:
        raise CheckpointError(f"cannot drain to {directory}: {error}") from error
    agent.count("drained", total)
    pruned = prune_drained(directory, agent.options.job, set(newest))
    return {"steps": steps, "bytes": total, "seconds": time.monotonic() - started,
            "dir": directory, "address": agent.address, "pruned": pruned}


def prune_drained(directory: str, job: str, names: Collection[str]) -> list[str]:
    """Removes drained saves that newer ones have made superfluous; returns their names.

    Agents sweep at the same time, each on its own: what another has removed is no error, and what is
    not yet whole counts for nothing, so that half a drain never costs the one before it.

    Args:
      directory: where was drained to.
      job: whose saves.
      names: items to sweep.
    """
    by_name: dict[str, list[tuple[float, pathlib.Path, bool]]] = {}
    for folder in find_drained(directory, job):
        try:
            manifest = parse_manifest((folder / "manifest.json").read_bytes())
        except (OSError, CheckpointError):
            continue
        if manifest.name in names:
            # By age, not by step: a run that went back to an older step counts from there again.
            by_name.setdefault(manifest.name, []).append(
                (manifest.created_s, folder, _is_whole(folder, manifest)))
    pruned = []
    for saves in by_name.values():
        whole = 0
        for _, folder, good in sorted(saves, key=lambda s: s[0], reverse=True):
            if whole >= _KEPT:
                shutil.rmtree(folder, ignore_errors=True)
                pruned.append(folder.name)
                continue
            whole += good
            for path in folder.glob(".*.tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _STALE_S:
                        path.unlink()
    return pruned


def _is_whole(folder: pathlib.Path, manifest: Manifest) -> bool:
    """Says whether a drained save can be read from its files alone."""
    here, committed = set(), False
    for path in folder.glob("g*-p*.chunks"):
        try:
            head, _ = open_chunks(path)
            here.add((int(head["group"]), int(head["position"])))
            committed = committed or head["state"] == COMMITTED
        except (CheckpointError, KeyError, ValueError):
            continue
    return committed and all(
        sum((g, p) in here for p in range(layout.n)) >= layout.k
        for g, layout in enumerate(manifest.layouts)
    )


def open_chunks(path: pathlib.Path) -> tuple[dict[str, Any], MappedSource]:
    """Returns header and source of one drained file.

    Raises:
      CheckpointError: it is not a whole chunk file.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
        magic, length = _HEAD.unpack(data[: _HEAD.size].tobytes())
        if magic != _MAGIC or length > len(data):
            raise CheckpointError(f"{path} is not a chunk file")
        head = json.loads(data[_HEAD.size : _HEAD.size + length].tobytes())
        layout = Layout.from_json(head["layout"])
        used = place(layout).used_blocks[int(head["position"])]
        at = _HEAD.size + length
        sums = data[at : at + 8 * sum(used)].copy().view(np.uint64)
        at += 8 * sum(used)
        at += -at % _PAGE
        if len(data) != at + sum(used) * layout.block_bytes:
            raise CheckpointError(f"{path} is cut short")
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path}: {error}") from error
    ends = np.cumsum([0, *used])
    offsets = [at + int(e) * layout.block_bytes for e in ends[:-1]]
    return head, MappedSource(
        data, offsets, lambda first, last: sums[ends[first] : ends[last]], str(path)
    )


def find_drained(directory: str, job: str) -> list[pathlib.Path]:
    """Returns the folders of drained objects of a job."""
    root = pathlib.Path(directory) / _safe(job)
    return sorted(p.parent for p in root.glob("*/manifest.json")) if root.is_dir() else []
