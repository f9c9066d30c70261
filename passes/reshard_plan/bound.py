"""The time below which no way of resharding can stay.

Every byte that a place needs and lacks must enter it, every byte that only a set of places holds must
leave them, and the first byte takes a latency. A place is a device, a node or a site. Unique bytes are
counted, so relays cannot undercut the bound.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from hetjax.ir.cluster import Cluster
from hetjax.passes.reshard_plan.layout import Layout
from hetjax.passes.reshard_plan.network import network

# Sets of source nodes are enumerated up to this many nodes; beyond, single nodes and all of them.
MAX_ENUMERATED = 10


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound and what it comes from.

    Attributes:
      seconds: no way takes less.
      binding: in words.
      into_node: bytes each target node needs and lacks, by name.
      crossing: unique bytes that devices of the target mesh need and lack.
    """

    seconds: float
    binding: str
    into_node: dict[str, float]
    crossing: float


def lower_bound(cluster: Cluster, held: Layout, wanted: Layout, itemsize: int) -> Bound:
    """Returns the bound of resharding from one layout to another.

    Args:
      cluster: whose links count.
      held, wanted: where the blocks lie and shall lie.
      itemsize: bytes of an element.
    """
    net = network(cluster)
    low = np.maximum(held.start[:, None, :], wanted.start[None])
    high = np.minimum(held.stop[:, None, :], wanted.stop[None])
    # [source blocks, target blocks]: the unique pieces; each byte of the value is in exactly one of them.
    size = np.prod(np.maximum(high - low, 0), axis=2) * float(itemsize)
    found: list[tuple[float, str]] = [(0.0, "nothing moves")]
    latency = np.inf

    def best(sources: np.ndarray, targets: np.ndarray) -> float:
        """Returns the widest link between two groups of devices, bytes/s."""
        nonlocal latency
        links = {cluster.link(int(a), int(b)) for a in sources for b in targets if a != b}
        latency = min([latency, *(k.latency_s for k in links)])
        return max((k.bandwidth_bytes_s for k in links), default=np.inf)

    def one_each(devices: np.ndarray) -> np.ndarray:
        """Returns one device of each node."""
        return devices[np.unique(net.node_of[devices], return_index=True)[1]]

    sources, targets = np.unique(held.devices), np.unique(wanted.devices)
    everyone = np.unique(np.concatenate([sources, targets]))
    hold_node = {int(n): np.any(net.node_of[held.devices] == n, axis=1) for n in np.unique(net.node_of[sources])}
    need_node = {int(n): np.any(net.node_of[wanted.devices] == n, axis=1) for n in np.unique(net.node_of[targets])}
    names = [n.name for n in cluster.nodes]
    into: dict[str, float] = {}
    for n, need in need_node.items():
        lacks = size[:, need].sum() - (size[hold_node[n]][:, need].sum() if n in hold_node else 0.0)
        into[names[n]] = float(lacks)
        others = one_each(everyone[net.node_of[everyone] != n])
        if lacks and len(others):
            mine = targets[net.node_of[targets] == n][:1]
            found.append((lacks / best(others, mine), f"{lacks:.0f} bytes into node {names[n]}"))
    # What only a set of nodes holds and somebody outside needs must leave them.
    nodes = list(hold_node)
    sets = (
        itertools.chain.from_iterable(itertools.combinations(nodes, k) for k in range(1, len(nodes) + 1))
        if len(nodes) <= MAX_ENUMERATED else [*((n,) for n in nodes), tuple(nodes)])
    speed_out = {}
    for n in nodes:
        others = one_each(everyone[net.node_of[everyone] != n])
        speed_out[n] = best(sources[net.node_of[sources] == n][:1], others) if len(others) else np.inf
    for group in sets:
        outside = [n for n in nodes if n not in group]
        only = ~np.any([hold_node[n] for n in outside], axis=0) if outside else np.ones(held.num_blocks, bool)
        needed = [need for n, need in need_node.items() if n not in group]
        if not needed:
            continue
        leaves = float(size[only][:, np.any(needed, axis=0)].sum())
        if leaves:
            who = ", ".join(names[n] for n in group)
            found.append((leaves / sum(speed_out[n] for n in group), f"{leaves:.0f} bytes out of {who}"))
    # Sites: the wire between them carries every byte that one needs and lacks.
    hold_site = {int(s): np.any(net.site_of[held.devices] == s, axis=1) for s in np.unique(net.site_of[sources])}
    for s in np.unique(net.site_of[targets]).tolist():
        need = np.any(net.site_of[wanted.devices] == s, axis=1)
        lacks = size[:, need].sum() - (size[hold_site[s]][:, need].sum() if s in hold_site else 0.0)
        if lacks:
            links = {cluster.site_link(cluster.sites[o].name, cluster.sites[s].name) for o in hold_site if o != s}
            speed = sum(k.bandwidth_bytes_s for k in links)
            found.append((float(lacks) / speed, f"{lacks:.0f} bytes into site {cluster.sites[s].name}"))
    # Devices: their own port takes what their block lacks.
    crossing = 0.0
    held_by: dict[int, list[int]] = {}
    for b, row in enumerate(held.devices.tolist()):
        for d in row:
            held_by.setdefault(d, []).append(b)
    for t, row in enumerate(wanted.devices.tolist()):
        lacking = np.ones(held.num_blocks, bool)
        for d in row:
            own = size[held_by.get(d, []), t].sum()
            lacking[held_by.get(d, [])] = False
            lacks = float(size[:, t].sum() - own)
            if lacks:
                speed = best(one_each(np.concatenate([everyone[net.node_of[everyone] == net.node_of[d]], everyone])), np.array([d]))
                near = everyone[(net.node_of[everyone] == net.node_of[d]) & (everyone != d)]
                if len(near):
                    speed = max(speed, best(near[:1], np.array([d])))
                found.append((lacks / speed, f"{lacks:.0f} bytes into device {d}"))
        crossing += float(size[lacking, t].sum())
    seconds, binding = max(found, key=lambda x: x[0])
    if seconds and np.isfinite(latency):
        seconds += latency
    return Bound(seconds, binding, into, crossing)
