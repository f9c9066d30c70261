"""On which stages the update runs: arrays with the state leaf they update, scalars where they are read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hetjax.ir.graph import Graph, Op, Ref, definitions, users
from hetjax.passes.op_kinds import BACKWARD, FORWARD, UPDATE, acts


class _Sets:
    """Union-find over refs."""

    def __init__(self) -> None:
        self._parent: dict[Ref, Ref] = {}

    def find(self, ref: Ref) -> Ref:
        parent = self._parent.setdefault(ref, ref)
        while parent != ref:
            grand = self._parent.setdefault(parent, parent)
            self._parent[ref] = grand
            ref, parent = parent, grand
        return ref

    def union(self, a: Ref, b: Ref) -> None:
        self._parent[self.find(a)] = self.find(b)

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._parent


def update_stages(
    graph: Graph, kinds: Sequence[str], stage: Sequence[int], homes: dict[Ref, int],
    num_stages: int, fixed: Mapping[int, int], resliced: frozenset[Ref] = frozenset(),
) -> list[tuple[int, ...]]:
    """Places update ops: arrays with the state leaf they update, scalars wherever they are read.

    Those in `fixed` stay on the stage that it gives by their number; values in `resliced` are also pulled by
    the backwards that read them.
    """
    defined, readers = definitions(graph), users(graph)
    array = lambda r: graph.avals[r].ndim > 0  # noqa: E731
    sets = _Sets()
    for i, op in enumerate(graph.ops):
        if kinds[i] == UPDATE and i not in fixed:
            linked = [r for r in (*op.refs, *op.outputs) if array(r)]
            for a, b in itertools.pairwise(linked):
                sets.union(a, b)
            for r in linked:
                sets.find(r)
    for result in graph.outputs:  # a new leaf lives where the old one did
        if result.updates is not None and isinstance(result.atom, int) and array(result.atom):
            sets.union(result.atom, graph.inputs[result.updates].ref)
    weight: dict[Ref, dict[int, int]] = {}

    def vote(ref: Ref, at: int, nbytes: int) -> None:
        votes = weight.setdefault(sets.find(ref), {})
        votes[at] = votes.get(at, 0) + nbytes

    for ref, home in homes.items():
        if ref in sets and array(ref):
            vote(ref, home, max(1, graph.avals[ref].nbytes) << 20)
    for i, op in enumerate(graph.ops):  # values of the microbatches pull too, but weakly
        if kinds[i] in (FORWARD, BACKWARD) or i in fixed:
            for r in (*op.outputs, *(r for r in op.refs if r in resliced)):
                if r in sets and array(r):
                    vote(r, stage[i], graph.avals[r].nbytes)
    where = {root: max(votes, key=lambda s: (votes[s], -s)) for root, votes in weight.items()}
    for argument in graph.inputs:
        if argument.ref in sets and array(argument.ref):
            homes.setdefault(argument.ref, where.get(sets.find(argument.ref), 0))
    out: list[tuple[int, ...]] = [
        (stage[i],) if kinds[i] in (FORWARD, BACKWARD) or i in fixed else () for i in range(len(kinds))
    ]
    returned = {r.atom: r for r in graph.outputs if isinstance(r.atom, int)}
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if kinds[i] != UPDATE or i in fixed:
            continue
        if acts(op):
            out[i] = (num_stages - 1,)  # all on one stage, or nothing would keep their order
            continue
        anchored = [r for r in (*op.refs, *op.outputs) if array(r)]
        if anchored:
            out[i] = (where.get(sets.find(anchored[0]), 0),)
            continue
        wanted = {s for r in op.outputs for u in readers.get(r, ()) for s in out[u]}
        for r in op.outputs:
            updates = returned[r].updates if r in returned else None
            if r in returned and not wanted:
                wanted.add(_scalar_owner(graph, kinds, stage, out, op, defined, sets, where))
            elif updates is not None:
                wanted.add(homes.get(graph.inputs[updates].ref, 0))
        out[i] = tuple(sorted(wanted)) or (0,)
    return out


def _scalar_owner(
    graph: Graph, kinds: Sequence[str], stage: Sequence[int], placed: Sequence[tuple[int, ...]],
    op: Op, defined: Mapping[Ref, int], sets: _Sets, where: Mapping[Ref, int],
) -> int:
    """Returns the stage that has most of what a returned scalar is made from."""
    seen, stack, found = set(), list(op.refs), []
    while stack:
        r = stack.pop()
        if r in seen:
            continue
        seen.add(r)
        if graph.avals[r].ndim and r in sets:
            found.append(where.get(sets.find(r), 0))
        elif r in defined:
            i = defined[r]
            if kinds[i] in (FORWARD, BACKWARD):
                found.append(stage[i])
            elif len(placed[i]) == 1:  # a sum put off, on the stage of its operands
                found.append(placed[i][0])
            elif kinds[i] == UPDATE:
                stack.extend(graph.ops[i].refs)
    return max(found, default=0, key=lambda s: (found.count(s), s))
