"""How many GPUs of which kind there are in which zone, as published with Sailor, as a cluster.

A row of such a table names its columns GPU_ZONE:

  ,Timestamp,A100-40_us-central1-a,V100-16_us-central1-a
  0,1712574014.0187,32,96
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Link, Node, Site
from hetjax.ir.errors import PlanError
from hetjax.ir.suggest import nearest
from hetjax.passes.cost.sailor import KINDS, load_json, measured_link


@dataclasses.dataclass(frozen=True, slots=True)
class Available:
    """GPUs of one kind in one zone.

    Attributes:
      gpu: the name they give it.
      zone: where.
      count: how many.
    """

    gpu: str
    zone: str
    count: int

    @property
    def site(self) -> str:
        """Returns the name of the site that stands for them in a cluster."""
        return f"{self.zone}/{self.gpu}"


def read_availability(path: str | Path, row: int = 0) -> tuple[Available, ...]:
    """Returns one row of a table of available GPUs; columns with none are left out.

    Args:
      path: the CSV file.
      row: counts from 0, the header aside.

    Raises:
      PlanError: no such file or row, an unknown GPU, a number that is none; every problem at once.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}") from None
    if not table or not 0 <= row < len(table) - 1:
        rows = max(0, len(table) - 1)
        there = f"its rows are 0 … {rows - 1}" if rows else "it has no rows"
        raise PlanError(f"{path} has no row {row}; {there}")
    header, line = table[0], table[1 + row]
    found, wrong = [], []
    for name, text in zip(header, line):
        gpu, _, zone = name.partition("_")
        if not zone:
            continue  # the index and the time
        if gpu not in KINDS:
            wrong.append(f"{path}: column {name!r}: unknown GPU {gpu!r}{nearest(gpu, KINDS)}")
            continue
        try:
            count = int(text)
        except ValueError:
            count = -1
        if count < 0:
            wrong.append(f"{path}: row {row}, column {name!r}: {text!r} is no number of GPUs")
        elif count:
            found.append(Available(gpu, zone, count))
    if wrong:
        raise PlanError(wrong)
    if not found:
        raise PlanError(f"{path}: row {row} has no GPUs in columns named GPU_ZONE")
    return tuple(found)


def availability_cluster(folder: str | Path, available: tuple[Available, ...]) -> Cluster:
    """Returns the cluster of available GPUs with the links published for them.

    A node has as many GPUs as the largest for which a link inside one was measured; what is left over is a
    smaller node in a site of its own. Between sites, all pairs of nodes send at once, as they do when
    every replica hands on its part: the link carries what one pair was measured to, times the nodes of
    the smaller side.

    Raises:
      PlanError: a link between two of them was not measured.
    """
    inside = load_json(Path(folder) / "links" / "intra_node_bandwidths.json")
    between = load_json(Path(folder) / "links" / "multizone_bandwidths_het.json")
    places = [p for a in available for p in _places(a, inside)]
    links: dict[str, Link] = {}
    for i, (site, a, nodes, size) in enumerate(places):
        links[f"{site} inside"] = _inner(f"{site} inside", a.gpu, size, inside)
        for other, b, other_nodes, other_size in places[i:]:
            entry = _measured(between, a, b, min(size, 4), min(other_size, 4))
            if other == site:
                if nodes > 1:
                    links[f"{site} nodes"] = measured_link(f"{site} nodes", entry, size)
                continue
            link = measured_link(f"{site} - {other}", entry, min(size, 4))
            at_once = min(nodes, other_nodes)
            links[link.name] = dataclasses.replace(
                link, between=(site, other), bandwidth_bytes_s=link.bandwidth_bytes_s * at_once,
                curve=tuple((n * at_once, b * at_once) for n, b in link.curve),
            )  # fmt: skip
    return Cluster(
        "available",
        tuple(presets.KINDS[k] for k in sorted({KINDS[a.gpu] for _, a, _, _ in places})),
        tuple(Site(site, f"{site} nodes" if nodes > 1 else "") for site, _, nodes, _ in places),
        tuple(
            Node(f"{site}/{n}", KINDS[a.gpu], size, site, f"{site} inside")
            for site, a, nodes, size in places
            for n in range(nodes)
        ),
        tuple(links.values()),
    )


def _places(a: Available, inside: Mapping[str, Mapping]) -> list[tuple[str, Available, int, int]]:
    """Returns (site, what, nodes, GPUs of a node) of one entry."""
    largest = max((int(n) for n in inside.get(a.gpu, ())), default=1)
    whole, rest = divmod(a.count, largest)
    out = [(a.site, a, whole, largest)] if whole else []
    return [*out, (f"{a.site} rest" if whole else a.site, a, 1, rest)] if rest else out


def _inner(name: str, gpu: str, size: int, inside: Mapping[str, Mapping]) -> Link:
    table = inside.get(gpu, {})
    sizes = [int(n) for n in table if int(n) <= size]
    if not sizes:
        return dataclasses.replace(presets.LINKS[presets.KIND_LINK[KINDS[gpu]]], name=name)
    best = max(sizes)
    return measured_link(name, table[str(best)], max(1, best // 2))


def _measured(between: Mapping, a: Available, b: Available, size: int, other: int):
    """Returns the entry for two nodes, of the largest sizes measured that they reach."""
    for n in range(size, 0, -1):
        for k in range(other, 0, -1):
            try:
                return between[a.zone][a.gpu][str(n)][b.zone][b.gpu][str(k)]
            except KeyError:
                continue
    raise PlanError(f"no measured link from {a.gpu} in {a.zone} to {b.gpu} in {b.zone}")
