"""A machine: device kinds, nodes, sites and the links between them.

Bandwidths are bytes per second in one direction. What they are counted over depends on where the
link lies: inside a node, what one device can send; between the nodes of a site, what one node can
send; between sites, what the whole link carries.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetjax.ir.cluster_check import problems
from hetjax.ir.display import Shown
from hetjax.ir.errors import ClusterError
from hetjax.ir.suggest import nearest


def _set(self: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind of device.

    Attributes:
      name: "a100-80g".
      platform: "cpu", "cuda", "rocm" or "tpu", JAX's names of back ends.
      memory_bytes: what one device has; vendors' GB are counted as 1e9, so never too much.
      memory_bandwidth_bytes_s: of its main memory.
      peak_flops: (dtype, FLOP/s) pairs, dense matrix products, multiply and add counted as two.
        "tf32" is not a dtype but how f32 products run under JAX's default precision on GPUs that
        have it.
      emulated_dtypes: dtypes it computes by means of another one.
      jaxlib: the requirement of the jaxlib build that runs on it, "" when the default build does.
      device_kinds: parts of `jax.Device.device_kind` by which it is recognised.
      source: where the numbers come from.
      price_per_hour: of one device, in whatever currency all kinds' prices are in; 0 where none is known.
    """

    name: str
    platform: str
    memory_bytes: int
    memory_bandwidth_bytes_s: float
    peak_flops: tuple[tuple[str, float], ...]
    emulated_dtypes: tuple[str, ...] = ()
    jaxlib: str = ""
    device_kinds: tuple[str, ...] = ()
    source: str = ""
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        # Whole numbers would compare equal to floats and yet print and hash otherwise.
        _set(self, memory_bytes=int(self.memory_bytes))
        _set(self, memory_bandwidth_bytes_s=float(self.memory_bandwidth_bytes_s))
        _set(self, price_per_hour=float(self.price_per_hour))
        _set(self, peak_flops=tuple((d, float(v)) for d, v in self.peak_flops))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Returns the floating-point dtypes it computes in natively."""
        return tuple(d for d, _ in self.peak_flops if d != "tf32" and d not in self.emulated_dtypes)

    def supports(self, dtype: str) -> bool:
        """Returns whether it computes in this dtype natively; integers and booleans always."""
        if dtype in self.dtypes:
            return True
        return not (dtype.startswith(("f", "c")) or dtype == "bf16")

    def emulates(self, dtype: str) -> bool:
        """Returns whether it computes in this dtype by means of another."""
        return dtype in self.emulated_dtypes

    def peak(self, dtype: str) -> float:
        """Returns peak FLOP/s in a dtype; f32's for integers and for emulated dtypes without one.

        Raises:
          ClusterError: it neither has nor emulates the dtype.
        """
        table = dict(self.peak_flops)
        if dtype in table:
            return table[dtype]
        if dtype.startswith("c"):
            return self.peak({"c64": "f32", "c128": "f64"}[dtype])
        if self.supports(dtype) or self.emulates(dtype):
            return table.get("f32") or max(table.values())
        raise ClusterError(
            f"device kind {self.name!r} has no {dtype}: it computes in {', '.join(self.dtypes)}"
            + (f" and emulates {', '.join(self.emulated_dtypes)}" if self.emulated_dtypes else "")
            + "; choose another dtype or another kind for this stage"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes to travel.

    Attributes:
      name: "nvlink3", "lyon-oslo".
      bandwidth_bytes_s: one direction; see the module's text for what it is counted over.
      latency_s: one way, before the first byte arrives.
      between: the sites or nodes it joins, every pair of them; () for a link that nodes and sites
        name as their inner one.
      duplex: "full" when both directions run at once at full bandwidth, else "half".
      curve: (message bytes, bytes/s) points, ascending, of the bandwidth that a message of this
        size reaches once the latency is taken off; () where it is constant.
      uplink: links that name the same uplink share one wire; "" for a wire of its own.
      source: where the numbers come from.
    """

    name: str
    bandwidth_bytes_s: float
    latency_s: float
    between: tuple[str, ...] = ()
    duplex: str = "full"
    curve: tuple[tuple[int, float], ...] = ()
    uplink: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        _set(self, bandwidth_bytes_s=float(self.bandwidth_bytes_s), latency_s=float(self.latency_s))
        _set(self, curve=tuple((n, float(b)) for n, b in self.curve))

    def bandwidth(self, nbytes: float) -> float:
        """Returns bytes/s that a message of `nbytes` reaches.

        Linear in the logarithm of the size between the points of the curve.
        """
        if not self.curve:
            return self.bandwidth_bytes_s
        if nbytes <= self.curve[0][0]:
            return self.curve[0][1]
        for (n0, b0), (n1, b1) in itertools.pairwise(self.curve):
            if nbytes <= n1:
                return b0 + (b1 - b0) * math.log(nbytes / n0) / math.log(n1 / n0)
        return self.curve[-1][1]

    def serialise_s(self, nbytes: float) -> float:
        """Returns the seconds for which a message occupies the wire."""
        return nbytes / self.bandwidth(nbytes)

    def transfer_s(self, nbytes: float) -> float:
        """Returns the seconds from the first byte sent to the last byte received."""
        return self.latency_s + self.serialise_s(nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A host with devices of one kind.

    Attributes:
      name: unique in the cluster.
      kind: the device kind's name.
      num_devices: at least one.
      site: the site's name.
      link: the link between its devices.
    """

    name: str
    kind: str
    num_devices: int
    site: str
    link: str


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Nodes that are near each other.

    Attributes:
      name: unique in the cluster.
      link: the link between its nodes; may be "" where there is one node.
    """

    name: str
    link: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One device; `kind`, `node` and `site` are names, `index` its position in the cluster."""

    index: int
    kind: str
    node: str
    site: str


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Devices of one kind in one site, as positions in the cluster.

    Attributes:
      site, kind: names.
      devices: positions, ascending.
      nodes: the same positions, one tuple a node.
    """

    site: str
    kind: str
    devices: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]

    @property
    def num_devices(self) -> int:
        return len(self.devices)


@dataclasses.dataclass(frozen=True)
class Cluster(Shown):
    """Devices that may be unlike and far apart.

    Attributes:
      name: what plans call it.
      kinds: the device kinds its nodes have, by name.
      sites: in the order a pipeline would visit them unless told otherwise.
      nodes: in site order.
      links: all that sites, nodes and pairs of them use, by name.

    Raises:
      ClusterError: names that clash or lead nowhere, numbers out of range, sites without a link
        between them; all of them at once.
    """

    name: str
    kinds: tuple[DeviceKind, ...]
    sites: tuple[Site, ...]
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        # One order whatever the source, so that equal clusters compare and hash equal.
        for field in ("kinds", "links"):
            _set(self, **{field: tuple(sorted(getattr(self, field), key=lambda x: x.name))})
        if found := problems(self.kinds, self.sites, self.nodes, self.links):
            raise ClusterError([f"cluster {self.name!r}: {sentence}" for _, sentence in found])

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.kinds, self.sites, self.nodes, self.links))

    def __hash__(self) -> int:
        # Searches look prices up by cluster; walking hundreds of nodes each time would dominate.
        return self._hash

    # Devices.

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """Returns every device, numbered in node order."""
        flat = ((n.kind, n.name, n.site) for n in self.nodes for _ in range(n.num_devices))
        return tuple(Device(i, *names) for i, names in enumerate(flat))

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def kind(self, name: str) -> DeviceKind:
        """Returns a device kind by name.

        Raises:
          ClusterError: no node has it.
        """
        for kind in self.kinds:
            if kind.name == name:
                return kind
        known = [k.name for k in self.kinds]
        raise ClusterError(f"cluster {self.name!r} has no kind {name!r}{nearest(name, known)}")

    def kind_of(self, device: int) -> DeviceKind:
        """Returns the kind of the device at a position."""
        return self.kind(self.devices[device].kind)

    def nodes_of(self, site: str) -> tuple[Node, ...]:
        """Returns the nodes of a site, in order."""
        return tuple(n for n in self.nodes if n.site == site)

    @functools.cached_property
    def _groups(self) -> tuple[Group, ...]:
        nodes_of: dict[tuple[str, str], dict[str, list[int]]] = {}
        for device in self.devices:
            nodes = nodes_of.setdefault((device.site, device.kind), {})
            nodes.setdefault(device.node, []).append(device.index)
        return tuple(
            Group(*key, tuple(itertools.chain(*nodes.values())), tuple(map(tuple, nodes.values())))
            for key, nodes in nodes_of.items()
        )

    def groups(self) -> tuple[Group, ...]:
        """Returns the largest sets of devices of one kind in one site, in site order."""
        return self._groups

    # Links.

    def link_named(self, name: str) -> Link:
        """Returns a link by name.

        Raises:
          ClusterError: there is none.
        """
        for link in self.links:
            if link.name == name:
                return link
        known = [k.name for k in self.links]
        raise ClusterError(f"cluster {self.name!r} has no link {name!r}{nearest(name, known)}")

    @functools.cached_property
    def _inner(self) -> dict[str, Link]:
        named = {link.name: link for link in self.links}
        places = [*self.sites, *self.nodes]
        return {place.name: named[place.link] for place in places if place.link}

    @functools.cached_property
    def _joined(self) -> dict[frozenset[str], Link]:
        # The link that joins fewest places wins, so that a pair may be singled out of many.
        widest_first = sorted(self.links, key=lambda link: -len(link.between))
        return {
            frozenset(pair): link
            for link in widest_first
            for pair in itertools.combinations(link.between, 2)
        }

    def link(self, a: int, b: int) -> Link:
        """Returns the link that bytes take between two devices.

        Inside a node, the node's; between nodes, the link that names both, else the site's (same
        site) or the one between their sites.

        Args:
          a, b: device positions; of one device, its node's link.
        """
        first, second = self.devices[a], self.devices[b]
        if first.node == second.node:
            return self._inner[first.node]
        direct = self._joined.get(frozenset((first.node, second.node)))
        if direct is not None:
            return direct
        if first.site == second.site:
            return self._inner[first.site]
        return self._joined[frozenset((first.site, second.site))]

    def site_link(self, a: str, b: str) -> Link:
        """Returns the link between two sites, or of one site's nodes where they are the same."""
        return self._inner[a] if a == b else self._joined[frozenset((a, b))]

    def wires(self, a: int, b: int) -> tuple[str, str]:
        """Returns the names of the two resources that bytes from one device to another occupy.

        Transfers that share a name share its bandwidth: a device's port inside its node, a node's
        port in its site, the wire (or uplink) between sites. With a half-duplex link both
        directions share one name.
        """
        first, second = self.devices[a], self.devices[b]
        link = self.link(a, b)
        if first.node == second.node:
            ends = (f"{first.node}.{a}", f"{second.node}.{b}")
        elif first.site == second.site and not link.between:
            ends = (first.node, second.node)
        else:
            wire = link.uplink or link.name
            pair = f"{first.site}>{second.site}" if link.duplex == "full" else ""
            return (f"{wire}:{pair}", f"{wire}:{pair}")
        out, into = (":out", ":in") if link.duplex == "full" else ("", "")
        return (f"{link.name}:{ends[0]}{out}", f"{link.name}:{ends[1]}{into}")

    def transfer_s(self, a: int, b: int, nbytes: float) -> float:
        """Returns the seconds for `nbytes` from device `a` to device `b`, alone on the wire."""
        return 0.0 if a == b else self.link(a, b).transfer_s(nbytes)

    # Text.

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """Returns the cluster a TOML file describes; docs/cluster.md has the format.

        Raises:
          ClusterError: the file cannot be read, or describes no cluster; every problem with its
            line, key and the nearest valid name.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"cannot read the cluster file {path}: {error}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, filename: str = "<toml>") -> Cluster:
        """Returns the cluster that TOML text describes; see `from_toml`."""
        from hetjax.ir.cluster_toml import parse_cluster

        return parse_cluster(text, filename)

    def to_toml(self) -> str:
        """Returns TOML text that parses back to an equal cluster."""
        from hetjax.ir.cluster_text import print_cluster

        return print_cluster(self)

    @classmethod
    def local(cls, devices: Sequence[Any] | None = None) -> Cluster:
        """Returns a description of JAX devices: those given, or all that JAX sees."""
        from hetjax.ir.accelerator import describe_devices

        return describe_devices(devices)

    @functools.cached_property
    def hash(self) -> str:
        """Returns the SHA-256 of everything that a plan rests on; `source` notes and prices do not count."""
        data = dataclasses.asdict(self)
        for item in (*data["kinds"], *data["links"]):
            del item["source"]
            item.pop("price_per_hour", None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        from hetjax.ir.cluster_text import summarise

        return summarise(self)
