"""The layers of a step, and what a fragment does layer by layer, with a name that another trace gives too.

A layer is a stretch of the forward between two places where the modules change: a block of a
transformer, an embedding, a head. Its backward and update belong to it as they would to a stage cut
there, so that a stage's work is the sum of its layers' work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from hetjax.ir.graph import Aval, Graph, Literal, Ref
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.plan import Cut
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.passes.cost.program_price import OpWork
from hetjax.passes.cutting import Candidate, cut_candidates
from hetjax.passes.op_kinds import BACKWARD, CLONE, FORWARD, ONCE, UPDATE
from hetjax.passes.placement import place

# A stretch with less than this share of the forward's work and of the parameters joins its neighbour.
_LEAST = 0.01
_PHASES = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "update"}


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A stretch of the forward.

    Attributes:
      name: the module's path, as deep as tells layers apart.
      first: where it starts; None for the first layer.
      op: position in `Graph.ops` of its first forward op; 0 for the first layer.
    """

    name: str
    first: Cut | None
    op: int


@dataclasses.dataclass(frozen=True)
class LayerMap:
    """Which layer and phase each op belongs to.

    Attributes:
      layers: in order.
      layer_of, phase_of: by the first ref an op defines; ops that run in every layer that needs
        them, or once before the microbatches, have neither.
    """

    layers: tuple[Layer, ...]
    layer_of: Mapping[Ref, int]
    phase_of: Mapping[Ref, str]


@dataclasses.dataclass(frozen=True)
class Segment:
    """What a fragment does for one layer in one phase.

    Attributes:
      layer: the layer's name.
      phase: "forward", "backward" or "update".
      ops: in order.
      signature: equal for equal work, in any trace.
    """

    layer: str
    phase: str
    ops: tuple[OpWork, ...]
    signature: str


def step_layers(graph: Graph, micro: Microbatching) -> tuple[Layer, ...]:
    """Returns the layers of a labelled step; at least one."""
    candidates = cut_candidates(graph, micro)
    forward = [op.block for op in graph.ops if op.region == "forward" and op.block]
    depth = _depth(forward)
    name = lambda block: _shorten(block, depth)  # noqa: E731
    edges: list[tuple[str, Candidate | None]] = [(name(forward[0]) if forward else "", None)]
    for c in candidates.places:
        # What a parent module does between its children goes with the child before it.
        here = name(c.cut.block)
        if here != edges[-1][0] and here.count("/") >= min(depth, edges[-1][0].count("/")):
            edges.append((here, c))
    return tuple(_merged(graph, edges, candidates.total_flops, name))


def _merged(graph: Graph, edges: list[tuple[str, Candidate | None]], total_flops: int, name) -> list[Layer]:
    """Returns the layers with stretches of next to no work and no parameters joined to the next one."""
    starts = [c.flops_before if c else 0 for _, c in edges]
    flops = [b - a for a, b in zip(starts, [*starts[1:], total_flops])]
    held = _parameter_bytes(graph, name)
    most = max(1, sum(held.values()))
    out: list[Layer] = []
    waiting: Candidate | None = None  # where a small stretch began that the next layer takes in
    open_ = False
    for (label, c), n in zip(edges, flops):
        start = waiting if open_ else c
        if n < _LEAST * total_flops and held.get(label, 0) < _LEAST * most:
            waiting, open_ = start, True
            continue
        out.append(Layer(label, start.cut if start else None, start.op if start else 0))
        waiting, open_ = None, False
    return out or [Layer(edges[0][0], None, 0)]


def _parameter_bytes(graph: Graph, name) -> dict[str, int]:
    """Returns the bytes of state leaves that each layer's forward reads first."""
    state = {a.ref for a in graph.inputs if a.role == "state" and graph.avals[a.ref].ndim}
    out: dict[str, int] = {}
    for op in graph.ops:
        if op.region == "forward" and op.block:
            for r in op.refs:
                if r in state:
                    state.discard(r)
                    label = name(op.block)
                    out[label] = out.get(label, 0) + graph.avals[r].nbytes
    return out


def _shorten(block: str, depth: int) -> str:
    """Returns the path down to a depth, and the number with it where that is a list: "blocks/3"."""
    parts = block.split("/")
    numbered = len(parts) > depth + 1 and parts[depth + 1].isdigit()
    return "/".join(parts[: depth + 1 + numbered])


def _depth(blocks: Sequence[str]) -> int:
    """Returns the depth at which modules repeat; where none do, the least with three names."""
    deepest = max((b.count("/") for b in blocks), default=0)
    fallback = None
    for depth in range(deepest + 1):
        names = {_shorten(b, depth) for b in blocks}
        if len({re.sub(r"\d+", "#", n) for n in names}) < len(names):
            return depth
        if fallback is None and len(names) >= 3:
            fallback = depth
    return deepest if fallback is None else fallback


def layer_map(graph: Graph, micro: Microbatching, layers: Sequence[Layer]) -> LayerMap:
    """Returns which layer and phase each op of the step belongs to."""
    cuts = [layer.op for layer in layers[1:]]
    placement = place(graph, micro, len(layers), cuts)
    layer_of, phase_of = {}, {}
    for i, op in enumerate(graph.ops):
        kind = placement.kinds[i]
        if kind in (ONCE, CLONE) or not placement.stages[i] or not op.outputs:
            continue
        layer_of[op.outputs[0]] = placement.stages[i][0]
        phase_of[op.outputs[0]] = _PHASES[kind]
    return LayerMap(tuple(layers), layer_of, phase_of)


def segments(
    program: Program, fragment: Fragment, ops: Sequence[OpWork], layers: LayerMap
) -> list[Segment]:
    """Returns a fragment layer by layer.

    Args:
      program: what it belongs to.
      fragment: its ops have costs.
      ops: from `fragment_ops`.
      layers: of the step the program was made of.
    """
    groups: dict[tuple[int, str], list[OpWork]] = {}
    loose: list[OpWork] = []  # ops of no layer: the next op that has one takes them
    last: tuple[int, str] | None = None
    for work in ops:
        key = layers.layer_of.get(work.op.outputs[0]) if work.op.outputs else None
        if key is None:
            loose.append(work)
            continue
        last = (key, layers.phase_of[work.op.outputs[0]])
        groups.setdefault(last, []).extend(loose)
        groups[last].append(work)
        loose = []
    if loose:
        groups.setdefault(last or (0, "update"), []).extend(loose)
    mesh = program.meshes[fragment.stage]
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    specs = {p.ref: p.spec for p in fragment.inputs if p.ref < len(program.feeds) and any(p.spec)}
    return [
        Segment(
            layers.layers[layer].name,
            phase,
            tuple(work),
            signature(
                phase,
                [w for w in work if w.op.outputs and w.op.outputs[0] in layers.layer_of],
                avals,
                specs,
                mesh.axes,
            ),
        )
        for (layer, phase), work in groups.items()
    ]


def signature(
    phase: str,
    ops: Sequence[OpWork],
    avals: Sequence[Aval],
    specs: Mapping[Ref, Spec],
    axes: Sequence[tuple[str, int]],
) -> str:
    """Returns a name for what ops do on a mesh: equal ops on equal types, split equally.

    Args:
      phase: of the segment.
      ops: in order.
      avals: type of each ref.
      specs: of the state leaves that are split.
      axes: the mesh.
    """
    number: dict[Ref, int] = {}

    def local(r: Ref) -> str:
        if r in number:
            return f"%{number[r]}"
        number[r] = len(number)
        spec = f" {specs[r]}" if r in specs else ""
        return f"%{number[r]}:{avals[r]}{spec}"

    digest = hashlib.sha256(f"{phase} {tuple(axes)}".encode())
    for work in ops:
        op = work.op
        read = [repr(a) if isinstance(a, Literal) else local(a) for a in op.inputs]
        made = [local(r) for r in op.outputs]
        digest.update(f"{op.primitive} {read} {made} {op.params!r}\n".encode())
    return digest.hexdigest()[:24]
