"""Every picture opened in a real browser: no error, nothing fetched, everything visible and inside its frame.

`HETJAX_SCREENSHOTS=DIR` keeps what was seen.
"""

from __future__ import annotations

import os
import pathlib

import pytest

import hetjax
from hetjax import notebook
from hetjax.notebook.reprs import picture_of
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.simulator import simulate, with_step_tasks
from hetjax.render.line_charts import Series, bars_picture, line_picture
from hetjax.render.picture import Picture
from hetjax.render.units import human_seconds
from tests.browser import HEIGHT, OUTSIDE, VISIBLE, Browser, find_browser

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason="no Chromium on this machine (apt-get install chromium): pictures were not opened",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as b:
        yield b


@pytest.fixture(scope="module")
def pictures(rehearsal, ran, dump, found) -> dict[str, Picture]:
    costs = PipelineCosts(
        (1, 1, 0.5), (2, 2, 1), 6, (0.5, 2), (0.1, 0.3), sync_s=(1, 1, 1), update_s=(1, 1, 1)
    )
    zero_bubble = simulate(with_step_tasks(schedule("zb-h1", costs), costs), costs)
    long = PipelineCosts((1.0,) * 16, (2.0,) * 16, 128, (0.1,) * 15)
    reshard = rehearsal.bundle.program.reshards[0]
    triples = [(f"plan {k}", 1.0 + 0.13 * k, 1.0 + 0.1 * k * k) for k in range(12)]
    return {
        "graph": picture_of(rehearsal.bundle.graph),
        "program": picture_of(rehearsal.bundle.program),
        "mesh": picture_of(rehearsal.bundle.program.meshes[1]),
        "bundle": picture_of(rehearsal.bundle),
        "plan": picture_of(rehearsal.plan),
        "changed_plan": picture_of(rehearsal.plan.with_(num_microbatches=2)),
        "rehearsal": picture_of(rehearsal),
        "function": picture_of(ran),
        "gantt": notebook.gantt(ran),
        "gantt_zero_bubble": notebook.gantt(zero_bubble, title="zb-h1"),
        "gantt_long": notebook.gantt(simulate(schedule("1f1b", long), long), title="1f1b"),
        "memory": notebook.memory(rehearsal),
        "cluster": notebook.cluster_map(rehearsal),
        "large_cluster": notebook.cluster_map(large_cluster()),
        "sharding": notebook.sharding(rehearsal, f"%{reshard.ref}"),
        "sharding_parameter": notebook.sharding(rehearsal, "params/block_1/down/kernel"),
        "shardings": notebook.shardings(rehearsal),
        "roofline": notebook.roofline(rehearsal),
        "compare": notebook.compare(triples),
        "stepper": notebook.stepper(dump),
        "search": notebook.search(found),
        "lines": line_picture([Series("lamb", [(0, 3.0), (50, 1.0)]), Series("slamb", [(0, 3.0), (50, 1.1)])], "loss", "step", "loss"),
        "bars": bars_picture([("a", 1.0), ("b", 0.2)], "seconds", human_seconds, lines=[("bound", 0.9)]),
    }  # fmt: skip


def large_cluster() -> hetjax.Cluster:
    text = 'name = "four sites"\n[links.wan]\nbetween = ["a", "b", "c", "d"]\nbandwidth_gbit_s = 10\nlatency_ms = 9\n'
    kinds = {"a": "a100-80g", "b": "h200", "c": "v100-16g", "d": "t4"}
    for site, kind in kinds.items():
        text += f'[[sites]]\nname = "{site}"\nlink = "infiniband-hdr"\n[[sites.nodes]]\nkind = "{kind}"\ndevices = 8\ncount = 23\n'
    return hetjax.Cluster.parse(text)


NAMES = (
    "graph", "program", "mesh", "bundle", "plan", "changed_plan", "rehearsal", "function", "gantt", "gantt_zero_bubble",
    "gantt_long", "memory", "cluster", "large_cluster", "sharding", "sharding_parameter", "shardings", "roofline",
    "compare", "stepper", "search", "lines", "bars",
)  # fmt: skip


def keep(name: str, png: bytes) -> None:
    folder = os.environ.get("HETJAX_SCREENSHOTS")
    if folder:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        (pathlib.Path(folder) / f"{name}.png").write_bytes(png)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_in_the_browser(name, pictures, browser, tmp_path):
    picture = pictures[name]
    path = tmp_path / f"{name}.html"
    picture.save(path)
    for dark in (False, True):
        seen = browser.open(path, [OUTSIDE, VISIBLE, HEIGHT, COLOURS], dark=dark)
        outside, visible, height, (text, ground) = seen.answers
        assert seen.errors == [] and seen.requests == []
        assert outside == []
        assert height > 40 and len(seen.screenshot) > 1000
        for kind, found in visible.items():
            assert all(w > 0 and h > 0 and shapes > 0 for w, h, shapes in found), kind
        assert bool(visible) == ("data-picture" in picture.body)
        # Light text on dark ground where the system is dark, and the other way round.
        assert (text > ground) == dark and abs(text - ground) > 120
        keep(f"{name}{'_dark' if dark else ''}", seen.screenshot)


# How light the text and the ground are, from 0 to 255.
COLOURS = """(() => { const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number); return (r + g + b) / 3; };
const s = getComputedStyle(document.body); return [light(s.color), light(s.backgroundColor)]; })()"""


def test_an_svg_file_alone(pictures, browser, tmp_path):
    path = tmp_path / "gantt.svg"
    pictures["gantt"].save(path)
    seen = browser.open(
        path,
        ["document.querySelectorAll('rect').length", "document.querySelector('title').textContent"],
    )
    assert seen.errors == [] and seen.requests == []
    assert seen.answers[0] == pictures["gantt"].body.count("<rect")
    keep("svg_file", seen.screenshot)


def test_the_stepper_opens_a_pass_without_script(pictures, browser, tmp_path):
    path = tmp_path / "stepper.html"
    pictures["stepper"].save(path)
    shown = "[...document.querySelectorAll('[data-pass]')].filter(e => e.offsetHeight > 0).map(e => e.dataset.pass)"
    choose = "[...document.querySelectorAll('.hj-step>label')].find(e => e.textContent.includes('insert-reshards')).click()"
    seen = browser.open(path, [shown, choose, shown])
    assert len(seen.answers[0]) == 1 and seen.answers[2] == ["insert-reshards"]
    assert seen.errors == []


def test_the_search_tree_opens_without_script(pictures, browser, tmp_path):
    path = tmp_path / "search.html"
    pictures["search"].save(path)
    seen = "[...document.querySelectorAll('[data-node]')].filter(e => e.checkVisibility()).length"
    choose = "document.querySelector('.hj-tree details:not([open])>summary').click()"
    before, _, after = browser.open(path, [seen, choose, seen]).answers
    assert 0 < before < after


def test_two_pictures_on_one_page_keep_their_hatches(pictures, browser, tmp_path):
    path = tmp_path / "two.html"
    blocks = [pictures[n]._repr_html_() for n in ("gantt", "gantt_zero_bubble", "memory")]
    path.write_text("<!doctype html><meta charset='utf-8'>" + "".join(blocks))
    unique = "(() => { const all = [...document.querySelectorAll('pattern')].map(p => p.id); return all.length == new Set(all).size; })()"
    known = "[...document.querySelectorAll('[fill^=url]')].every(e => document.querySelector(e.getAttribute('fill').slice(4, -1)))"
    assert browser.open(path, [unique, known]).answers == [True, True]


def test_the_browser_tells_of_what_is_wrong(browser, tmp_path):
    """The checks above can fail: an error, a request and text outside its frame are seen."""
    path = tmp_path / "wrong.html"
    path.write_text(
        "<!doctype html><img src='missing.png'><script>console.error('no')</script>"
        "<svg class='hj-svg' data-picture='x' width='50' height='20'><text x='40' y='12'>far too long a text</text></svg>"
    )
    seen = browser.open(path, [OUTSIDE])
    assert any("no" in e for e in seen.errors) and seen.requests == [
        (tmp_path / "missing.png").as_uri()
    ]
    assert seen.answers == [["x: far too long a text"]]
