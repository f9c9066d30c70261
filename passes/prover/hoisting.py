"""Which hoisted values are handed to the microbatches: the smallest that serve."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hetjax.ir.graph import Graph, Op, Ref, users
from hetjax.passes.prover.batch_types import Type


def with_followers(
    full: Graph, types: Mapping[Ref, Type], parametric: Collection[Ref], hoisted: Collection[Ref]
) -> frozenset[Ref]:
    """Returns the hoisted refs, and those computed from them alone that are no larger.

    Random bits are four bytes an element, the dropout mask made of them is one: computed where the
    bits are, only the mask is kept for the microbatches.

    Args:
      full: the full graph.
      types: of each ref.
      parametric: refs that depend on parameters.
      hoisted: refs that must be computed at full batch.
    """
    out, readers = set(hoisted), users(full)
    nbytes = lambda refs: sum(full.avals[r].nbytes for r in refs)  # noqa: E731

    def follows(i: int, op: Op) -> bool:
        mine = [r for r in dict.fromkeys(op.refs) if r in out]
        return (
            bool(mine) and op.eqn is not None and not op.eqn.effects
            and not any(r in parametric or r in out or types[r].kind not in "BR" or types[r].power for r in op.outputs)
            and all(readers[r] == [i] for r in mine)
            and nbytes(op.outputs) <= nbytes(mine)
        )  # fmt: skip

    returned = {r.atom for r in full.outputs}
    for i, op in enumerate(full.ops):
        if follows(i, op) and not returned & set(op.refs):
            out.update(op.outputs)
    return frozenset(out)


def handed_over(full: Graph, hoisted: Collection[Ref]) -> frozenset[Ref]:
    """Returns the hoisted refs that something else reads: what is kept through the step."""
    read = {r for op in full.ops if not any(o in hoisted for o in op.outputs) for r in op.refs}
    read.update(r.atom for r in full.outputs if isinstance(r.atom, int))
    return frozenset(read & set(hoisted))
