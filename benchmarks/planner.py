"""The planner: against exhaustive search, published planners, baselines and its own lower bound.

  exhaustive  small random problems: the same plan as exhaustive search, and how near at a tenth of the evaluations
  published   five published instances under the published simulator's equations, our own judge beside
  large       736 devices of four kinds in four sites, a 70B decoder (analytic): bound, curve, baselines, sites alone
  scaling     search time from 64 to 4,096 devices
  crossover   two sites: what the planner does as the link between them speeds up
  ablation    search against baselines, and with one principle less, at equal evaluations

Published instances need the folder of Sailor's data (`--data`, or HETJAX_SHARED). Where HETJAX_SAILOR names a checkout
of its public repository, the plans are scored by the published simulator itself as well.

A full run takes hours. With `--keep FILE` what was measured is kept there, row by row, and the next run of the same
code goes on from it; `--for-s` ends a sitting.
"""

from __future__ import annotations

import argparse
import math
import sys

from _planner_parts import PARTS, Part
from _planner_rescore import checkout
from _planner_settings import Kept, Over, Settings
from _report import Figure, Report, main


def run(report: Report, only: list[str], settings: Settings) -> None:
    for name, (expected_s, part) in PARTS.items():
        if not only or name in only:
            report.measure(name, expected_s if report.quick else 0.0, lambda part=part, name=name: _measured(name, part, report, settings))


def _measured(name: str, part: Part, report: Report, settings: Settings) -> list[Figure]:
    try:
        return part(report, settings)
    except Over:
        report.not_measured.append(f"{name}: this sitting is over; the same command goes on from the rows kept")
        return []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", action="append", choices=tuple(PARTS), default=[])
    parser.add_argument("--data")
    parser.add_argument("--large-s", type=float, default=0.0, help="seconds of the large instance's search")
    parser.add_argument("--keep", help="a file that rows measured are kept in")
    parser.add_argument("--for-s", type=float, default=math.inf, help="seconds after which no row is begun")
    mine, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    try:  # before anything is measured
        checkout(None)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    main(
        (__doc__ or "") + "\n  --only PART (again for more), --data DIR, --large-s SECONDS, --keep FILE, --for-s SECONDS",
        lambda report: run(report, mine.only, Settings(mine.data, mine.large_s, kept=Kept(mine.keep, mine.for_s))),
    )
