"""Predicted against measured, the outliers named."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetjax.render.axes import RIGHT, TOP, Axes, mark, names_of
from hetjax.render.markup import at, tag
from hetjax.render.picture import Picture, svg
from hetjax.render.units import human_seconds


def scatter_picture(
    pairs: Sequence[tuple[str, float, float]], title: str, *, band: float = 0.15, named: int = 6
) -> Picture:
    """Returns predicted against measured seconds; the worst outside the band are named.

    Args:
      pairs: (name, predicted, measured) in seconds, both positive.
      title: of the picture.
      band: relative error that is not called an outlier.
      named: how many outliers bear their names.
    """
    pairs = [p for p in pairs if p[1] > 0 and p[2] > 0]
    error = {name: predicted / measured - 1 for name, predicted, measured in pairs}
    worst = sorted(pairs, key=lambda p: -abs(math.log(p[1] / p[2])))
    outliers = [p for p in worst if not 1 / (1 + band) <= p[1] / p[2] <= 1 + band][:named]
    middle = sorted(abs(e) for e in error.values())
    half = f"median error {middle[len(middle) // 2]:.1%}" if middle else "nothing to compare"
    heading = f"{title}: {len(pairs)} points, {half}"
    values = [v for p in pairs for v in p[1:]] or [1.0, 10.0]
    ends = (min(values) / 2, max(values) * 2)
    axes = Axes(ends, ends, 560, 430, log=True)
    low, high = ends
    parts = [
        tag("text", heading, x="8", y="15", class_="h"),
        axes.frame(human_seconds, human_seconds, "measured", "predicted"),
    ]
    for factor, style in ((1.0, "axis"), (1 + band, "grid"), (1 / (1 + band), "grid")):
        a, b = (low, high / factor) if factor >= 1 else (low / factor, high)
        parts.append(
            tag(
                "path",
                d=f"M{at(axes.px(a))} {at(axes.py(a * factor))}L{at(axes.px(b))} {at(axes.py(b * factor))}",
                class_=style,
            )
        )
    for name, predicted, measured in pairs:
        far = any(name == o[0] for o in outliers)
        words = f"{name}: predicted {human_seconds(predicted)}, measured {human_seconds(measured)} ({error[name]:+.0%})"
        sign = mark("d" if far else "o", axes.px(measured), axes.py(predicted))
        parts.append(
            tag(
                "g",
                tag("title", words),
                sign,
                class_="dot",
                data_name=name,
                data_predicted=predicted,
                data_measured=measured,
                data_outlier="1" if far else None,
            )
        )
    marks = [(axes.px(m), axes.py(p)) for _, p, m in pairs]
    parts += names_of(
        [(f"{n} {error[n]:+.0%}", axes.px(m), axes.py(p)) for n, p, m in outliers], axes, marks
    )
    legend = f"line: equal; grey lines: ±{band:.0%}; diamonds: outliers"
    parts.append(tag("text", legend, x=at(axes.width - RIGHT), y=str(TOP - 4), class_="e faint"))
    body = svg(axes.width, axes.height, *parts, label=heading, data_picture="scatter")
    text = [
        heading,
        *(
            f"  {n}: predicted {human_seconds(p)}, measured {human_seconds(m)} ({error[n]:+.0%})"
            for n, p, m in worst[:20]
        ),
    ]
    return Picture(title, body, "\n".join(text), is_svg=True)
