"""Clusters out of TOML, with every problem named by file, line, key and the nearest valid name.

docs/cluster.md describes the format; `hetjax.ir.cluster_text` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError as TomlError
from tomlkit.exceptions import TOMLKitError

from hetjax.ir import cluster_check, presets
from hetjax.ir.cluster import Cluster, DeviceKind, Link, Node, Site
from hetjax.ir.errors import ClusterError, ParseError
from hetjax.ir.suggest import nearest
from hetjax.ir.toml_lines import Path, key_lines, line_of

Table = Mapping[str, Any]

# Field of the dataclass -> the keys that may give it, each with its factor.
UNITS: dict[str, dict[str, float]] = {
    "memory_bytes": {"memory_gb": 1e9, "memory_gib": 2.0**30, "memory_bytes": 1},
    "memory_bandwidth_bytes_s": {"memory_bandwidth_gb_s": 1e9, "memory_bandwidth_bytes_s": 1},
    "peak_flops": {"peak_tflops": 1e12, "peak_flops": 1},
    "bandwidth_bytes_s": {
        "bandwidth_gb_s": 1e9,
        "bandwidth_gbit_s": 1.25e8,
        "bandwidth_bytes_s": 1,
    },
    "latency_s": {"latency_us": 1e-6, "latency_ms": 1e-3, "latency_s": 1},
    "curve": {"curve_gb_s": 1e9, "curve_bytes_s": 1},
}


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(key for name in names for key in UNITS.get(name, (name,)))


TOP_KEYS = ("name", "kinds", "links", "sites")
SITE_KEYS = ("name", "link", "nodes")
NODE_KEYS = ("name", "kind", "devices", "link", "count")
KIND_KEYS = _keys(
    "like", "platform", "memory_bytes", "memory_bandwidth_bytes_s", "peak_flops",
    "emulated_dtypes", "jaxlib", "device_kinds", "source", "price_per_hour",
)  # fmt: skip
LINK_KEYS = _keys(
    "like", "between", "bandwidth_bytes_s", "latency_s", "curve", "duplex", "uplink", "source"
)


def parse_cluster(text: str, filename: str) -> Cluster:
    """Returns the cluster that TOML text describes.

    Raises:
      ParseError: the text is not TOML.
      ClusterError: it describes no cluster; every problem as "file:line: key: what is wrong".
    """
    try:
        data = tomlkit.parse(text).unwrap()
    except TomlError as error:
        message = str(error).split(" at line ")[0]
        line, column = getattr(error, "line", 0), getattr(error, "col", 0) + 1
        raise ParseError(
            message, source=text, line=line, column=column, filename=filename
        ) from None
    except TOMLKitError as error:
        raise ParseError(str(error), source=text, filename=filename) from None
    return _Reader(text, filename, data).cluster()


class _Reader:
    """Collects problems while it turns tables into dataclasses.

    A wrong value is noted and replaced by a harmless one, so that reading goes on.
    """

    def __init__(self, text: str, filename: str, data: Table):
        self.lines, self.filename, self.data = key_lines(text), filename, data
        self.given = set(_paths(data, ()))
        self.found: list[tuple[int, str]] = []
        self.told: set[Path] = set()
        # Where a thing of the description was written, for problems found on the whole.
        self.written: dict[tuple[str, str], Path] = {}
        self.kinds: dict[str, DeviceKind] = {}
        self.links: dict[str, Link] = {}

    def problem(self, path: Path, sentence: str) -> None:
        self.told.add(path)
        line = line_of(self.lines, path)
        key = ".".join(str(p) for p in path if isinstance(p, str))
        where = f"{self.filename}:{line}" if line else self.filename
        self.found.append((line, f"{where}: {key + ': ' if key else ''}{sentence}"))

    def cluster(self) -> Cluster:
        self.known_keys(self.data, (), TOP_KEYS)
        name = self.get(self.data, (), "name", "text", "", required=True)
        self.kinds = presets.KINDS | self.named("kinds", self.kind)
        self.links = presets.LINKS | self.named("links", self.link)
        sites, nodes = self.sites()
        kinds = {n.kind: self.kinds[n.kind] for n in nodes if n.kind in self.kinds}
        inner = [p.link for p in (*sites, *nodes) if p.link in self.links]
        outer = [k for k, link in self.links.items() if link.between]
        links = {k: self.links[k] for k in (*inner, *outer)}
        told = set(self.told)
        parts = tuple(kinds.values()), tuple(sites), tuple(nodes), tuple(links.values())
        for place, sentence in cluster_check.problems(*parts):
            path = self.locate(place)
            if path not in told and not (told and _may_follow(place)):
                self.problem(path, sentence)
        if self.found:
            self.found.sort(key=lambda item: item[0])
            raise ClusterError(list(dict.fromkeys(text for _, text in self.found)))
        return Cluster(name, *parts)

    def locate(self, place: cluster_check.Place) -> Path:
        """Returns where the file says what `cluster_check` found wrong."""
        if len(place) < 2:
            return place
        start = self.written.get((str(place[0]), str(place[1])), (place[0],))
        tail = place[2:]
        if tail and (units := UNITS.get(str(tail[0]))):
            key = next((k for k in units if (*start, k) in self.given), str(tail[0]))
            tail = (key, *tail[1:])
        return (*start, *tail)

    # Typed access.

    def known_keys(self, table: Table, path: Path, known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                self.problem((*path, key), f"unknown field{nearest(key, known)}")

    def get(
        self, table: Table, path: Path, key: str, what: str, default: Any, *, required: bool = False
    ) -> Any:
        if key not in table:
            if required:
                self.problem(path, f"missing field {key!r}")
            return default
        accept, words = _TYPES[what]
        if accept(table[key]):
            return table[key]
        self.problem((*path, key), f"must be {words}, not {table[key]!r}")
        return default

    def quantity(self, table: Table, path: Path, field: str, default: float | None) -> float:
        """Reads a number that may be given in one of several units, or keeps the default."""
        given = [key for key in table if key in UNITS[field]]
        for key in given[1:]:
            self.problem((*path, key), f"says the same as {given[0]!r}; keep one of them")
        if not given:
            if default is None:
                self.problem(path, f"missing field: give one of {', '.join(UNITS[field])}")
            return 1.0 if default is None else default
        value = self.get(table, path, given[0], "number", 1)
        if value >= 0 and math.isfinite(value):
            return value * UNITS[field][given[0]]
        self.problem((*path, given[0]), f"must be a number of at least 0, but is {value!r}")
        return 1.0

    def name_of(
        self, table: Table, path: Path, key: str, choices: Table, *, required: bool = False
    ) -> str:
        name = self.get(table, path, key, "text", "", required=required)
        if name and name not in choices:
            what = "preset" if key == "like" else key
            self.problem((*path, key), f"unknown {what} {name!r}{nearest(name, choices)}")
        return name

    # Parts.

    def named(self, section: str, read: Callable[[str, Table, Path], Any]) -> dict[str, Any]:
        out = {}
        for name, table in self.get(self.data, (), section, "table", {}).items():
            path = (section, name)
            self.written[path] = path
            if isinstance(table, Mapping):
                out[name] = read(name, table, path)
            else:
                self.problem(path, f"must be a table, not {table!r}")
        return out

    def kind(self, name: str, table: Table, path: Path) -> DeviceKind:
        self.known_keys(table, path, KIND_KEYS)
        base = presets.KINDS.get(self.name_of(table, path, "like", presets.KINDS))
        # Under a misspelt `like`, what is missing cannot be told from what it would have given.
        alone = "like" not in table

        def text(key: str, default: str) -> str:
            required = alone and key == "platform"
            value = getattr(base, key) if base else default
            return self.get(table, path, key, "text", value, required=required)

        def number(field: str) -> float:
            value = getattr(base, field) if base else None if alone else 1.0
            return self.quantity(table, path, field, value)

        def texts(key: str) -> tuple[str, ...]:
            return tuple(self.get(table, path, key, "texts", getattr(base, key) if base else ()))

        return DeviceKind(
            name=name,
            platform=text("platform", "cpu"),
            memory_bytes=round(number("memory_bytes")),
            memory_bandwidth_bytes_s=number("memory_bandwidth_bytes_s"),
            peak_flops=self.peaks(table, path, base, required=alone),
            emulated_dtypes=texts("emulated_dtypes"),
            jaxlib=text("jaxlib", ""),
            device_kinds=texts("device_kinds"),
            source=text("source", ""),
            price_per_hour=self.get(table, path, "price_per_hour", "number", base.price_per_hour if base else 0.0),
        )

    def peaks(
        self, table: Table, path: Path, base: DeviceKind | None, *, required: bool
    ) -> tuple[tuple[str, float], ...]:
        merged = dict(base.peak_flops) if base else {}
        given = [key for key in UNITS["peak_flops"] if key in table]
        if required and not given:
            self.problem(path, "missing field: give peak_tflops, a table of dtype = TFLOP/s")
        for key in given:
            values = self.get(table, path, key, "table", {})
            for dtype in values:
                value = self.get(values, (*path, key), dtype, "number", 1.0)
                merged[dtype] = value * UNITS["peak_flops"][key]
        return tuple(merged.items()) if merged or given else (("f32", 1.0),)

    def link(self, name: str, table: Table, path: Path) -> Link:
        self.known_keys(table, path, LINK_KEYS)
        base = presets.LINKS.get(self.name_of(table, path, "like", presets.LINKS))
        alone = "like" not in table

        def number(field: str) -> float:
            value = getattr(base, field) if base else None if alone else 1.0
            return self.quantity(table, path, field, value)

        curve = base.curve if base else ()
        for key, factor in UNITS["curve"].items():
            if key in table:
                points = self.get(table, path, key, "points", [])
                curve = tuple((n, bandwidth * factor) for n, bandwidth in points)
        return Link(
            name=name,
            bandwidth_bytes_s=number("bandwidth_bytes_s"),
            latency_s=number("latency_s"),
            between=tuple(self.get(table, path, "between", "texts", ())),
            duplex=self.get(table, path, "duplex", "text", base.duplex if base else "full"),
            curve=curve,
            uplink=self.get(table, path, "uplink", "text", ""),
            source=self.get(table, path, "source", "text", base.source if base else ""),
        )

    def sites(self) -> tuple[list[Site], list[Node]]:
        sites, nodes = [], []
        for i, table in enumerate(self.get(self.data, (), "sites", "tables", [], required=True)):
            path = ("sites", i)
            self.known_keys(table, path, SITE_KEYS)
            name = self.get(table, path, "name", "text", f"site{i}", required=True)
            self.written["sites", name] = path
            sites.append(Site(name, self.name_of(table, path, "link", self.links)))
            inside: list[Node] = []
            for j, entry in enumerate(self.get(table, path, "nodes", "tables", [], required=True)):
                inside += self.node(entry, (*path, "nodes", j), name, len(inside))
            nodes += inside
        return sites, nodes

    def node(self, table: Table, path: Path, site: str, number: int) -> list[Node]:
        self.known_keys(table, path, NODE_KEYS)
        kind = self.name_of(table, path, "kind", self.kinds, required=True)
        devices = self.get(table, path, "devices", "count", 1, required=True)
        count = self.get(table, path, "count", "count", 1)
        name = self.get(table, path, "name", "text", None)
        if "link" in table:
            link = self.name_of(table, path, "link", self.links)
        else:
            link = self.usual_link(kind)
            if not link and kind in self.kinds and ("kinds", kind, "like") not in self.told:
                choices = ", ".join(sorted(self.links))
                self.problem(
                    path, f"missing field 'link', what joins its devices; valid: {choices}"
                )
        if name is None:
            names = [f"{site}-{number + k}" for k in range(count)]
        else:
            names = [name] if count == 1 else [f"{name}-{k}" for k in range(count)]
        self.written |= {("nodes", own): path for own in names}
        return [Node(own, kind, devices, site, link) for own in names]

    def usual_link(self, kind: str) -> str:
        table = self.data.get("kinds")
        own = table.get(kind) if isinstance(table, Mapping) else None
        like = own.get("like") if isinstance(own, Mapping) else kind
        return presets.KIND_LINK.get(like, "") if isinstance(like, str) else ""


def _may_follow(place: cluster_check.Place) -> bool:
    """Returns whether a problem found on the whole may merely follow from one already told."""
    return place[0] in ("nodes", "sites") and place[-1] in ("kind", "link", "between")


def _paths(value: Any, path: Path) -> Iterator[Path]:
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _is_number(value: Any) -> bool:
    # TOML's whole numbers have no end; beyond this one they are no floats.
    huge = isinstance(value, int) and abs(value) > 10**300
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not huge


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], int)
        and all(map(_is_number, value))
    )


def _list_of(accept: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accept, value))


# Type name -> (test, what a message calls it).
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda v: isinstance(v, str), "a string"),
    "texts": (_list_of(lambda v: isinstance(v, str)), "a list of strings"),
    "number": (_is_number, "a number"),
    "count": (_is_count, "a whole number of at least 1"),
    "table": (lambda v: isinstance(v, Mapping), "a table"),
    "tables": (_list_of(lambda v: isinstance(v, Mapping)), "an array of tables ([[…]])"),
    "points": (_list_of(_is_point), "a list of [message bytes, bandwidth] pairs"),
}
