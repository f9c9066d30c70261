"""What stages and replicas send each other: seconds of a boundary, of a collective, of an exchange of gradients.

Activations cross a boundary once, whatever the degrees: each byte goes over a slow link a single time and is
spread on the other side, and the nodes of both sides share the work.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from hetjax.ir.cluster import Link
from hetjax.passes.cost.collectives import Level, levels_price_s
from hetjax.passes.search.published_judge import pairs
from hetjax.passes.search.space import Group, Options, Part, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A boundary: seconds on the line, latency, and the lines' names both ways (() for lines of its own)."""

    serialisation_s: float
    latency_s: float
    lines: tuple[str, str] | tuple[()]


class Wires:
    """The links of one problem, as its stages use them; what was asked once is kept.

    Args:
      problem: the problem.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self._crossings: dict[tuple[Group, Group, int], Crossing] = {}
        self._levels: dict[tuple[Part, ...], tuple[Level, ...]] = {}

    def crossing(self, source: Group, target: Group, edge: int) -> Crossing:
        """Returns the boundary between two stages that meet before layer `edge`."""
        nbytes = self.problem.table.output_bytes[edge - 1]
        key = (source, target, nbytes)
        found = self._crossings.get(key)
        if found is None:
            found = self._crossings[key] = self._make_crossing(source, target, nbytes)
        return found

    def _make_crossing(self, source: Group, target: Group, nbytes: int) -> Crossing:
        seconds = latency_s = 0.0
        lines: tuple[str, str] | tuple[()] = ()
        whole = source.examples * nbytes
        facing = list(pairs(source, target))
        for a, b in facing:
            link = self.problem.link(a.pool, b.pool)
            share = whole / len(facing) if len(facing) > 1 else whole
            pool_a, pool_b = self.problem.pools[a.pool], self.problem.pools[b.pool]
            if pool_a.site != pool_b.site:
                pace = link.serialise_s(share)
                wire = link.uplink or link.name
                lines = (
                    (f"{wire}:{pool_a.site}>{pool_b.site}", f"{wire}:{pool_b.site}>{pool_a.site}")
                    if link.duplex == "full"
                    else (wire, wire)
                )
            elif a.pool == b.pool and pool_a.nodes == 1:
                inner = self.inner(a.pool)
                flows = min(a.devices, b.devices)
                pace, link = inner.serialise_s(share / flows), inner
            else:
                flows = min(self._nodes(a), self._nodes(b))
                pace = link.serialise_s(share / flows)
            seconds, latency_s = max(seconds, pace), max(latency_s, link.latency_s)
        return Crossing(seconds, latency_s, lines)

    def _nodes(self, part: Part) -> int:
        return -(-part.devices // self.problem.pools[part.pool].per_node)

    def inner(self, pool: int) -> Link:
        """Returns the link inside a pool's nodes."""
        head = self.problem.heads[pool][0]
        return self.problem.cluster.link(head, head)

    def levels(self, parts: tuple[Part, ...]) -> tuple[Level, ...]:
        """Returns the levels of a collective over replicas, innermost first.

        The tensor-parallel ranks of a replica run one collective each, side by side on a node's port.
        """
        found = self._levels.get(parts)
        if found is not None:
            return found
        pools = self.problem.pools
        out: list[Level] = []
        inside, across, inner, between = 1, 0, [], []
        sites: dict[str, int] = {}
        for p in parts:
            pool = pools[p.pool]
            together = min(p.replicas, max(1, pool.per_node // p.tensor))
            nodes = -(-p.replicas // together)
            inside = max(inside, together)
            if together > 1:
                inner.append(self.inner(p.pool))
            sites[pool.site] = sites.get(pool.site, 0) + nodes
            if nodes > 1:
                between.append(self.problem.link(p.pool, p.pool))
        ids = sorted({p.pool for p in parts})
        far = []
        for a, b in itertools.combinations(ids, 2):
            (between if pools[a].site == pools[b].site else far).append(self.problem.link(a, b))
        tensor = max(p.tensor for p in parts)
        if inside > 1:
            out.append(Level(inside, _slowest(inner), 1))
        across = max(sites.values())
        if across > 1 and between:
            out.append(Level(across, _slowest(between), min(tensor, 8)))
        if len(sites) > 1:
            out.append(Level(len(sites), _slowest(far), min(tensor, 8)))
        found = self._levels[parts] = tuple(out)
        return found

    def exchange_s(self, parts: tuple[Part, ...], parameters: int, options: Options) -> float:
        """Returns the seconds of the exchange of what all replicas hold."""
        nbytes = self.problem.table.state_bytes[1] * parameters
        passes_s = 0.0
        if options.exchange == "compressed":
            kinds = {self.problem.pools[p.pool].kind for p in parts}
            slowest = min(self.problem.cluster.kind(k).memory_bandwidth_bytes_s for k in kinds)
            passes_s = self.problem.compress_passes * nbytes / slowest
            nbytes *= self.problem.compressed
        replicas = sum([p.replicas for p in parts])
        return passes_s + levels_price_s("all-reduce", self.levels(parts), replicas, nbytes)


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.bandwidth_bytes_s)
