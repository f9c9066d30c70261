"""Elements as text: tags whose children are escaped unless they are markup already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape as _escape

_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(e[-+]?\d+)?( ?[A-Za-z%µ/]{1,9})?")


# No page and no file can hold these.
_NO_TEXT = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\ud800-\\udfff\\ufffe\\uffff]")


def escape(text: str) -> str:
    """Returns text as it stands in HTML and SVG, with "\ufffd" for what is no character there."""
    return _escape(_NO_TEXT.sub("\ufffd", text))


class Markup(str):
    """Text that is HTML or SVG and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: object) -> Markup:
    """Returns one element.

    Args:
      name: of the element.
      children: markup as it is, other text escaped; None is left out.
      attributes: "_" in a name stands for "-", one at its end for nothing (`class_`). None and False
        are left out, True gives the bare name's value. A float is written so that it reads back
        exactly; coordinates go through `at` first.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        text = key if value is True else value if isinstance(value, str) else repr(value)
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    if not children and name not in _NEVER_EMPTY:
        parts.append("/>")
        return Markup("".join(parts))
    parts.append(">")
    parts.extend(c if isinstance(c, Markup) else escape(c) for c in children if c is not None)
    parts.append(f"</{name}>")
    return Markup("".join(parts))


# HTML reads `<div/>` as an opening tag.
_NEVER_EMPTY = frozenset(
    {"div", "span", "td", "th", "table", "details", "p", "pre", "label", "svg"}
)


def join(parts: Iterable[str | None], between: str = "") -> Markup:
    """Returns parts one after the other, those that are no markup escaped."""
    return Markup(
        between.join(p if isinstance(p, Markup) else escape(p) for p in parts if p is not None)
    )


def at(x: float) -> str:
    """Returns a coordinate with two decimals at most."""
    return f"{x:.2f}".rstrip("0").rstrip(".") or "0"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, class_: str | None = None
) -> Markup:
    """Returns an HTML table; numbers stand to the right, short cells are not broken."""
    body = [tag("tr", *(tag("th", h) for h in head))] if head else []
    for row in rows:
        cells = (
            tag("td", c, class_="n" if _NUMBER.fullmatch(c) else "s" if len(c) < 32 else None)
            for c in row
        )
        body.append(tag("tr", *cells))
    return tag("table", *body, class_=class_)


def fold(summary: str, *body: str, open_: bool = False) -> Markup:
    """Returns something that opens when its summary is clicked, without script."""
    return tag("details", tag("summary", summary), *body, open=open_)
