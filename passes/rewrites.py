"""Numbered rewrites, so that a wrong one can be found.

A pass that makes many small independent changes asks before each:

    if rewrite("fold-add-zero", op_text):
        ...

Outside a bisection the answer is always yes. Under `limit_rewrites(n)` only the first n are made,
and the log tells their names; `hetjax bisect` halves n until one rewrite is to blame.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class RewriteLog:
    """What was asked for while the log was in force.

    Attributes:
      limit: how many rewrites are let through; None for all.
      names: (name, where) of each rewrite asked for, in order.
    """

    limit: int | None = None
    names: list[tuple[str, str]] = dataclasses.field(default_factory=list)


_LOG: contextvars.ContextVar[RewriteLog | None] = contextvars.ContextVar(
    "hetjax_rewrites", default=None
)


def rewrite(name: str, where: str = "") -> bool:
    """Returns whether a pass may make its next rewrite, and records that it asked.

    Args:
      name: what the rewrite does, in kebab-case.
      where: the op or value it changes, as a reader of the text would find it.
    """
    log = _LOG.get()
    if log is None:
        return True
    log.names.append((name, where))
    return log.limit is None or len(log.names) <= log.limit


@contextlib.contextmanager
def limit_rewrites(limit: int | None) -> Iterator[RewriteLog]:
    """Yields a log under which only the first `limit` rewrites are made."""
    log = RewriteLog(limit)
    token = _LOG.set(log)
    try:
        yield log
    finally:
        _LOG.reset(token)
