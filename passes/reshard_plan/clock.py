"""When each part of a resharding runs: wires carry one chunk at a time.

A chunk occupies both its wires for its bytes over their bandwidth and arrives a latency later; a relay
sends a chunk on once every chunk it is made of has arrived. Of the chunks that could start, the one
whose wires have most left to carry goes first: that keeps the wire that decides busy.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from hetjax.ir.blocks import chunk_bytes, chunk_edges
from hetjax.ir.cluster import Cluster
from hetjax.passes.reshard_plan.network import Priced, network
from hetjax.passes.reshard_plan.routes import Route


@dataclasses.dataclass(frozen=True)
class Clock:
    """What a route takes.

    Attributes:
      seconds: until the last chunk has arrived.
      wire_bytes: what each wire carried, by name.
      wire_s: for how long.
    """

    seconds: float
    wire_bytes: dict[str, float]
    wire_s: dict[str, float]


def simulate_route(cluster: Cluster, route: Route, itemsize: int, limit: int | None = None) -> Clock:
    """Returns when a route is through.

    Args:
      cluster: whose wires.
      route: the pieces.
      itemsize: bytes of an element.
      limit: bytes of a chunk; None takes `chunk_bytes` of the largest sum that one device sends.
    """
    net = network(cluster)
    if not len(route):
        return Clock(0.0, {}, {})
    nbytes = route.nbytes(itemsize).astype(float)
    if limit is None:
        limit = chunk_bytes(float(np.bincount(route.source, nbytes).max()))
    owner: list[int] = []
    starts: list[tuple[int, ...]] = []
    stops: list[tuple[int, ...]] = []
    turn: list[int] = []
    for k, (a, b) in enumerate(zip(route.start.tolist(), route.stop.tolist())):
        for c, (low, high) in enumerate(chunk_edges(tuple(a), tuple(b), itemsize, limit)):
            owner.append(k)
            starts.append(low)
            stops.append(high)
            turn.append(c)
    piece = np.array(owner)
    low = np.array(starts, dtype=np.int64).reshape(len(piece), -1)
    high = np.array(stops, dtype=np.int64).reshape(len(piece), -1)
    size = np.prod(high - low, axis=1) * float(itemsize)
    source, target, hop = route.source[piece], route.target[piece], route.hop[piece]
    priced = net.price(source, target, size)
    missing, readers = _needs(source, target, hop, low, high)
    return _run(net.names, priced, size, missing, readers, list(zip(hop.tolist(), turn, owner)))


def _needs(source: np.ndarray, target: np.ndarray, hop: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """Returns for each chunk how many chunks it waits for, and who waits for it."""
    n = len(source)
    missing = [0] * n
    readers: list[list[int]] = [[] for _ in range(n)]
    for d in np.unique(source[hop > 0]).tolist():
        leaving = np.flatnonzero((source == d) & (hop > 0))
        arriving = np.flatnonzero(target == d)
        meet = np.all(np.maximum(low[leaving][:, None], low[arriving][None]) < np.minimum(high[leaving][:, None], high[arriving][None]), axis=2)
        meet &= hop[arriving][None] < hop[leaving][:, None]
        for i, j in zip(*np.nonzero(meet)):
            missing[leaving[i]] += 1
            readers[arriving[j]].append(int(leaving[i]))
    return missing, readers


def _run(names: list[str], priced: Priced, size: np.ndarray, missing: list[int], readers: list[list[int]], order: list[tuple[int, int, int]]) -> Clock:
    wires, seconds, latency = priced.wires.tolist(), priced.seconds.tolist(), priced.latency_s.tolist()
    left = [0.0] * len(names)
    carried = [0.0] * len(names)
    for (a, b), s, z in zip(wires, seconds, size.tolist()):
        if s:
            for w in {a, b}:
                left[w] += s
                carried[w] += z
    busy_s = list(left)
    waiting: dict[tuple[int, int], list[tuple[tuple[int, int, int], int]]] = {}
    events: list[tuple[float, int, int]] = []  # (time, 0 arrives / 1 wires free, chunk)
    busy = [False] * len(names)
    now = end = 0.0

    def ready(k: int) -> None:
        if seconds[k] == 0.0:
            heapq.heappush(events, (now, 0, k))
        else:
            heapq.heappush(waiting.setdefault(tuple(wires[k]), []), (order[k], k))

    for k, m in enumerate(missing):
        if not m:
            ready(k)
    while True:
        for pair in sorted(waiting, key=lambda p: (-max(left[p[0]], left[p[1]]), -left[p[0]] - left[p[1]], p)):
            queue = waiting[pair]
            if busy[pair[0]] or busy[pair[1]]:
                continue
            _, k = heapq.heappop(queue)
            if not queue:
                del waiting[pair]
            busy[pair[0]] = busy[pair[1]] = True
            heapq.heappush(events, (now + seconds[k], 1, k))
            heapq.heappush(events, (now + seconds[k] + latency[k], 0, k))
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] <= now:
            _, kind, k = heapq.heappop(events)
            if kind:
                for w in set(wires[k]):
                    busy[w] = False
                    left[w] -= seconds[k]
                continue
            end = max(end, now)
            for r in readers[k]:
                missing[r] -= 1
                if not missing[r]:
                    ready(r)
    if any(missing):
        raise ValueError("a piece is sent on by a device that never gets it")
    used = [w for w, s in enumerate(busy_s) if s]
    return Clock(end, {names[w]: carried[w] for w in used}, {names[w]: busy_s[w] for w in used})
