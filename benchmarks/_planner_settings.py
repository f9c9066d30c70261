"""What the parts of `benchmarks/planner.py` share: the command line, figures with bounds, rows kept between sittings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import Figure

_ROOT = Path(__file__).resolve().parents[1]
# What a row depends on: search, cost model and this benchmark.
_SOURCES = ("ir/*.py", "passes/*.py", "passes/search/*.py", "passes/cost/*.py", "passes/schedules/*.py", "benchmarks/*planner*.py")


class Over(Exception):
    """The sitting is over: nothing more is begun."""


@functools.cache
def code_version() -> str:
    """Returns a digest of all that the rows of this benchmark depend on."""
    digest = hashlib.sha256()
    for path in sorted(p for pattern in _SOURCES for p in _ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def commit() -> str:
    """Returns the commit that is checked out, "" where that is not known."""
    asked = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _parsed(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:  # a sitting that was killed may leave half a line
        return {}


class Kept:
    """Rows measured before, by the same code; a row that is not among them is measured and added.

    Args:
      path: of the file, one JSON object a line; None to keep nothing.
      seconds: of a sitting; after these no row is begun.
    """

    def __init__(self, path: str | None = None, seconds: float = math.inf):
        self.path = Path(path) if path else None
        self.until = time.perf_counter() + seconds
        self._rows: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            rows = map(_parsed, self.path.read_text().splitlines())
            self._rows = {r["key"]: r["value"] for r in rows if r.get("code") == code_version()}

    def row(self, key: str, measure: Callable[[], Any]) -> Any:
        """Returns a row: what `measure` returns, as JSON gives it back.

        Raises:
          Over: it is not there, and the sitting is over.
        """
        if key in self._rows:
            return self._rows[key]
        if time.perf_counter() > self.until:
            raise Over
        value = json.loads(json.dumps(measure()))
        self._rows[key] = value
        if self.path is not None:
            with self.path.open("a") as file:
                line = {"code": code_version(), "commit": commit(), "key": key, "value": value}
                file.write("\n" * (file.tell() > 0) + json.dumps(line))
        return value


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line says.

    Attributes:
      data: the folder of published data.
      large_s: seconds of the large search (0: the default).
      sailor: a checkout of the published simulator's repository; HETJAX_SAILOR when None.
      kept: rows measured before.
    """

    data: str | None = None
    large_s: float = 0.0
    sailor: str | None = None
    kept: Kept = dataclasses.field(default_factory=Kept)


def holds_at_least(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, value, unit, f">= {bound:g}", value >= bound)


def holds_above(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, value, unit, f"> {bound:g}", value > bound)


def holds_at_most(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, value, unit, f"<= {bound:g}", value <= bound)
