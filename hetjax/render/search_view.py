"""A search to explore: the best plan over time with the bound, the best lines, and the tree to open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hetjax.passes.search.result import SETTLED, SearchResult, SearchTree, TreeNode
from hetjax.passes.search.space import PLAIN
from hetjax.render.axes import plain
from hetjax.render.line_charts import Series, line_picture
from hetjax.render.markup import Markup, fold, join, table, tag
from hetjax.render.picture import Picture, stack
from hetjax.render.units import human_bytes, human_seconds, plural

# What one picture holds at most; per node, the likeliest visited decisions and some that were ruled out.
MAX_NODES, MAX_CHILDREN, MAX_PRUNED, MAX_LINES = 360, 8, 3, 6
_LONG = 96
_LEGEND = (
    "value: mean, over what was found below, of the best known over it; prior: what the principles gave it; "
    "x3: so many stages of the kind before; 0 2 6: the layers at which stages begin, and the end"
)


def search_picture(found: SearchResult) -> Picture:
    """Returns what a search found, how it came there, and the tree it leaves."""
    words = _words(found.tree.unit)
    share = "proved best" if found.proved else f"gap to the bound {found.gap:.1%}"
    title = (
        f"search: {words(found.value)} a step, at least {words(found.lower_bound)}, {share}; "
        f"{plural(found.evaluations, 'plan')} judged in {human_seconds(found.search_s)}, seed {found.seed}"
    )
    head = Picture(title, tag("p", tag("b", title)), title)
    parts = [head, _stages(found), _curve(found), _history(found)]
    if found.unused:
        rows = [[str(n), kind, site, why] for n, kind, site, why in found.unused]
        left = table(["left out", "kind", "site", "why"], rows)
        parts.append(Picture("left out", left, "\n".join("  left out: " + ", ".join(r) for r in rows)))
    return stack(title, *parts, tree_picture(found.tree))


def _words(unit: str):
    return human_seconds if unit == "s" else plain


def _stages(found: SearchResult) -> Picture:
    """Returns the best plan, stage by stage, with what the judge says of each."""
    head = ["stage", "devices", "layers", "options", "forward", "backward", "peak", "in flight"]
    rows = []
    for i, (s, r) in enumerate(zip(found.stages, found.report.stages)):
        parts = (
            f"{p['replicas']} x {p['tensor']} {p['kind']} at {p['site']}, {p['examples']} each" for p in s["parts"]
        )
        chosen = [
            name if value is True else f"{name} {value}"
            for name, value in s["options"].items()
            if value != getattr(PLAIN, name)
        ]
        rows.append(
            [
                f"s{i}", " + ".join(parts), f"{s['layers'][0]} … {s['layers'][1]} ({s['num_layers']})",
                ", ".join(chosen) or "plain", human_seconds(r.forward_s), human_seconds(r.backward_s),
                f"{human_bytes(r.peak_bytes)} of {human_bytes(r.memory_bytes)}", str(r.in_flight),
            ]
        )  # fmt: skip
    title = f"best plan: {found.outline.num_microbatches} microbatches, {found.report.schedule}"
    body = join([tag("p", title), table(head, rows)])
    return Picture(title, body, "\n".join([title, *("  " + "  ".join(r) for r in rows)]))


def _curve(found: SearchResult) -> Picture:
    words = _words(found.tree.unit)
    points = [(float(i.evaluations), i.value) for i in found.improvements]
    last = float(max(found.evaluations, points[-1][0], points[0][0] + 1))
    best = Series("best so far", [*points, (last, found.value)])
    bound = Series("lower bound", [(points[0][0], found.lower_bound), (last, found.lower_bound)])
    return line_picture(
        [best, bound], "best plan so far, and what none can beat", "plans judged", "a step",
        x_words=lambda v: f"{v:,.0f}", y_words=words, steps=True, zero=False,
    )  # fmt: skip


def _history(found: SearchResult) -> Picture:
    words = _words(found.tree.unit)
    rows = [
        [
            f"{i.evaluations:,}", human_seconds(i.elapsed_s), words(i.value),
            f"{1 - found.lower_bound / i.value:.1%}", i.found_by, str(i.outline.num_stages),
            str(i.outline.num_microbatches),
        ]
        for i in found.improvements
    ]  # fmt: skip
    head = ["plans judged", "after", "a step", "gap", "found by", "stages", "microbatches"]
    body = fold(f"{plural(len(rows), 'best plan')}, one after the other", table(head, rows[-40:]))
    return Picture("history", body, "\n".join("  " + "  ".join(r) for r in rows[-8:]))


def tree_picture(tree: SearchTree) -> Picture:
    """Returns the tree, opened down to the best plan; what was little visited is only counted."""
    words, below = _words(tree.unit), tree.children()
    title = f"search tree: {plural(len(tree), 'node')}{_why_closed(tree)}"
    if not len(tree):
        return Picture(title, tag("p", tag("b", title)), title)
    lines = best_lines(tree)
    top = [[words(v), f"{tree[i].visits:,}", " › ".join(tree.line(i))] for v, i in lines]
    shown = _shown(tree, below)
    path, at = set(), lines[0][1] if lines else 0
    while at >= 0:
        path.add(at)
        at = tree[at].parent
    heading = _row(
        tag("b", "decision"), ["visits", "value", "prior", "best", "bound"], class_="hj-leaf faint"
    )
    body = join(
        [
            tag("p", tag("b", title)),
            table(["a step", "visits", "the best lines of decisions"], top),
            tag(
                "div", heading, _node(tree, 0, below, shown, path, words),
                class_="hj-tree", data_picture="search-tree",
            ),
            tag("p", _LEGEND, class_="faint"),
        ]
    )  # fmt: skip
    return Picture(title, body, "\n".join([title, *_text(tree, below, top, words)]))


def _why_closed(nodes: Iterable[TreeNode]) -> str:
    """Returns how many nodes are closed, by why."""
    kinds = Counter(
        "settled" if n.pruned == SETTLED
        else "closed by the bound" if n.pruned.startswith("bounds:")
        else "ruled out by a principle"
        for n in nodes
        if n.pruned
    )  # fmt: skip
    return "".join(f", {kinds[k]:,} {k}" for k in sorted(kinds))


def best_lines(tree: SearchTree, most: int = MAX_LINES) -> list[tuple[float, int]]:
    """Returns (best value, node) of the best ways down the tree, each to the node from where that plan was completed."""
    below = tree.children()
    ends = [
        (n.best, i)
        for i, n in enumerate(tree)
        if n.best is not None and n.best not in {tree[c].best for c in below[i]}
    ]
    return sorted(ends)[:most]


def _order(tree: SearchTree, children: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the children that were visited, most first, and those ruled out unseen, likeliest first."""
    seen = sorted((c for c in children if tree[c].visits), key=lambda c: (-tree[c].visits, c))
    never = sorted(
        (c for c in children if not tree[c].visits and tree[c].pruned),
        key=lambda c: (-tree[c].prior, c),
    )
    return seen[:MAX_CHILDREN], never[:MAX_PRUNED]


def _shown(tree: SearchTree, below: list[list[int]]) -> set[int]:
    """Returns the nodes there is room for: the way to the best plans, then the most visited."""
    shown = {0}
    for _, i in best_lines(tree):
        while i >= 0:
            shown.add(i)
            i = tree[i].parent
    # Parents come first, so that a node is looked at after the one it hangs on.
    for i in range(len(tree)):
        if len(shown) >= MAX_NODES:
            break
        if i in shown:
            shown.update(*_order(tree, below[i]))
    return shown


def _node(tree: SearchTree, i: int, below, shown: set[int], path: set[int], words) -> Markup:
    n = tree[i]
    label: list[str | None] = [n.label if len(n.label) <= _LONG else n.label[: _LONG - 1] + "…"]
    if n.pruned:
        why = "settled" if n.pruned == SETTLED else n.pruned
        label.append(tag("span", f" — {why}", class_="faint"))
    numbers = [
        f"{n.visits:,}", "" if n.value is None else f"{n.value:.3f}", f"{n.prior:.3f}",
        "" if n.best is None else words(n.best), "" if n.bound is None else words(n.bound),
    ]  # fmt: skip
    facts = {"data_node": str(i), "data_visits": str(n.visits), "data_best": n.best}
    inside = [c for c in below[i] if c in shown]
    left = [tree[c] for c in below[i] if c not in shown]
    if not below[i]:
        return _row(join(label), numbers, class_="hj-leaf", **facts)
    seen, never = [c for c in inside if tree[c].visits], [c for c in inside if not tree[c].visits]
    order = sorted(seen, key=lambda c: (-tree[c].visits, c)) + never
    rows = [_node(tree, c, below, shown, path, words) for c in order]
    if left:
        rows.append(tag("div", _left(left), class_="hj-leaf faint"))
    head = tag("summary", _numbers(numbers), *label, **facts)
    return tag("details", head, *rows, open=i in path)


def _left(left: Sequence[TreeNode]) -> str:
    visits = sum(n.visits for n in left)
    more = f"… and {plural(len(left), 'decision')} more, visited {plural(visits, 'time')}"
    return more + _why_closed(left)


def _row(label: Markup, numbers: Sequence[str], **attributes: object) -> Markup:
    return tag("div", _numbers(numbers), label, **attributes)


def _numbers(numbers: Sequence[str]) -> Markup:
    return tag("span", *(tag("span", n) for n in numbers), class_="hj-node")


def _text(tree: SearchTree, below, top: Sequence[Sequence[str]], words) -> list[str]:
    """Returns the best lines, then the tree to three levels, for terminals."""
    out = [f"  {value}  {line}" for value, _, line in top]

    def walk(i: int, depth: int) -> None:
        n = tree[i]
        best = "" if n.best is None else f", best {words(n.best)}"
        said = f"{n.label}: {plural(n.visits, 'visit')}{best}"
        out.append("  " * (depth + 1) + said + (f" ({n.pruned})" if n.pruned not in ("", SETTLED) else ""))
        if depth < 3:
            for c in _order(tree, below[i])[0][:4]:
                walk(c, depth + 1)

    walk(0, 0)
    return out[:48]
