"""A frame that turns numbers into places, with what charts put into it: marks and names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from hetjax.render.markup import Markup, at, tag
from hetjax.render.units import human_bytes, human_seconds

LEFT, RIGHT, TOP, BOTTOM = 78, 16, 46, 40


@dataclasses.dataclass(frozen=True)
class Axes:
    """A frame that turns numbers into places.

    Attributes:
      x, y: (least, most) of each axis; positive where the axis is logarithmic.
      width, height: of the drawing.
      log: whether both axes are logarithmic.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 560
    height: float = 320
    log: bool = False

    def px(self, v: float) -> float:
        return LEFT + self._share(v, self.x) * (self.width - LEFT - RIGHT)

    def py(self, v: float) -> float:
        return self.height - BOTTOM - self._share(v, self.y) * (self.height - TOP - BOTTOM)

    def _share(self, v: float, ends: tuple[float, float]) -> float:
        a, b = ends
        if self.log:
            a, b, v = math.log10(a), math.log10(b), math.log10(max(v, a * 1e-3))
        return (v - a) / (b - a) if b > a else 0.5

    def frame(
        self,
        x_words: Callable[[float], str],
        y_words: Callable[[float], str],
        x_name: str,
        y_name: str,
    ) -> Markup:
        """Returns the grid with its numbers and names."""
        bottom = self.height - BOTTOM
        parts = [
            tag("path", d=f"M{LEFT} {TOP}V{at(bottom)}H{at(self.width - RIGHT)}", class_="axis")
        ]
        for v in self._ticks(self.x, x_words, (self.width - LEFT - RIGHT) / 110):
            x = self.px(v)
            anchor = "e" if x > self.width - RIGHT - 30 else "m"
            parts += [
                tag("path", d=f"M{at(x)} {TOP}V{at(bottom)}", class_="grid"),
                tag("text", x_words(v), x=at(x), y=at(bottom + 14), class_=anchor),
            ]
        for v in self._ticks(self.y, y_words, (self.height - TOP - BOTTOM) / 45):
            y = self.py(v)
            parts += [
                tag("path", d=f"M{LEFT} {at(y)}H{at(self.width - RIGHT)}", class_="grid"),
                tag("text", y_words(v), x=LEFT - 5, y=at(y + 4), class_="e"),
            ]
        if x_name:
            parts.append(
                tag(
                    "text",
                    x_name,
                    x=at((LEFT + self.width) / 2),
                    y=at(self.height - 6),
                    class_="m faint",
                )
            )
        if y_name:
            parts.append(tag("text", y_name, x="8", y=at(TOP - 8), class_="faint"))
        return tag("g", *parts)

    def _ticks(
        self, ends: tuple[float, float], words: Callable[[float], str], most: float
    ) -> list[float]:
        a, b = ends
        if self.log:
            low, high = math.floor(math.log10(a)), math.ceil(math.log10(b))
            step = max(1, math.ceil((high - low) / 5))
            powers = [10.0**k for k in range(low, high + 1, step)]
            return [v for v in powers if a * 0.999 <= v <= b * 1.001]
        return round_ticks(a, b, words, most)


def round_ticks(
    low: float, high: float, words: Callable[[float], str], most: float
) -> list[float]:
    """Returns round numbers from `low` to `high`, about `most` of them, round in the units that `words` writes."""
    if not high > low:
        return [low]
    span, unit = high - low, 1.0
    if not 1e-290 < span < math.inf:  # below, tenths of it are no numbers any more
        return [low]
    if words is human_bytes:
        unit = 1024.0 ** max(0, math.floor(math.log(max(high, 1.0), 1024)))
    elif words is human_seconds and high >= 600:
        unit = 60.0 if high < 7200 else 3600.0
    power = 10.0 ** math.floor(math.log10(span / unit / most))
    # Half as many again are better than half as many.
    step = next(s * power for s in (1, 2, 5, 10) if s * power * most * 1.5 >= span / unit) * unit
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


MARKS = ("o", "s", "d", "t")


def plain(v: float) -> str:
    return f"{v:.3g}"


def mark(shape: str, x: float, y: float) -> Markup:
    """Returns a mark whose shape says the kind, so that colour need not."""
    if shape == "o":
        return tag(
            "circle", cx=at(x), cy=at(y), r="4", fill="#4a90d9", fill_opacity=".7", class_="task"
        )
    d = {"s": "M-4 -4h8v8h-8z", "d": "M0 -5l5 5l-5 5l-5 -5z", "t": "M0 -5l5 9h-10z"}[shape]
    colour = {"s": "#d4674a", "d": "#4fa35f", "t": "#a56cc1"}[shape]
    return tag(
        "path",
        d=d,
        transform=f"translate({at(x)} {at(y)})",
        fill=colour,
        fill_opacity=".7",
        class_="task",
    )


def names_of(
    points: Iterable[tuple[str, float, float]],
    axes: Axes,
    marks: Iterable[tuple[float, float]] = (),
) -> list[Markup]:
    """Returns names beside points where there is room for them; a name that would cover something is left to the hover."""
    taken = [(x - 5, x + 5, y - 5, y + 5) for x, y in marks]
    out = []
    for name, x, y in points:
        long = 6.3 * len(name)
        for dx, dy in (
            (8, 4),
            (-8 - long, 4),
            (8, -8),
            (8, 16),
            (-8 - long, -8),
            (-8 - long, 16),
            (8, -20),
            (8, 28),
            (-8 - long, -20),
            (-8 - long, 28),
        ):
            left, low = x + dx, y + dy
            box = (left, left + long, low - 9, low + 2)
            inside = (
                box[0] > LEFT
                and box[1] < axes.width - RIGHT + 2
                and box[2] > TOP
                and low < axes.height - BOTTOM
            )
            if inside and not any(
                box[0] < d and c < box[1] and box[2] < f and e < box[3] for c, d, e, f in taken
            ):
                taken.append(box)
                out.append(tag("text", name, x=at(left), y=at(low)))
                break
    return out
