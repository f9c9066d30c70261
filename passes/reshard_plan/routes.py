"""The ways a value can take from one mesh to another, as arrays of pieces.

Every way is a list of pieces with a hop: a piece of hop 0 leaves a device that held the value from the
start, a piece of a later hop leaves a device that earlier hops brought its block to.

  direct           every target device gets each part of its block from a device that holds it
  hierarchical     the replicas of a target block get one share each, and pass it on: once to every
                   other node, there to its neighbours
  broadcast-chain  one node gets the block, and passes it on from node to node
  gather-scatter   one source device gathers, one target device receives and scatters
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hetjax.passes.reshard_plan.layout import Layout
from hetjax.passes.reshard_plan.network import Network, Priced

# Above this, choosing senders one by one costs more than it gains over taking turns.
MAX_GREEDY = 256

# Senders are even enough when the busiest wire is this close to what the busiest receiver needs.
EVEN = 1.02


@dataclasses.dataclass(frozen=True)
class Route:
    """Pieces, as arrays of one length; see the module's text.

    Attributes:
      strategy: the way's name.
      source, target: devices.
      start, stop: [pieces, dimensions] bounds in the whole value.
      hop: after how many other transfers a piece can leave.
    """

    strategy: str
    source: np.ndarray
    target: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    hop: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    def nbytes(self, itemsize: int) -> np.ndarray:
        """Returns [pieces] bytes."""
        return np.prod(self.stop - self.start, axis=1) * itemsize


def join(strategy: str, routes: list[Route]) -> Route:
    """Returns the pieces of all routes in order of hops."""
    together = [np.concatenate([getattr(r, f) for r in routes]) for f in ("source", "target", "start", "stop", "hop")]
    order = np.argsort(together[-1], kind="stable")
    return Route(strategy, *(x[order] for x in together))


def _piece(source: np.ndarray, target: np.ndarray, start: np.ndarray, stop: np.ndarray, hop: np.ndarray | int) -> Route:
    """Returns a route of these pieces, without the empty ones."""
    hop = np.broadcast_to(np.asarray(hop), source.shape)
    some = np.all(stop > start, axis=1)
    if some.all():
        return Route("", source, target, start, stop, hop)
    return Route("", source[some], target[some], start[some], stop[some], hop[some])


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the devices of each block lie, [blocks, replicas] each.

    Attributes:
      rank: a device's number among those of its block in its node.
      count: how many those are.
      first: the position of the node's first device once the row is sorted by node.
      by_node: the columns, sorted by node.
      by_rank: the columns, sorted by rank: consecutive ones lie in different nodes, as far as they can.
    """

    rank: np.ndarray
    count: np.ndarray
    first: np.ndarray
    by_node: np.ndarray
    by_rank: np.ndarray


@functools.lru_cache(maxsize=256)
def places(net: Network, where: Layout) -> Places:
    """Returns where the devices of each block of a layout lie."""
    node = net.node_of[where.devices]
    rows = np.arange(len(node))[:, None]
    by_node = np.argsort(node, axis=1, kind="stable")
    ordered = node[rows, by_node]
    n = node.shape[1]
    at = np.arange(n)
    edge = ordered[:, 1:] != ordered[:, :-1]
    one = np.ones((len(node), 1), bool)
    first = np.maximum.accumulate(np.where(np.concatenate([one, edge], axis=1), at, 0), axis=1)
    last = np.minimum.accumulate(np.where(np.concatenate([edge, one], axis=1), at, n)[:, ::-1], axis=1)[:, ::-1]
    rank, count, place = np.empty_like(first), np.empty_like(first), np.empty_like(first)
    rank[rows, by_node], count[rows, by_node], place[rows, by_node] = at - first, last - first + 1, first
    return Places(rank, count, place, by_node, np.argsort(rank, axis=1, kind="stable"))


def _cells(held: Layout, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns where the blocks held and the blocks wanted meet: both numbers, and the bounds."""
    low = np.maximum(held.start[:, None, :], start[None])
    high = np.minimum(held.stop[:, None, :], stop[None])
    block, wanted = np.nonzero(np.all(high > low, axis=2))
    return block, wanted, low[block, wanted], high[block, wanted]


def choose_senders(net: Network, held: Layout, block: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Returns who sends each cell: the nearest holders, taking turns, so that network interfaces are even.

    Args:
      net: the wires.
      held: who holds what.
      block: [cells] the block each cell is part of.
      target: [cells] where it goes.
      nbytes: [cells] its size.
    """
    count = held.num_replicas
    if count == 1 or not len(block):
        return held.devices[block, 0]
    holders = np.take_along_axis(held.devices, places(net, held).by_rank, axis=1)[block]
    to = target[:, None]
    far = np.where(holders == to, 0, np.where(net.node_of[holders] == net.node_of[to], 1, np.where(net.site_of[holders] == net.site_of[to], 2, 3)))
    near = far == far.min(axis=1, keepdims=True)
    order = np.argsort(block, kind="stable")
    ordered = block[order]
    fresh = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    turn = np.empty(len(block), dtype=np.int64)
    turn[order] = np.arange(len(block)) - np.maximum.accumulate(np.where(fresh, np.arange(len(block)), 0))
    chosen = (turn + block) % near.sum(axis=1)
    column = np.argmax(near & (np.cumsum(near, axis=1) == chosen[:, None] + 1), axis=1)
    taken = holders[np.arange(len(block)), column]
    if len(block) * count > MAX_GREEDY:
        return taken
    busy = net.price(taken, target, nbytes)
    load = wire_seconds(busy)
    if load.max(initial=0.0) <= EVEN * load[busy.wires[:, 1]].max(initial=0.0):
        return taken
    better = _greedy(net, holders, near, target, nbytes)
    return better if _slowest(net, better, target, nbytes) < _slowest(net, taken, target, nbytes) * (1 - 1e-9) else taken


def _slowest(net: Network, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> float:
    return float(wire_seconds(net.price(source, target, nbytes)).max(initial=0.0))


def wire_seconds(priced: Priced) -> np.ndarray:
    """Returns the seconds each wire is occupied, by number."""
    out, into = priced.wires[:, 0], priced.wires[:, 1]
    size = int(priced.wires.max(initial=0)) + 1
    busy = np.bincount(out, priced.seconds, size)
    return busy + np.bincount(into, np.where(out == into, 0.0, priced.seconds), size)


def _greedy(net: Network, holders: np.ndarray, near: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Returns senders chosen largest cell first, each the one whose wire is then least occupied."""
    n, count = holders.shape
    priced = net.price(holders.ravel(), np.repeat(target, count), np.repeat(nbytes, count))
    wires, seconds = priced.wires.reshape(n, count, 2).tolist(), priced.seconds.reshape(n, count).tolist()
    options = [[c for c in range(count) if row[c]] for row in near.tolist()]
    size = nbytes.tolist()
    used: dict[int, float] = {}
    sent: dict[int, float] = {}
    column = [0] * n
    table = holders.tolist()
    for k in sorted(range(n), key=lambda k: (len(options[k]), -size[k])):
        best = min(options[k], key=lambda c: (
            used.get(wires[k][c][0], 0.0) + seconds[k][c], sent.get(table[k][c], 0.0)))
        column[k] = best
        used[wires[k][best][0]] = used.get(wires[k][best][0], 0.0) + seconds[k][best]
        sent[table[k][best]] = sent.get(table[k][best], 0.0) + seconds[k][best]
    return holders[np.arange(n), column]


def naive(held: Layout, wanted: Layout) -> Route:
    """Returns the per-replica send: every target device gets its whole block from the first holders."""
    block, to, start, stop = _cells(held, wanted.start, wanted.stop)
    t = wanted.num_replicas
    again = lambda x: np.repeat(x, t, axis=0)  # noqa: E731
    return dataclasses.replace(
        _piece(again(held.devices[block, 0]), wanted.devices[to].ravel(), again(start), again(stop), 0), strategy="naive")


def direct(net: Network, held: Layout, wanted: Layout, itemsize: int) -> Route:
    """Returns the way without relays, with senders balanced."""
    block, to, start, stop = _cells(held, wanted.start, wanted.stop)
    t = wanted.num_replicas
    again = lambda x: np.repeat(x, t, axis=0)  # noqa: E731
    block, start, stop, target = again(block), again(start), again(stop), wanted.devices[to].ravel()
    nbytes = np.prod(stop - start, axis=1) * itemsize
    source = choose_senders(net, held, block, target, nbytes)
    return dataclasses.replace(_piece(source, target, start, stop, 0), strategy="direct")


def split(start: np.ndarray, stop: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns [blocks, parts, dimensions] bounds of blocks cut along one dimension.

    The first dimension that divides is cut, so that the parts are a sharding of the target mesh; else
    the longest, into parts that differ by one at most.
    """
    extent = (stop - start).max(axis=0)
    d = next((d for d, n in enumerate(extent) if n and n % parts == 0), int(np.argmax(extent)))
    edges = start[:, d, None] + (stop - start)[:, d, None] * np.arange(parts + 1) // parts
    low = np.repeat(start[:, None], parts, axis=1)
    high = np.repeat(stop[:, None], parts, axis=1)
    low[:, :, d], high[:, :, d] = edges[:, :-1], edges[:, 1:]
    return low, high


def relayed(
    net: Network, held: Layout, wanted: Layout, itemsize: int, parts: int, chain: bool = False,
) -> Route:
    """Returns the way on which each target block comes in once, in parts, and is passed on.

    Args:
      net, held, wanted, itemsize: see `direct`.
      parts: into how many parts each target block is cut.
      chain: whether all parts come in at one node and go from node to node, instead of coming in
        at all nodes and going from each to all others.
    """
    if wanted.start.shape[1] == 0:
        parts = 1
    devices = wanted.devices
    blocks, t = devices.shape
    lie = places(net, wanted)
    low, high = split(wanted.start, wanted.stop, parts) if parts > 1 else (wanted.start[:, None], wanted.stop[:, None])
    turn = np.arange(parts)
    rows = np.arange(blocks)[:, None]
    if chain:  # at the devices of one node, another for each block
        firsts = [np.unique(p) for p in lie.first]
        entry = np.array([f[b % len(f)] for b, f in enumerate(firsts)])
        size = lie.count[rows, lie.by_node[rows, entry[:, None]]]
        owner = lie.by_node[rows, entry[:, None] + turn[None] % size]
    elif parts >= t:
        owner = np.broadcast_to(turn[None] * t // parts, (blocks, parts))
    else:
        owner = lie.by_rank[:, turn]
    # [blocks, parts]: entry pieces.
    receiver = devices[rows, owner]
    block, to, start, stop = _cells(held, low.reshape(blocks * parts, -1), high.reshape(blocks * parts, -1))
    target = receiver.ravel()[to]
    source = choose_senders(net, held, block, target, np.prod(stop - start, axis=1) * itemsize)
    routes = [_piece(source, target, start, stop, 0)]
    if t > 1:
        routes.append(_relays(net, devices, low, high, owner, lie, chain))
    return join("broadcast-chain" if chain else "hierarchical", routes)


def _relays(net: Network, devices: np.ndarray, low: np.ndarray, high: np.ndarray, owner: np.ndarray,
            lie: Places, chain: bool) -> Route:
    """Returns how parts go on from their owners to the other replicas of their block."""
    blocks, t = devices.shape
    parts = owner.shape[1]
    rows = np.arange(blocks)[:, None]
    mine = np.arange(t)[None, None, :]
    own = owner[:, :, None]
    # The device that receives part j from outside its node: the owner in its own, else the one of rank j there.
    lane = np.arange(parts)[None, :, None]
    place = lie.first[:, None, :]
    leader = lie.by_node[rows[:, :, None], place + lane % lie.count[:, None, :]]
    home = lie.first[rows, owner][:, :, None]
    at_home = place == home
    leader = np.where(at_home, own, leader)
    leads = leader == mine
    previous = own
    away = np.where(at_home, 0, 1)
    if chain:
        # Nodes in order of place, starting from the owner's: the one before passes on.
        position = (place - home) % t
        order = np.argsort(np.where(leads, position, t + 1), axis=2, kind="stable")
        along = np.take_along_axis(leader, order, axis=2)
        num = leads.sum(axis=2, keepdims=True)
        index = np.argsort(order, axis=2, kind="stable")
        index = np.where(leads, index, 0)
        # A device's node stands in the chain where its leader does.
        away = np.take_along_axis(index, leader, axis=2) % np.maximum(num, 1)
        previous = np.take_along_axis(along, np.maximum(away - 1, 0), axis=2)
    sender = np.where(leads, previous, leader)
    hop = np.where(leads, away, away + 1)
    send = (mine != own) & np.ones_like(leads)
    b, j, i = np.nonzero(send)
    source = devices[b, np.broadcast_to(sender, send.shape)[b, j, i]]
    return _piece(source, devices[b, i], low[b, j], high[b, j], np.broadcast_to(hop, send.shape)[b, j, i])


def gather_scatter(net: Network, held: Layout, wanted: Layout, itemsize: int) -> Route:
    """Returns the way through one device on either side."""
    hub, far = int(held.devices[0, 0]), int(wanted.devices[0, 0])
    if not held.start.shape[1]:
        start, stop = np.zeros((1, 0), np.int64), np.zeros((1, 0), np.int64)
    else:
        start, stop = held.start.min(axis=0)[None], held.stop.max(axis=0)[None]
    routes = []
    if held.num_blocks > 1:
        senders = held.devices[:, 0]
        away = senders != hub
        routes.append(_piece(senders[away], np.full(away.sum(), hub), held.start[away], held.stop[away], 0))
    routes.append(_piece(np.array([hub]), np.array([far]), start, stop, len(routes)))
    flat = wanted.devices.ravel()
    rest = flat != far
    again = lambda x: np.repeat(x, wanted.num_replicas, axis=0)[rest]  # noqa: E731
    routes.append(_piece(np.full(rest.sum(), far), flat[rest], again(wanted.start), again(wanted.stop), len(routes)))
    return join("gather-scatter", routes)
