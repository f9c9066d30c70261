"""The published instances: planned under the published equations, scored by the published simulator itself."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from _planner_rescore import Scores, checkout, rescore
from _planner_settings import Settings, holds_above, holds_at_least, holds_at_most
from _report import Figure, Report

from hetjax.passes.cost.availability import availability_cluster, read_availability
from hetjax.passes.cost.sailor import read_model
from hetjax.passes.search import baselines
from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.judge import INF
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.published_judge import PublishedJudge
from hetjax.passes.search.published_plan import sailor_plan
from hetjax.passes.search.result import search
from hetjax.passes.search.space import Outline, Problem, pools_of
from hetjax.passes.search.table import PublishedTable

_MODEL, _BATCH = "OPT-350", 1024
# (name, file of available GPUs, row, iterations/s, whether a plan must have more than these)
INSTANCES = (
    ("32 A100", "gpu_trace_scaled.csv", 0, 0.1251, False),
    ("32 A100 + 96 V100", "gpu_trace_heterogeneous_imbalanced.csv", 0, 0.1905, False),
    ("5 zones x 32 A100", "gpu_trace_multizone.csv", 0, 0.4148, False),
    ("80 A100 + 240 V100", "gpu_trace_heterogeneous_imbalanced.csv", 1, 0.361, True),
    ("128 A100 + 384 V100", "gpu_trace_heterogeneous_imbalanced.csv", 2, 0.523, True),
)
# The best plans of each instance, and so many drawn at random, are scored again.
_TOP, _DRAWN = 5, 200
_AGREE = 1e-6


def published_folder(given: str | None) -> Path | None:
    root = Path(__file__).resolve().parents[1]
    shared = Path(os.environ.get("HETJAX_SHARED", root.parent / "shared"))
    folder = Path(given) if given else shared / "data" / "sailor"
    return folder if (folder / "llm_info.json").exists() else None


def instance(folder: Path, file: str, row: int, *, repaired: bool = False) -> Problem:
    """Returns the problem of planning OPT-350 for the GPUs of one row of a published trace."""
    cluster = availability_cluster(folder, read_availability(folder / "availability" / file, row))
    table = PublishedTable(read_model(folder, _MODEL), repaired=repaired)
    return Problem(table, cluster, pools_of(cluster), _BATCH, alike=True)


def published_part(report: Report, settings: Settings) -> list[Figure]:
    folder = published_folder(settings.data)
    if folder is None:
        report.not_measured.append("published instances: their data is not here; --data DIR")
        return []
    root = checkout(settings.sailor)
    figures, rows, again = [], [], []
    for name, file, row, least, more in INSTANCES:
        line = settings.kept.row(
            f"published {name} {bool(root)} {report.quick}",
            lambda file=file, row=row: _planned(folder, file, row, root, report.quick),
        )
        bound = holds_above if more else holds_at_least
        figures += [
            bound(f"{name}, published equations", line["it/s"], "it/s", least),
            Figure(f"{name}, our own simulator", line["own it/s"], "it/s"),
            holds_at_most(f"{name}, search", line["search_s"], "s", 4.0),
            Figure(f"{name}, global batch", line["batch"], "examples", f"= {_BATCH}", line["batch"] == _BATCH),
        ]
        rescored = line.pop("rescored", None)
        rows.append({"instance": name, **line})
        if rescored is not None:
            rates = [1 / s if fits else 0.0 for s, fits in rescored["top"]]
            figures += [
                bound(f"{name}, published simulator", rates[0], "it/s", least),
                holds_at_most(f"{name}, equations against it, {rescored['compared']} plans", rescored["apart"], "share", _AGREE),
                Figure(f"{name}, plans of which one says that they fit", rescored["unlike"], "plans", "= 0", not rescored["unlike"]),
            ]  # fmt: skip
            again.append({"instance": name, **{f"plan {i + 1}": r for i, r in enumerate(rates)}})
            report.tables["published simulator, the best plans (iterations/s, 0 where none fits)"] = again
            if rescored["stand_ins"]:
                report.tables["published simulator, empty modules in place of"] = [{"package": p} for p in rescored["stand_ins"]]
    report.tables["published instances"] = rows
    if root is None:
        report.not_measured.append(
            "published instances by the published simulator itself: HETJAX_SAILOR=DIR, a checkout of the public "
            "repository of Sailor (SOSP 2025)"
        )
    return figures


def _planned(folder: Path, file: str, row: int, root: Path | None, quick: bool) -> dict[str, Any]:
    """Returns the figures of one instance: what was found, and what the published simulator says of it."""
    begin = time.perf_counter()
    problem = instance(folder, file, row)
    found = search(PublishedJudge(problem, folder), max_evaluations=6000, budget_s=3.0)
    took_s = time.perf_counter() - begin
    outline = found.outline
    own = OwnJudge(dataclasses.replace(problem, table=instance(folder, file, row, repaired=True).table))
    line: dict[str, Any] = {
        "it/s": 1 / found.report.seconds, "search_s": took_s, "evaluations": found.evaluations,
        "batch": outline.num_microbatches * outline.groups[0].examples, "own it/s": 1 / own.report(outline).seconds, "gap": found.gap,
    }  # fmt: skip
    if root is not None:
        top = [(i.outline, i.value) for i in reversed(found.improvements)][:_TOP]
        drawn = [] if quick else drawn_plans(problem, folder, _DRAWN)
        line["rescored"] = compared(problem, root, top, drawn)
    return line


def drawn_plans(problem: Problem, folder: Path, count: int, seed: int = 0) -> list[tuple[Outline, float]]:
    """Returns plans drawn at random with our score of each, those that fit and those that do not."""
    evaluator = Evaluator(PublishedJudge(problem, folder), max_evaluations=count)
    baselines.stopped(lambda: baselines.randomly(evaluator, seed))
    return list(evaluator.judged())


def compared(
    problem: Problem, root: Path, top: list[tuple[Outline, float]], drawn: list[tuple[Outline, float]]
) -> dict[str, Any]:
    """Returns the published scores of the top plans, and how far all are from ours."""
    plans = top + drawn
    # What a plan that does not fit would take is not asked for here; the number stands in the plan only.
    emitted = [sailor_plan(problem, o, v if v < INF else 1.0) for o, v in plans]
    given: Scores = rescore(root, _MODEL, emitted)
    both = [(v, s) for (_, v), s in zip(plans, given.scores)]
    return {
        "top": [(s.seconds, s.fits) for s in given.scores[: len(top)]],
        "apart": max(abs(v / s.seconds - 1) for v, s in both if v < INF),
        "unlike": sum((v < INF) != s.fits for v, s in both),
        "compared": len(plans), "stand_ins": given.stand_ins,
    }  # fmt: skip
