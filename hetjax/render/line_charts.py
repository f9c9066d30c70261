"""Lines over one pair of axes, and bars."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from hetjax.render.axes import Axes, names_of, plain
from hetjax.render.markup import at, tag
from hetjax.render.picture import Picture, svg
from hetjax.render.style import LINES, fill_of, hatches, prefix_of


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a line chart: a name and (x, y) points, ascending in x."""

    name: str
    points: Sequence[tuple[float, float]]


def line_picture(
    series: Sequence[Series],
    title: str,
    x_name: str,
    y_name: str,
    *,
    x_words: Callable[[float], str] = plain,
    y_words: Callable[[float], str] = plain,
    log: bool = False,
    zero: bool = True,
    steps: bool = False,
) -> Picture:
    """Returns lines over one pair of axes, each with its own dashes and its name at its end.

    Args:
      series: at least one with points.
      title, x_name, y_name: words.
      x_words, y_words: how numbers on the axes are written.
      log: both axes logarithmic.
      zero: the y axis begins at 0 (of linear axes).
      steps: a value holds until the next one.
    """
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    if log:
        axes = Axes((min(xs), max(xs)), (min(ys) / 1.3, max(ys) * 1.3), 700, 360, log=True)
    else:
        low = 0.0 if zero else min(ys)
        axes = Axes((min(xs), max(xs)), (low, low + (max(ys) - low) * 1.08 or 1.0), 700, 360)
    parts = [
        tag("text", title, x="8", y="15", class_="h"),
        axes.frame(x_words, y_words, x_name, y_name),
    ]
    ends = []
    for k, s in enumerate(series):
        d = []
        for i, (x, y) in enumerate(s.points):
            px, py = at(axes.px(x)), at(axes.py(y))
            d.append(f"M{px} {py}" if not i else f"H{px}V{py}" if steps else f"L{px} {py}")
        style = LINES[k % len(LINES)]
        data = " ".join(f"{x!r},{y!r}" for x, y in s.points)
        parts.append(
            tag(
                "path",
                tag("title", s.name),
                d="".join(d),
                class_=style,
                data_series=s.name,
                data_points=data,
            )
        )
        x, y = s.points[-1]
        ends.append((s.name, axes.px(x), axes.py(y) - 8))
    # Beside the lines where there is room, over them where there is none: a line without a name says nothing.
    ends.sort(key=lambda e: e[2])
    beside = names_of(ends, axes, _course(series, axes, steps))
    parts += beside if len(beside) == len(ends) else names_of(ends, axes)
    body = svg(axes.width, axes.height, *parts, label=title, data_picture="lines")
    text = [
        title,
        *(
            f"  {s.name}: {y_words(s.points[0][1])} at {x_words(s.points[0][0])}, {y_words(s.points[-1][1])} at {x_words(s.points[-1][0])}"
            for s in series
        ),
    ]
    return Picture(title, body, "\n".join(text), is_svg=True)


def _course(series: Sequence[Series], axes: Axes, steps: bool) -> list[tuple[float, float]]:
    """Returns where the last part of each line runs, every few units."""
    out = []
    for s in series:
        places = [(axes.px(x), axes.py(y)) for x, y in s.points]
        for (x0, y0), (x1, y1) in itertools.pairwise(places):
            for k in range(max(1, int(x1 - x0) // 8)):
                share = k / max(1, int(x1 - x0) // 8)
                x = x0 + (x1 - x0) * share
                if x > places[-1][0] - 110:
                    out.append((x, y0 if steps else y0 + (y1 - y0) * share))
    return out


def bars_picture(
    bars: Sequence[tuple[str, float]],
    title: str,
    words: Callable[[float], str],
    *,
    lines: Sequence[tuple[str, float]] = (),
) -> Picture:
    """Returns horizontal bars with their names and numbers, and vertical lines that bear a name.

    Args:
      bars: (name, value), values of at least 0.
      title: words.
      words: how a value is written.
      lines: (name, value) to compare with.
    """
    most = max([v for _, v in (*bars, *lines)] or [1.0]) or 1.0
    left = 24 + 6.3 * max(len(n) for n, _ in bars)
    scale = (760 - left - 120) / most
    kinds = ("F", "B", "W", "update", "sync", "I", "transfer", "prologue")
    prefix = prefix_of("bars", title, bars)
    parts = [tag("text", title, x="8", y="16", class_="h")]
    y = 30.0 + 14 * len(lines)
    for k, (name, value) in enumerate(bars):
        parts.append(tag("text", name, x=at(left - 6), y=at(y + 15), class_="e"))
        parts.append(
            tag(
                "rect",
                tag("title", f"{name}: {words(value)}"),
                x=at(left),
                y=at(y),
                width=at(max(0.5, value * scale)),
                height="21",
                fill=fill_of(prefix, kinds[k % 8]),
                class_="task",
                data_name=name,
                data_value=float(value),
            )
        )
        parts.append(tag("text", words(value), x=at(left + value * scale + 6), y=at(y + 15)))
        y += 27
    for k, (name, value) in enumerate(lines):
        x = left + value * scale
        parts.append(
            tag(
                "path",
                d=f"M{at(x)} {at(30 + 14 * k)}V{at(y)}",
                class_="over",
                data_name=name,
                data_value=float(value),
            )
        )
        said = f"{name} {words(value)}"
        right = x + 4 + 6.2 * len(said) < 756
        parts.append(
            tag(
                "text",
                said,
                x=at(x + 4 if right else x - 4),
                y=at(36 + 14 * k),
                class_=None if right else "e",
            )
        )
    body = svg(
        760, y + 6, hatches(prefix, kinds[: len(bars)]), *parts, label=title, data_picture="bars"
    )
    return Picture(
        title,
        body,
        "\n".join([title, *(f"  {n}: {words(v)}" for n, v in (*bars, *lines))]),
        is_svg=True,
    )
