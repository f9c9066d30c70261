"""Carries what is known of state leaves to the gradients and moments they meet in the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from hetjax.ir.graph import Graph, Ref

T = TypeVar("T")


def follow_updates(graph: Graph, known: Mapping[Ref, T]) -> dict[Ref, T]:
    """Returns what is known of state leaves, carried to the values that meet them in the update.

    A gradient, a moment and a parameter of one shape meet in elementwise update ops; what holds for
    one (how it is split) should hold for all. Values of other shapes are left out.
    """
    out = dict(known)
    for result in graph.outputs:
        if result.updates is not None and isinstance(result.atom, int):
            leaf = graph.inputs[result.updates].ref
            if leaf in out and graph.avals[leaf].shape == graph.avals[result.atom].shape:
                out.setdefault(result.atom, out[leaf])
    update = [op for op in graph.ops if op.region == "update" and len(op.outputs) == 1]
    for ops in (update, update[::-1], update):
        for op in ops:
            shape = graph.avals[op.outputs[0]].shape
            same = [r for r in (*op.refs, *op.outputs) if graph.avals[r].shape == shape]
            facts = {out[r] for r in same if r in out}
            if len(facts) == 1 and len(shape) > 0:
                fact = facts.pop()
                for r in same:
                    out.setdefault(r, fact)
    return out
