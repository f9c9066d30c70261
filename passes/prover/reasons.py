"""Puts a refusal into words: the op, the module it belongs to, the line, and what it does to examples."""

from __future__ import annotations

import dataclasses

from hetjax.ir.graph import Graph, Op, subgraphs
from hetjax.ir.microbatching import Refusal
from hetjax.passes.prover.batch_types import Untypable


def inner_op(op: Op, trail: tuple[tuple[int, int], ...]) -> Op:
    """Returns the op that a trail through nested programs ends at, or the last one found on the way."""
    for number, position in trail:
        nested = list(subgraphs(op))
        if number >= len(nested) or position >= len(nested[number].ops):
            return op
        inner = nested[number].ops[position]
        op = inner if inner.source or not op.source else _placed(inner, op)
    return op


def _placed(inner: Op, outer: Op) -> Op:
    return dataclasses.replace(inner, source=outer.source, block=inner.block or outer.block)


def place(op: Op) -> str:
    """Returns "at train.py:41 in Transformer/block_3/attn", as far as it is known."""
    at = f" at {op.source}" if op.source else ""
    within = f" in {op.block}" if op.block else ""
    return at + within


def sentence_for_sum(graph: Graph, at: int) -> str:
    """Returns where a sum over the batch was taken."""
    op = graph.ops[at]
    return f"the sum or mean over the batch is taken by '{op.primitive}'{place(op)}"


def refusal_at(graph: Graph, at: int, error: Untypable, reader: int | None) -> Refusal:
    """Returns the refusal of the op at position `at`.

    Args:
      graph: the full graph.
      at: the op that cannot be split.
      error: why.
      reader: the op of the forward or backward that needs its result per example, where the first
        could have waited for the whole batch.
    """
    outer = graph.ops[at]
    op = inner_op(outer, error.trail)
    nested = f" (inside '{outer.primitive}'{place(outer)})" if error.trail else ""
    reason = f"'{op.primitive}'{place(op)}{nested}: {error.reason}"
    if reader is not None:
        user = graph.ops[reader]
        reason += (
            f"; single examples need the result again in '{user.primitive}'{place(user)}, as batch "
            "normalisation and other batch-wise statistics do"
        )
    return Refusal(reason, at, op.primitive, op.block or outer.block, op.source or outer.source)
