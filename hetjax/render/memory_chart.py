"""Bytes held over time, a chart per device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetjax.render.axes import LEFT, RIGHT, TOP, Axes
from hetjax.render.markup import Markup, at, tag
from hetjax.render.picture import Picture, svg
from hetjax.render.style import fill_of, hatches, prefix_of
from hetjax.render.units import human_bytes, human_seconds


def memory_picture(
    rows: Sequence[tuple[str, Sequence[tuple[float, float]], float, float]],
    end_s: float,
    title: str,
) -> Picture:
    """Returns bytes held over time, one chart per device.

    Args:
      rows: (name, (time, bytes held from then on), bytes that are always there, bytes the device has).
      end_s: when the step ends.
      title: of the whole.
    """
    prefix = prefix_of("memory", title, end_s, [(r[0], r[2], r[3], len(r[1])) for r in rows])
    parts: list[Markup] = [tag("text", title, x="8", y="16", class_="h")]
    y, high = -2.0, 120.0
    lines = [title]
    for name, steps, static, capacity in rows:
        peak = max((b for _, b in steps), default=static)
        # A device that is nearly empty is drawn to its own scale; its size is written beside it.
        top = capacity * 1.05 if peak > 0.25 * capacity else max(peak * 1.25, 1.0)
        axes = Axes((0, end_s or 1.0), (0, top), 860, high + TOP)
        points = [(t, b) for t, b in steps] or [(0.0, static)]
        path = [f"M{at(axes.px(0))} {at(axes.py(points[0][1]))}"]
        before = points[0][1]
        for t, group in itertools.groupby(points[1:], key=lambda p: p[0]):
            held = [b for _, b in group]
            # What is given back and taken in one moment is no dip; what is taken and given back is a peak.
            steps_at = [max(held), held[-1]] if max(held) > max(before, held[-1]) else [held[-1]]
            path.append(f"H{at(axes.px(t))}" + "".join(f"V{at(axes.py(b))}" for b in steps_at))
            before = held[-1]
        path.append(f"H{at(axes.px(end_s))}")
        floor = f"V{at(axes.py(static))}H{at(axes.px(0))}z"
        base = f"M{at(axes.px(0))} {at(axes.py(static))}H{at(axes.px(end_s))}V{at(axes.py(0))}H{at(axes.px(0))}z"
        words = f"{name}: peak {human_bytes(peak)} of {human_bytes(capacity)} ({peak / capacity:.1%}), always there {human_bytes(static)}"
        lines.append("  " + words)
        inside = [
            axes.frame(human_seconds, human_bytes, "", ""),
            tag("text", words, x=LEFT, y=str(TOP - 8)),
            tag("path", d="".join(path) + floor, fill=fill_of(prefix, "F"), stroke="none"),
            tag("path", d=base, fill=fill_of(prefix, "W"), stroke="none"),
            tag(
                "path", tag("title", words), d="".join(path), class_="line", data_row=name,
                data_points=" ".join(f"{t!r},{b!r}" for t, b in points), data_static=static,
                data_capacity=float(capacity),
            ),
        ]  # fmt: skip
        if top > capacity:
            c = axes.py(capacity)
            inside.append(tag("path", d=f"M{LEFT} {at(c)}H{at(860 - RIGHT)}", class_="over"))
            inside.append(
                tag("text", "all the device has", x=at(860 - RIGHT - 4), y=at(c + 12), class_="e")
            )
        parts.append(tag("g", *inside, transform=f"translate(0 {at(y)})"))
        y += high + TOP - 14
    legend = [
        tag(
            "rect",
            x=LEFT,
            y=at(y + 10),
            width="16",
            height="12",
            fill=fill_of(prefix, "W"),
            class_="task",
        ),
        tag("text", "state, gradients, temporaries, transfers", x=LEFT + 20, y=at(y + 20)),
        tag(
            "rect",
            x=LEFT + 270,
            y=at(y + 10),
            width="16",
            height="12",
            fill=fill_of(prefix, "F"),
            class_="task",
        ),
        tag("text", "activations in flight", x=LEFT + 290, y=at(y + 20)),
    ]
    body = svg(
        860,
        y + 30,
        hatches(prefix, ("F", "W")),
        *parts,
        *legend,
        label=title,
        data_picture="memory",
    )
    return Picture(title, body, "\n".join(lines), is_svg=True)
