"""Two plans of one step beside each other: what was changed, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetjax.render.markup import join, table, tag
from hetjax.render.picture import Picture
from hetjax.render.units import human_bytes, human_seconds


def delta_picture(
    name: str, decisions: Sequence[Any], costs: Sequence[Any], over: Sequence[str]
) -> Picture:
    """Returns the two tables.

    Args:
      name: of the step.
      decisions, costs: rows with `what`, `before`, `after` and `unit`.
      over: sentences about memory that does not suffice afterwards.
    """
    title = f"{name}: what was changed and what that costs"
    changed = [[r.what, str(r.before), str(r.after)] for r in decisions]
    rows = [[r.what, _said(r.before, r.unit), _said(r.after, r.unit), _change(r)] for r in costs]
    body = join(
        [
            tag("p", tag("b", title)),
            table(["decision", "before", "after"], changed)
            if changed
            else tag("p", "Nothing was changed."),
            table(["cost", "before", "after", "change"], rows),
            *(tag("p", f"Does not fit: {s}", class_="bad") for s in over),
        ]
    )
    text = [title, *_aligned([["decision", "before", "after"], *changed])]
    text += [
        "",
        *_aligned([["cost", "before", "after", "change"], *rows]),
        *(f"does not fit: {s}" for s in over),
    ]
    return Picture(title, body, "\n".join(text))


def _said(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "s":
        return human_seconds(value)
    if unit == "bytes":
        return human_bytes(value)
    return f"{value:.1%}" if unit == "share" else f"{value:g}"


def _change(row: Any) -> str:
    if isinstance(row.before, str) or isinstance(row.after, str):
        return ""
    if row.unit == "share":
        points = (row.after - row.before) * 100
        return f"{points:+.1f} points" if abs(points) >= 0.05 else "none"
    if not row.before:
        return "none" if not row.after else f"+{_said(row.after, row.unit)}"
    return f"{row.after / row.before - 1:+.1%}" if row.after != row.before else "none"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    if len(rows) < 2:
        return []
    widths = [max(len(r[k]) for r in rows) for k in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in rows]
