"""What every op is to the schedule: before the microbatches, in each of them, or after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetjax.ir.graph import Graph, Op, Ref, definitions
from hetjax.ir.microbatching import Microbatching
from hetjax.passes.prover.analysis import is_parameter

# What an op is to the schedule:
#   once      before the microbatches, at full batch, on every stage that needs it
#   clone     cheap and free of parameters: repeated inside every fragment that needs it
#   forward, backward   per microbatch
#   update    after the microbatches
ONCE, CLONE, FORWARD, BACKWARD, UPDATE = "once", "clone", "forward", "backward", "update"
PHASE = {FORWARD: 0, BACKWARD: 1, UPDATE: 2}

# Ops that make constants of numbers.
CONSTANT_MAKERS = frozenset({
    "add", "broadcast_in_dim", "convert_element_type", "div", "eq", "ge", "gt", "iota", "le", "lt", "max", "min",
    "mul", "ne", "neg", "reshape", "select_n", "squeeze", "sub", "transpose",
})


def parameter_refs(graph: Graph) -> frozenset[Ref]:
    """Returns the inputs that count as parameters, as the prover sees them."""
    return frozenset(a.ref for a in graph.inputs if is_parameter(a, graph.avals[a.ref]))


def depends_on(graph: Graph, sources: Iterable[Ref]) -> list[bool]:
    """Returns, per op, whether it reads one of `sources` through any number of ops."""
    reached = set(sources)
    out = []
    for op in graph.ops:
        hit = any(r in reached for r in op.refs)
        if hit:
            reached.update(op.outputs)
        out.append(hit)
    return out


def classify(graph: Graph, micro: Microbatching) -> list[str]:
    """Returns the kind of every op."""
    types, parametric = micro.types, depends_on(graph, parameter_refs(graph))
    backward_refs: set[Ref] = set()
    kinds: list[str] = []
    for i, op in enumerate(graph.ops):
        of = [types[r] for r in op.outputs]
        if any(t.kind == "U" for t in of) or any(r in micro.resliced for r in op.outputs):
            kind = UPDATE
        elif any(r in micro.hoisted for r in op.outputs) or all(t.kind == "Z" or (t.kind == "R" and not t.power) for t in of):
            kind = ONCE
        elif not parametric[i]:
            kind = CLONE
        elif op.region == "backward" or any(r in backward_refs for r in op.refs):
            kind = BACKWARD
        else:
            kind = FORWARD
        if kind == BACKWARD:
            backward_refs.update(op.outputs)
        kinds.append(kind)
    if micro.resliced:
        _before_the_head(graph, micro, kinds)
    _repeat_constants(graph, micro, kinds)
    # A step-level op that no microbatch needs (weight decay, a learning rate) waits for the update, or its result would be held through the whole step.
    defined = definitions(graph)
    early = [k in (FORWARD, BACKWARD) for k in kinds]
    for i in reversed(range(len(kinds))):
        if early[i] or (kinds[i] == ONCE and graph.ops[i].outputs and _hoisted(graph.ops[i], micro)):
            early[i] = True
            for r in graph.ops[i].refs:
                if r in defined:
                    early[defined[r]] = True
    kinds = [UPDATE if k == ONCE and not early[i] else k for i, k in enumerate(kinds)]
    if micro.num_microbatches == 1:  # a callback that gives values runs once, on however many stages they are read
        told: set[Ref] = set()
        for i, op in enumerate(graph.ops):
            if kinds[i] in (ONCE, CLONE) and op.outputs and (acts(op) or told.intersection(op.refs)):
                kinds[i] = FORWARD if early[i] else UPDATE
                told.update(op.outputs)
    return kinds


def _before_the_head(graph: Graph, micro: Microbatching, kinds: list[str]) -> None:
    """Makes forwards of the backward's ops that a loss head at full batch reads, as it runs before all backwards."""
    wanted = set(micro.resliced)
    for i in reversed(range(len(kinds))):
        if wanted.intersection(graph.ops[i].outputs):
            wanted.update(graph.ops[i].refs)
            if kinds[i] == BACKWARD:
                kinds[i] = FORWARD


def _repeat_constants(graph: Graph, micro: Microbatching, kinds: list[str]) -> None:
    """Makes clones of what is made of nothing (a broadcast number, an iota).

    Made once, it would be held in memory and read from there by every fragment, and XLA could not see
    that it is a constant.
    """
    from_nothing: set[Ref] = set()
    for i, op in enumerate(graph.ops):
        made_here = op.primitive in CONSTANT_MAKERS and all(r in from_nothing for r in op.refs)
        if kinds[i] == ONCE and made_here and not _hoisted(op, micro):
            kinds[i] = CLONE
            from_nothing.update(op.outputs)


def _hoisted(op: Op, micro: Microbatching) -> bool:
    return any(r in micro.hoisted for r in op.outputs)


def rounds_of(graph: Graph, kinds: Sequence[str]) -> list[int]:
    """Returns the round of each op: how often the step has gone from update back to forward before."""
    where: dict[Ref, tuple[int, int]] = {}
    out = []
    for op, kind in zip(graph.ops, kinds):
        if kind not in PHASE:
            out.append(0)
            continue
        rnd, phase = 0, PHASE[kind]
        for r in op.refs:
            if r in where:
                before = where[r]
                rnd = max(rnd, before[0] + (before[1] > phase))
        out.append(rnd)
        for r in op.outputs:
            where[r] = (rnd, phase)
    return out


def acts(op: Op) -> bool:
    """Returns whether an op has an effect, as a print or a callback has: it runs once, and is not repeated."""
    return op.eqn is not None and bool(op.eqn.effects)
