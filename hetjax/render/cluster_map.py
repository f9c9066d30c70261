"""A cluster as a map: sites, their nodes and devices, and the links that join them."""

from __future__ import annotations

import dataclasses
import itertools
import math

from hetjax.ir.cluster import Cluster, Node
from hetjax.ir.cluster_text import speed
from hetjax.ir.plan import Plan
from hetjax.render.markup import Markup, at, fold, join, table, tag
from hetjax.render.picture import Picture, svg
from hetjax.render.style import fill_of, hatches, prefix_of
from hetjax.render.units import human_bytes, human_rate, human_seconds, plural

CELL = 15
ACROSS = 8  # devices in a row of a node's box
MAX_DEVICES = 32  # drawn per box
CHARACTER = 6.2  # of small text
MAX_ARCS = 12
# Stages take the hatches in turn; their numbers stand in the boxes too.
_STAGE_KINDS = ("F", "update", "B", "W", "sync", "I", "transfer", "prologue")


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """Nodes of a site that are alike: drawn once, with their number."""

    nodes: tuple[Node, ...]
    stages: tuple[int | None, ...]  # of each device of each node, in order

    @property
    def count(self) -> int:
        return len(self.nodes)


def cluster_picture(cluster: Cluster, plan: Plan | None = None) -> Picture:
    """Returns the map, and tables of the kinds and links with the source of each number.

    Args:
      cluster: the devices.
      plan: its stages, shown on the devices they use.
    """
    title = f"cluster {cluster.name}: {plural(cluster.num_devices, 'device')} in {plural(len(cluster.sites), 'site')}"
    if plan is not None:
        title += f", {plural(plan.num_stages, 'stage')} of {plan.name}"
    kinds = [
        [
            k.name, f"{sum(n.num_devices for n in cluster.nodes if n.kind == k.name):,}", human_bytes(k.memory_bytes),
            human_rate(k.memory_bandwidth_bytes_s, "B/s"),
            ", ".join(f"{d} {human_rate(v, 'FLOP/s')}" for d, v in k.peak_flops), k.source,
        ]
        for k in cluster.kinds
    ]  # fmt: skip
    links = [
        [
            k.name, " – ".join(k.between) or "inside", human_rate(k.bandwidth_bytes_s, "B/s"),
            human_seconds(k.latency_s), k.duplex, k.source,
        ]
        for k in cluster.links
    ]  # fmt: skip
    body = join(
        [
            tag("div", _map(cluster, plan, title)),
            fold(
                "device kinds",
                table(["kind", "devices", "memory", "bandwidth", "peak", "source"], kinds),
            ),
            fold(
                "links", table(["link", "joins", "one way", "latency", "duplex", "source"], links)
            ),
        ]
    )
    text = str(cluster) if plan is None else f"{cluster}\n{plan}"
    return Picture(title, body, text)


def _map(cluster: Cluster, plan: Plan | None, title: str) -> Markup:
    stage_of = {d: s for s, st in enumerate(plan.stages) for d in st.devices} if plan else {}
    prefix = prefix_of("map", cluster.hash, plan.hash if plan else "")
    parts: list[Markup] = [tag("text", title, x="8", y="17", class_="h")]
    columns = min(4, len(cluster.sites)) or 1
    wide = _site_width(cluster)
    lowest = [34.0] * columns
    bottom_of: dict[str, tuple[float, float]] = {}
    for k, site in enumerate(cluster.sites):
        column = k % columns
        x, y = 8 + column * (wide + 40), lowest[column]
        drawn, height = _site(cluster, site.name, stage_of, prefix, x, y, wide)
        parts.append(drawn)
        bottom_of[site.name] = (x + wide / 2, y + height)
        lowest[column] = y + height + 30
    arcs, bottom = _arcs(cluster, bottom_of, max(lowest) - 22)
    kinds = [_STAGE_KINDS[s % len(_STAGE_KINDS)] for s in range(plan.num_stages)] if plan else []
    width = max(16 + columns * (wide + 40) - 40, 16 + 7.2 * len(title))
    return svg(
        width, bottom, hatches(prefix, kinds), *parts, *arcs, label=title, data_picture="cluster"
    )


def _site_width(cluster: Cluster) -> float:
    """Returns a width that all that is written in the sites' boxes fits into."""
    lines = [_joined(cluster, n) for n in cluster.nodes]
    lines += [f"nodes: {speed(cluster.link_named(s.link))}" for s in cluster.sites if s.link]
    return max(ACROSS * (CELL + 16) + 28, 40 + CHARACTER * max(map(len, lines), default=0))


def _joined(cluster: Cluster, node: Node) -> str:
    return f"joined by {speed(cluster.link_named(node.link))}"


def _site(
    cluster: Cluster,
    site: str,
    stage_of: dict[int, int],
    prefix: str,
    x: float,
    y: float,
    wide: float,
) -> tuple[Markup, float]:
    """Returns a site's box at a place, and how high it is."""
    named = next(s for s in cluster.sites if s.name == site)
    groups = _alike(cluster, site, stage_of)
    parts: list[Markup] = []
    parts.append(tag("text", f"site {site}", x=at(x + 8), y=at(y + 16), class_="h"))
    top = y + 24
    if named.link:
        parts.append(
            tag(
                "text",
                f"nodes: {speed(cluster.link_named(named.link))}",
                x=at(x + 8),
                y=at(top + 10),
            )
        )
        top += 17
    for g in groups:
        node = g.nodes[0]
        count = f"{g.count} nodes of " if g.count > 1 else ""
        many = plural(node.num_devices, "device")
        words = (
            f"{count}{node.num_devices} x {node.kind}"
            if count or node.num_devices > 1
            else f"{many}: {node.kind}"
        )
        shown = min(len(g.stages), MAX_DEVICES)
        rows = math.ceil(shown / ACROSS)
        left = len(g.stages) - shown
        height = 36 + rows * (CELL + 3) + (14 if left else 0)
        parts.append(
            tag(
                "rect",
                x=at(x + 8),
                y=at(top),
                width=at(wide - 16),
                height=at(height),
                rx="3",
                class_="box",
            )
        )
        title = ", ".join(n.name for n in g.nodes[:6]) + (f" … ({g.count})" if g.count > 6 else "")
        parts.append(tag("text", tag("title", title), words, x=at(x + 14), y=at(top + 14)))
        parts.append(
            tag("text", _joined(cluster, node), x=at(x + 14), y=at(top + 28), class_="faint")
        )
        for i, stage in enumerate(g.stages[:shown]):
            row, column = divmod(i, ACROSS)
            cx, cy = x + 14 + column * (CELL + 16), top + 34 + row * (CELL + 3)
            fill = (
                fill_of(prefix, _STAGE_KINDS[stage % len(_STAGE_KINDS)])
                if stage is not None
                else "transparent"
            )
            name = f"stage {stage}" if stage is not None else "no stage" if stage_of else "a device"
            parts.append(
                tag(
                    "rect", tag("title", name), x=at(cx), y=at(cy), width=at(CELL + 12), height=at(CELL), rx="2",
                    fill=fill, class_="task", data_stage=stage,
                )
            )  # fmt: skip
            if stage is not None:
                parts.append(
                    tag("text", f"s{stage}", x=at(cx + CELL / 2 + 6), y=at(cy + 11.5), class_="m")
                )
        if left:
            parts.append(
                tag(
                    "text",
                    f"… and {left:,} more devices",
                    x=at(x + 14),
                    y=at(top + height - 5),
                    class_="faint",
                )
            )
        top += height + 6
    box = tag(
        "rect", x=at(x), y=at(y), width=at(wide), height=at(top - y + 2), rx="5", class_="box"
    )
    return tag("g", box, *parts, data_site=site), top - y + 2


def _alike(cluster: Cluster, site: str, stage_of: dict[int, int]) -> list[_Nodes]:
    """Returns a site's nodes, alike ones together."""
    first, out = 0, {}
    for node in cluster.nodes:
        devices = range(first, first + node.num_devices)
        first += node.num_devices
        if node.site == site:
            out.setdefault((node.kind, node.num_devices, node.link), []).append(
                (node, [stage_of.get(d) for d in devices])
            )
    return [
        _Nodes(tuple(n for n, _ in members), tuple(itertools.chain(*(s for _, s in members))))
        for members in out.values()
    ]


def _arcs(
    cluster: Cluster, bottom_of: dict[str, tuple[float, float]], y: float
) -> tuple[list[Markup], float]:
    """Returns the links between sites below the boxes, slow ones dashed, and where they end.

    What one link joins is one line: with three sites or more, a bus.
    """
    joined: dict[str, dict[str, None]] = {}
    for a, b in itertools.combinations([s.name for s in cluster.sites], 2):
        joined.setdefault(cluster.site_link(a, b).name, {}).update({a: None, b: None})
    parts: list[Markup] = []
    for k, (name, sites) in enumerate(list(joined.items())[:MAX_ARCS]):
        link = cluster.link_named(name)
        shift = 9.0 * (k % 9)
        y += 24
        ends = [(bottom_of[s][0] + shift, bottom_of[s][1]) for s in sites]
        if len({x for x, _ in ends}) < len(ends):  # sites below each other: drops side by side
            ends = [(x + 14 * i, bottom) for i, (x, bottom) in enumerate(ends)]
        drops = "".join(f"M{at(x)} {at(bottom)}V{at(y)}" for x, bottom in ends)
        left, right = min(x for x, _ in ends), max(x for x, _ in ends)
        width = max(1.0, math.log10(max(10.0, link.bandwidth_bytes_s)) - 7)
        parts.append(
            tag(
                "path", d=f"{drops}M{at(left)} {at(y)}H{at(right)}", fill="none", stroke="#8d939c",
                stroke_width=at(width), data_link=link.name, data_bandwidth=link.bandwidth_bytes_s,
                data_latency=link.latency_s, data_sites=" ".join(sites),
                stroke_dasharray="6 4" if link.latency_s >= 1e-3 else None,
            )
        )  # fmt: skip
        words = f"{' – '.join(sites)}: {speed(link)}"
        x = max((left + right) / 2, 12 + CHARACTER / 2 * len(words))
        parts.append(tag("text", words, x=at(x), y=at(y - 5), class_="m"))
    if len(joined) > MAX_ARCS:
        y += 18
        words = f"… and {len(joined) - MAX_ARCS} more links, in the table"
        parts.append(tag("text", words, x="8", y=at(y)))
    return parts, y + 12
