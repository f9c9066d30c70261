"""Published instances: scored as the published equations say, and beaten."""

from __future__ import annotations

import csv
import itertools
import json
import math

import click
import pytest
from click.testing import CliRunner

from hetjax.cli.plan import plan as plan_command
from hetjax.ir.errors import PlanError
from hetjax.passes.cost.availability import Available, availability_cluster, read_availability
from hetjax.passes.cost.sailor import read_model, read_plan
from hetjax.passes.search.published_judge import PublishedJudge
from hetjax.passes.search.result import search
from hetjax.passes.search.space import Group, Outline, Part, Problem, pools_of, problems_of
from hetjax.passes.search.table import PublishedTable

HET = "gpu_trace_heterogeneous_imbalanced.csv"


@pytest.fixture(scope="module")
def folder(shared_dir):
    path = shared_dir / "data" / "sailor"
    if not path.is_dir():
        pytest.skip(f"the published profiles are not at {path}")
    return path


def judge_of(folder, file, row=0, batch=1024):
    cluster = availability_cluster(folder, read_availability(folder / "availability" / file, row))
    table = PublishedTable(read_model(folder, "OPT-350"), repaired=False)
    return PublishedJudge(Problem(table, cluster, pools_of(cluster), batch, alike=True), folder)


def by_the_equations(folder, m, groups, edges, sites):
    """Returns the score of a plan, written out plainly, replica by replica; sites are ZONE/GPU by pool."""
    bandwidth = json.loads((folder / "links" / "multizone_bandwidths_het.json").read_text())
    info = json.loads((folder / "llm_info.json").read_text())["OPT-350"]
    gpus = {s.split("/")[1] for s in sites}
    profiles = {g: json.loads((folder / "profiles" / "OPT-350" / g / "profile.json").read_text()) for g in gpus}

    def message_s(nbytes, a, sizes, b, size):
        (zone_a, gpu_a), (zone_b, gpu_b) = sites[a].split("/"), sites[b].split("/")
        c2, c1, c0 = bandwidth[zone_a][gpu_a][str(sizes)][zone_b][gpu_b][str(size)][0]
        x = math.log2(nbytes / 1e6)
        return nbytes / 1e9 / (c2 * x * x + c1 * x + c0)

    # (pool, tensor degree) of every replica of every stage
    stages = [[(p.pool, p.tensor) for p in g.parts for _ in range(p.replicas)] for g in groups]
    share, last = groups[0].parts[0].share, len(groups) - 1
    work, update, sync, held = [], [], [], []
    for s, replicas in enumerate(stages):
        layers = range(edges[s], edges[s + 1])
        rows = [profiles[sites[pool].split("/")[1]][str(share)][str(tensor)] for pool, tensor in replicas]
        work.append(max(sum(r[str(n)][0] + r[str(n)][1] for n in layers) for r in rows))
        update.append(max(r[str(edges[s])][2] for r in rows))
        nbytes = sum(info["1"][str(n)]["params_floats"] * 4 for n in layers) / min(4, *(t for _, t in replicas))
        rings = [0.0]
        for (a, _), (b, _) in itertools.pairwise(replicas):
            left, total = nbytes, 0.0
            while left > 0:
                bucket = min(left, 5e8)
                total += 2 * (len(replicas) - 1) * message_s(bucket / len(replicas), a, 1, b, 1)
                left -= bucket
            rings.append(total)
        sync.append(max(rings))

        def to(other, layer, s=s):
            nbytes = info["1"][str(layer)]["act_output_floats"] * 4 * share
            return max(message_s(nbytes, *a, *b) for a, b in zip(stages[s], stages[other], strict=True))

        if not last:
            held.append(0.0)
        elif s == 0:
            held.append((1 if last < 3 else 2) * to(1, edges[1] - 1))
        elif s == last:
            held.append(2 * to(s - 1, edges[s]))
        else:
            held.append(to(s + 1, edges[s + 1] - 1) + to(s - 1, edges[s]))
    both = [a + b for a, b in zip(work, held)]
    return (m - 1) * max(both) + sum(both) + max(update) + max(sync)


@pytest.mark.parametrize(
    ("file", "edges", "stages", "m"),
    [
        (HET, (0, 26), [[(0, 4, 8, 8)]], 16),
        (HET, (0, 16, 24, 26), [[(0, 2, 16, 4)], [(1, 4, 16, 4)], [(1, 2, 16, 4)]], 16),
        (HET, (0, 5, 9, 13, 26), [[(1, 2, 16, 2)], [(1, 2, 16, 2)], [(1, 2, 16, 2)], [(0, 2, 16, 2)]], 32),
        (HET, (0, 13, 26), [[(0, 1, 8, 2), (1, 4, 24, 2)], [(0, 1, 24, 2), (1, 4, 8, 2)]], 16),
        ("gpu_trace_multizone.csv", (0, 20, 26), [[(0, 2, 16, 4), (1, 2, 16, 4)], [(4, 1, 32, 4)]], 8),
    ],
)
def test_scores_as_the_equations_do(folder, file, edges, stages, m):
    judge = judge_of(folder, file)
    groups = tuple(Group(tuple(Part(*p) for p in parts)) for parts in stages)
    sites = [p.site for p in judge.problem.pools]
    assert judge.seconds(m, groups, edges) == pytest.approx(by_the_equations(folder, m, groups, edges, sites), rel=1e-12)


def test_published_plans_have_their_published_scores(folder):
    # 32 x A100: one stage of 8 replicas, 4-way tensor parallel, 8 examples each.
    judge = judge_of(folder, "gpu_trace_scaled.csv")
    assert 1 / judge.seconds(16, (Group((Part(0, 4, 8, 8),)),), (0, 26)) == pytest.approx(0.12511, abs=5e-6)
    # The best of a sweep over uniform stages on 32 A100 and 96 V100.
    judge = judge_of(folder, HET)
    groups = tuple(Group((Part(*p),)) for p in [(0, 2, 16, 4), (1, 4, 16, 4), (1, 2, 16, 4)])
    assert 1 / judge.seconds(16, groups, (0, 16, 24, 26)) == pytest.approx(0.19053, abs=5e-6)


@pytest.mark.parametrize(
    ("file", "row", "least", "evaluations"),
    [
        ("gpu_trace_scaled.csv", 0, 0.1251, 50), (HET, 0, 0.1905, 500), ("gpu_trace_multizone.csv", 0, 0.4148, 500),
        (HET, 1, 0.398, 500), (HET, 2, 0.58, 500),
    ],
)  # fmt: skip
def test_beats_the_published_planners(folder, file, row, least, evaluations):
    judge = judge_of(folder, file, row)
    found = search(judge, max_evaluations=evaluations, budget_s=20)
    assert 1 / found.report.seconds >= least
    assert not list(problems_of(judge.problem, found.outline))
    first = found.outline.groups[0]
    assert found.outline.num_microbatches * first.examples == 1024
    assert all(s.peak_bytes <= s.memory_bytes for s in found.report.stages)


def test_memory_is_refused_with_the_reason(folder):
    judge = judge_of(folder, HET)
    groups = (Group((Part(1, 1, 8, 4),)),)
    assert judge.seconds(32, groups, (0, 26)) == math.inf
    report = judge.report(Outline(32, groups, (0, 26)))
    assert "stage 0 needs" in report.problems[0]
    assert "V100-16" in report.problems[0]


def test_availability_is_read_and_refused(folder, tmp_path):
    assert read_availability(folder / "availability" / HET, 1) == (
        Available("A100-40", "us-central1-a", 80), Available("V100-16", "us-central1-a", 240),
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"has no row 3; its rows are 0 … 2"):
        read_availability(folder / "availability" / HET, 3)
    wrong = tmp_path / "wrong.csv"
    with wrong.open("w", newline="") as file:
        csv.writer(file).writerows([["", "A100-4_z", "V100-16_z"], ["0", "4", "many"]])
    with pytest.raises(PlanError) as error:
        read_availability(wrong)
    assert "did you mean 'A100-40'" in str(error.value)
    assert "'many' is no number of GPUs" in str(error.value)


def run(folder, *more, file=HET):
    arguments = [
        "--profiles", str(folder), "--model", "OPT-350", "--availability",
        str(folder / "availability" / file), "--gbs", "1024", "--cost", "published", *more,
    ]  # fmt: skip
    return CliRunner().invoke(plan_command, arguments, standalone_mode=False)


def test_the_command_plans_and_emits(folder):
    result = run(folder, "--json", "--evaluations", "600", "--budget", "60s")
    facts = json.loads(result.output)
    assert facts["ok"] and facts["stopped"] in ("evaluations", "time", "idle", "proved")
    assert facts["global_batch"] == 1024
    assert facts["iteration_s"] >= facts["lower_bound_s"] > 0
    assert facts["evaluations"] <= 600
    assert facts["own_iteration_s"] != facts["iteration_s"]
    emitted = run(folder, "--emit", "sailor", "--evaluations", "600", "--budget", "60s").output
    published = read_plan(emitted)
    assert published.batch == 1024
    assert published.num_microbatches == facts["plan"]["num_microbatches"]
    assert sum(r.tensor for s in published.replicas for r in s) == facts["devices_used"]


def test_the_command_searches_in_processes_but_not_for_a_step(folder):
    plans = [
        json.loads(run(folder, "--json", "--evaluations", "150", "--budget", "60s", "--processes", n).output)["plan"]
        for n in ("1", "2")
    ]
    assert plans[0] == plans[1]
    with pytest.raises(click.UsageError, match="STEP is searched in one process"):
        CliRunner().invoke(
            plan_command, ["step.py:build", "--processes", "2"], standalone_mode=False, catch_exceptions=False
        )


def test_the_command_refuses_in_sentences(folder):
    result = run(folder, "--json", "--without", "alik")
    assert result.return_value == 1
    assert "did you mean 'alike'" in json.loads(result.output)["error"]
    listed = CliRunner().invoke(plan_command, ["--principles", "--json"], standalone_mode=False)
    assert "bounds" in {p["name"] for p in json.loads(listed.output)}


def test_the_command_writes_the_search_to_explore(folder, tmp_path):
    page, dot, wrong = tmp_path / "search.html", tmp_path / "search.dot", tmp_path / "search.pdf"
    facts = json.loads(run(folder, "--json", "--evaluations", "100", "--explore", str(page)).output)
    text = page.read_text()
    assert f",{facts['iteration_s']!r}\"" in text  # the curve ends at the plan found
    assert 'data-picture="search-tree"' in text and "<script" not in text
    run(folder, "--json", "--evaluations", "100", "--explore", str(dot))
    assert dot.read_text().startswith("digraph search {")
    result = run(folder, "--json", "--evaluations", "100", "--explore", str(wrong))
    assert result.return_value == 1 and ".html or .txt" in json.loads(result.output)["error"]
