"""Many ops in few lines: by region, then by module, equal modules once, then the first ops of each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from hetjax.ir.graph import REGIONS, Aval, Op
from hetjax.ir.text import print_op
from hetjax.render.markup import Markup, fold, tag
from hetjax.render.units import human_count, plural

MAX_LINE = 150
MAX_GROUPS = 120


@dataclasses.dataclass(frozen=True)
class Group:
    """Ops of one module, or of several modules that do the same.

    Attributes:
      region: of all of them.
      blocks: module paths, in order; () for ops of no module.
      ops: of the first module.
    """

    region: str
    blocks: tuple[str, ...]
    ops: tuple[Op, ...]

    @property
    def num_ops(self) -> int:
        return len(self.ops) * max(1, len(self.blocks))

    @property
    def flops(self) -> int:
        return sum(op.cost.flops for op in self.ops if op.cost is not None) * max(
            1, len(self.blocks)
        )

    def __str__(self) -> str:
        if not self.blocks:
            return "no module"
        if len(self.blocks) == 1:
            return self.blocks[0]
        return f"{self.blocks[0]} … {self.blocks[-1].rpartition('/')[2]} ({len(self.blocks)} alike)"


def groups_of(ops: Sequence[Op], avals: Sequence[Aval]) -> list[Group]:
    """Returns the ops by region and module, in order; modules that do the same are one group."""
    depth = _depth(ops)
    found: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        found.setdefault((op.region, "/".join(op.block.split("/")[:depth])), []).append(op)
    alike: dict[tuple[str, tuple], tuple[list[str], list[Op]]] = {}
    for (region, block), members in found.items():
        # Two modules do the same if their ops do, whatever their values are called.
        does = tuple((op.primitive, tuple(avals[r] for r in op.outputs)) for op in members)
        blocks, _ = alike.setdefault((region, does if block else (block,)), ([], members))
        if block:
            blocks.append(block)
    out = [
        Group(region, tuple(blocks), tuple(members))
        for (region, _), (blocks, members) in alike.items()
    ]
    order = {r: i for i, r in enumerate(REGIONS)}
    return sorted(out, key=lambda g: order.get(g.region, -1))


def _depth(ops: Sequence[Op]) -> int:
    """Returns how much of a module path tells the model's parts apart: one level below what all share."""
    paths = {op.block for op in ops if op.block}
    for depth in range(1, 9):
        if len({"/".join(p.split("/")[:depth]) for p in paths}) > 1:
            return depth
    return 9


def outline_ops(ops: Sequence[Op], avals: Sequence[Aval], budget: int) -> Markup:
    """Returns the ops folded, at most `budget` of them spelled out."""
    groups = groups_of(ops, avals)
    each = max(4, budget // max(1, len(groups)))
    parts = []
    for g in groups[:MAX_GROUPS]:
        counts = Counter(op.primitive for op in g.ops)
        most = ", ".join(f"{n} {name}" for name, n in counts.most_common(4))
        work = f", {human_count(g.flops)} FLOP" if g.flops else ""
        head = f"{g.region or 'not labelled'} · {cut(str(g))}: {plural(g.num_ops, 'op')}{work} — {most}"
        shown = [cut(print_op(op, avals)) for op in g.ops[:each]]
        if len(g.ops) > each:
            shown.append(f"… and {len(g.ops) - each:,} more")
        parts.append(fold(head, tag("pre", "\n".join(shown))))
    if len(groups) > MAX_GROUPS:
        left = groups[MAX_GROUPS:]
        words = f"… and {plural(len(left), 'group')} more, {plural(sum(g.num_ops for g in left), 'op')}"
        parts.append(tag("p", words, class_="faint"))
    return tag("div", *parts)


def outline_text(ops: Sequence[Op], avals: Sequence[Aval], most: int = 24) -> list[str]:
    """Returns one line per group, for terminals."""
    groups = groups_of(ops, avals)
    lines = [
        f"  {g.region or 'not labelled':12} {plural(g.num_ops, 'op'):>10}  {g}"
        for g in groups[:most]
    ]
    return [*lines, *([f"  … and {len(groups) - most} more groups"] if len(groups) > most else [])]


def cut(text: str) -> str:
    """Returns a line of `MAX_LINE` characters at most."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_LINE else text[: MAX_LINE - 1] + "…"
