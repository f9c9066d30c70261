"""What makes a cluster description wrong, each with the place it is found at.

A place is a path into the description as TOML spells it, e.g. ("links", "wan", "latency_s"), so
that the reader of a file can say the line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetjax.ir.dtypes import is_dtype_name
from hetjax.ir.suggest import nearest

if TYPE_CHECKING:
    from hetjax.ir.cluster import DeviceKind, Link, Node, Site

Place = tuple[str | int, ...]
Problem = tuple[Place, str]

# What a message proposes for a misspelt dtype.
_DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "i8")


def problems(
    kinds: Sequence[DeviceKind], sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> list[Problem]:
    """Returns every (place, sentence) that keeps the description from making sense."""
    return [
        *_names(kinds, sites, nodes, links),
        *(p for kind in kinds for p in kind_problems(kind)),
        *(p for link in links for p in link_problems(link)),
        *_nodes(kinds, sites, nodes, links),
        *_joints(sites, nodes, links),
    ]


def kind_problems(kind: DeviceKind) -> list[Problem]:
    """Returns what is wrong with one device kind."""
    from hetjax.ir.cluster import PLATFORMS

    at: Place = ("kinds", kind.name)
    out: list[Problem] = []
    if kind.platform not in PLATFORMS:
        out.append(((*at, "platform"), f"kind {kind.name!r}: unknown platform {kind.platform!r}{nearest(kind.platform, PLATFORMS)}"))
    for field in ("memory_bytes", "memory_bandwidth_bytes_s"):
        value = getattr(kind, field)
        if not (value > 0 and math.isfinite(value)):
            out.append(((*at, field), f"kind {kind.name!r}: {field} must be positive, not {value!r}"))
    if not kind.peak_flops:
        out.append(((*at, "peak_flops"), f"kind {kind.name!r}: peak_flops names no dtype; give at least f32"))
    for dtype, flops in kind.peak_flops:
        if not (flops > 0 and math.isfinite(flops)):
            out.append(((*at, "peak_flops", dtype), f"kind {kind.name!r}: peak FLOP/s in {dtype} must be positive, not {flops!r}"))
    for field, dtypes in (("peak_flops", [d for d, _ in kind.peak_flops]), ("emulated_dtypes", kind.emulated_dtypes)):
        out += [
            ((*at, field, dtype), f"kind {kind.name!r}: unknown dtype {dtype!r}{nearest(dtype, _DTYPES)}")
            for dtype in dtypes if dtype != "tf32" and not is_dtype_name(dtype)
        ]
    return out


def link_problems(link: Link) -> list[Problem]:
    """Returns what is wrong with one link by itself."""
    from hetjax.ir.cluster import DUPLEX

    at: Place = ("links", link.name)
    out: list[Problem] = []
    if not (link.bandwidth_bytes_s > 0 and math.isfinite(link.bandwidth_bytes_s)):
        out.append(((*at, "bandwidth_bytes_s"), f"link {link.name!r}: bandwidth must be positive, not {link.bandwidth_bytes_s!r} bytes/s"))
    if not (link.latency_s >= 0 and math.isfinite(link.latency_s)):
        out.append(((*at, "latency_s"), f"link {link.name!r}: latency must not be negative, but is {link.latency_s!r} s"))
    if link.duplex not in DUPLEX:
        out.append(((*at, "duplex"), f"link {link.name!r}: unknown duplex {link.duplex!r}{nearest(link.duplex, DUPLEX)}"))
    sizes = [n for n, _ in link.curve]
    if sizes != sorted(set(sizes)) or any(n <= 0 for n in sizes):
        out.append(((*at, "curve"), f"link {link.name!r}: message sizes of the curve must be positive and ascending, not {sizes}"))
    for nbytes, bandwidth in link.curve:
        if not (bandwidth > 0 and math.isfinite(bandwidth)):
            out.append(((*at, "curve"), f"link {link.name!r}: bandwidth at {nbytes} bytes must be positive, not {bandwidth!r} bytes/s"))
    if len(link.between) == 1 or len(set(link.between)) != len(link.between):
        out.append(((*at, "between"), f"link {link.name!r}: between must name two or more different places, not {list(link.between)}"))
    return out


def _names(
    kinds: Sequence[DeviceKind], sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> list[Problem]:
    out: list[Problem] = []
    if not sites:
        out.append((("sites",), "no site is described; a cluster needs at least one"))
    for what, names in (
        ("kind", [k.name for k in kinds]),
        ("link", [k.name for k in links]),
        ("site or node", [p.name for p in (*sites, *nodes)]),
    ):
        twice = sorted({n for n in names if names.count(n) > 1})
        out += [(("sites",), f"two {what}s are called {name!r}; names must differ") for name in twice]
    return out


def _nodes(
    kinds: Sequence[DeviceKind], sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> list[Problem]:
    out: list[Problem] = []
    kind_names, link_names = {k.name for k in kinds}, {k.name for k in links}
    site_names = [s.name for s in sites]
    order = [site_names.index(n.site) for n in nodes if n.site in site_names]
    if order != sorted(order):
        out.append((("sites",), "nodes must follow each other in the order of their sites"))
    used = {n.kind for n in nodes}
    out += [(("kinds", k.name), f"no node has kind {k.name!r}") for k in kinds if k.name not in used]
    for node in nodes:
        at: Place = ("nodes", node.name)
        if node.kind not in kind_names:
            out.append(((*at, "kind"), f"node {node.name!r}: unknown device kind {node.kind!r}{nearest(node.kind, kind_names)}"))
        if node.site not in site_names:
            out.append(((*at, "site"), f"node {node.name!r}: unknown site {node.site!r}{nearest(node.site, site_names)}"))
        if node.num_devices < 1:
            out.append(((*at, "devices"), f"node {node.name!r}: a node has at least one device, not {node.num_devices}"))
        if node.link not in link_names:
            out.append(((*at, "link"), f"node {node.name!r}: unknown link {node.link!r}{nearest(node.link, link_names)}"))
    for site in sites:
        at = ("sites", site.name)
        inside = [n for n in nodes if n.site == site.name]
        if not inside:
            out.append((at, f"site {site.name!r} has no node"))
        if site.link and site.link not in link_names:
            out.append(((*at, "link"), f"site {site.name!r}: unknown link {site.link!r}{nearest(site.link, link_names)}"))
        if len(inside) > 1 and not site.link:
            out.append((at, f"site {site.name!r} has {len(inside)} nodes and no link between them; give it link = \"…\""))
    return out


def _joints(sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]) -> list[Problem]:
    out: list[Problem] = []
    places = {p.name for p in (*sites, *nodes)}
    joined: set[frozenset[str]] = set()
    for link in links:
        out += [
            (("links", link.name, "between"), f"link {link.name!r}: unknown site or node {name!r}{nearest(name, places)}")
            for name in link.between if name not in places
        ]
        joined |= {frozenset(pair) for pair in itertools.combinations(link.between, 2)}
    used = {link.name for link in links if link.between} | {p.link for p in (*sites, *nodes)}
    out += [(("links", link.name), f"link {link.name!r} joins nothing") for link in links if link.name not in used]
    for a, b in itertools.combinations(sites, 2):
        if frozenset((a.name, b.name)) not in joined:
            out.append((("sites", b.name), f"sites {a.name!r} and {b.name!r} have no link between them; add one with between = [{a.name!r}, {b.name!r}]"))
    return out
