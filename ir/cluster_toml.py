"""Clusters as TOML: read with every problem named by line and key, written so that it reads back.

docs/cluster.md describes the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError as TomlError

from hetjax.ir import cluster_check, presets
from hetjax.ir.cluster import Cluster, DeviceKind, Link, Node, Site
from hetjax.ir.errors import ClusterError, ParseError
from hetjax.ir.suggest import nearest
from hetjax.ir.toml_lines import Path, key_lines, line_of

# Field of the dataclass -> the keys that may give it, each with its factor; the first is preferred when writing.
_MEMORY = {"memory_gb": 1e9, "memory_gib": 2.0**30, "memory_bytes": 1.0}
_MEMORY_BANDWIDTH = {"memory_bandwidth_gb_s": 1e9, "memory_bandwidth_bytes_s": 1.0}
_PEAK = {"peak_tflops": 1e12, "peak_flops": 1.0}
_BANDWIDTH = {"bandwidth_gb_s": 1e9, "bandwidth_gbit_s": 1e9 / 8, "bandwidth_bytes_s": 1.0}
_LATENCY = {"latency_us": 1e-6, "latency_ms": 1e-3, "latency_s": 1.0}
_CURVE = {"curve_gb_s": 1e9, "curve_bytes_s": 1.0}

_KIND_KEYS = (
    "like", "platform", *_MEMORY, *_MEMORY_BANDWIDTH, *_PEAK, "emulated_dtypes", "jaxlib", "device_kinds", "source",
)
_LINK_KEYS = ("like", "between", *_BANDWIDTH, *_LATENCY, *_CURVE, "duplex", "uplink", "source")
_SITE_KEYS = ("name", "link", "nodes")
_NODE_KEYS = ("name", "kind", "devices", "link", "count")
_TOP_KEYS = ("name", "kinds", "links", "sites")


def parse_cluster(text: str, filename: str) -> Cluster:
    """Returns the cluster that TOML text describes.

    Raises:
      ParseError: the text is not TOML.
      ClusterError: it describes no cluster; every problem as "file:line: key: what is wrong".
    """
    try:
        data = tomlkit.parse(text).unwrap()
    except TomlError as error:
        raise ParseError(
            str(error).split(" at line ")[0], source=text, line=getattr(error, "line", 0),
            column=getattr(error, "col", 0) + 1, filename=filename,
        ) from None
    return _Reader(text, filename).cluster(data)


class _Reader:
    """Collects problems while it turns tables into dataclasses."""

    def __init__(self, text: str, filename: str):
        self.lines, self.filename = key_lines(text), filename
        self.found: list[tuple[int, str]] = []
        # A wrong value is replaced to read on; what follows from the replacement is not told again.
        self.told: list[Path] = []
        self.given: set[Path] = set()
        self.kinds: dict[str, DeviceKind] = {}
        self.links: dict[str, Link] = {}
        # Where a name of the description was written, for problems found on the whole.
        self.place: dict[tuple[str, str], Path] = {}

    def problem(self, path: Path, sentence: str) -> None:
        self.told.append(path)
        line = line_of(self.lines, path)
        key = ".".join(str(p) for p in path if isinstance(p, str))
        where = f"{self.filename}:{line}" if line else self.filename
        self.found.append((line, f"{where}: {key + ': ' if key else ''}{sentence}"))

    def stop(self) -> None:
        if self.found:
            raise ClusterError("\n".join(dict.fromkeys(t for _, t in sorted(self.found, key=lambda p: p[0]))))

    # Typed access.

    def keys(self, table: Mapping[str, Any], path: Path, known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                self.problem((*path, key), f"unknown field{nearest(key, known)}")

    def get(self, table: Mapping[str, Any], path: Path, key: str, kind: str, default: Any = None, *, required: bool = False) -> Any:
        if key not in table:
            if required:
                self.problem(path, f"missing field {key!r}")
            return default
        value = table[key]
        if _IS[kind](value):
            return value
        self.problem((*path, key), f"must be {_WORDS[kind]}, not {value!r}")
        return default

    def scaled(self, table: Mapping[str, Any], path: Path, units: Mapping[str, float], default: float | None) -> float:
        """Reads a number that may be given in one of several units, or keeps the default."""
        given = [key for key in units if key in table]
        if len(given) > 1:
            self.problem((*path, given[1]), f"says the same as {given[0]!r}; keep one of them")
        if not given:
            if default is None:
                self.problem(path, f"missing field: give one of {', '.join(units)}")
            return math.nan if default is None else default
        value = self.get(table, path, given[0], "number")
        if value is None:
            return math.nan
        if value < 0 or not math.isfinite(value):
            self.problem((*path, given[0]), f"must not be negative, but is {value!r}" if value < 0 else f"must be finite, not {value!r}")
            return math.nan
        return value * units[given[0]]

    # Parts.

    def cluster(self, data: Mapping[str, Any]) -> Cluster:
        self.given = set(_paths(data, ()))
        self.keys(data, (), _TOP_KEYS)
        name = self.get(data, (), "name", "text", "", required=True)
        self.kinds = presets.KINDS | self.named(data, "kinds", self.kind)
        self.links = presets.LINKS | self.named(data, "links", self.link)
        sites, nodes = self.sites(data)
        kinds = {n.kind: self.kinds.get(n.kind) for n in nodes}
        links = {p.link: self.links.get(p.link) for p in (*sites, *nodes)}
        links |= {k: v for k, v in self.links.items() if v.between}
        used_kinds = tuple(k for k in kinds.values() if k)
        used_links = tuple(k for k in links.values() if k)
        told = set(self.told)
        for place, sentence in cluster_check.problems(used_kinds, sites, nodes, used_links):
            path = self.locate(place)
            if path not in told and not (told and _follows(place)):
                self.problem(path, sentence)
        self.stop()
        return Cluster(name, used_kinds, tuple(sites), tuple(nodes), used_links)

    def locate(self, place: cluster_check.Place) -> Path:
        start = self.place.get((str(place[0]), str(place[1])), ()) if len(place) > 1 else place
        tail = place[2:]
        if tail and tail[0] in _ALIASES:
            tail = next(((a,) for a in _ALIASES[str(tail[0])] if (*start, a) in self.given), ())
        return (*start, *tail)

    def named(self, data: Mapping[str, Any], section: str, read: Callable[[str, Mapping[str, Any], Path], Any]) -> dict[str, Any]:
        tables = self.get(data, (), section, "table", {})
        out = {}
        for name, table in tables.items():
            self.place[section, name] = (section, name)
            if isinstance(table, Mapping):
                out[name] = read(name, table, (section, name))
            else:
                self.problem((section, name), f"must be a table, not {table!r}")
        return out

    def like(self, table: Mapping[str, Any], path: Path, choices: Mapping[str, Any]) -> Any:
        name = self.get(table, path, "like", "text")
        if name is not None and name not in choices:
            self.problem((*path, "like"), f"unknown preset {name!r}{nearest(name, choices)}")
        return choices.get(name or "")

    def name_of(self, table: Mapping[str, Any], path: Path, key: str, choices: Mapping[str, Any], *, required: bool = False) -> str:
        name = self.get(table, path, key, "text", "", required=required)
        if name and name not in choices:
            self.problem((*path, key), f"unknown {key} {name!r}{nearest(name, choices)}")
        return name

    def kind(self, name: str, table: Mapping[str, Any], path: Path) -> DeviceKind:
        self.keys(table, path, _KIND_KEYS)
        base: DeviceKind | None = self.like(table, path, presets.KINDS)
        unknown_base = "like" in table and base is None
        memory = self.scaled(table, path, _MEMORY, base.memory_bytes if base else (1 if unknown_base else None))
        return DeviceKind(
            name=name,
            platform=self.get(table, path, "platform", "text", base.platform if base else "cpu", required=not (base or unknown_base)),
            memory_bytes=0 if math.isnan(memory) else round(memory),
            memory_bandwidth_bytes_s=self.scaled(
                table, path, _MEMORY_BANDWIDTH, base.memory_bandwidth_bytes_s if base else (1.0 if unknown_base else None)
            ),
            peak_flops=self.peaks(table, path, base, unknown_base),
            emulated_dtypes=tuple(self.get(table, path, "emulated_dtypes", "texts", base.emulated_dtypes if base else ())),
            jaxlib=self.get(table, path, "jaxlib", "text", base.jaxlib if base else ""),
            device_kinds=tuple(self.get(table, path, "device_kinds", "texts", base.device_kinds if base else ())),
            source=self.get(table, path, "source", "text", base.source if base else ""),
        )

    def peaks(self, table: Mapping[str, Any], path: Path, base: DeviceKind | None, unknown_base: bool) -> tuple[tuple[str, float], ...]:
        merged = dict(base.peak_flops) if base else {}
        given = [key for key in _PEAK if key in table]
        if not given and not base and not unknown_base:
            self.problem(path, "missing field: give peak_tflops, a table of dtype = TFLOP/s")
        for key in given:
            values = self.get(table, path, key, "table", {})
            for dtype in values:
                value = self.get(values, (*path, key), dtype, "number")
                if value is not None and not value > 0:
                    self.problem((*path, key, dtype), f"must be positive, not {value!r}")
                elif value is not None:
                    merged[dtype] = value * _PEAK[key]
        return tuple(merged.items()) or (("f32", 1.0),)

    def link(self, name: str, table: Mapping[str, Any], path: Path) -> Link:
        self.keys(table, path, _LINK_KEYS)
        base: Link | None = self.like(table, path, presets.LINKS)
        unknown_base = "like" in table and base is None
        curve = base.curve if base else ()
        for key in (k for k in _CURVE if k in table):
            points = self.get(table, path, key, "points", ())
            curve = tuple((n, b * _CURVE[key]) for n, b in points)
        return Link(
            name=name,
            bandwidth_bytes_s=self.scaled(table, path, _BANDWIDTH, base.bandwidth_bytes_s if base else (1.0 if unknown_base else None)),
            latency_s=self.scaled(table, path, _LATENCY, base.latency_s if base else (0.0 if unknown_base else None)),
            between=tuple(self.get(table, path, "between", "texts", ())),
            duplex=self.get(table, path, "duplex", "text", base.duplex if base else "full"),
            curve=curve,
            uplink=self.get(table, path, "uplink", "text", ""),
            source=self.get(table, path, "source", "text", base.source if base else ""),
        )

    def sites(self, data: Mapping[str, Any]) -> tuple[list[Site], list[Node]]:
        sites, nodes = [], []
        for i, table in enumerate(self.get(data, (), "sites", "tables", [], required=True)):
            path: Path = ("sites", i)
            self.keys(table, path, _SITE_KEYS)
            name = self.get(table, path, "name", "text", f"site{i}", required=True)
            self.place["sites", name] = path
            sites.append(Site(name, self.name_of(table, path, "link", self.links)))
            for j, entry in enumerate(self.get(table, path, "nodes", "tables", [])):
                nodes.extend(self.node(entry, (*path, "nodes", j), name, sum(n.site == name for n in nodes)))
        return sites, nodes

    def node(self, table: Mapping[str, Any], path: Path, site: str, number: int) -> list[Node]:
        self.keys(table, path, _NODE_KEYS)
        kind = self.name_of(table, path, "kind", self.kinds, required=True)
        devices = self.get(table, path, "devices", "count", 1, required=True)
        count = self.get(table, path, "count", "count", 1)
        name = self.get(table, path, "name", "text")
        link = self.name_of(table, path, "link", self.links) if "link" in table else presets.KIND_LINK.get(kind, "")
        if not link and "link" not in table and kind in self.kinds:
            self.problem(path, f"missing field 'link': what joins the devices of a {kind} node is not known{nearest('', self.links)}")
        if name is None:
            names = [f"{site}-{number + k}" for k in range(count)]
        else:
            names = [name] if count == 1 else [f"{name}-{k}" for k in range(count)]
        self.place |= {("nodes", own): path for own in names}
        return [Node(own, kind, devices, site, link) for own in names]


_ALIASES = {
    "memory_bytes": tuple(_MEMORY), "memory_bandwidth_bytes_s": tuple(_MEMORY_BANDWIDTH), "bandwidth_bytes_s": tuple(_BANDWIDTH),
    "latency_s": tuple(_LATENCY), "curve": tuple(_CURVE), "peak_flops": tuple(_PEAK),
}


def _follows(place: cluster_check.Place) -> bool:
    """Whether a problem found on the whole may merely follow from one already told."""
    return place[0] in ("nodes", "sites") and (len(place) == 2 or place[-1] == "link")


def _paths(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_point(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], int) and all(map(_is_number, value))


_IS: dict[str, Callable[[Any], bool]] = {
    "text": lambda v: isinstance(v, str),
    "texts": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
    "number": _is_number,
    "count": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
    "table": lambda v: isinstance(v, Mapping),
    "tables": lambda v: isinstance(v, list) and all(isinstance(x, Mapping) for x in v),
    "points": lambda v: isinstance(v, list) and all(map(_is_point, v)),
}
_WORDS = {
    "text": "a string", "texts": "a list of strings", "number": "a number", "count": "a whole number of at least 1",
    "table": "a table", "tables": "an array of tables ([[…]])", "points": "a list of [message bytes, bandwidth] pairs",
}


# Writing.


def print_cluster(cluster: Cluster) -> str:
    """Returns TOML that parses back to an equal cluster; presets are named, not spelled out."""
    out = [f"name = {_text(cluster.name)}"]
    for site in cluster.sites:
        out += ["", "[[sites]]", f"name = {_text(site.name)}"]
        if site.link:
            out.append(f"link = {_text(site.link)}")
        for node in (n for n in cluster.nodes if n.site == site.name):
            out += [
                "", "[[sites.nodes]]", f"name = {_text(node.name)}", f"kind = {_text(node.kind)}",
                f"devices = {node.num_devices}", f"link = {_text(node.link)}",
            ]
    for link in cluster.links:
        if presets.LINKS.get(link.name) != link:
            out += ["", f"[links.{_text(link.name)}]", *_link_lines(link)]
    for kind in cluster.kinds:
        if presets.KINDS.get(kind.name) != kind:
            out += ["", f"[kinds.{_text(kind.name)}]", *_kind_lines(kind)]
    return "\n".join(out) + "\n"


def _link_lines(link: Link) -> list[str]:
    out = []
    if link.between:
        out.append(f"between = {_texts(link.between)}")
    out.append(_quantity(link.bandwidth_bytes_s, _BANDWIDTH))
    out.append(_quantity(link.latency_s, _LATENCY))
    if link.duplex != "full":
        out.append(f"duplex = {_text(link.duplex)}")
    if link.curve:
        out.append("curve_bytes_s = [" + ", ".join(f"[{n}, {float(b)!r}]" for n, b in link.curve) + "]")
    if link.uplink:
        out.append(f"uplink = {_text(link.uplink)}")
    if link.source:
        out.append(f"source = {_text(link.source)}")
    return out


def _kind_lines(kind: DeviceKind) -> list[str]:
    out = [
        f"platform = {_text(kind.platform)}", _quantity(kind.memory_bytes, _MEMORY),
        _quantity(kind.memory_bandwidth_bytes_s, _MEMORY_BANDWIDTH),
    ]
    if kind.emulated_dtypes:
        out.append(f"emulated_dtypes = {_texts(kind.emulated_dtypes)}")
    if kind.jaxlib:
        out.append(f"jaxlib = {_text(kind.jaxlib)}")
    if kind.device_kinds:
        out.append(f"device_kinds = {_texts(kind.device_kinds)}")
    if kind.source:
        out.append(f"source = {_text(kind.source)}")
    peaks = []
    for dtype, flops in kind.peak_flops:
        peaks.append(f"{dtype} = {float(flops)!r}")
    return [*out, "peak_flops = { " + ", ".join(peaks) + " }"]


def _text(value: str) -> str:
    return tomlkit.string(value).as_string()


def _texts(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(map(_text, values)) + "]"


def _quantity(value: float, units: Mapping[str, float]) -> str:
    """Writes a number in the first unit that reads back exactly and is short."""
    for key, factor in units.items():
        number = float(f"{value / factor:.6g}")
        if number * factor == value:
            return f"{key} = {number:g}" if number != int(number) else f"{key} = {int(number)}"
    key = list(units)[-1]
    return f"{key} = {value!r}"


# For people.


def summarise(cluster: Cluster) -> str:
    """Returns a few lines: sites, their devices, and what joins them."""
    out = [f"cluster {cluster.name}: {cluster.num_devices} devices in {len(cluster.sites)} site{'s' * (len(cluster.sites) != 1)}"]
    for site in cluster.sites:
        out.append(f"  site {site.name}" + (f" (nodes joined by {_speed(cluster.link_named(site.link))})" if site.link else ""))
        for node in (n for n in cluster.nodes if n.site == site.name):
            kind = cluster.kind(node.kind)
            out.append(
                f"    {node.name}: {node.num_devices} x {kind.name} ({kind.memory_bytes / 1e9:g} GB), joined by {_speed(cluster.link_named(node.link))}"
            )
    out += [f"  {' - '.join(link.between)}: {_speed(link)}" for link in cluster.links if link.between]
    return "\n".join(out)


def _speed(link: Link) -> str:
    bandwidth = link.bandwidth_bytes_s
    rate = f"{bandwidth / 1e9:g} GB/s" if bandwidth >= 1e8 else f"{bandwidth / 1e6:g} MB/s"
    latency = f"{link.latency_s * 1e3:g} ms" if link.latency_s >= 1e-3 else f"{link.latency_s * 1e6:g} us"
    return f"{link.name} {rate}, {latency}" + (", half duplex" if link.duplex == "half" else "")
