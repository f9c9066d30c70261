"""What collectives cost on the links their devices really have: alpha-beta per algorithm.

A group of p devices and a value of n bytes per device (all-gather and reduce-scatter: n is the
whole value). With a step of m bytes costing T(m) = latency + m / bandwidth(m):

  ring          all-reduce 2 (p-1) T(n/p); all-gather, reduce-scatter (p-1) T(n/p)
  tree          all-reduce 2 ceil(log2 p) T(n); broadcast ceil(log2 p) T(n)
  hierarchical  reduce-scatter inside nodes, all-reduce of n/q between them, all-gather inside;
                and the same once more between sites
  pairwise      all-to-all (p-1) T(n/p)

Sources: Thakur, Rabenseifner and Gropp (2005) for ring and tree; Cho et al., BlueConnect (2019),
for the hierarchy. Where several groups run at once, their messages share a node's or a site's link,
and with a half-duplex link both directions do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hetjax.ir.cluster import Cluster, Link
from hetjax.ir.errors import PlanError
from hetjax.ir.suggest import nearest

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")


@dataclasses.dataclass(frozen=True, slots=True)
class CollectivePrice:
    """What a collective costs.

    Attributes:
      seconds: the time.
      algorithm: "ring", "tree", "hierarchical", "pairwise" or "none".
    """

    seconds: float
    algorithm: str


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One level of a group's hierarchy, innermost first.

    Attributes:
      size: how many parts meet here: devices of a node, nodes of a site, sites.
      link: the slowest link among them.
      flows: messages that share the link at once, of this group and those beside it.
    """

    size: int
    link: Link
    flows: int

    def step_s(self, nbytes: float) -> float:
        """Returns the seconds of one step in which every part sends and receives `nbytes`."""
        both = 2 if self.link.duplex == "half" else 1
        return self.link.transfer_s(nbytes * self.flows * both)


def levels(cluster: Cluster, devices: Sequence[int], *, beside: int = 1) -> tuple[Level, ...]:
    """Returns the levels of a group; levels with one part are left out.

    Args:
      cluster: where the devices are.
      devices: positions.
      beside: groups like this one that run at the same time on the same nodes, this one included.
    """
    by_site: dict[str, dict[str, list[int]]] = {}
    for d in devices:
        device = cluster.devices[d]
        by_site.setdefault(device.site, {}).setdefault(device.node, []).append(d)
    nodes = [members for site in by_site.values() for members in site.values()]
    out = []
    inside = max(len(members) for members in nodes)
    if inside > 1:
        pairs = [(m[0], m[1]) for m in nodes if len(m) > 1]
        out.append(Level(inside, _slowest(cluster, pairs), 1))
    across = max(len(site) for site in by_site.values())
    if across > 1:
        heads = [[m[0] for m in site.values()] for site in by_site.values()]
        pairs = [(a, b) for h in heads for a, b in zip(h, [*h[1:], h[0]]) if a != b]
        out.append(Level(across, _slowest(cluster, pairs), beside))
    if len(by_site) > 1:
        heads = [next(iter(site.values()))[0] for site in by_site.values()]
        pairs = list(zip(heads, [*heads[1:], heads[0]]))
        out.append(Level(len(by_site), _slowest(cluster, pairs), beside))
    return tuple(out)


def collective_price(
    cluster: Cluster,
    collective: str,
    devices: Sequence[int],
    nbytes: float,
    *,
    beside: int = 1,
    algorithm: str | None = None,
) -> CollectivePrice:
    """Returns the price of a collective by its fastest algorithm, or by the one given.

    Args:
      cluster: the machine.
      collective: one of `COLLECTIVES`.
      devices: the group, as positions.
      nbytes: bytes of the whole value on each device (all-gather: after it; all-to-all: what each
        sends).
      beside: groups like this one that run at the same time on the same nodes, this one included.
      algorithm: None for the fastest.

    Raises:
      PlanError: an unknown collective or algorithm.
    """
    if collective not in COLLECTIVES:
        raise PlanError(f"unknown collective {collective!r}{nearest(collective, COLLECTIVES)}")
    if len(set(devices)) < 2 or nbytes == 0:
        return CollectivePrice(0.0, "none")
    steps = levels(cluster, devices, beside=beside)
    prices = dict(_prices(collective, steps, len(set(devices)), nbytes))
    if algorithm is not None and algorithm not in prices:
        raise PlanError(f"{collective} has no algorithm {algorithm!r}{nearest(algorithm, prices)}")
    best = algorithm or min(prices, key=lambda name: prices[name])
    return CollectivePrice(prices[best], best)


def levels_price_s(collective: str, steps: tuple[Level, ...], p: int, nbytes: float) -> float:
    """Returns the seconds of a collective by its fastest algorithm, over levels put together by hand.

    Args:
      collective: one of `COLLECTIVES`.
      steps: the levels, innermost first.
      p: devices of the group.
      nbytes: see `collective_price`.
    """
    if p < 2 or not steps or nbytes <= 0:
        return 0.0
    return min(seconds for _, seconds in _prices(collective, steps, p, nbytes))


def _prices(
    collective: str, steps: tuple[Level, ...], p: int, nbytes: float
) -> list[tuple[str, float]]:
    def whole(message: float) -> float:
        # Of a flat algorithm, a node's edge sees one message a step, whatever is inside the node.
        return max(level.step_s(message) for level in steps)

    share = nbytes / p
    if collective == "all-to-all":
        return [("pairwise", sum(_exchange(steps, share)))]
    rounds = math.ceil(math.log2(p))
    if collective == "broadcast":
        tree = rounds * whole(nbytes)
        # A scatter and a ring all-gather move each byte twice, whatever p is.
        return [("tree", tree), ("ring", 2 * (p - 1) * whole(share))]
    passes = 2 if collective == "all-reduce" else 1
    out = [("ring", passes * (p - 1) * whole(share))]
    if collective == "all-reduce":
        out.append(("tree", 2 * rounds * whole(nbytes)))
    if len(steps) > 1:
        out.append(("hierarchical", passes * _hierarchical(steps, nbytes)))
    return out


def _hierarchical(steps: tuple[Level, ...], nbytes: float) -> float:
    """Returns the seconds of one pass (reduce-scatter or all-gather) over all levels."""
    seconds, left, inner = 0.0, nbytes, 1
    for level in steps:
        share = left / level.size
        # Each of the devices inside carries its own share outward at the same time.
        flows = dataclasses.replace(level, flows=level.flows * inner)
        seconds += (level.size - 1) * flows.step_s(share)
        left, inner = share, inner * level.size
    return seconds


def _exchange(steps: tuple[Level, ...], share: float) -> list[float]:
    """Returns the seconds of an all-to-all's messages, per level."""
    out, inner = [], 1
    for level in steps:
        flows = dataclasses.replace(level, flows=level.flows * inner)
        out.append((level.size - 1) * flows.step_s(share * inner))
        inner *= level.size
    return out


def _slowest(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> Link:
    links = [cluster.link(a, b) for a, b in pairs]
    return min(links, key=lambda link: link.bandwidth_bytes_s)
