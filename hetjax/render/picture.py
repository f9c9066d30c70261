"""A picture: markup with a text that says the same, for notebooks, files and terminals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hetjax.ir.errors import HetjaxError
from hetjax.render.markup import Markup, join, tag
from hetjax.render.style import PAGE_STYLE, STYLE, SVG_PAGE_STYLE, SVG_STYLE


@dataclasses.dataclass(frozen=True, repr=False)
class Picture:
    """What a notebook shows as HTML and a terminal as text.

    Attributes:
      title: one line.
      body: HTML without the style sheet; an SVG alone where `is_svg`.
      text: the fallback.
      is_svg: whether the body is one SVG.
    """

    title: str
    body: Markup
    text: str
    is_svg: bool = False

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return block(self.body, self.title)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": self.text}

    def save(self, path: str | Path) -> None:
        """Writes one file that needs nothing else: .svg, .html, or .txt for the text.

        Raises:
          HetjaxError: the picture is more than one drawing and the name ends in .svg, or the ending is
            another.
        """
        path = Path(path)
        if path.suffix == ".svg" and self.is_svg:
            text = standalone_svg(self.body)
        elif path.suffix == ".html":
            text = page(self.title, self.body)
        elif path.suffix == ".txt":
            text = self.text + "\n"
        else:
            allowed = ".html or .txt" if not self.is_svg else ".svg, .html or .txt"
            raise HetjaxError(
                f"{self.title!r} cannot be written as {path.name}; use a name in {allowed}"
            )
        path.write_text(text, encoding="utf-8")


def block(body: Markup, title: str) -> Markup:
    """Returns a body with its style sheet, as a notebook shows it."""
    return tag(
        "div",
        tag("style", Markup(STYLE + SVG_STYLE)),
        body,
        class_="hj",
        role="group",
        aria_label=title,
    )


def page(title: str, *bodies: Markup) -> Markup:
    """Returns one HTML page that needs nothing else."""
    head = tag(
        "head", Markup('<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>'),
        tag("title", title), tag("style", Markup(PAGE_STYLE + STYLE + SVG_STYLE)),
    )  # fmt: skip
    body = tag("body", tag("div", *bodies, class_="hj", style="max-width:90em"))
    return join([Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), "\n"])


def svg(
    width: float, height: float, *children: str | None, label: str, **attributes: object
) -> Markup:
    """Returns an SVG element that shrinks with its page; the style stands outside.

    Args:
      width, height: in its own units.
      children: inside.
      label: what a screen reader says.
      attributes: more of them.
    """
    return tag(
        "svg", *children, xmlns="http://www.w3.org/2000/svg", class_="hj-svg",
        viewBox=f"0 0 {width:g} {height:g}", width=f"{width:g}", height=f"{height:g}", role="img",
        aria_label=label, **attributes,
    )  # fmt: skip


def standalone_svg(body: Markup) -> str:
    """Returns an SVG as a file of its own, with its style inside."""
    head, _, rest = body.partition(">")
    return f"{head}><style>{SVG_STYLE}{SVG_PAGE_STYLE}</style>{rest}\n"


def stack(title: str, *pictures: Picture) -> Picture:
    """Returns several pictures one below the other."""
    body = join(p.body if not p.is_svg else tag("div", p.body) for p in pictures)
    return Picture(title, body, "\n\n".join(p.text for p in pictures))
