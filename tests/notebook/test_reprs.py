"""Every value shows itself: HTML with a text beside it, small, without script or network."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import hetjax
from hetjax.demo.session import CLUSTER
from hetjax.ir.bundle import Bundle
from hetjax.ir.plan import Plan
from hetjax.notebook import reprs
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.simulator import simulate


def shown(value):
    """Returns the HTML and the text of a value, having looked for what none may have."""
    bundle = value._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    html = bundle["text/html"]
    assert html == value._repr_html_()
    assert "<script" not in html and "@import" not in html
    assert not re.findall(r"""(?:src|href)=|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)""", html)
    ElementTree.fromstring(html)  # well formed: nothing broke out of its element
    return html, bundle["text/plain"]


def values(rehearsal):
    bundle = rehearsal.bundle
    return {
        "graph": bundle.graph, "program": bundle.program, "stage": bundle.program.meshes[1], "fragment": bundle.program.fragments[0],
        "plan": rehearsal.plan, "plan's stage": rehearsal.plan.stages[1], "schedule": rehearsal.estimate.timeline,
        "cluster": rehearsal.cluster, "bundle": bundle, "estimate": rehearsal.estimate, "rehearsal": rehearsal,
        "plan alone": Plan.from_json(rehearsal.plan.to_json()), "empty": Bundle(),
    }  # fmt: skip


WORDS = {
    "graph": ["495 ops", "Model/block_0 … block_1 (2 alike)", "39 state leaves"],
    "program": ["2 stages, 8 fragments", "s0: 2 x fast at near", "x138:s0>s1"],
    "stage": ["s1: 4 x slow at far"], "fragment": ["fragment s0/prologue"],
    "plan": ["1f1b, batch 8 in 4 microbatches", "bubble", "Model/embed"], "plan's stage": ["4 x slow"],
    "schedule": ["bubble", "device 0"], "cluster": ["8 devices in 2 sites", "wan 1.25 GB/s, 2 ms"],
    "bundle": ["bubble", "8 devices", "521 ops"], "estimate": ["bubble", "activations"],
    "rehearsal": ["gap to the bound", "EUR", "s1"], "plan alone": ["1f1b"], "empty": [],
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_html_and_text_of_every_value(name, rehearsal):
    html, text = shown(values(rehearsal)[name])
    for word in WORDS[name]:
        assert word in "".join(ElementTree.fromstring(html).itertext()), word
    assert len(html) < 100_000 and (text or name == "empty")


def test_a_function_shows_its_plan_and_then_what_was_measured(ran, small_step):
    step, _, _ = small_step
    html, text = shown(hetjax.parallelize(step, cluster=str(CLUSTER)))
    assert "not planned yet" in html and "plan_for" in text
    html, _ = shown(ran)
    assert (
        "predicted and measured" in html
        and 'data-run="measured"' in html
        and 'data-picture="scatter"' in html
    )


def test_a_check_shows_every_tree_beside_its_bound(small_step):
    step, state, batch = small_step
    report = hetjax.check(
        step, state, [batch], steps=1, num_stages=2, num_microbatches=2, mesh="1,1"
    )
    html, text = shown(report)
    assert report.ok and "equal to plain jit over 1 steps (2 stages, 2 microbatches)" in text
    groups = {g["group"]: g["of_bound"] for g in report.as_dict()["groups"]}
    assert "state/params" in groups and 0 <= groups["state/params"] <= 1
    bars = {
        e.attrib["data-name"]: float(e.attrib["data-value"])
        for e in ElementTree.fromstring(html).iter()
        if "data-value" in e.attrib
    }
    assert bars == {**groups, "bound": 1.0}
    # One leaf past its bound, and the whole is not equal.
    leaf = report.steps[0].differences[0]
    past = dataclasses.replace(leaf, max_rel=2 * leaf.rtol + 1, note="made so")
    wrong = dataclasses.replace(
        report.steps[0], differences=(past, *report.steps[0].differences[1:])
    )
    unequal = dataclasses.replace(report, steps=(wrong,))
    assert not unequal.ok and "UNEQUAL" in shown(unequal)[1] and past.path in shown(unequal)[0]


def test_a_refusal_says_where(small_step):
    step, state, batch = small_step
    refused = hetjax.check(
        step, state, [batch], steps=1, num_stages=2, num_microbatches=8, mesh="1,1"
    )
    html, text = shown(refused)
    assert not refused.ok and refused.refusal is not None
    assert "refused" in text and "tests/support.py" in html


def test_a_check_of_a_value_nobody_draws():
    with pytest.raises(TypeError, match="nothing draws a dict"):
        reprs.picture_of({})


def big_step():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
            return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(50, 16)(tokens)
            for _ in range(13):
                x = Block()(x)
            return nn.Dense(50)(nn.LayerNorm()(x))

    model, optimizer = Deep(), optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = jax.eval_shape(optimizer.init, params)

    def step(state, tokens):
        params, opt_state = state

        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(
                model.apply(params, tokens), tokens
            ).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step, ((params, state), tokens)


def test_seven_thousand_ops_stay_small():
    step, args = big_step()
    r = hetjax.rehearse(
        step, str(CLUSTER), *args, options={"num_microbatches": 1, "mesh": "1,1;1,1"}
    )
    graph = r.bundle.graph
    assert len(graph.ops) > 7000
    for value in (graph, r.bundle.program, r.plan, r.bundle, r):
        html, text = shown(value)
        assert len(html.encode()) < 300_000 and len(text) < 10_000
    # Stages, then blocks, then ops: thirteen blocks that do the same are one line.
    assert "Deep/Block_0 … Block_12 (13 alike)" in shown(graph)[0]


def test_a_long_schedule_stays_small():
    costs = PipelineCosts((1.0,) * 32, (2.0,) * 32, 128, (0.1,) * 31)
    html, _ = shown(simulate(schedule("1f1b", costs), costs))
    assert len(html.encode()) < 300_000


def test_nothing_that_draws_is_imported_before_something_is_shown():
    code = (
        "import hetjax, sys, json\nfrom hetjax.ir.cluster import Cluster\nfrom hetjax.ir.plan import Plan\n"
        "print(json.dumps([m for m in sys.modules if m.startswith(('hetjax.render', 'hetjax.notebook', 'hetjax.frontend'))]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_a_plan_travels_without_its_step(rehearsal):
    plan = rehearsal.plan
    assert plan.costing is not None
    for other in (
        pickle.loads(pickle.dumps(plan)),
        copy.copy(plan),
        Plan.from_json(plan.to_json()),
    ):
        assert other == plan and other.hash == plan.hash and other.costing is None


def test_treescope_shows_one_line_and_the_picture(rehearsal):
    treescope = pytest.importorskip("treescope", reason="treescope is not installed")
    text = treescope.render_to_text(rehearsal.plan)
    assert text.startswith(str(rehearsal.plan).splitlines()[0] + "\n") and "StagePlan(" not in text
    assert len(treescope.render_to_html(rehearsal.bundle)) > 1000
