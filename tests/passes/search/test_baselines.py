"""Sketches, cuts with a choice of groups, the dynamic program, long steps, a declared exchange."""

from __future__ import annotations

import dataclasses
import random

import pytest

from hetjax.passes.search.baselines import on_site, randomly, sites, stopped
from hetjax.passes.search.cuts import balanced
from hetjax.passes.search.decoder import DECODER_70B, Decoder, decoder_layers
from hetjax.passes.search.dynamic import dynamic
from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import Moves
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.samples import random_problem
from hetjax.passes.search.space import Group, Options, Outline, Part, problems_of
from hetjax.passes.search.view import View


@pytest.mark.quick
def test_a_decoder_has_the_parameters_of_its_name():
    assert DECODER_70B.parameters == pytest.approx(70.6e9, rel=0.01)
    small = decoder_layers(Decoder("d", 2, 64, 4, 4, 128, 1000, 32))
    assert [c.name for c in small] == ["embed", "block0.attention", "block0.mlp", "block1.attention", "block1.mlp", "head"]
    # Two FLOPs a token for each parameter of a product.
    assert small[2].flops == 2 * 32 * 3 * 64 * 128


@pytest.mark.quick
def test_the_dynamic_program_finds_legal_plans():
    found = 0
    for seed in (1, 7, 54, 63):
        problem = random_problem(seed)
        evaluator = Evaluator(OwnJudge(problem), max_evaluations=60)
        stopped(lambda evaluator=evaluator: dynamic(evaluator))
        for m, groups, edges in evaluator._values:
            assert not list(problems_of(problem, Outline(m, groups, edges)))
        found += evaluator.best < INF
    assert found >= 3


@pytest.mark.quick
def test_a_stage_that_no_memory_is_left_for_takes_no_layers():
    problem = random_problem(63)
    judge = OwnJudge(problem)
    group = Group((Part(0, 1, 1, 2), Part(0, 1, 1, 2)))
    need, _ = judge.rooms(group, 1)[0]
    # The first part lacks memory before its first layer, the second has plenty.
    judge._rooms[group, 1] = ((need, -1.0), (need, INF))
    assert balanced(judge, 1, [[group]], 1) == ((), None, INF)


@pytest.mark.quick
def test_a_stage_recomputes_where_only_that_fits():
    problem = dataclasses.replace(random_problem(63), options=(Options(recompute=True),))
    judge = OwnJudge(problem)
    plain = Group((Part(0, 1, 1, 1),))
    again = plain.with_options(Options(recompute=True))
    groups, edges, _ = balanced(judge, 1, [[plain, again]], 1)
    assert edges == (0, problem.num_layers)
    assert groups == (plain,)
    need, _ = judge.rooms(plain, 1)[0]
    judge._rooms[plain, 1] = ((need, need[-1] / 2),)
    judge._rooms[again, 1] = ((need, INF),)
    assert balanced(judge, 1, [[plain, again]], 1)[0] == (again,)


@pytest.mark.quick
def test_many_microbatches_are_extrapolated_closely():
    problem = dataclasses.replace(random_problem(63), batch=1 << 11)
    judge = OwnJudge(problem)
    part = Group((Part(0, 1, 1, 1),))
    for stages in (1, 2):
        edges = (0, problem.num_layers) if stages == 1 else (0, 1, problem.num_layers)
        exact = judge.seconds(1 << 11, (part,) * stages, edges)
        if exact < INF:
            assert judge.seconds(1 << 11, (part,) * stages, edges, 0.0) == pytest.approx(exact, rel=1e-3)


@pytest.mark.quick
def test_compressing_costs_its_passes_and_saves_its_bytes():
    problem = next(p for p in map(random_problem, range(100)) if p.pools[0].devices >= 2)
    group = Group((Part(0, 1, 2, 1),))
    dense = OwnJudge(problem)._sync_s(group, 0, problem.num_layers)
    small = group.with_options(Options(exchange="compressed"))
    free = dataclasses.replace(problem, compressed=0.1)
    dear = dataclasses.replace(free, compress_passes=1e6)
    assert OwnJudge(free)._sync_s(small, 0, problem.num_layers) < dense
    assert OwnJudge(dear)._sync_s(small, 0, problem.num_layers) > dense


@pytest.mark.quick
def test_one_site_alone_has_only_its_devices_and_sketches_fit_the_limit():
    problem = next(p for p in map(random_problem, range(100)) if len({q.site for q in p.pools}) == 3)
    for site in sites(problem):
        alone = on_site(problem, site)
        assert {p.site for p in alone.pools} == {site}
        view = View(Evaluator(OwnJudge(alone)))
        for micro in view.moves.micros:
            assert view.sketch(micro).stages <= alone.stage_limit


@pytest.mark.quick
def test_what_is_drawn_is_legal_and_all_sorts_are():
    rng = random.Random(0)
    for seed in (7, 54, 63):
        moves = Moves(random_problem(seed), OwnJudge(random_problem(seed)).known)
        for micro in moves.micros:
            used: tuple[Group, ...] = ()
            for _ in range(3):
                listed = {mixed: set(moves.groups(micro, used, mixed)) for mixed in (False, True)}
                drawn: dict[bool, set[Group]] = {False: set(), True: set()}
                for mixed, groups in drawn.items():
                    groups.update(g for _ in range(60) if (g := moves.draw(rng, micro, used, mixed)))
                assert drawn[False] <= listed[False] and drawn[True] <= listed[True]
                assert not listed[False] or drawn[False]
                if not drawn[False]:
                    break
                used = (*used, min(drawn[False], key=lambda g: (g.devices, str(g))))


@pytest.mark.quick
@pytest.mark.parametrize("cut", [False, True])
def test_random_plans_are_legal_and_the_same_under_a_seed(cut):
    found = []
    for seed in (5, 5, 6):
        problem = random_problem(63)
        evaluator = Evaluator(OwnJudge(problem), max_evaluations=40)
        stopped(lambda evaluator=evaluator, seed=seed: randomly(evaluator, seed, cut=cut))
        plans = list(evaluator.judged())
        assert not any(list(problems_of(problem, outline)) for outline, _ in plans)
        found.append(plans)
    assert found[0] == found[1] != found[2]
