"""A run of passes, one at a time: the list of passes, and beside each what it changed. No script."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hetjax.passes.diffing import CONTEXT, Line
from hetjax.render.markup import Markup, join, tag
from hetjax.render.picture import Picture
from hetjax.render.style import prefix_of
from hetjax.render.units import human_seconds, plural

MAX_LINES = 160
MAX_WIDTH = 150


@dataclasses.dataclass(frozen=True)
class PassStep:
    """One pass of a run.

    Attributes:
      name: as the pipeline writes it.
      seconds: it took, None where it is not known.
      num_ops: after it.
      changed: the parts of the bundle it changed.
      diff: what it changed, () where nothing.
      error: why it failed, or "".
    """

    name: str
    seconds: float | None
    num_ops: int
    changed: tuple[str, ...]
    diff: Sequence[Line]
    error: str = ""


def stepper_picture(name: str, steps: Sequence[PassStep]) -> Picture:
    """Returns the passes as a list to step through; each opens the difference it made."""
    prefix = prefix_of("stepper", name, [(s.name, s.num_ops, len(s.diff)) for s in steps])
    title = f"{name}: {plural(len(steps), 'pass', 'passes')}"
    first = next((i for i, s in enumerate(steps) if s.diff), 0)
    parts, text = [], [title]
    for i, s in enumerate(steps):
        words = _words(i, s)
        text.append("  " + words)
        button = tag("input", type="radio", name=prefix, id=f"{prefix}-{i}", checked=i == first)
        shown = tag("p", s.error, class_="bad") if s.error else diff_markup(s.diff)
        parts += [
            button,
            tag("label", words, for_=f"{prefix}-{i}"),
            tag("div", shown, data_pass=s.name),
        ]
    body = join(
        [
            tag("p", tag("b", title), " — choose a pass to see what it changed"),
            tag(
                "div",
                *parts,
                class_="hj-step",
                data_picture="stepper",
                style=f"grid-template-rows:repeat({len(steps)},min-content) 1fr",
            ),
        ]
    )
    return Picture(title, body, "\n".join(text))


def _words(i: int, s: PassStep) -> str:
    took = f", {human_seconds(s.seconds)}" if s.seconds is not None else ""
    added = sum(x.mark in "+~" for x in s.diff)
    gone = sum(x.mark in "-~" for x in s.diff)
    what = (
        f"failed: {s.error.splitlines()[0]}"
        if s.error
        else f"+{added} −{gone} lines in {', '.join(s.changed)}"
        if s.changed
        else "changed nothing"
    )
    return f"{i + 1}. {s.name}: {what}, {plural(s.num_ops, 'op')}{took}"


def diff_markup(lines: Sequence[Line]) -> Markup:
    """Returns a difference with what did not change folded away; long ones are cut."""
    if not lines:
        return tag("p", "It changed nothing.", class_="faint")
    near: set[int] = set()
    for i, line in enumerate(lines):
        if line.mark != " ":
            near.update(range(max(0, i - CONTEXT), min(len(lines), i + CONTEXT + 1)))
    out: list[Markup | str] = []
    count = folded = 0
    for i, line in enumerate(lines):
        if i not in near:
            folded += 1
            continue
        if folded:
            out.append(f"  … {folded} lines unchanged\n")
            folded = 0
        if count >= MAX_LINES:
            left = sum(x.mark != " " for x in lines[i:])
            out.append(f"  … and {left} more changed lines, in the dump\n")
            break
        count += 1
        if line.mark == " ":
            out.append("  " + _cut(line.after) + "\n")
        if line.mark in "-~":
            out.append(tag("span", "- " + _cut(line.before) + "\n", class_="del"))
        if line.mark in "+~":
            out.append(tag("span", "+ " + _cut(line.after) + "\n", class_="ins"))
    else:
        if folded:
            out.append(f"  … {folded} lines unchanged\n")
    return tag("pre", *out)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 1] + "…"
