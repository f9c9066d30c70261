"""recompute-residuals: what a backward can compute again for little is not kept for it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Op, Ref, subgraphs
from hetjax.ir.plan import RECOMPUTE
from hetjax.ir.program import Fragment, Port, Program
from hetjax.passes.cost.layers import step_layers
from hetjax.passes.cutting import live_values
from hetjax.passes.residuals import residual_bytes
from hetjax.passes.split_scans import ELEMENTWISE

# Elementwise ops and those that only move values: XLA fuses them into what reads them.
CHEAP = (ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze", "transpose"}) - {
    "bessel_i0e", "bessel_i1e", "digamma", "igamma", "igamma_grad_a", "igammac", "lgamma", "polygamma",
    "regularized_incomplete_beta", "zeta",
}  # fmt: skip
MODES = tuple(m for m in RECOMPUTE if m)
_INFINITE = 1 << 62


@dataclasses.dataclass(frozen=True)
class RecomputeResiduals:
    """Keeps, of all values from which a stage's backward can be computed, those of the fewest bytes.

    Before: `s0/forward` keeps an activation, its exponential and a mask; `s0/backward` reads all three.
    After:  it keeps the activation; the backward makes the others again.
    The values kept are a minimum cut between what the stage is given and what its backward reads. What is
    made again is made where the backward first reads it.

    Attributes:
      mode: "cheap" computes elementwise ops again; "stage" anything, so that a stage keeps what it was
        given and runs its forward twice; "layer" the same layer by layer: what each layer of the model was
        given is kept, and only one layer's values are there at a time. The plan says which stages do.
    """

    name: ClassVar[str] = "recompute-residuals"
    summary: ClassVar[str] = "compute cheap residuals again in the backward instead of keeping them"
    requires: ClassVar[tuple[str, ...]] = ("program",)

    mode: str = "cheap"

    def apply(self, bundle: Bundle) -> Bundle:
        program = bundle.program
        if program is None:
            raise PassError(self.name, "needs a program; run cut-stages first")
        if self.mode not in MODES:
            raise PassError(self.name, f"mode is {self.mode!r}; it is one of {', '.join(MODES)}")
        if program.reshards or program.tasks:
            raise PassError(self.name, "must run before reshards and tasks are made")
        stages = bundle.plan.recompute_stages if bundle.plan is not None else ()
        held = frozenset()
        if self.mode == "layer":
            if bundle.graph is None or bundle.microbatching is None:
                raise PassError(self.name, "mode layer needs the graph with its microbatching, to find the layers")
            ends = {layer.op for layer in step_layers(bundle.graph, bundle.microbatching)}
            held = frozenset().union(
                *(live for op, live in live_values(bundle.graph, bundle.microbatching) if op in ends)
            )
        changed = recompute_residuals(program, everything=self.mode != "cheap", stages=stages, held=held)
        if changed is program:
            return bundle
        before, after = residual_bytes(program), residual_bytes(changed)
        told = ", ".join(f"s{s} {before[s]} -> {after[s]}" for s in sorted(before))
        return bundle.replace(program=changed).note("recompute", f"residual bytes per microbatch: {told}")


def recompute_residuals(
    program: Program, *, everything: bool = False, stages: Sequence[int] = (), held: frozenset[Ref] = frozenset()
) -> Program:
    """Returns the program with backwards that compute again what they can; the same object when none does.

    Args:
      program: fragments without specs, reshards or tasks.
      everything: whether dear ops are computed again too.
      stages: those that compute again; () for all.
      held: values that are never made again.
    """
    fragments = {f.name: f for f in program.fragments}
    for forward in program.fragments:
        backward = fragments.get(forward.name.replace("/forward", "/backward"))
        if stages and forward.stage not in stages:
            continue
        if forward.phase == "forward" and backward is not None and backward is not forward:
            pair = _recomputed(program, fragments[forward.name], backward, everything, held)
            if pair is not None:
                fragments[forward.name], fragments[backward.name] = pair
    if all(fragments[f.name] is f for f in program.fragments):
        return program
    return program.replace(fragments=tuple(fragments[f.name] for f in program.fragments))


def _recomputed(
    program: Program, forward: Fragment, backward: Fragment, everything: bool, held: frozenset[Ref]
) -> tuple[Fragment, Fragment] | None:
    made = {r: op for op in forward.ops for r in op.outputs}
    given = {p.ref: p for p in forward.inputs}
    out_ports = {p.ref: p for p in forward.outputs if p.form in ("micro", "step")}
    wanted = [p.ref for p in backward.inputs if p.ref in out_ports and p.ref in made]
    at_hand = {p.ref for p in backward.inputs} - set(wanted)
    again = {i for i, op in enumerate(forward.ops) if _may_run_again(op, everything)}
    position = {r: i for i, op in enumerate(forward.ops) for r in op.outputs}
    arguments = len(program.feeds) and max(f.argument for f in program.feeds) + 1

    def cost(ref: Ref) -> int:
        # Arguments lie on the stage anyway; what the backward reads for other reasons is there too.
        return 0 if ref in at_hand or ref < arguments else max(1, program.micro_avals[ref].nbytes)

    sources = {r: forward.ops[i].refs for r, i in position.items() if i in again and r not in held}
    kept = _cheapest_cut(wanted, sources, cost)
    if sum(map(cost, kept)) >= sum(map(cost, wanted)):
        return None
    ops, reads = _ancestors(wanted, kept, made)
    own = {r for op in backward.ops for r in op.outputs}
    ops = [op for op in ops if not all(r in own for r in op.outputs)]
    all_ops = _where_read(ops, sorted(backward.ops, key=_place))
    defined = {r for op in all_ops for r in op.outputs}
    form = next((p.form for p in forward.outputs if p.form in ("micro", "step")), "micro")
    ports = {p.ref: p for p in backward.inputs if p.ref not in wanted}
    needed = ({r for op in all_ops for r in op.refs} | {p.ref for p in backward.outputs} | reads) - defined
    for r in sorted(needed - set(ports)):
        ports[r] = given.get(r) or Port(r, form, ())
    elsewhere = {
        p.ref for f in program.fragments if f is not backward and f is not forward for p in f.inputs
    } | {r.port.ref for r in program.returns if r.port is not None}
    outputs = [p for p in forward.outputs if p.ref not in wanted or p.ref in kept or p.ref in elsewhere]
    outputs += [Port(r, form, ()) for r in sorted(kept) if r in made and r not in out_ports]
    return (
        dataclasses.replace(forward, outputs=tuple(sorted(outputs, key=lambda p: (p.ref, p.form)))),
        dataclasses.replace(
            backward, ops=tuple(all_ops),
            inputs=tuple(sorted((p for r, p in ports.items() if r in needed), key=lambda p: (p.ref, p.form))),
        ),
    )


def _may_run_again(op: Op, everything: bool) -> bool:
    if op.eqn is not None and op.eqn.effects:
        return False
    return everything or (op.primitive in CHEAP and not any(True for _ in subgraphs(op)))


def _where_read(again: Sequence[Op], ops: Sequence[Op]) -> list[Op]:
    """Returns ops in order, each of `again` before the first that reads what it makes."""
    made = {r: op for op in again for r in op.outputs}
    out: list[Op] = []
    done: set[int] = set()
    for op in ops:
        stack = [(op, False)]
        while stack:
            at, ready = stack.pop()
            if ready:
                out.append(at)
            elif id(at) not in done:
                done.add(id(at))
                stack.append((at, True))
                makers = {id(made[r]): made[r] for r in at.refs if r in made}
                stack += [(m, False) for m in sorted(makers.values(), key=_place, reverse=True)]
    return out


def _place(op: Op) -> float:
    """Orders ops by what they define: refs are numbered in order of definition."""
    return op.outputs[0] if op.outputs else max(op.refs, default=0) + 0.5


def _ancestors(wanted: Iterable[Ref], kept: set[Ref], made: Mapping[Ref, Op]) -> tuple[list[Op], set[Ref]]:
    """Returns the ops that make `wanted` from `kept`, and the kept values that are wanted themselves."""
    ops: dict[int, Op] = {}
    stack, seen, reads = list(wanted), set(), set()
    while stack:
        r = stack.pop()
        if r in seen:
            continue
        seen.add(r)
        if r in kept or r not in made:
            reads.add(r)
            continue
        ops.setdefault(id(made[r]), made[r])
        stack.extend(made[r].refs)
    return list(ops.values()), reads


def _cheapest_cut(wanted: Sequence[Ref], sources: Mapping[Ref, Sequence[Ref]], cost) -> set[Ref]:
    """Returns the values of least cost from which all `wanted` can be made.

    A minimum vertex cut by maximum flow (Dinic): every value is two nodes joined by an arc of its cost.

    Args:
      wanted: values to be had.
      sources: of what each value can be made; those without an entry can only be kept.
      cost: of keeping a value.
    """
    seen: list[Ref] = []
    stack, found = list(wanted), set(wanted)
    while stack:
        r = stack.pop()
        seen.append(r)
        for a in sources.get(r, ()):
            if a not in found:
                found.add(a)
                stack.append(a)
    number = {r: k for k, r in enumerate(seen)}
    source, sink = 2 * len(seen), 2 * len(seen) + 1
    arcs: list[list[int]] = [[] for _ in range(sink + 1)]
    to: list[int] = []
    room: list[int] = []

    def join(a: int, b: int, capacity: int) -> None:
        arcs[a].append(len(to))
        to.append(b)
        room.append(capacity)
        arcs[b].append(len(to))
        to.append(a)
        room.append(0)

    for r, k in number.items():
        join(2 * k, 2 * k + 1, cost(r))
        made_of = sources.get(r)
        if made_of is None:
            join(source, 2 * k, _INFINITE)
        else:
            for a in dict.fromkeys(made_of):
                join(2 * number[a] + 1, 2 * k, _INFINITE)
    for r in wanted:
        join(2 * number[r] + 1, sink, _INFINITE)

    def levels() -> list[int]:
        level = [-1] * (sink + 1)
        level[source] = 0
        queue = collections.deque([source])
        while queue:
            a = queue.popleft()
            for e in arcs[a]:
                if room[e] and level[to[e]] < 0:
                    level[to[e]] = level[a] + 1
                    queue.append(to[e])
        return level

    while (level := levels())[sink] >= 0:
        at = [0] * (sink + 1)
        while _push(source, sink, arcs, to, room, level, at):
            pass
    return {r for r, k in number.items() if level[2 * k] >= 0 and level[2 * k + 1] < 0}


def _push(
    source: int, sink: int, arcs: list[list[int]], to: list[int], room: list[int], level: list[int], at: list[int]
) -> bool:
    """Sends what one path of the level graph carries; returns whether there was one."""
    path: list[int] = []
    a = source
    while a != sink:
        while at[a] < len(arcs[a]):
            e = arcs[a][at[a]]
            if room[e] and level[to[e]] == level[a] + 1:
                break
            at[a] += 1
        if at[a] == len(arcs[a]):
            if a == source:
                return False
            e = path.pop()
            a = to[e ^ 1]
            at[a] += 1
            continue
        path.append(arcs[a][at[a]])
        a = to[path[-1]]
    flow = min(room[e] for e in path)
    for e in path:
        room[e] -= flow
        room[e ^ 1] += flow
    return True
