"""Op-level differences between two texts of the IR: renumbering is no change, a swapped operand is."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence

_REF = re.compile(r"%(\d+)")
_DEFINED = re.compile(r"%(\d+):")
CONTEXT = 2
RED, GREEN, DIM, RESET = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of a difference.

    Attributes:
      mark: " " unchanged, "-" only before, "+" only after, "~" changed (both sides given).
      before, after: the line on each side; "" where there is none.
    """

    mark: str
    before: str
    after: str


def diff(before: str, after: str) -> list[Line]:
    """Returns the lines of both texts, aligned.

    Lines that differ only in the numbers of their values are unchanged when those numbers stand for
    the same values, by the definitions aligned so far.
    """
    old, new = before.splitlines(), after.splitlines()
    same: dict[str, str] = {}
    out: list[Line] = []
    for tag, i1, i2, j1, j2 in _opcodes(
        [_REF.sub("%", x) for x in old], [_REF.sub("%", x) for x in new]
    ):
        if tag == "equal":
            for a, b in zip(old[i1:i2], new[j1:j2]):
                out.append(Line(" ", a, b) if _agree(a, b, same) else Line("~", a, b))
                same.update(zip(_DEFINED.findall(a), _DEFINED.findall(b)))
            continue
        out.extend(Line("-", a, "") for a in old[i1:i2])
        out.extend(Line("+", "", b) for b in new[j1:j2])
    return out


def _opcodes(old: list[str], new: list[str]) -> Iterator[tuple[str, int, int, int, int]]:
    """As difflib's, with the common head and tail set apart first, which is most of a long text."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    if head:
        yield "equal", 0, head, 0, head
    middle = difflib.SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail])
    for tag, i1, i2, j1, j2 in middle.get_opcodes():
        yield tag, i1 + head, i2 + head, j1 + head, j2 + head
    if tail:
        yield "equal", len(old) - tail, len(old), len(new) - tail, len(new)


def _agree(a: str, b: str, same: dict[str, str]) -> bool:
    if a == b and not same:
        return True
    defined = set(_DEFINED.findall(a))
    return all(
        x in defined or same.get(x, x) == y for x, y in zip(_REF.findall(a), _REF.findall(b))
    )


def changed(lines: Sequence[Line]) -> bool:
    """Returns whether anything differs."""
    return any(line.mark != " " for line in lines)


def render(
    lines: Sequence[Line], *, side: bool = False, colour: bool = False, width: int = 160
) -> str:
    """Returns a difference as text; runs of unchanged lines are folded.

    Args:
      lines: of `diff`.
      side: before and after in two columns.
      colour: ANSI colours.
      width: of both columns together.
    """
    shown = _near_changes(lines)
    out: list[str] = []
    folded = 0
    for i, line in enumerate(lines):
        if i not in shown:
            folded += 1
            continue
        if folded:
            out.append(_paint(f"  … {folded} lines unchanged", DIM, colour))
            folded = 0
        out.extend(_columns(line, width // 2, colour) if side else _unified(line, colour))
    if folded:
        out.append(_paint(f"  … {folded} lines unchanged", DIM, colour))
    return "\n".join(out)


def _near_changes(lines: Sequence[Line]) -> set[int]:
    near: set[int] = set()
    for i, line in enumerate(lines):
        if line.mark != " ":
            near.update(range(max(0, i - CONTEXT), min(len(lines), i + CONTEXT + 1)))
    return near


def _paint(text: str, colour: str, on: bool) -> str:
    return f"{colour}{text}{RESET}" if on else text


def _unified(line: Line, colour: bool) -> Iterator[str]:
    if line.mark == " ":
        yield "  " + line.after
    if line.mark in "-~":
        yield _paint("- " + line.before, RED, colour)
    if line.mark in "+~":
        yield _paint("+ " + line.after, GREEN, colour)


def _columns(line: Line, width: int, colour: bool) -> Iterator[str]:
    left, right = _cut(line.before, width - 3), _cut(line.after, width - 3)
    on = colour and line.mark != " "
    mark = "|" if line.mark == "~" else {"-": "<", "+": ">"}.get(line.mark, " ")
    yield f"{_paint(left.ljust(width - 3), RED, on)} {mark} {_paint(right, GREEN, on)}".rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
