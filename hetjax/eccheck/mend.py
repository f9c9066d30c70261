"""Puts steps back to full strength, and checks them end to end, from outside the agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hetjax.eccheck.client import Client
from hetjax.eccheck.layout import place
from hetjax.eccheck.reader import Found, ObjectReader, survey
from hetjax.eccheck.strengthen import strengthen
from hetjax.ir.errors import CheckpointError
from hetjax.kernels.erasure import Code


def mend(client: Client, told: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Rebuilds damaged and missing positions of every committed step, and makes weak ones stronger.

    A missing position goes to its old address if that agent is alive and has nothing of the group,
    else to another agent that has nothing of it. A step that lost too much is reported, not touched.
    A step that too few agents took, so that it survives less than was asked for, is made again.

    Args:
      client: connections.
      told: called with (done, total).

    Returns:
      {"repaired": [...], "strengthened": [...], "failed": [...]}.
    """
    seen = survey(client)
    tasks: list[tuple[Found, int, int, str]] = []
    failed = []
    for found in seen.found:
        assert found.manifest is not None
        if found.missing():
            failed.append(f"{found.name}@{found.step}: {'; '.join(found.missing())}")
            continue
        busy = set(found.holders.values())
        spare = [a for a in seen.alive if a not in busy]
        for group, layout in enumerate(found.manifest.layouts):
            for position in range(layout.n):
                if (group, position) in found.holders:
                    tasks.append((found, group, position, found.holders[group, position]))
                    continue
                old = layout.members[position]
                target = old if old in spare else spare[0] if spare else ""
                if not target:
                    failed.append(
                        f"{found.name}@{found.step}: position {position} of group {group} is lost "
                        "and no agent is free to take it; start one and list it among the agents"
                    )
                    continue
                spare.remove(target)
                tasks.append((found, group, position, target))
    repaired = []
    for done, (found, group, position, target) in enumerate(tasks):
        told(done, len(tasks))
        sources = [[p, a] for (g, p), a in found.holders.items() if g == group and p != position]
        assert found.manifest is not None
        total = sum(b for lay in found.manifest.layouts for _, _, b in lay.writers)
        try:
            reply, _ = client.pool.peer(target).call(
                "repair", oid=found.oid, group=group, position=position, name=found.name,
                step=found.step, epoch=found.epoch, manifest=found.digest, sources=sources,
                timeout_s=client.config.bulk_timeout_s(4 * total),
            )
        except CheckpointError as error:
            failed.append(f"{found.name}@{found.step}: position {position} of group {group}: {error}")
            continue
        found.holders[group, position] = target
        if reply["bytes"]:
            repaired.append({"name": found.name, "step": found.step, "group": group,
                             "position": position, "agent": target, "bytes": reply["bytes"]})
    strengthened = []
    for found in seen.found:
        if found.missing():
            continue
        try:
            stronger = strengthen(client, found)
        except CheckpointError as error:
            failed.append(f"{found.name}@{found.step}: not made stronger: {error}")
            continue
        if stronger is not None:
            strengthened.append(stronger)
    told(len(tasks), len(tasks))
    return {"repaired": repaired, "strengthened": strengthened, "failed": failed}


def verify_object(client: Client, found: Found) -> dict[str, Any]:
    """Reads all chunks of a step, checks their sums, and encodes each stripe again.

    Returns:
      {"good", "problems", "bytes"}.

    Raises:
      CheckpointError: it cannot be rebuilt.
    """
    if found.missing():
        raise CheckpointError("; ".join(found.missing()))
    reader, problems = ObjectReader(client, found), []
    for number, group in enumerate(reader.groups):
        layout, placed = group.layout, place(group.layout)
        for stripe in range(layout.n):
            used = [placed.used_blocks[p][stripe] for p in range(layout.n)]
            length = max(used) * layout.block_bytes
            chunks = {layout.role(p, stripe): np.zeros(length, np.uint8) for p in range(layout.n)}

            def deliver(position: int, j: int, block: int, data: np.ndarray,
                        chunks: dict[int, np.ndarray] = chunks, group: Any = group) -> None:
                start = block * group.layout.block_bytes
                chunks[group.layout.role(position, j)][start : start + len(data)] = data

            group.fetch({(p, stripe): np.ones(u, bool) for p, u in enumerate(used) if u}, deliver)
            parity = [np.empty(length, np.uint8) for _ in range(layout.m)]
            Code(layout.k, layout.m).encode([chunks[c] for c in range(layout.k)], parity)
            problems += [
                f"group {number}, stripe {stripe}: parity {row} is not that of the data"
                for row, out in enumerate(parity) if not np.array_equal(out, chunks[layout.k + row])
            ]
        problems += [
            f"group {number}: position {p} ({layout.members[p]}): {why}" for p, why in group.dead.items()
        ]
        problems += [
            f"group {number}: position {p} ({layout.members[p]}): stripe {s}, block {b} is damaged"
            for p, s, b in sorted(group.bad)
        ]
    return {"good": not problems, "problems": problems, "bytes": reader.read_bytes}
