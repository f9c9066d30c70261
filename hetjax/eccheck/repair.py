"""An agent makes again what it should hold: a lost member's chunks, or its own damaged blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.eccheck.gather import GroupReader
from hetjax.eccheck.layout import Layout
from hetjax.eccheck.manifest import LIMIT_BYTES, check_digest
from hetjax.eccheck.sources import RemoteSource
from hetjax.eccheck.store import COMMITTED, Entry
from hetjax.ir.errors import CheckpointError
from hetjax.kernels.erasure import block_sums

if TYPE_CHECKING:
    from hetjax.eccheck.agent import Agent


def _fill(agent: Agent, entry: Entry, reader: GroupReader, wanted: dict[int, np.ndarray]) -> int:
    """Rebuilds masked blocks of this agent's chunks by stripe; returns the bytes written."""
    size, total = entry.layout.block_bytes, 0

    def deliver(position: int, stripe: int, block: int, data: np.ndarray) -> None:
        if position != entry.position:
            return
        agent.pace(len(data) * entry.layout.k)
        agent.store.write(entry, stripe, block, block_sums(data, size), data.data)

    reader.fetch({(entry.position, s): m for s, m in wanted.items()}, deliver)
    total = sum(int(m.sum()) for m in wanted.values()) * size
    agent.count("repaired", total)
    return total


def _manifest(agent: Agent, oid: str, addresses: Iterable[str], digest: str) -> bytes:
    """Returns the manifest of an object: the one that is here, else the first that an agent gives."""
    problem = CheckpointError(f"object {oid}: no other agent holds anything of it")
    with agent.store.lock:
        entry = agent.store.entries.get(oid)
    if entry is not None and entry.manifest:
        check_digest(entry.manifest, digest)
        return entry.manifest
    for address in addresses:
        try:
            manifest = agent.pool.peer(address).blob(
                "manifest", oid=oid, timeout_s=agent.timeout_of(0), limit_bytes=LIMIT_BYTES
            )
            check_digest(manifest, digest)
            return manifest
        except CheckpointError as error:
            problem = error
    raise problem


def repair_here(agent: Agent, header: dict[str, Any]) -> dict[str, Any]:
    """Rebuilds one position of one object on this agent.

    Args:
      agent: this agent.
      header: oid, group, position, name, step, epoch; `manifest`: digest of the manifest;
        `sources`: [[position, address], ...] of who holds what.

    Returns:
      {"bytes": rebuilt}.

    Raises:
      CheckpointError: too few sources, or the result is not what the manifest says.
    """
    oid, group, position = str(header["oid"]), int(header["group"]), int(header["position"])
    holders = {int(p): str(a) for p, a in header["sources"] if int(p) != position}
    manifest = _manifest(agent, oid, holders.values(), str(header["manifest"]))
    fields = json.loads(manifest)["groups"][group]
    layout, digests = Layout.from_json(fields["layout"]), fields["digests"]
    reader = GroupReader(
        layout,
        {p: RemoteSource(agent.pool.peer(a), oid, agent.timeout_of) for p, a in holders.items()},
        digests, f"{header['name']}@{header['step']}",
    )
    entry = agent.store.adopt(
        oid=oid, name=str(header["name"]), step=int(header["step"]), epoch=int(header["epoch"]),
        group=group, position=position, layout=layout,
    )
    if entry.state == COMMITTED:
        bad = agent.store.scrub(entry)
        wanted = {s: np.zeros(entry.used(s), bool) for s, _ in bad}
        for stripe, block in bad:
            wanted[stripe][block] = True
    else:
        wanted = {s: np.ones(entry.used(s), bool) for s in range(layout.n) if entry.used(s)}
    sums_before = [s.copy() for s in entry.sums]
    try:
        total = _fill(agent, entry, reader, wanted)
        if entry.sums_digest() != digests[position]:
            raise CheckpointError(
                f"{entry.name}@{entry.step}: position {position} was rebuilt with other bytes than "
                "the manifest says; a source is wrong in a way its sums do not show"
            )
    except BaseException:
        if entry.state == COMMITTED:
            for ours, old in zip(entry.sums, sums_before):
                ours[:] = old
        else:
            agent.store.drop(oid)
        raise
    entry.manifest, entry.state = manifest, COMMITTED
    entry.damaged.clear()
    return {"bytes": total}


def heal(agent: Agent) -> list[str]:
    """Rebuilds what a scrub found damaged, from the members the objects were saved on.

    Returns:
      What could not be repaired, in words.
    """
    failed = []
    with agent.store.lock:
        entries = [e for e in agent.store.entries.values() if e.damaged and e.state == COMMITTED]
    for entry in entries:
        sources = []
        for address in entry.layout.members:
            if address == agent.address:
                continue
            try:
                reply, _ = agent.pool.peer(address).call("where", oid=entry.oid, timeout_s=2.0)
            except CheckpointError:
                continue
            if reply["group"] == entry.group:
                sources.append([reply["position"], address])
        try:
            repair_here(agent, {
                "oid": entry.oid, "group": entry.group, "position": entry.position,
                "name": entry.name, "step": entry.step, "epoch": entry.epoch,
                "manifest": entry.summary()["manifest"], "sources": sources,
            })
        except CheckpointError as error:
            failed.append(str(error))
    agent.last_scrub["repair_failed"] = failed
    return failed
