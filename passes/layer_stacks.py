"""Which scans of a step are loops over layers, and which belong together."""

from __future__ import annotations

import dataclasses

from hetjax.ir.graph import Graph, Op, Ref
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.prover.needs import is_parameter


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Layers that scans run through, forward and backward.

    Attributes:
      length: number of layers.
      scans: positions in `Graph.ops` of all scans over these layers, ascending.
      forward: those that go through them first.
      leaves: refs of the state leaves whose rows are these layers'.
    """

    length: int
    scans: tuple[int, ...]
    forward: tuple[int, ...]
    leaves: frozenset[Ref]


def layer_stacks(graph: Graph) -> tuple[LayerStack, ...]:
    """Returns the stacks of layers of a labelled graph, in order of their first scan.

    A scan is over layers where what it scans through is parameters and nothing of the batch, and what
    it carries comes from the batch. A scan over time scans through the batch; its backward through
    what the forward kept of it. The backward of a scan over layers reads what its forward stacked.
    """
    params = {a.ref for a in graph.inputs if is_parameter(a, graph.avals[a.ref])}
    batch = {a.ref for a in graph.inputs if a.role == "batch"}
    parametric, dependent = set(params), set(batch)
    stack_of: dict[Ref, int] = {}  # values with a row per layer, by number of their stack
    scans: list[list[int]] = []
    forward: list[list[int]] = []
    joined: list[int] = []

    def root(k: int) -> int:
        while joined[k] != k:
            k = joined[k]
        return k

    for i, op in enumerate(graph.ops):
        xs = _scanned(op)
        if xs and dict(op.params)["length"] > 1 and op.region in ("forward", "backward", "update"):
            known = {root(stack_of[r]) for r in xs if r in stack_of}
            stacked = [r for r in xs if r in parametric and r not in dependent]
            carries = any(r in dependent for r in op.refs if r not in xs)
            own = op.region == "forward" and stacked and carries and not any(r in dependent for r in xs)
            if known or own:
                if not known:
                    joined.append(len(joined))
                    scans.append([])
                    forward.append([])
                    known = {len(joined) - 1}
                first = min(known)
                for k in known - {first}:
                    joined[k] = first
                scans[first].append(i)
                if own:
                    forward[first].append(i)
                num_carry = op.param("num_carry")
                stack_of.update((r, first) for r in (*stacked, *op.outputs[num_carry:]))
        if any(r in parametric for r in op.refs):
            parametric.update(op.outputs)
        if any(r in dependent for r in op.refs):
            dependent.update(op.outputs)
        if len(op.refs) == 1 and op.refs[0] in stack_of and op.primitive in ("convert_element_type", "copy"):
            stack_of[op.outputs[0]] = stack_of[op.refs[0]]
    state = {a.ref for a in graph.inputs if a.role == "state"}
    followers = follow_updates(graph, {r: root(k) for r, k in _before(graph, stack_of).items() if r in state})
    out = []
    for k in range(len(joined)):
        if root(k) != k:
            continue
        members = [j for j in range(len(joined)) if root(j) == k]
        positions = sorted(i for j in members for i in scans[j])
        length = int(graph.ops[positions[0]].param("length"))
        leaves = frozenset(
            r for r, j in followers.items()
            if r in state and j == k and graph.avals[r].shape[:1] == (length,)
        )
        out.append(LayerStack(length, tuple(positions), tuple(sorted(i for j in members for i in forward[j])), leaves))
    return tuple(out)


def _scanned(op: Op) -> list[Ref]:
    """Returns the refs a scan goes through, [] for other ops."""
    if op.primitive != "scan" or op.eqn is None:
        return []
    first = int(op.param("num_consts")) + int(op.param("num_carry"))
    return [a for a in op.inputs[first:] if isinstance(a, int)]


def _before(graph: Graph, stack_of: dict[Ref, int]) -> dict[Ref, int]:
    """Adds the values that stacked values were cast from."""
    out = dict(stack_of)
    for op in reversed(graph.ops):
        if op.primitive in ("convert_element_type", "copy") and op.outputs[0] in out and op.refs:
            out.setdefault(op.refs[0], out[op.outputs[0]])
    return out
