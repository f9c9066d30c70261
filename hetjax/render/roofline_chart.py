"""Work under the roof of its devices: Williams, Waterman and Patterson, "Roofline" (2009)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hetjax.render.axes import MARKS, Axes, mark, names_of, plain
from hetjax.render.markup import at, tag
from hetjax.render.picture import Picture, svg
from hetjax.render.style import LINES
from hetjax.render.units import human_rate, human_seconds


@dataclasses.dataclass(frozen=True)
class Roof:
    """What a kind of device can do at most.

    Attributes:
      name: of the kind.
      flops: peak FLOP/s in what is computed in.
      bandwidth: bytes/s of its memory.
      dtype: whose peak it is.
    """

    name: str
    flops: float
    bandwidth: float
    dtype: str


@dataclasses.dataclass(frozen=True)
class Point:
    """A piece of work on a device.

    Attributes:
      name: "s0/forward".
      roof: name of its kind's roof.
      flops, nbytes: on one device.
      seconds: it takes, predicted or measured.
      share: of the step's device time, for who is named first.
    """

    name: str
    roof: str
    flops: float
    nbytes: float
    seconds: float
    share: float = 0.0


def roofline_picture(
    roofs: Sequence[Roof], points: Sequence[Point], title: str, *, named: int = 6
) -> Picture:
    """Returns work by its intensity and what it reaches, under each kind's roof; the costliest are named."""
    points = [p for p in points if p.flops > 0 and p.nbytes > 0 and p.seconds > 0]
    xs = [p.flops / p.nbytes for p in points] + [r.flops / r.bandwidth for r in roofs]
    ys = [p.flops / p.seconds for p in points] + [r.flops for r in roofs]
    axes = Axes((min(xs) / 4, max(xs) * 6), (min(ys) / 4, max(ys) * 3), 700, 380, log=True)
    parts = [
        tag("text", title, x="8", y="15", class_="h"),
        axes.frame(
            plain,
            lambda v: human_rate(v, ""),
            "FLOP per byte of memory traffic",
            "FLOP/s of one device",
        ),
    ]
    lines = [title]
    for k, r in enumerate(roofs):
        ridge = r.flops / r.bandwidth
        x0, x1 = axes.x
        start = max(x0, axes.y[0] / r.bandwidth)
        d = f"M{at(axes.px(start))} {at(axes.py(start * r.bandwidth))}L{at(axes.px(ridge))} {at(axes.py(r.flops))}H{at(axes.px(x1))}"
        words = (
            f"{r.name}: {human_rate(r.flops, 'FLOP/s')} {r.dtype}, {human_rate(r.bandwidth, 'B/s')}"
        )
        parts.append(
            tag(
                "path",
                tag("title", words),
                d=d,
                class_=LINES[k % len(LINES)],
                data_roof=r.name,
            )
        )
        parts.append(
            tag("text", words, x=at(axes.px(x1) - 4), y=at(axes.py(r.flops) - 5), class_="e")
        )
        lines.append("  " + words)
    roof_of = {r.name: r for r in roofs}
    order = sorted(points, key=lambda p: -p.share)
    for p in order:
        r = roof_of[p.roof]
        best = min(r.flops, r.bandwidth * p.flops / p.nbytes)
        reach = p.flops / p.seconds / best
        words = f"{p.name}: {human_rate(p.flops / p.seconds, 'FLOP/s')}, {reach:.0%} of its roof, {human_seconds(p.seconds)}"
        x, y = axes.px(p.flops / p.nbytes), axes.py(p.flops / p.seconds)
        sign = mark(MARKS[list(roof_of).index(p.roof) % len(MARKS)], x, y)
        parts.append(
            tag(
                "g",
                tag("title", words),
                sign,
                class_="dot",
                data_name=p.name,
                data_flops=float(p.flops),
                data_bytes=float(p.nbytes),
                data_seconds=p.seconds,
            )
        )
        lines.append("  " + words)
    places = [(p.name, axes.px(p.flops / p.nbytes), axes.py(p.flops / p.seconds)) for p in order]
    parts += names_of(places[:named], axes, [p[1:] for p in places])
    body = svg(axes.width, axes.height, *parts, label=title, data_picture="roofline")
    return Picture(title, body, "\n".join(lines[:40]), is_svg=True)
