"""The search explorer: what it draws is read back and is what the search left behind."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

from hetjax import notebook
from hetjax.emit.dot import search_dot
from hetjax.passes.search.result import SearchTree
from hetjax.render import search_view


def parsed(picture):
    return ElementTree.fromstring(f"<div>{picture.body}</div>")


def test_the_curve_is_every_best_plan_with_the_bound_below(found):
    lines = {
        e.attrib["data-series"]: [
            tuple(map(float, p.split(","))) for p in e.attrib["data-points"].split()
        ]
        for e in parsed(notebook.search(found)).iter()
        if "data-series" in e.attrib
    }
    steps = [(float(i.evaluations), i.value) for i in found.improvements]
    assert lines["best so far"] == [*steps, (float(found.evaluations), found.value)]
    assert {v for _, v in lines["lower bound"]} == {found.lower_bound}
    assert found.lower_bound <= found.value == found.improvements[-1].value


def test_the_tree_shows_what_the_search_knows_of_its_nodes(found):
    picture = parsed(notebook.search(found))
    rows = [e for e in picture.iter() if "data-node" in e.attrib]
    assert 0 < len(rows) <= search_view.MAX_NODES + search_view.MAX_CHILDREN < len(found.tree)
    for row in rows:
        n = found.tree[int(row.attrib["data-node"])]
        assert int(row.attrib["data-visits"]) == n.visits
        assert row.attrib.get("data-best") == (None if n.best is None else repr(n.best))
        cells = [x.text or "" for x in row.find("span")]
        assert cells[0] == f"{n.visits:,}" and cells[2] == f"{n.prior:.3f}"
        assert cells[1] == ("" if n.value is None else f"{n.value:.3f}")
        text = "".join(row.itertext())
        assert n.label in text and (n.pruned in text or n.pruned == search_view.SETTLED)
    why = {found.tree[int(r.attrib["data-node"])].pruned.partition(":")[0] for r in rows}
    assert "bounds" in why
    # Of what is not shown it is said how much there is.
    counted = re.findall(r"… and ([\d,]+) decisions? more", "".join(picture.itertext()))
    assert sum(int(n.replace(",", "")) for n in counted) > 0


def test_the_tree_is_open_down_to_the_best_plan(found):
    top, at = search_view.best_lines(found.tree)[0]
    assert top == min(n.best for n in found.tree if n.best is not None)
    path = set()
    while at >= 0:
        path.add(at)
        at = found.tree[at].parent
    opened = set()
    for e in parsed(notebook.search(found.tree)).iter("details"):
        head = e.find("summary")
        if "data-node" in head.attrib and "open" in e.attrib:
            opened.add(int(head.attrib["data-node"]))
    below = found.tree.children()
    assert opened == {i for i in path if below[i]}


def test_what_a_principle_ruled_out_is_shown_with_its_reason(found):
    root = dataclasses.replace(found.tree[0], pruned="")
    never = dataclasses.replace(
        root, parent=0, label="x9", visits=0, best=None, value=None, pruned="dense-inside: too slow"
    )
    seen = dataclasses.replace(root, parent=0, label="x1", best=2.0)
    picture = notebook.search(SearchTree((root, seen, never), unit=""))
    assert "x9 — dense-inside: too slow" in re.sub(r"<[^>]+>", "", picture.body)
    assert "1 ruled out by a principle" in picture.title and "2 s" not in picture.body


def test_the_result_and_the_tree_show_themselves(found):
    for value in (found, found.tree):
        html = value._repr_html_()
        ElementTree.fromstring(html)
        assert "<script" not in html and len(html.encode()) < 300_000
        text = value._repr_mimebundle_()["text/plain"]
        assert "search tree" in text and len(text) < 10_000


def test_graphviz_has_the_most_visited_nodes_and_what_leads_to_them(found, tmp_path):
    text = search_dot(found.tree, most=40)
    nodes = [int(n) for n in re.findall(r"^  n(\d+) \[", text, re.M)]
    edges = [(int(a), int(b)) for a, b in re.findall(r"^  n(\d+) -> n(\d+);", text, re.M)]
    assert nodes == list(range(40))
    assert edges == [(found.tree[i].parent, i) for i in range(1, 40)]
    notebook.save_dot(found, tmp_path / "search.dot")
    assert (tmp_path / "search.dot").read_text().startswith("digraph search {")
