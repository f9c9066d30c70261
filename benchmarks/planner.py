"""The planner: against exhaustive search, published planners, baselines and its own lower bound.

  exhaustive  small random problems: the same plan as exhaustive search, and how near at a tenth of the evaluations
  published   five published instances under the published simulator's equations, our own judge beside
  large       736 devices of four kinds in four sites, a 70B decoder (analytic): bound, curve, baselines, sites alone
  scaling     search time from 64 to 4,096 devices
  crossover   two sites: what the planner does as the link between them speeds up
  ablation    search against baselines, and with one principle less, at equal evaluations

Published instances need the folder of Sailor's data (`--data`, or HETJAX_SHARED).
"""

from __future__ import annotations

import argparse
import sys

from _planner_parts import PARTS, Settings
from _report import Report, main


def run(report: Report, only: list[str], settings: Settings) -> None:
    for name, (expected_s, part) in PARTS.items():
        if not only or name in only:
            report.measure(name, expected_s if report.quick else 0.0, lambda part=part: part(report, settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", action="append", choices=tuple(PARTS), default=[])
    parser.add_argument("--data")
    parser.add_argument("--large-s", type=float, default=0.0, help="seconds of the large instance's search")
    mine, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    main(
        (__doc__ or "") + "\n  --only PART (again for more), --data DIR",
        lambda report: run(report, mine.only, Settings(mine.data, mine.large_s)),
    )
