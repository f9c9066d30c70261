"""The parts of `benchmarks/planner.py`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable

from _planner_ablation import ablation_part
from _planner_large import large_part
from _planner_problems import DECODER_7B, scaled_sites, slamb_ratio, two_sites
from _planner_published import published_part
from _planner_settings import Settings, holds_at_least, holds_at_most
from _report import Figure, Report

from hetjax.ir.errors import PlanError
from hetjax.passes.search import baselines
from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import FINE
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.result import SearchResult, search
from hetjax.passes.search.samples import random_problem
from hetjax.passes.search.space import Problem

# Small problems are those that exhaustive search walks in seconds, and whose tenth is more than a few plans.
_LEAST, _MOST = 500, 8000
_EPS = 1e-9


def small_problem(seed: int) -> Problem:
    """Returns a random problem whose every plan exhaustive search can reach: up to 3 sites, 8 devices, 6 layers."""
    problem = random_problem(seed)
    return dataclasses.replace(problem, batch=min(problem.batch, FINE))


# Against exhaustive search.


def exhaustive_part(report: Report, settings: Settings) -> list[Figure]:
    equal_wanted, near_wanted = (12, 40) if report.quick else (200, 1000)
    rows: list[dict[str, float]] = []
    looked_at = 0
    while len(rows) < near_wanted:
        seed, looked_at = looked_at, looked_at + 1
        both = len(rows) < equal_wanted
        row = settings.kept.row(f"exhaustive {seed} {both}", lambda seed=seed, both=both: _against_exhaustive(seed, both))
        if row is not None:
            rows.append({"seed": seed, **row})
    whole = [r["equal"] for r in rows if "equal" in r]
    near = sum(r["over_best"] <= 0.01 for r in rows)
    report.tables["missed at a tenth of the evaluations"] = [
        {k: r[k] for k in ("seed", "plans", "over_best")} for r in rows if r["over_best"] > 0.01
    ]
    return [
        holds_at_least(f"equal to exhaustive search, of {len(whole)}", sum(whole) / len(whole), "share", 1.0),
        holds_at_least(f"within 1 % at a tenth of the evaluations, of {len(rows)}", near / len(rows), "share", 0.98),
        Figure("problems looked at for these", looked_at, "problems"),
    ]  # fmt: skip


def _against_exhaustive(seed: int, both: bool) -> dict[str, float] | None:
    """Returns how the search does on one small problem; None where it is none to compare on.

    Args:
      seed: of the problem.
      both: whether to search with as many evaluations too.
    """
    problem = small_problem(seed)
    if not _LEAST <= baselines.count_plans(problem, OwnJudge(problem).known, _MOST) <= _MOST:
        return None
    whole = Evaluator(OwnJudge(problem))
    baselines.exhaustive(whole)
    if whole.best == INF:
        return None
    row: dict[str, float] = {"plans": whole.evaluations}
    if both:
        found = search(OwnJudge(problem), max_evaluations=whole.evaluations)
        row["equal"] = abs(found.value / whole.best - 1) <= _EPS
    try:
        row["over_best"] = search(OwnJudge(problem), max_evaluations=whole.evaluations // 10).value / whole.best - 1
    except PlanError:
        row["over_best"] = INF
    return row


# Scaling.


def scaling_part(report: Report, settings: Settings) -> list[Figure]:
    sizes = (64, 256, 1024, 4096) if report.quick else (64, 128, 256, 512, 1024, 2048, 4096)
    evaluations = 100 if report.quick else 400
    rows = [settings.kept.row(f"scaling {n} {evaluations}", lambda n=n: _scaled(n, evaluations)) for n in sizes]
    report.tables["scaling"] = rows
    first, last = rows[0], rows[-1]
    power = math.log(last["cpu_s"] / first["cpu_s"]) / math.log(last["devices"] / first["devices"])
    slopes = [math.log(b["cpu_s"] / a["cpu_s"]) / math.log(b["devices"] / a["devices"]) for a, b in itertools.pairwise(rows)]
    return [
        holds_at_most(f"scaling: search time ~ devices ** this, {sizes[0]} to {sizes[-1]}", power, "power", 1.0),
        Figure("scaling: the steepest step", max(slopes), "power"),
    ]


def _scaled(devices: int, evaluations: int) -> dict[str, float]:
    problem = scaled_sites(devices)
    begin = time.process_time()
    found = search(OwnJudge(problem), max_evaluations=evaluations)
    took_s = time.process_time() - begin
    return {
        "devices": devices, "cpu_s": took_s, "us per device": 1e6 * took_s / devices, "step_s": found.value,
        "over_bound": found.value / found.lower_bound - 1, "evaluations": found.evaluations,
    }  # fmt: skip


# Crossover.

_LINKS_GB_S = (0.1, 1, 3, 10, 30, 100, 300, 1000, 4000)


def crossover_part(report: Report, settings: Settings) -> list[Figure]:
    ratio = slamb_ratio(DECODER_7B)
    evaluations = 150 if report.quick else 1500
    speeds = (1, 10, 300, 4000) if report.quick else _LINKS_GB_S
    rows = [settings.kept.row(f"crossover {n} {evaluations}", lambda n=n: _crossed(n, ratio, evaluations)) for n in speeds]
    ways = [row["planner"] for row in rows]
    report.tables[f"crossover, a compressed exchange has {ratio:.3f} of the bytes"] = rows
    order = ["one site", "cut there", "replicas, compressed", "replicas, dense"]
    ranks = [order.index(w) for w in ways]
    return [
        Figure("crossover: ways taken as the link speeds up", len(set(ranks)), "ways", ">= 3", len(set(ranks)) >= 3),
        Figure("crossover: steps back on the way", sum(b < a for a, b in itertools.pairwise(ranks)), "steps", "= 0", ranks == sorted(ranks)),
        Figure("crossover: bytes of the compressed exchange", ratio, "of dense"),
    ]  # fmt: skip


def _crossed(gb_s: float, ratio: float, evaluations: int) -> dict[str, float | str]:
    """Returns what the planner does with a link, and what each way of using it comes to."""
    problem = two_sites(gb_s * 1e9, ratio)
    families = {
        "one site": baselines.on_site(dataclasses.replace(problem, compressed=0.0), "east"),
        "cut there": dataclasses.replace(problem, mixed=False, compressed=0.0),
        "replicas, compressed": dataclasses.replace(problem, max_stages=1),
        "replicas, dense": dataclasses.replace(problem, max_stages=1, compressed=0.0),
    }
    best = {}
    for name, family in families.items():
        try:
            best[name] = search(OwnJudge(family), max_evaluations=max(100, evaluations // 4)).value
        except PlanError:
            best[name] = INF
    found = search(OwnJudge(problem), max_evaluations=evaluations)
    return {"link GB/s": gb_s, "planner": way_of(problem, found), "step_s": found.value, **{f"{n}, s": v for n, v in best.items()}}


def way_of(problem: Problem, found: SearchResult) -> str:
    """Returns what a plan does with the link between two sites."""
    stages = [{problem.pools[p.pool].site for p in g.parts} for g in found.outline.groups]
    across = [g for g, where in zip(found.outline.groups, stages) if len(where) > 1]
    if across:
        return "replicas, compressed" if any(g.options.exchange == "compressed" for g in across) else "replicas, dense"
    return "cut there" if len(set().union(*stages)) > 1 else "one site"


Part = Callable[[Report, Settings], list[Figure]]

# name to (about how many seconds a quick run takes, the part)
PARTS: dict[str, tuple[float, Part]] = {
    "large": (33.0, large_part),
    "exhaustive": (16.0, exhaustive_part),
    "published": (26.0, published_part),
    "scaling": (12.0, scaling_part),
    "crossover": (10.0, crossover_part),
    "ablation": (15.0, ablation_part),
}
