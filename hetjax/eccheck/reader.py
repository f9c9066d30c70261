"""Finds committed objects, on agents and among drained files, and reads bytes from them."""

from __future__ import annotations

import bisect
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetjax.eccheck.client import Client
from hetjax.eccheck.drain import find_drained, open_chunks
from hetjax.eccheck.gather import GroupReader
from hetjax.eccheck.layout import place
from hetjax.eccheck.manifest import LIMIT_BYTES, Manifest, check_digest, parse_manifest
from hetjax.eccheck.sources import MappedSource, RemoteSource, Source
from hetjax.eccheck.store import COMMITTED
from hetjax.ir.errors import CheckpointError


@dataclass
class Found:
    """A committed object somebody holds.

    Attributes:
      oid: its name.
      name: which item of which directory.
      step: training step.
      epoch: start of the job that wrote it.
      digest: hash of its manifest.
      holders: (group, position) -> addresses of agents.
      files: (group, position) -> drained files.
      damaged: (group, position) -> blocks a scrub found bad.
      num_bytes: memory it takes over all holders.
      created_s: wall clock at the save.
      ids: address -> which agent answered there.
      manifest: once read.
    """

    oid: str
    name: str
    step: int
    epoch: int
    digest: str
    holders: dict[tuple[int, int], str] = field(default_factory=dict)
    files: dict[tuple[int, int], pathlib.Path] = field(default_factory=dict)
    damaged: dict[tuple[int, int], int] = field(default_factory=dict)
    num_bytes: int = 0
    created_s: float = 0.0
    ids: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None

    def missing(self) -> list[str]:
        """Returns why it cannot be rebuilt, a line for each group that lost too much."""
        assert self.manifest is not None
        problems = []
        for g, layout in enumerate(self.manifest.layouts):
            here = {p for group, p in (*self.holders, *self.files) if group == g}
            gone = [p for p in range(layout.n) if p not in here]
            if len(gone) > layout.m:
                problems.append(
                    f"group {g} has {layout.n - len(gone)} of the {layout.k} chunks that each "
                    "stripe needs; gone are "
                    + ", ".join(f"position {p} ({layout.members[p]})" for p in gone)
                )
        return problems

    def margin(self) -> int:
        """Returns how many more losses it survives; below 0 it is lost."""
        assert self.manifest is not None
        margins = []
        for g, layout in enumerate(self.manifest.layouts):
            here = {p for group, p in (*self.holders, *self.files) if group == g}
            margins.append(layout.m - (layout.n - len(here)))
        return min(margins)


@dataclass
class Survey:
    """What the agents and the drain directory hold.

    Attributes:
      found: committed objects, newest step first.
      alive: addresses that answered.
      silent: address -> why there was no answer.
    """

    found: list[Found]
    alive: list[str]
    silent: dict[str, str]

    def named(self, name: str) -> list[Found]:
        """Returns the objects of one name, newest first."""
        return [f for f in self.found if f.name == name]


def survey(
    client: Client, drain_dir: str = "", *, name: str | None = None, manifests: bool = True
) -> Survey:
    """Asks all agents what they hold.

    An object counts as committed if one agent says so; members that prepared the same object hold
    their part of it.

    Args:
      client: connections.
      drain_dir: where drained files may lie; "" for where the agents drain to, if they do.
      name: only objects of this name.
      manifests: read each object's manifest too; objects whose manifest nobody can give are left
        out.

    Raises:
      CheckpointError: every agent refuses this job.
    """
    replies = client.pool.each(
        client.config.agents,
        lambda a: client.pool.peer(a).call("list", timeout_s=client.config.rpc_timeout_s)[0],
    )
    silent = {
        a: getattr(r, "detail", str(r)) for a, r in replies if isinstance(r, CheckpointError)
    }
    refused = [
        r for _, r in replies
        if getattr(r, "code", "") in ("unauthenticated", "failed_precondition")
    ]
    if refused and len(refused) == len(replies):
        raise refused[0]
    objects: dict[tuple[str, str], Found] = {}
    committed: Counter[tuple[str, str]] = Counter()

    def add(summary: Mapping[str, object]) -> Found:
        key = (str(summary["oid"]), str(summary["manifest"]))
        if summary["state"] == COMMITTED:
            committed[key] += 1
        return objects.setdefault(key, Found(
            key[0], str(summary["name"]), int(str(summary["step"])), int(str(summary["epoch"])),
            key[1], created_s=float(str(summary["created_s"])),
        ))

    for address, reply in replies:
        if isinstance(reply, CheckpointError):
            continue
        for summary in reply["objects"]:
            if summary["state"] == "open" or (name is not None and summary["name"] != name):
                continue
            found = add(summary)
            place_ = (int(summary["group"]), int(summary["position"]))
            found.holders.setdefault(place_, address)
            found.num_bytes += int(summary["bytes"])
            if summary["damaged"]:
                found.damaged[place_] = len(summary["damaged"])
    ids = {a: str(r["id"]) for a, r in replies if not isinstance(r, CheckpointError)}
    drain_dir = drain_dir or next(
        (str(r["drain_dir"]) for _, r in replies if isinstance(r, dict) and r["drain_dir"]), ""
    )
    if drain_dir:
        _add_drained(objects, committed, drain_dir, client.config.job, name)
    result = []
    for key, found in objects.items():
        if not committed[key]:
            continue
        if manifests and found.manifest is None:
            try:
                found.manifest = _read_manifest(client, found)
            except CheckpointError:
                continue
        found.ids = ids
        result.append(found)
    result.sort(key=lambda f: (f.step, f.epoch, f.created_s), reverse=True)
    alive = [a for a, r in replies if not isinstance(r, CheckpointError)]
    return Survey(result, alive, silent)


def _add_drained(
    objects: dict[tuple[str, str], Found], committed: Counter[tuple[str, str]], directory: str,
    job: str, name: str | None,
) -> None:
    from hetjax.eccheck.manifest import digest_of

    for folder in find_drained(directory, job):
        try:
            data = (folder / "manifest.json").read_bytes()
            manifest = parse_manifest(data)
        except (OSError, CheckpointError):
            continue
        if name is not None and manifest.name != name:
            continue
        key = (manifest.oid, digest_of(data))
        found = objects.setdefault(key, Found(
            manifest.oid, manifest.name, manifest.step, manifest.epoch, key[1],
            created_s=manifest.created_s,
        ))
        found.manifest = manifest
        for path in folder.glob("g*-p*.chunks"):
            try:
                head, _ = open_chunks(path)
            except CheckpointError:
                continue
            place_ = (int(head["group"]), int(head["position"]))
            if place_ not in found.holders:
                found.files[place_] = path
            committed[key] += head["state"] == COMMITTED


def _read_manifest(client: Client, found: Found) -> Manifest:
    problem: CheckpointError | None = None
    for address in found.holders.values():
        try:
            data = client.pool.peer(address).blob(
                "manifest", oid=found.oid, timeout_s=client.config.rpc_timeout_s,
                limit_bytes=LIMIT_BYTES,
            )
            check_digest(data, found.digest)
            return parse_manifest(data)
        except CheckpointError as error:
            problem = error
    raise problem or CheckpointError(f"nobody holds the manifest of {found.name}@{found.step}")


@dataclass(frozen=True)
class Range:
    """Bytes of one writer, and where they go.

    Attributes:
      writer: number of the writer.
      offset: first byte in the writer's numbering.
      out: destination, uint8, writable; its length says how many.
    """

    writer: int
    offset: int
    out: np.ndarray


class ObjectReader:
    """Reads byte ranges of one object.

    Args:
      client: connections.
      found: the object, with its manifest.
      silent: address -> why it does not answer, for errors.
    """

    def __init__(self, client: Client, found: Found, silent: Mapping[str, str] | None = None):
        assert found.manifest is not None
        self.manifest, self._silent = found.manifest, dict(silent or {})
        self.groups = [
            GroupReader(
                layout, self._sources(client, found, g), digests, found.manifest.title,
                {p: self._silent.get(a, "its agent holds nothing of it")
                 for p, a in enumerate(layout.members)},
            )
            for g, (layout, digests) in enumerate(
                zip(found.manifest.layouts, found.manifest.digests))
        ]
        self._group_of = {
            w: g for g, layout in enumerate(found.manifest.layouts) for w, _, _ in layout.writers
        }

    def _sources(self, client: Client, found: Found, group: int) -> dict[int, Source]:
        sources: dict[int, Source] = {}
        for (g, position), path in found.files.items():
            if g == group:
                sources[position] = open_chunks(path)[1]
        config = client.config
        local = client.local()
        mine = next((a for a, i in found.ids.items() if local and i == local.agent_id), "")
        for (g, position), address in found.holders.items():
            if g != group:
                continue
            peer = client.pool.peer(address)
            remote = RemoteSource(peer, found.oid, config.bulk_timeout_s)
            sources[position] = remote
            if address == mine and local is not None:
                try:
                    reply, _ = peer.call("where", oid=found.oid, timeout_s=config.rpc_timeout_s)
                except CheckpointError:
                    continue
                sources[position] = MappedSource(
                    local.bytes, reply["chunk_offsets"], remote.sums, address
                )
        return sources

    @property
    def read_bytes(self) -> int:
        """Chunk bytes read so far, data and parity."""
        return sum(g.read_bytes for g in self.groups)

    @property
    def rebuilt_bytes(self) -> int:
        """Bytes rebuilt so far."""
        return sum(g.rebuilt_bytes for g in self.groups)

    def read(self, ranges: Iterable[Range]) -> None:
        """Fills the destinations.

        Raises:
          CheckpointError: more is lost than the parity covers; the destinations hold nothing of
            use then.
        """
        by_group: dict[int, list[Range]] = {}
        for item in ranges:
            if len(item.out):
                by_group.setdefault(self._group_of[item.writer], []).append(item)
        for group, items in by_group.items():
            self._read_group(self.groups[group], items)

    def _read_group(self, reader: GroupReader, items: Sequence[Range]) -> None:
        layout, placed = reader.layout, place(reader.layout)
        size = layout.block_bytes
        wanted: dict[tuple[int, int], np.ndarray] = {}
        pieces: dict[tuple[int, int], list[tuple[int, int, np.ndarray]]] = {}
        for item in items:
            start, stop = item.offset, item.offset + len(item.out)
            extents = placed.extents[item.writer]
            first = bisect.bisect_right(extents, start // size, key=lambda e: e.writer_block) - 1
            for extent in extents[first:]:
                low = max(start, extent.writer_block * size)
                high = min(stop, (extent.writer_block + extent.num_blocks) * size)
                if low >= high:
                    break
                key = (extent.position, extent.stripe)
                shift = (extent.chunk_block - extent.writer_block) * size
                mask = wanted.get(key)
                if mask is None:
                    used = placed.used_blocks[extent.position][extent.stripe]
                    mask = wanted[key] = np.zeros(used, bool)
                mask[(low + shift) // size : -(-(high + shift) // size)] = True
                pieces.setdefault(key, []).append(
                    (low + shift, high + shift, item.out[low - start : high - start])
                )
        for lists in pieces.values():
            lists.sort(key=lambda p: p[0])
        # Ranges may overlap (a leaf asked for twice), so ends are made monotonic for the search.
        ends = {
            key: np.maximum.accumulate([p[1] for p in lists]).tolist()
            for key, lists in pieces.items()
        }

        def deliver(position: int, stripe: int, block: int, data: np.ndarray) -> None:
            lists = pieces.get((position, stripe))
            if lists is None:
                return
            start, stop = block * size, block * size + len(data)
            for low, high, out in lists[bisect.bisect_right(ends[position, stripe], start) :]:
                if low >= stop:
                    break
                a, b = max(low, start), min(high, stop)
                if a < b:
                    np.copyto(out[a - low : b - low], data[a - start : b - start])

        def destination(
            position: int, stripe: int, block: int, num_bytes: int
        ) -> np.ndarray | None:
            lists = pieces.get((position, stripe), [])
            start, stop = block * size, block * size + num_bytes
            at = bisect.bisect_right(ends[position, stripe], start) if lists else 0
            if at == len(lists):
                return None
            low, high, out = lists[at]
            # Just one range may want it: a second would have to be copied to.
            alone = at + 1 == len(lists) or lists[at + 1][0] >= stop
            return out[start - low : stop - low] if low <= start and stop <= high and alone else None

        reader.fetch(wanted, deliver, destination)
