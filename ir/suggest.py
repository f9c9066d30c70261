"""The tail of an error message: the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the closest choice, else "; valid: …" with all of them.

    Args:
      name: what was written.
      choices: what could have been written.
    """
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(known)}" if known else ""
