"""Where each key of a TOML text stands: no TOML library in reach tells."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_DOTTED = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_DOTTED})[ \t]*\]\]?")
_KEY = re.compile(rf"[ \t]*({_DOTTED})[ \t]*=")
# What may end or hide the end of a value: strings (long ones first), comments, brackets, newlines.
_TOKEN = re.compile(
    r"""
      \"{3}(?:[^\\]|\\.)*?\"{3,5} | '{3}.*?'{3,5}
    | "(?:[^"\\\n]|\\.)*" | '[^'\n]*'
    | \#[^\n]* | [\[\]{}\n]
    """,
    re.DOTALL | re.VERBOSE,
)


def key_lines(text: str) -> dict[Path, int]:
    """Returns the 1-based line of every table and key of well-formed TOML.

    Keys inside inline tables are not listed; look up the nearest listed prefix of their path.

    Args:
      text: TOML that a parser has accepted.

    Returns:
      Path to line; the tables of an array of tables are numbered, e.g. ("sites", 0, "name").
    """
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    position, line = 0, 1
    while position < len(text):
        if header := _HEADER.match(text, position):
            table = _table_path(_parts(header[2]), header[1] == "[[", counts)
            lines[table] = line
            position = header.end()
        elif key := _KEY.match(text, position):
            path = table
            for part in _parts(key[1]):
                path = (*path, part)
                lines.setdefault(path, line)
            position = key.end()
        position, line = _skip_value(text, position, line)
    return lines


def line_of(lines: dict[Path, int], path: Path) -> int:
    """Returns the line of a path or of the nearest prefix that has one, else 0."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)


def _parts(dotted: str) -> list[str]:
    return [p[1:-1] if p[0] in "\"'" else p for p in re.findall(_PART, dotted)]


def _table_path(parts: list[str], is_array: bool, counts: dict[Path, int]) -> Path:
    path: Path = ()
    for i, part in enumerate(parts):
        path = (*path, part)
        if is_array and i == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
            path = (*path, counts[path])
            # A new element starts its own nested arrays anew; their paths hold its number already.
        elif path in counts:
            path = (*path, counts[path])
    return path


def _skip_value(text: str, position: int, line: int) -> tuple[int, int]:
    depth = 0
    while token := _TOKEN.search(text, position):
        position = token.end()
        line += token[0].count("\n")
        if token[0] == "\n" and depth <= 0:
            return position, line
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
    return len(text), line
