"""What makes a cluster description wrong, each with the place it is found at.

A place is a path into the description, e.g. ("links", "wan", "latency_s"), so that the reader of a
file can say the line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hetjax.ir.dtypes import is_dtype_name
from hetjax.ir.suggest import nearest

if TYPE_CHECKING:
    from hetjax.ir.cluster import DeviceKind, Link, Node, Site

Place = tuple[str | int, ...]
Problem = tuple[Place, str]

# What JAX calls the back end: jax.devices("cuda"), …
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DUPLEX = ("full", "half")
# What a message proposes for a misspelt dtype.
_DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "i8")


def problems(
    kinds: Sequence[DeviceKind], sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> list[Problem]:
    """Returns every (place, sentence) that keeps the description from making sense."""
    return [
        *_names(kinds, sites, nodes, links),
        *(p for kind in kinds for p in _kind(kind)),
        *(p for link in links for p in _link(link)),
        *_nodes(kinds, sites, nodes, links),
        *_sites(sites, nodes, links),
        *_joints(sites, nodes, links),
    ]


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _kind(kind: DeviceKind) -> Iterator[Problem]:
    at, who = ("kinds", kind.name), f"kind {kind.name!r}"
    if kind.platform not in PLATFORMS:
        hint = nearest(kind.platform, PLATFORMS)
        yield (*at, "platform"), f"{who}: unknown platform {kind.platform!r}{hint}"
    for field in ("memory_bytes", "memory_bandwidth_bytes_s"):
        value = getattr(kind, field)
        if not _positive(value):
            yield (*at, field), f"{who}: {field} must be positive, not {value!r}"
    if not kind.peak_flops:
        yield (*at, "peak_flops"), f"{who}: peak_flops names no dtype; give at least f32"
    for dtype, flops in kind.peak_flops:
        if not _positive(flops):
            place = (*at, "peak_flops", dtype)
            yield place, f"{who}: peak FLOP/s in {dtype} must be positive, not {flops!r}"
    if not (kind.price_per_hour >= 0 and math.isfinite(kind.price_per_hour)):
        yield (
            (*at, "price_per_hour"),
            f"{who}: the price must not be negative, but is {kind.price_per_hour!r}",
        )
    named = [("peak_flops", d) for d, _ in kind.peak_flops if d != "tf32"]
    for field, dtype in [*named, *(("emulated_dtypes", d) for d in kind.emulated_dtypes)]:
        if not is_dtype_name(dtype):
            yield (*at, field, dtype), f"{who}: unknown dtype {dtype!r}{nearest(dtype, _DTYPES)}"


def _link(link: Link) -> Iterator[Problem]:
    at, who = ("links", link.name), f"link {link.name!r}"
    if not _positive(link.bandwidth_bytes_s):
        value = link.bandwidth_bytes_s
        yield (
            (*at, "bandwidth_bytes_s"),
            f"{who}: bandwidth must be positive, not {value!r} bytes/s",
        )
    if not (link.latency_s >= 0 and math.isfinite(link.latency_s)):
        yield (
            (*at, "latency_s"),
            f"{who}: latency must not be negative, but is {link.latency_s!r} s",
        )
    if link.duplex not in DUPLEX:
        yield (
            (*at, "duplex"),
            f"{who}: unknown duplex {link.duplex!r}{nearest(link.duplex, DUPLEX)}",
        )
    sizes = [n for n, _ in link.curve]
    if sizes != sorted(set(sizes)) or any(n <= 0 for n in sizes):
        yield (*at, "curve"), f"{who}: message sizes of the curve must ascend from above 0: {sizes}"
    for nbytes, value in link.curve:
        if not _positive(value):
            place = (*at, "curve")
            yield (
                place,
                f"{who}: bandwidth at {nbytes} bytes must be positive, not {value!r} bytes/s",
            )
    if len(link.between) == 1 or len(set(link.between)) != len(link.between):
        places = list(link.between)
        yield (*at, "between"), f"{who}: between must name two or more different places: {places}"


def _names(
    kinds: Sequence[DeviceKind], sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> Iterator[Problem]:
    if not sites:
        yield ("sites",), "no site is described; a cluster needs at least one"
    for section, what, names in (
        ("kinds", "kinds", [k.name for k in kinds]),
        ("links", "links", [k.name for k in links]),
        ("sites", "sites or nodes", [p.name for p in (*sites, *nodes)]),
    ):
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield (section, name), f"two {what} are called {name!r}; names must differ"


def _nodes(
    kinds: Sequence[DeviceKind], sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> Iterator[Problem]:
    kind_names, link_names = {k.name for k in kinds}, {k.name for k in links}
    site_names = [s.name for s in sites]
    order = [site_names.index(n.site) for n in nodes if n.site in site_names]
    if order != sorted(order):
        yield ("sites",), "nodes must follow each other in the order of their sites"
    for node in nodes:
        at, who = ("nodes", node.name), f"node {node.name!r}"
        if node.kind not in kind_names:
            hint = nearest(node.kind, kind_names)
            yield (*at, "kind"), f"{who}: unknown device kind {node.kind!r}{hint}"
        if node.site not in site_names:
            yield (
                (*at, "site"),
                f"{who}: unknown site {node.site!r}{nearest(node.site, site_names)}",
            )
        if node.num_devices < 1:
            yield (*at, "devices"), f"{who}: a node has at least one device, not {node.num_devices}"
        if node.link not in link_names:
            yield (
                (*at, "link"),
                f"{who}: unknown link {node.link!r}{nearest(node.link, link_names)}",
            )
    used = {n.kind for n in nodes}
    for kind in kinds:
        if kind.name not in used:
            yield ("kinds", kind.name), f"no node has kind {kind.name!r}"


def _sites(
    sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> Iterator[Problem]:
    link_names = {k.name for k in links}
    for site in sites:
        at, who = ("sites", site.name), f"site {site.name!r}"
        inside = sum(n.site == site.name for n in nodes)
        if not inside:
            yield (*at, "nodes"), f"{who} has no node"
        if site.link and site.link not in link_names:
            yield (
                (*at, "link"),
                f"{who}: unknown link {site.link!r}{nearest(site.link, link_names)}",
            )
        if inside > 1 and not site.link:
            yield (
                (*at, "link"),
                f'{who} has {inside} nodes and no link between them; add link = "…"',
            )


def _joints(
    sites: Sequence[Site], nodes: Sequence[Node], links: Sequence[Link]
) -> Iterator[Problem]:
    places = {p.name for p in (*sites, *nodes)}
    joined: dict[frozenset[str], Link] = {}
    inner = {p.link for p in (*sites, *nodes)}
    for link in links:
        at, who = ("links", link.name, "between"), f"link {link.name!r}"
        for name in link.between:
            if name not in places:
                yield at, f"{who}: unknown site or node {name!r}{nearest(name, places)}"
        if not link.between and link.name not in inner:
            yield ("links", link.name), f"{who} joins nothing"
        for pair in itertools.combinations(link.between, 2):
            other = joined.setdefault(frozenset(pair), link)
            if other is not link and len(other.between) == len(link.between):
                yield at, f"{who} joins {pair[0]!r} and {pair[1]!r}, and so does {other.name!r}"
    for a, b in itertools.combinations([s.name for s in sites], 2):
        if frozenset((a, b)) not in joined:
            hint = f'add one with between = ["{a}", "{b}"]'
            yield (
                ("sites", b, "between"),
                f"sites {a!r} and {b!r} have no link between them; {hint}",
            )
