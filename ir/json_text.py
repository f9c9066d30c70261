"""JSON text to values, with the place of what is wrong in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hetjax.ir.errors import ParseError


def parse_json(
    text: str, filename: str, parse_constant: Callable[[str], Any] | None = None
) -> Any:
    """Returns what JSON text says.

    Args:
      text: of one value.
      filename: where it came from.
      parse_constant: what to make of NaN and the infinities, as for `json.loads`.

    Raises:
      ParseError: the text is not JSON; shows the line.
    """
    try:
        return json.loads(text, parse_constant=parse_constant)
    except json.JSONDecodeError as error:
        raise ParseError(
            f"not JSON: {error.msg}", source=text, line=error.lineno, column=error.colno,
            filename=filename,
        ) from None  # fmt: skip
