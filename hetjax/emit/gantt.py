"""Timelines for people: a chart in characters, an SVG, a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import click

from hetjax.passes.simulator import Span, Timeline

_TERMINAL = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow", "sync": "magenta", "update": "red"}
_FILL = {
    "F": "#7aa6da", "B": "#8fbf7f", "I": "#7fc7c0", "W": "#d9c26a", "sync": "#c58fc0", "update": "#d98c7a",
    "prologue": "#b0b0b0",
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
    label = max(map(len, names)) + 2
    columns = max(width - label, 10)
    total = timeline.makespan_s or 1.0
    # Whole steps of time look best: one column per shortest task where that fits.
    shortest = min((s.end_s - s.start_s for row in timeline.spans for s in row if s.end_s > s.start_s), default=total)
    exact = round(total / shortest)
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
            cells.append(click.style(sign, fg=_TERMINAL.get(spans[i].task.kind)) if here and colour else sign)
        out.append(name.ljust(label) + "".join(cells))
    return "\n".join(out)


def svg_chart(timeline: Timeline, names: Sequence[str], title: str) -> str:
    """Returns an SVG document: a row per device, transfers between the rows, seconds below."""
    left, row, gap, width = 90, 26, 10, 1100
    total = timeline.makespan_s or 1.0
    scale = width / total
    height = 40 + len(names) * (row + gap) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for d, (name, spans) in enumerate(zip(names, timeline.spans)):
        y = 34 + d * (row + gap)
        parts.append(f'<text x="8" y="{y + 17}">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{row}" fill="#eeeeee"/>')
        for s in spans:
            x, w = left + s.start_s * scale, (s.end_s - s.start_s) * scale
            words = f"s{s.task.stage}/{s.task}: {s.start_s:.6g} to {s.end_s:.6g}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{row}" stroke="#555555"'
                f' stroke-width="0.4" fill="{_FILL[s.task.kind]}"><title>{escape(words)}</title></rect>')
            if w > 14:
                parts.append(f'<text x="{x + w / 2:.2f}" y="{y + 17}" text-anchor="middle">{escape(str(s.task))}</text>')
    y = 34 + len(names) * (row + gap)
    for tick in range(11):
        x = left + width * tick / 10
        parts.append(f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle">{total * tick / 10:.4g}</text>')
    return "\n".join([*parts, "</svg>", ""])


def chrome_trace(timeline: Timeline, names: Sequence[str]) -> dict[str, Any]:
    """Returns a Chrome trace: a thread per device, one per line or network; microseconds."""
    events: list[dict[str, Any]] = []
    lines = sorted({t.place for t in timeline.transfers})
    for n, name in enumerate([*names, *lines]):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": n, "args": {"name": name}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": n, "args": {"sort_index": n}})

    def add(span: Span, thread: int) -> None:
        events.append({
            "name": f"s{span.task.stage}/{span.task}", "cat": span.task.kind, "ph": "X", "pid": 0,
            "tid": thread, "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"stage": span.task.stage, "microbatch": span.task.microbatch},
        })

    for d, spans in enumerate(timeline.spans):
        for span in spans:
            add(span, d)
    for span in timeline.transfers:
        add(span, len(names) + lines.index(span.place))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
