"""How a value shows itself in a notebook: it asks whoever has registered to draw it.

Nothing here can draw; `hetjax` registers what can, by name, and it is imported when a value is first
shown.
"""

from __future__ import annotations

import importlib
from typing import Any

_DRAWERS: list[str] = []


def register_drawer(target: str) -> None:
    """Lets `target` draw.

    Args:
      target: "module:function"; the function takes a value and returns what has `_repr_html_()` and a
        text as its `repr`.
    """
    if target not in _DRAWERS:
        _DRAWERS.append(target)


def drawn(value: Any) -> Any:
    """Returns the picture of a value, None where nobody draws."""
    if not _DRAWERS:
        return None
    module, _, name = _DRAWERS[-1].partition(":")
    return getattr(importlib.import_module(module), name)(value)


class Shown:
    """Gives a value its picture in Jupyter, VS Code, marimo and treescope; elsewhere nothing changes."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        picture = drawn(self)
        return None if picture is None else picture._repr_html_()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        picture = drawn(self)
        if picture is None:
            return {"text/plain": repr(self)}
        return {"text/html": picture._repr_html_(), "text/plain": repr(picture)}

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        # treescope would open every field; it puts the picture below this line by itself.
        from treescope import rendering_parts  # pyright: ignore[reportMissingImports]

        first = (repr(drawn(self)).splitlines() or [""])[0]
        return rendering_parts.text(first)
