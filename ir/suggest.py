"""The tail of an error message: the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the closest choice, else "; valid: …" with all of them.

    Choices that are equally close are all named.

    Args:
      name: what was written.
      choices: what could have been written.
    """
    known = sorted(choices)
    ratio = {c: difflib.SequenceMatcher(None, name, c).ratio() for c in known}
    best = max(ratio.values(), default=0.0)
    if best >= 0.6:
        return f"; did you mean {' or '.join(repr(c) for c in known if ratio[c] == best)}?"
    return f"; valid: {', '.join(known)}" if known else ""
