"""What of a step waits for what: parameters, the ops microbatches wait for, running statistics."""

from __future__ import annotations

from hetjax.ir.graph import Argument, Aval, Graph, Ref

# A captured array up to this size is a table (positions, class weights), not a parameter: what depends
# on it may be computed on every stage. A megabyte is sent in a millisecond over ten gigabit.
TABLE_BYTES = 1 << 20

# Ops whose cost grows with a model's size: what leads to them is the model, what follows them is not.
_HEAVY = frozenset({
    "dot_general", "ragged_dot_general", "conv_general_dilated", "scan", "while", "remat2",
    "custom_vjp_call", "custom_jvp_call", "jit", "pjit", "closed_call",
})  # fmt: skip


def is_parameter(argument: Argument, aval: Aval) -> bool:
    """Returns whether an input leaf counts as trained (or frozen) parameters.

    Keys, counters, scalars and the batch do not; neither do captured arrays of at most
    `TABLE_BYTES`.
    """
    if argument.role == "batch" or not aval.is_inexact or aval.size <= 1:
        return False
    return argument.role != "const" or aval.nbytes > TABLE_BYTES


def guarded_ops(full: Graph, parameters: set[Ref]) -> tuple[list[bool], bool]:
    """Returns, per op, whether the microbatches wait for its result; and whether there is a gradient.

    With a gradient these are the ops of the backward and the forward ops it needs. Without, they are
    the ops that a heavy op needs: what follows the model (a metric of all scores) may wait for the
    whole batch, the model may not.
    """
    has_gradient = any(op.region in ("forward", "backward") for op in full.ops)
    has_backward = any(op.region == "backward" for op in full.ops)
    wanted: set[Ref] = set()
    guarded = [False] * len(full.ops)
    if not has_gradient:
        reached = set(parameters)
        heavy = [False] * len(full.ops)
        for i, op in enumerate(full.ops):
            if any(r in reached for r in op.refs):
                reached.update(op.outputs)
                heavy[i] = op.primitive in _HEAVY
    for i in reversed(range(len(full.ops))):
        op = full.ops[i]
        if not has_gradient:
            ends = heavy[i]
        elif has_backward:
            ends = op.region == "backward"
        else:
            ends = op.region == "forward"
        early = op.region != "update" or not has_gradient
        guarded[i] = ends or (early and any(r in wanted for r in op.outputs))
        if guarded[i]:
            wanted.update(op.refs)
    return guarded, has_gradient


def running_statistics(full: Graph, batch: set[Ref]) -> tuple[dict[Ref, Ref], set[int]]:
    """Finds state that the forward renews from the batch: the new value by the old, and the ops between.

    Such is an array, no scalar, whose old value is first scaled down (`decay * old + …`), and whose new
    one the backward has no part in. A sum of a metric, which only grows, is not.
    """
    backward: set[Ref] = set()
    reached = set(batch)
    decayed: dict[Ref, set[Ref]] = {a.ref: set() for a in full.inputs if a.role == "state"}
    olds: dict[Ref, set[Ref]] = {}
    for op in full.ops:
        refs = op.refs
        if op.region == "backward" or any(r in backward for r in refs):
            backward.update(op.outputs)
            continue
        if any(r in reached for r in refs):
            reached.update(op.outputs)
        found = {r for r in refs if r in decayed and op.primitive == "mul"}
        found.update(*(olds.get(r, ()) for r in refs))
        if found:
            olds.update((r, found) for r in op.outputs)
    chained = {
        result.atom: full.inputs[result.updates].ref
        for result in full.outputs
        if result.updates is not None and isinstance(result.atom, int) and result.atom in reached
        and result.atom not in backward and full.avals[result.atom].ndim
        and full.inputs[result.updates].ref in olds.get(result.atom, ())
    }
    wanted, between = set(chained), set()
    for i in reversed(range(len(full.ops))):
        op = full.ops[i]
        if any(r in wanted for r in op.outputs) and any(r in reached for r in op.outputs):
            between.add(i)
            wanted.update(op.refs)
    return chained, between
