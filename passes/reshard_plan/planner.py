"""Chooses how a value goes from one mesh to another: every way is priced on the cluster's wires."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hetjax.ir.blocks import chunk_bytes, common, covers
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.program import Block, Piece, Spec, StageMesh
from hetjax.passes.reshard_plan.layout import Layout, layout
from hetjax.passes.reshard_plan.network import Network, Priced, network
from hetjax.passes.reshard_plan.routes import (
    Route,
    direct,
    gather_scatter,
    naive,
    relayed,
    wire_seconds,
)

# Seconds a message occupies its sender and receiver beside its bytes; assumed, the order of one system call with its wake-up.
MESSAGE_S = 5e-6

# Nodes that all send to all wait for each other's interfaces: what the clock shows at worst for up to four nodes.
CONTENTION = 1.2

# A way must be this much quicker than one with fewer pieces.
MARGIN = 0.02

# This near a time that no way can beat, ways with more pieces are not looked at.
NEAR = 0.04


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """How one value travels.

    Attributes:
      route: the pieces, as arrays.
      seconds: estimated, from the first byte to the last.
      occupied_s: for how long the busiest wire is occupied.
      compared: (way, seconds) of every way that was priced.
    """

    route: Route
    seconds: float
    occupied_s: float
    compared: tuple[tuple[str, float], ...]

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Returns the pieces in an order in which every relay follows what it relays."""
        r = self.route
        return tuple(map(
            Piece, r.source.tolist(), r.target.tolist(), map(tuple, r.start.tolist()), map(tuple, r.stop.tolist())))


def estimate(cluster: Cluster, route: Route, itemsize: int) -> tuple[float, float]:
    """Returns the seconds of a route, and for how long its busiest wire is occupied.

    The busiest wire decides; every relay adds a latency and the time of one chunk before it is busy.
    """
    if not len(route):
        return 0.0, 0.0
    net = network(cluster)
    nbytes = route.nbytes(itemsize)
    priced = net.price(route.source, route.target, nbytes)
    fill_s = _fill_s(priced, route, itemsize)
    away = route.source != route.target
    priced = dataclasses.replace(priced, seconds=np.where(away, priced.seconds + MESSAGE_S, 0.0))
    occupied = float(wire_seconds(priced).max(initial=0.0))
    if route.strategy == "hierarchical" and _exchanges(net, route):
        occupied *= CONTENTION
    return occupied + fill_s, occupied


def price_pieces(
    cluster: Cluster, pieces: Sequence[Piece], own: Mapping[int, Block], itemsize: int
) -> tuple[dict[str, float], float]:
    """Returns for how long pieces occupy each wire, by name, and the seconds until the last byte beside that.

    Args:
      cluster: whose wires.
      pieces: in an order in which relays follow what they relay.
      own: what each device of the source mesh has from the start.
      itemsize: bytes of an element.
    """
    if not pieces:
        return {}, 0.0
    net = network(cluster)
    arrived: dict[int, dict[Block, int]] = {}
    hops = []
    for p in pieces:
        block, got = (p.start, p.stop), arrived.get(p.source, {})
        hop = 0
        if not (p.source in own and covers(own[p.source], block)):
            hop = 1 + (got[block] if block in got else max((h for b, h in got.items() if common(b, block)), default=-1))
        into = arrived.setdefault(p.target, {})
        into[block] = max(into.get(block, 0), hop)
        hops.append(hop)
    ends = [np.array([getattr(p, f) for p in pieces]) for f in ("source", "target")]
    start, stop = (np.array([getattr(p, f) for p in pieces], np.int64).reshape(len(pieces), -1) for f in ("start", "stop"))
    route = Route("", ends[0], ends[1], start, stop, np.array(hops))
    priced = net.price(route.source, route.target, route.nbytes(itemsize))
    occupied = wire_seconds(priced)
    return (
        {net.names[w]: float(s) for w, s in enumerate(occupied) if s},
        _fill_s(priced, route, itemsize))


def _fill_s(priced: Priced, route: Route, itemsize: int) -> float:
    """Returns what relays add to the time of the busiest wire: a latency and a chunk each."""
    nbytes = route.nbytes(itemsize)
    hops = int(route.hop.max())
    limit = chunk_bytes(float(np.bincount(route.source, nbytes).max()))
    chunk = priced.seconds / np.maximum(1, np.ceil(nbytes / limit))
    return sum(
        float(priced.latency_s[mine].max(initial=0.0)) + (float(chunk[mine].max(initial=0.0)) if h < hops else 0.0)
        for h in range(hops + 1) for mine in (route.hop == h,))


def _exchanges(net: Network, route: Route) -> bool:
    """Returns whether relays go from node to node."""
    on = route.hop > 0
    return bool(np.any(net.node_of[route.source[on]] != net.node_of[route.target[on]]))


def candidates(cluster: Cluster, held: Layout, wanted: Layout, itemsize: int) -> Iterator[Route]:
    """Yields every way worth pricing, those with few pieces first."""
    net = network(cluster)
    yield direct(net, held, wanted, itemsize)
    t = wanted.num_replicas
    if t > 1:
        yield from _relayed_ways(net, held, wanted, itemsize)
    yield gather_scatter(net, held, wanted, itemsize)


def _relayed_ways(net: Network, held: Layout, wanted: Layout, itemsize: int) -> Iterator[Route]:
    t = wanted.num_replicas
    nodes = max(len(set(row)) for row in net.node_of[wanted.devices].tolist())
    holders = max(len(set(row)) for row in net.node_of[held.devices].tolist())
    if nodes > 1:
        yield relayed(net, held, wanted, itemsize, max(1, t // nodes), chain=True)
    if nodes < t:
        yield relayed(net, held, wanted, itemsize, nodes)
    yield relayed(net, held, wanted, itemsize, t)
    if holders > t:
        yield relayed(net, held, wanted, itemsize, t * -(-holders // t))


def floor_s(cluster: Cluster, held: Layout, wanted: Layout, itemsize: int) -> float:
    """Returns a time no way can beat, at a glance: what a target node needs over the fastest wire into any node."""
    net = network(cluster)
    into = np.zeros((wanted.num_blocks, net.num_nodes))
    into[np.arange(wanted.num_blocks)[:, None], net.node_of[wanted.devices]] = 1.0
    into[:, net.node_of[held.devices]] = 0.0  # what lies in the node already needs no wire
    nbytes = np.prod(wanted.stop - wanted.start, axis=1) * float(itemsize)
    return float((nbytes @ into).max(initial=0.0)) / net.fastest_between_nodes


def plan_layouts(cluster: Cluster, held: Layout, wanted: Layout, itemsize: int) -> ReshardPlan:
    """Returns the quickest way from one layout to another; of about equal ones, that with fewest pieces."""
    priced: list[tuple[float, float, Route]] = []
    compared: list[tuple[str, float]] = []
    enough = floor_s(cluster, held, wanted, itemsize) * (1 + NEAR)
    once = math.inf  # bytes between sites: a wire others wait for is never lent to a second copy
    for route in candidates(cluster, held, wanted, itemsize):
        seconds, occupied = estimate(cluster, route, itemsize)
        compared.append((route.strategy, seconds))
        far = between_sites(cluster, route, itemsize)
        if far > once:
            continue
        if far < once:
            once, priced = far, []
        priced.append((seconds, occupied, route))
        if seconds <= enough and not far:
            break  # the ways that follow have more pieces, and can gain next to nothing
    limit = min(s for s, _, _ in priced) * (1 + MARGIN)
    seconds, occupied, route = min((p for p in priced if p[0] <= limit), key=lambda p: (len(p[2]), p[0]))
    return ReshardPlan(route, seconds, occupied, tuple(compared))


def between_sites(cluster: Cluster, route: Route, itemsize: int) -> float:
    """Returns the bytes that pieces carry from one site to another."""
    net = network(cluster)
    far = net.site_of[route.source] != net.site_of[route.target]
    return float(route.nbytes(itemsize)[far].sum()) if far.any() else 0.0


@functools.lru_cache(maxsize=4096)
def plan_reshard(
    cluster: Cluster, source: StageMesh, source_spec: Spec, target: StageMesh, target_spec: Spec,
    shape: tuple[int, ...], itemsize: int,
) -> ReshardPlan:
    """Returns how a value goes from one mesh to another.

    Args:
      cluster: where both meshes' devices are.
      source, source_spec: the mesh that has it, and how it is split there.
      target, target_spec: the mesh that needs it, and how it shall be split; dimensions that do not
        divide are split into blocks of the rounded-up size.
      shape, itemsize: of the value; bytes of an element.

    Raises:
      PlanError: a spec does not fit its mesh, or a mesh names a device that the cluster has not.
    """
    for mesh in (source, target):
        lost = [d for d in mesh.devices if not 0 <= d < cluster.num_devices]
        if lost:
            raise PlanError(
                f"mesh {mesh.name} names device(s) {', '.join(map(str, lost))}; cluster {cluster.name!r} has "
                f"{cluster.num_devices}, numbered from 0")
    return plan_layouts(
        cluster, layout(source, source_spec, shape), layout(target, target_spec, shape), itemsize)


def plan_naive(
    cluster: Cluster, source: StageMesh, source_spec: Spec, target: StageMesh, target_spec: Spec,
    shape: tuple[int, ...], itemsize: int,
) -> ReshardPlan:
    """Returns the per-replica send as a plan, to compare with: what whole-array copies do."""
    route = naive(layout(source, source_spec, shape), layout(target, target_spec, shape))
    seconds, occupied = estimate(cluster, route, itemsize)
    return ReshardPlan(route, seconds, occupied, (("naive", seconds),))


def cheapest_spec(
    cluster: Cluster, source: StageMesh, source_spec: Spec, target: StageMesh,
    shape: tuple[int, ...], itemsize: int, keep: Spec | None = None, among: Sequence[Spec] | None = None,
) -> tuple[Spec, ReshardPlan]:
    """Returns the receiving spec with the cheapest reshard, where the receiver does not care, and its plan.

    Every way to split dimensions over the target's axes is priced, where the axes divide them.

    Args:
      keep: the spec to stay with unless another is quicker by more than `MARGIN`; None for replicated.
      among: the specs to choose from; None for all.
    """
    stay: Spec = keep if keep is not None else ((),) * len(shape)
    plan = lambda spec: plan_reshard(cluster, source, source_spec, target, spec, shape, itemsize)  # noqa: E731
    best, found = stay, plan(stay)
    for spec in possible_specs(target, shape) if among is None else among:
        if spec == stay:
            continue
        other = plan(spec)
        if other.seconds < found.seconds * (1 - MARGIN):
            best, found = spec, other
    return best, found


def possible_specs(mesh: StageMesh, shape: tuple[int, ...]) -> list[Spec]:
    """Returns the specs in which each axis of more than one device splits at most one dimension, and divides it."""
    axes = [(a, n) for a, n in mesh.axes if n > 1]
    out: list[Spec] = []
    for where in itertools.product(range(-1, len(shape)), repeat=len(axes)):
        spec = tuple(tuple(a for (a, _), d in zip(axes, where) if d == k) for k in range(len(shape)))
        parts = mesh.parts(spec)
        if all(n and n % p == 0 for n, p in zip(shape, parts) if p > 1):
            out.append(spec)
    return out
