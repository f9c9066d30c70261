"""A cluster's wires as arrays: what a transfer between two devices occupies, and for how long."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from hetjax.ir.cluster import Cluster, Link


@dataclasses.dataclass(frozen=True)
class Priced:
    """What each of many transfers occupies.

    Attributes:
      wires: [transfers, 2] numbers of the wires; both alike where it is one wire.
      seconds: [transfers] for which it occupies them, 0 from a device to itself.
      latency_s: [transfers] until the last byte arrives after that.
    """

    wires: np.ndarray
    seconds: np.ndarray
    latency_s: np.ndarray


class Network:
    """The wires of one cluster, numbered as they are first used."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        nodes = {n.name: i for i, n in enumerate(cluster.nodes)}
        sites = {s.name: i for i, s in enumerate(cluster.sites)}
        self.node_of = np.array([nodes[d.node] for d in cluster.devices])
        self.site_of = np.array([sites[d.site] for d in cluster.devices])
        self.num_nodes = len(cluster.nodes)
        self.links: list[Link] = list(cluster.links)
        self._link_number = {link.name: i for i, link in enumerate(self.links)}
        self._bandwidth = np.array([link.bandwidth_bytes_s for link in self.links])
        self._latency = np.array([link.latency_s for link in self.links])
        inside = {node.link for node in cluster.nodes}
        between = [k for k in self.links if k.between or k.name not in inside or any(k.name == s.link for s in cluster.sites)]
        self.fastest_between_nodes = max((max([k.bandwidth_bytes_s, *(b for _, b in k.curve)]) for k in between), default=math.inf)
        self._curved = [i for i, link in enumerate(self.links) if link.curve]
        n = self.num_nodes
        self._known = np.zeros((n, n), dtype=bool)
        self._pair_link = np.zeros((n, n), dtype=np.int64)
        self._pair_wires = np.zeros((n, n, 2), dtype=np.int64)
        self._port = np.array(
            [[self._number(w) for w in cluster.wires(d, d)] for d in range(cluster.num_devices)], dtype=np.int64)

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def _learn(self, source: np.ndarray, target: np.ndarray) -> None:
        """Asks the cluster about pairs of nodes not seen before."""
        a, b = self.node_of[source], self.node_of[target]
        known = self._known[a, b]
        if known.all():
            return
        for k in np.flatnonzero(~known):
            i, j = int(a[k]), int(b[k])
            if self._known[i, j]:
                continue
            link = self.cluster.link(int(source[k]), int(target[k]))
            self._pair_link[i, j] = self._link_number[link.name]
            if i != j:
                wires = self.cluster.wires(int(source[k]), int(target[k]))
                self._pair_wires[i, j] = [self._number(w) for w in wires]
            self._known[i, j] = True

    def price(self, source: np.ndarray, target: np.ndarray, nbytes: np.ndarray) -> Priced:
        """Returns what transfers of `nbytes` from device to device occupy; arrays of one length."""
        self._learn(source, target)
        a, b = self.node_of[source], self.node_of[target]
        link = self._pair_link[a, b]
        inside = a == b
        wires = self._pair_wires[a, b]
        wires[inside, 0], wires[inside, 1] = self._port[source[inside], 0], self._port[target[inside], 1]
        bandwidth = self._bandwidth[link]
        for i in self._curved:
            mine = link == i
            sizes, speeds = zip(*self.links[i].curve)
            bandwidth[mine] = np.interp(np.log(np.maximum(nbytes[mine], 1)), np.log(sizes), speeds)
        here = source == target
        seconds = np.where(here, 0.0, nbytes / bandwidth)
        return Priced(wires, seconds, np.where(here, 0.0, self._latency[link]))


@functools.lru_cache(maxsize=64)
def network(cluster: Cluster) -> Network:
    """Returns the wires of a cluster; one object per cluster, which learns as it is asked."""
    return Network(cluster)
