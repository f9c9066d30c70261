"""What every benchmark prints: figures with their targets, the machine, what was not measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
      name: what was measured.
      value, unit: the number.
      target: what it must be ("<= 1.05"), "" for a number that is only reported.
      holds: whether it is.
    """

    name: str
    value: float
    unit: str
    target: str = ""
    holds: bool = True


def at_most(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, value, unit, f"<= {bound:g}", value <= bound)


@dataclasses.dataclass
class Report:
    """What one run measured; a quick run ends in time and says what it left out.

    Attributes:
      quick: whether `--quick` was asked for.
      limit_s: when a quick run starts nothing more.
      tables: name to rows, for what is more than one number.
    """

    quick: bool
    limit_s: float = 45.0
    figures: list[Figure] = dataclasses.field(default_factory=list)
    not_measured: list[str] = dataclasses.field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    begin: float = dataclasses.field(default_factory=time.perf_counter)

    def measure(self, name: str, expected_s: float, run: Callable[[], list[Figure]]) -> None:
        """Runs one part; a quick run skips it where it would not end in time.

        Args:
          name: the part, for "not measured".
          expected_s: about how long it takes.
          run: returns its figures.
        """
        if self.quick and time.perf_counter() - self.begin + expected_s > self.limit_s:
            self.not_measured.append(name)
        else:
            self.figures += run()


def interleaved(
    arms: Mapping[str, Callable[[], float]], seconds: float, *, at_least: int = 3
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Returns the median of each arm, and every round; run in turns, so that what else the machine does hits all alike.

    Args:
      arms: name to a function that measures once.
      seconds: starts no round after this time,
      at_least: but runs so many.
    """
    rounds: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(rounds) < at_least or time.perf_counter() - begin < seconds:
        names = list(arms) if len(rounds) % 2 == 0 else list(reversed(arms))
        rounds.append({name: arms[name]() for name in names})
    return {name: statistics.median(r[name] for r in rounds) for name in arms}, rounds


def median_ratio(rounds: list[dict[str, float]], over: str, under: str) -> float:
    """Returns the median over rounds of one arm divided by another in the same round."""
    return statistics.median(r[over] / r[under] for r in rounds)


def machine() -> dict[str, Any]:
    """Returns what the numbers depend on."""
    import importlib.metadata as metadata

    versions = {}
    for name in ("jax", "jaxlib", "flax", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2), "python": platform.python_version(), **versions,
    }


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows under their keys."""
    keys = list(dict.fromkeys(k for row in rows for k in row))
    lines = [keys, *([_cell(row.get(k, "")) for k in keys] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    print(f"{name}{'' if rows else ': none'}")
    for line in lines if rows else ():
        print("  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths)))
    print()


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def main(doc: str, run: Callable[[Report], None]) -> None:
    """Parses `--quick` and `--json`, measures and prints."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    args = parser.parse_args()
    before = machine()
    report = Report(args.quick)
    run(report)
    if args.json:
        print(json.dumps({
            "figures": [dataclasses.asdict(f) for f in report.figures], "machine": before,
            "not_measured": report.not_measured, **({"tables": report.tables} if report.tables else {}),
        }))
        return
    for name, rows in report.tables.items():
        print_table(name, rows)
    width = max((len(f.name) for f in report.figures), default=0)
    for f in report.figures:
        verdict = "" if not f.target else "  holds" if f.holds else "  DOES NOT HOLD"
        print(f"{f.name:{width}}  {f.value:10.4g} {f.unit:8} {f.target:9}{verdict}")
    for line in report.not_measured:
        print(f"not measured: {line}")
    print(f"machine: {before}")
