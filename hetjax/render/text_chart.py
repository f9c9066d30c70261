"""Timelines as text: a row of characters per device."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hetjax.passes.simulator import Span, Timeline

_TERMINAL = {
    "F": "blue",
    "B": "green",
    "I": "cyan",
    "W": "yellow",
    "sync": "magenta",
    "update": "red",
}
LEGEND = "digit: forward of that microbatch (last digit); a-z: its backward (or I); A-Z: W; +: update; .: idle"


def mark(span: Span) -> str:
    """Returns the one character that stands for a task."""
    kind, i = span.task.kind, span.task.microbatch or 0
    if kind == "F":
        return str(i % 10)
    if kind in ("B", "I"):
        return chr(ord("a") + i % 26)
    return chr(ord("A") + i % 26) if kind == "W" else "+"


def text_chart(timeline: Timeline, names: Sequence[str], width: int, colour: bool = False) -> str:
    """Returns one row of characters per device; a character shows what runs in the middle of its time.

    Args:
      timeline: what to draw.
      names: a label per device.
      width: columns for the whole chart, labels included.
      colour: whether to colour the tasks by kind.
    """
    label = max(map(len, names), default=0) + 2
    columns = max(width - label, 10)
    total = timeline.makespan_s or 1.0
    # Whole steps of time look best: one column per shortest task where that fits.
    shortest = min(
        (s.end_s - s.start_s for row in timeline.spans for s in row if s.end_s > s.start_s),
        default=total,
    )
    # No whole number of columns where the times are none, or below what divides.
    exact = round(total / shortest) if 0 < total / shortest < 1e6 else 0
    if 0 < exact <= columns:
        columns = exact * (columns // exact)
    step = total / columns
    out = []
    for name, spans in zip(names, timeline.spans):
        cells, i = [], 0
        for c in range(columns):
            middle = (c + 0.5) * step
            while i < len(spans) and spans[i].end_s <= middle:
                i += 1
            here = i < len(spans) and spans[i].start_s <= middle
            sign = mark(spans[i]) if here else "."
            cells.append(
                click.style(sign, fg=_TERMINAL.get(spans[i].task.kind)) if here and colour else sign
            )
        out.append(name.ljust(label) + "".join(cells))
    return "\n".join(out)
