"""Saves one object: placement, bytes to the agents, parity, two-phase commit.

The first process of the save coordinates: it places the bytes, tells the agents to begin, waits for
the other processes, has the parity made, collects the digests, and commits. Processes talk through
a mailbox on the first agent that answers, so nothing here needs the processes to be one JAX job.

An attempt that fails because an agent died, hung or refused is undone and made once more with the
agents that still answer: fewer members, declared in the result and in a warning.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from hetjax.eccheck import wire
from hetjax.eccheck.client import Client, new_oid
from hetjax.eccheck.encode import PutStream
from hetjax.eccheck.layout import Layout, form_groups, pick_block_bytes, place, sole_writer
from hetjax.eccheck.manifest import Manifest, digest_of
from hetjax.eccheck.snapshot import Snapshot, merge_leaves
from hetjax.eccheck.wire import AgentError, blocks_per_message
from hetjax.ir.errors import CheckpointError
from hetjax.kernels.erasure import block_sums, combine
from hetjax.kernels.erasure.field import generator

ATTEMPTS = 2
WANTED = "wanted_code"  # in a manifest's extra: [k, m] where fewer agents than that took the save
_log = logging.getLogger("hetjax.eccheck")


@dataclass(frozen=True)
class Request:
    """What to save, and what must stay.

    Attributes:
      name: which item of which directory.
      step: training step.
      live: objects of this name still wanted; others are freed.
      protect: objects that must never make room.
      extra: goes into the manifest.
      writer: number of this process among those that save together.
      count: how many those are.
      run: this start of the job; distinguishes messages of another start.
      serial: number of the save in this run, the same in all processes; distinguishes messages of
        two saves of one step.
    """

    name: str
    step: int
    live: Collection[str] = ()
    protect: Collection[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    writer: int = 0
    count: int = 1
    run: str = ""
    serial: int = 0


@dataclass(frozen=True)
class Saved:
    """A committed object.

    Attributes:
      oid: its name.
      manifest: digest of its manifest.
      k: data members, of each group.
      m: losses it survives, of each group.
      notes: what is less than asked for, in words.
      evicted: live steps that made room.
      data: the manifest itself, in the coordinating process; empty elsewhere.
    """

    oid: str
    manifest: str
    k: tuple[int, ...]
    m: tuple[int, ...]
    notes: tuple[str, ...] = ()
    evicted: tuple[int, ...] = ()
    data: bytes = b""


def save_object(client: Client, snapshot: Snapshot, request: Request) -> Saved:
    """Writes a snapshot to the agents and commits it.

    Returns:
      What was committed, in every process of the save.

    Raises:
      CheckpointError: it could not be committed; what was committed before is untouched.
    """
    box = f"{request.run}/{request.serial}/{request.name}/{request.step}"
    for attempt in range(ATTEMPTS):
        last = attempt == ATTEMPTS - 1
        try:
            run = _coordinate if request.writer == 0 else _follow
            return run(client, snapshot, request, f"{box}/{attempt}")
        except _Retry as error:
            if last:
                raise CheckpointError(str(error)) from error.__cause__
            _log.warning("saving step %d of %s: %s; trying again", request.step, request.name, error)
    raise AssertionError("unreachable")


class _Retry(Exception):
    """An attempt failed in a way that another set of agents may cure."""


def is_stale(error: CheckpointError) -> bool:
    """Says whether a newer start of the job has taken this process's place."""
    return (
        isinstance(error, AgentError)
        and error.code in ("failed_precondition", "unauthenticated") and "stale" in error.detail
    )


def _final(error: CheckpointError) -> bool:
    """Says whether trying again is of no use."""
    return not isinstance(error, AgentError) or is_stale(error) or error.code == "resource_exhausted"


# -- the mailbox -----------------------------------------------------------------------------------


def _post(client: Client, lead: str, box: str, writer: int, value: Any) -> None:
    client.pool.peer(lead).call(
        "post", box=box, writer=writer, payload=json.dumps(value).encode(),
        timeout_s=client.config.bulk_timeout_s(0),
    )


def _collect(client: Client, lead: str, box: str, count: int, wait_s: float) -> list[Any]:
    header, payload = client.pool.peer(lead).call(
        "collect", box=box, count=count, wait_s=wait_s, timeout_s=wait_s + 5.0
    )
    values, at = [], 0
    for length in header["lengths"]:
        values.append(json.loads(bytes(payload[at : at + length])))
        at += length
    return values


def _alive(client: Client) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    alive, silent = client.probe()
    if not alive:
        raise CheckpointError(
            "no checkpoint agent answers: "
            + "; ".join(f"{a}: {why}" for a, why in silent.items())
        )
    return alive, silent


# -- roles -----------------------------------------------------------------------------------------


def _follow(client: Client, snapshot: Snapshot, request: Request, box: str) -> Saved:
    alive, _ = _alive(client)
    lead = next(a for a in client.config.agents if a in alive)
    wait_s = client.config.bulk_timeout_s(snapshot.total_bytes * request.count)
    try:
        _post(client, lead, box + "/join", request.writer, {
            "home": client.home(alive), "bytes": snapshot.total_bytes, "leaves": snapshot.leaves,
        })
        (plan,) = _collect(client, lead, box + "/plan", 1, wait_s)
        if "error" not in plan:
            trouble = None
            try:
                write_bytes(client, snapshot, request.writer, plan)
            except CheckpointError as error:
                trouble = str(error)
            _post(client, lead, box + "/sealed", request.writer, trouble)
        (done,) = _collect(client, lead, box + "/done", 1, 4 * wait_s)
    except AgentError as error:
        raise _Retry(str(error)) from error
    if "error" in done:
        raise _Retry(done["error"]) if done["retry"] else CheckpointError(done["error"])
    return Saved(done["oid"], done["manifest"], tuple(done["k"]), tuple(done["m"]),
                 tuple(done["notes"]), tuple(done["evicted"]))


def _coordinate(client: Client, snapshot: Snapshot, request: Request, box: str) -> Saved:
    alive, silent = _alive(client)
    lead = next(a for a in client.config.agents if a in alive)
    joins = [{"home": client.home(alive), "bytes": snapshot.total_bytes, "leaves": snapshot.leaves}]
    wait_s = client.config.bulk_timeout_s(snapshot.total_bytes * request.count)
    many, result = request.count > 1, {"error": "interrupted", "retry": False}
    try:
        if many:
            joins += _collect(client, lead, box + "/join", request.count - 1, wait_s)
        saved = _save(client, snapshot, request, box, lead, alive, silent, joins, wait_s)
        result = {"oid": saved.oid, "manifest": saved.manifest, "k": saved.k, "m": saved.m,
                  "notes": saved.notes, "evicted": saved.evicted}
        return saved
    except CheckpointError as error:
        result = {"error": str(error), "retry": not _final(error)}
        if _final(error):
            raise
        raise _Retry(str(error)) from error
    finally:
        if many:
            try:
                if "error" in result:
                    _post(client, lead, box + "/plan", 0, {"error": result["error"]})
                _post(client, lead, box + "/done", 0, result)
            except CheckpointError:
                pass  # the others run into their own deadline


def _save(
    client: Client, snapshot: Snapshot, request: Request, box: str, lead: str,
    alive: dict[str, dict[str, Any]], silent: dict[str, str], joins: list[dict[str, Any]],
    wait_s: float,
) -> Saved:
    leaves = merge_leaves([join["leaves"] for join in joins])
    layouts, notes = lay_out(client, alive, silent, joins)

    def write(plan: dict[str, Any]) -> None:
        if request.count > 1:
            _post(client, lead, box + "/plan", 0, plan)
        write_bytes(client, snapshot, request.writer, plan)
        if request.count > 1:
            sealed = _collect(client, lead, box + "/sealed", request.count - 1, wait_s)
            trouble = [t for t in sealed if t]
            if trouble:
                raise AgentError("; ".join(trouble), code="aborted", address=lead)

    if min(lay.m for lay in layouts) < client.config.m:  # so that a repair knows what was asked for
        request = replace(request, extra={**request.extra, WANTED: [client.config.k, client.config.m]})
    saved = commit_object(client, request, layouts, leaves, new_oid(), client.epoch(alive), write)
    return replace(saved, notes=(*notes, *saved.notes))


def commit_object(
    client: Client, request: Request, layouts: tuple[Layout, ...], leaves: list[Any], oid: str,
    epoch: int, write: Callable[[dict[str, Any]], None], *, remakes: float = 0.0,
) -> Saved:
    """Allocates an object on its agents, has its bytes written, makes parity, and commits it.

    Args:
      client: connections.
      request: what it is; `live` and `protect` say what stays.
      layouts: a layout a group.
      leaves: the tree's leaves.
      oid: its name.
      epoch: start of the job it belongs to.
      write: given the plan, writes all bytes of all writers.
      remakes: when the save was made that this holds once more, seconds since 1970; 0 for a new save.

    Raises:
      CheckpointError: it could not be committed; nothing of it is left.
    """
    config, notes = client.config, []
    members = [(g, p, a) for g, lay in enumerate(layouts) for p, a in enumerate(lay.members)]
    total = sum(size for lay in layouts for _, _, size in lay.writers)
    bulk_s, small_s = config.bulk_timeout_s(4 * total), config.rpc_timeout_s

    def every(op: str, timeout_s: float, **fields: Any) -> dict[tuple[int, int], dict[str, Any]]:
        replies, errors = {}, []
        for (g, p, _), reply in client.pool.each(members, lambda member: client.pool.peer(
            member[2]).call(op, oid=oid, epoch=epoch, timeout_s=timeout_s, **fields)):
            if isinstance(reply, CheckpointError):
                errors.append(reply)
            else:
                replies[g, p] = reply[0]
        if errors:
            # The most telling one: a refusal before a dead line, a dead line before its echo.
            raise min(errors, key=lambda e: (not _final(e), getattr(e, "code", "") == "aborted"))
        return replies

    def begin(member: tuple[int, int, str]) -> dict[str, Any]:
        group, position, address = member
        return client.pool.peer(address).call(
            "begin", oid=oid, name=request.name, step=request.step, epoch=epoch, group=group,
            position=position, layout=layouts[group].to_json(), live=list(request.live),
            protect=list(request.protect), keep_all=bool(remakes), timeout_s=small_s,
        )[0]

    try:
        begun = client.pool.each(members, begin)
        errors = [reply for _, reply in begun if isinstance(reply, CheckpointError)]
        if errors:
            raise min(errors, key=lambda e: not _final(e))
        plan = {
            "oid": oid, "epoch": epoch, "layouts": [lay.to_json() for lay in layouts],
            "offsets": {a: reply["chunk_offsets"] for (_, _, a), reply in begun},
            "ids": {a: reply["id"] for (_, _, a), reply in begun},
        }
        write(plan)
        if any(lay.m and any(sole_writer(lay, j) < 0 and any(
                place(lay).used_blocks[p][j] for p in range(lay.n)) for j in range(lay.n))
               for lay in layouts):
            every("encode", bulk_s)
        digests = {key: reply["digest"] for key, reply in every("digest", small_s).items()}
        manifest = Manifest(
            oid, config.job, request.name, request.step, epoch, remakes or time.time(), layouts,
            tuple(tuple(digests[g, p] for p in range(lay.n)) for g, lay in enumerate(layouts)),
            leaves, request.extra,
        ).to_bytes()
        _prepare(client, members, oid, epoch, manifest)
    except BaseException:
        client.pool.each(members, lambda member: client.pool.peer(member[2]).call(
            "abort", oid=oid, timeout_s=min(small_s, 2.0)))
        raise
    notes += _commit(client, members, layouts, oid, epoch)
    evicted = sorted({e["step"] for _, reply in begun for e in reply["evicted"]
                      if e["oid"] in request.live})
    return Saved(oid, digest_of(manifest), tuple(lay.k for lay in layouts),
                 tuple(lay.m for lay in layouts), tuple(notes), tuple(evicted), manifest)


def lay_out(
    client: Client, alive: dict[str, dict[str, Any]], silent: dict[str, str],
    joins: list[dict[str, Any]],
) -> tuple[tuple[Layout, ...], list[str]]:
    """Returns a layout per group that gets bytes, and what is less than asked for."""
    config = client.config
    addresses = [a for a in config.agents if a in alive]
    groups = form_groups(addresses, config.k, config.m, config.domains)
    where = {a: (g, p) for g, (_, _, ms) in enumerate(groups) for p, a in enumerate(ms)}
    writers: list[list[tuple[int, int, int]]] = [[] for _ in groups]
    for number, join in enumerate(joins):
        if join["home"] in where:
            group, position = where[join["home"]]
        else:
            loads = [sum(b for _, _, b in ws) for ws in writers]
            group, position = loads.index(min(loads)), -1
        writers[group].append((number, position, int(join["bytes"])))
    layouts, notes = [], []
    for (k, m, members), mine in zip(groups, writers):
        if not mine and layouts:
            continue
        total = sum(b for _, _, b in mine)
        layouts.append(Layout(k, m, pick_block_bytes(total, k, m), tuple(mine), members))
    if silent:
        notes.append("no answer from " + ", ".join(f"{a} ({why})" for a, why in silent.items()))
    weakest = min(lay.m for lay in layouts)
    if weakest < config.m:
        notes.append(f"{len(addresses)} agents survive the loss of {weakest}, not of {config.m}")
    if any(lay.k < config.k for lay in layouts):
        lay = min(layouts, key=lambda x: x.k)
        notes.append(
            f"{len(addresses)} agents instead of {config.k + config.m}: {lay.k}+{lay.m}, memory "
            f"{lay.n / lay.k:.2f} x the state instead of {(config.k + config.m) / config.k:.2f} x"
        )
    return tuple(layouts), notes


def _prepare(
    client: Client, members: list[tuple[int, int, str]], oid: str, epoch: int, manifest: bytes
) -> None:
    def prepare(member: tuple[int, int, str]) -> Any:
        messages = [wire.pack({"op": "prepare", "oid": oid, "epoch": epoch})]
        messages += [
            wire.pack({}, manifest[i : i + wire.PAYLOAD_BYTES])
            for i in range(0, len(manifest), wire.PAYLOAD_BYTES)
        ]
        return client.pool.peer(member[2]).put(
            messages, timeout_s=client.config.bulk_timeout_s(len(manifest))
        )

    errors = [r for _, r in client.pool.each(members, prepare) if isinstance(r, CheckpointError)]
    if errors:
        raise errors[0]


def _commit(
    client: Client, members: list[tuple[int, int, str]], layouts: tuple[Layout, ...], oid: str,
    epoch: int,
) -> list[str]:
    """Tells all members that the object holds; returns notes on those that did not hear it.

    One commit record anywhere makes the object readable, since all members have prepared it.
    """
    replies = client.pool.each(members, lambda member: client.pool.peer(member[2]).call(
        "commit", oid=oid, epoch=epoch, timeout_s=client.config.rpc_timeout_s))
    lost = [(member, r) for member, r in replies if isinstance(r, CheckpointError)]
    for group, layout in enumerate(layouts):
        gone = [member[2] for member, _ in lost if member[0] == group]
        if len(gone) > layout.m or len(gone) == len(members):
            raise CheckpointError(
                f"{len(gone)} agents were lost while the step was committed and the code covers "
                f"{layout.m}: {', '.join(gone)}; the step before it is untouched"
            )
    return [f"{member[2]} was lost during the commit ({error})" for member, error in lost]


# -- bytes -----------------------------------------------------------------------------------------


class Pieces(Protocol):
    """The bytes of one writer; a `Snapshot` is one."""

    def piece(self, offset: int, num_bytes: int) -> np.ndarray:
        """Returns some of them, fewer where it reaches the end."""
        ...


def write_bytes(client: Client, snapshot: Pieces, writer: int, plan: Mapping[str, Any]) -> None:
    """Writes this process's bytes where the plan puts them, and the parity it can make alone.

    Raises:
      CheckpointError: an agent failed.
    """
    layout = next(
        (lay for lay in map(Layout.from_json, plan["layouts"]) if writer in {w for w, *_ in lay.writers}),
        None,
    )
    if layout is None:
        return
    placed, size = place(layout), layout.block_bytes
    local = client.local()
    home = next(h for w, h, _ in layout.writers if w == writer)
    if local is None or plan["ids"].get(layout.members[home]) != local.agent_id:
        home = -1  # none, or the agent was started anew and the memory mapped here is the old one's
    offsets = plan["offsets"].get(layout.members[home]) if home >= 0 else None
    streams: dict[int, PutStream] = {}
    sealed: list[list[int]] = []
    sealed_sums: list[np.ndarray] = []
    per = blocks_per_message(size)

    spare: list[np.ndarray] = []  # memory of parity that has been sent: fresh pages cost more than the code

    def in_place(position: int, stripe: int, block: int, num_bytes: int) -> np.ndarray | None:
        """Returns the own agent's memory for some blocks, where they belong there."""
        if position != home or local is None or offsets is None:
            return None
        start = offsets[stripe] + block * size
        return local.bytes[start : start + num_bytes]

    def store(
        position: int, stripe: int, block: int, sums: np.ndarray, data: np.ndarray,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        target = in_place(position, stripe, block, len(sums) * size)
        if target is not None:
            if target.ctypes.data != data.ctypes.data:
                np.copyto(target[: len(data)], data)
                target[len(data) :] = 0
            sealed.append([stripe, block, len(sums)])
            sealed_sums.append(sums)
            client.local_bytes += len(data)
            return
        client.pace(len(data))
        if position not in streams:
            expected = sum(placed.used_blocks[position]) * size
            streams[position] = PutStream(
                client.pool.peer(layout.members[position]), plan["oid"],
                timeout_s=client.config.bulk_timeout_s(expected * layout.n),
            )
        streams[position].send(stripe, block, sums, data, done)
        client.sent_bytes += len(data)

    def padded_sums(data: np.ndarray, blocks: int) -> np.ndarray:
        if len(data) == blocks * size:
            return block_sums(data, size)
        whole = np.zeros(blocks * size, np.uint8)
        whole[: len(data)] = data
        return block_sums(whole, size)

    extents = placed.extents[writer]
    try:
        for stripe in range(layout.n):
            mine = [e for e in extents if e.stripe == stripe]
            if not mine:
                continue
            sole = layout.m > 0 and sole_writer(layout, stripe) == writer
            length = max(e.chunk_block + e.num_blocks for e in mine)
            rows = generator(layout.k, layout.m)[layout.k :]
            for block in range(0, length, per):
                blocks = min(per, length - block)
                columns: dict[int, np.ndarray] = {}
                for e in mine:
                    low = max(block, e.chunk_block)
                    high = min(block + blocks, e.chunk_block + e.num_blocks)
                    if low >= high:
                        continue
                    data = snapshot.piece(
                        (e.writer_block + low - e.chunk_block) * size, (high - low) * size
                    )
                    store(e.position, stripe, low, padded_sums(data, high - low), data)
                    if sole:
                        role = layout.role(e.position, stripe)
                        if low == block and len(data) == blocks * size:
                            columns[role] = data
                        else:
                            whole = columns.setdefault(role, np.zeros(blocks * size, np.uint8))
                            whole[(low - block) * size :][: len(data)] = data
                if sole:
                    holders = [layout.holder(layout.k + row, stripe) for row in range(layout.m)]
                    parity, used = [], []
                    for position in holders:
                        out = in_place(position, stripe, block, blocks * size)
                        used.append(None if out is not None else spare.pop() if spare
                                    else np.empty(per * size, np.uint8))
                        parity.append(used[-1][: blocks * size] if out is None else out)
                    combine(rows[:, list(columns)], list(columns.values()), parity)
                    for position, out, base in zip(holders, parity, used):
                        store(position, stripe, block, block_sums(out, size), out,
                              (lambda: None) if base is None else functools.partial(spare.append, base))
        for stream in streams.values():
            stream.close()
    except BaseException:
        for stream in streams.values():
            stream.abandon()
        raise
    if sealed:
        client.pool.peer(layout.members[home]).call(
            "seal", oid=plan["oid"], epoch=plan["epoch"], runs=sealed,
            payload=np.concatenate(sealed_sums).tobytes(), timeout_s=client.config.rpc_timeout_s,
        )
