"""What Shardy makes of a fragment whose border is sharded: specs of open results, and collectives inside.

XLA runs the same propagation when it compiles the fragment, and merges some collectives afterwards.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence

from hetjax.ir import _jax
from hetjax.ir.errors import LoweringError
from hetjax.ir.exporter import export_jaxpr, to_jax_aval
from hetjax.ir.graph import Aval, Graph, Literal, Op, Ref
from hetjax.ir.program import Program, Spec
from hetjax.ir.rebuild import rebuild_equations

# Fragments that say the same are partitioned once; the blocks of a model mostly do.
_MOST_KEPT = 512
_KINDS = {
    "sdy.all_reduce": "all-reduce", "sdy.all_gather": "all-gather", "sdy.reduce_scatter": "reduce-scatter",
    "sdy.all_to_all": "all-to-all", "sdy.collective_permute": "all-to-all",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Data that the devices of a mesh exchange.

    Attributes:
      kind: one of `hetjax.passes.cost.collectives.COLLECTIVES`.
      axes: of the mesh.
      nbytes: of the whole value on each device, as `collective_price` counts them.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float


@dataclasses.dataclass(frozen=True)
class Partition:
    """A fragment, partitioned.

    Attributes:
      results: spec of each result.
      collectives: inside it.
      product_flops: of the matrix products, on one device.
    """

    results: tuple[Spec, ...]
    collectives: tuple[Collective, ...]
    product_flops: float


_known: collections.OrderedDict[str, Partition] = collections.OrderedDict()
# The module last lowered, by the ops it was lowered from: many borders are tried on one fragment.
_lowered: dict[str, tuple[object, str]] = {}


def partition(
    ops: Sequence[Op], avals: Sequence[Aval], inputs: Mapping[Ref, Spec | None],
    outputs: Mapping[Ref, Spec | None], axes: Sequence[tuple[str, int]],
) -> Partition:
    """Returns how ops are split over a mesh.

    Args:
      ops: of a fragment, in order.
      avals: type of each ref.
      inputs, outputs: spec of each value that comes in or leaves; None leaves it to the propagation.
      axes: (name, size) of the mesh.

    Raises:
      LoweringError: the ops cannot be lowered, or Shardy refuses the shardings.
    """
    key = _signature(ops, avals, inputs, outputs, axes)
    found = _known.get(key)
    if found is None:
        module = _module(ops, avals, list(inputs), list(outputs))
        found = _known[key] = _partition(module, avals, inputs, outputs, axes)
        if len(_known) > _MOST_KEPT:
            _known.popitem(last=False)
    return found


def _module(ops: Sequence[Op], avals: Sequence[Aval], inputs: Sequence[Ref], outputs: Sequence[Ref]) -> object:
    """Returns the ops as a module that may be changed."""
    key = fragment_signature(ops, avals, inputs, outputs)
    if key not in _lowered:
        built = rebuild_equations(Graph("fragment", (), tuple(ops), (), tuple(avals))).ops
        closed = export_jaxpr("fragment", built, inputs, outputs, avals)
        structs = [_jax.shaped(to_jax_aval(avals[r])) for r in inputs]
        module = _jax.lower_to_module(_jax.jaxpr_function(closed), structs)
        _lowered.clear()
        _lowered[key] = (module, str(module))
    module, text = _lowered[key]
    return _jax.module_from(text, module)


def _partition(
    module: object, avals: Sequence[Aval], inputs: Mapping[Ref, Spec | None], outputs: Mapping[Ref, Spec | None],
    axes: Sequence[tuple[str, int]],
) -> Partition:
    mesh = "[" + ", ".join(f"{json.dumps(a)}={n}" for a, n in axes) + "]"
    texts = lambda specs: [_text(spec, avals[r].ndim) for r, spec in specs.items()]  # noqa: E731
    try:
        module = _jax.partition_module(module, mesh, texts(inputs), texts(outputs))
    except ValueError as error:
        raise LoweringError(f"Shardy refuses the shardings of a fragment: {error}") from error
    results = tuple(
        spec if spec is not None else _spec(text, avals[r].ndim)
        for (r, spec), text in zip(outputs.items(), _jax.result_shardings(module))
    )
    sizes, found, flops = dict(axes), [], 0.0
    for name, shape, bits, text, contracted, sums in _jax.partitioned_ops(module):
        if contracted:
            split = [*_axes(re.search(r"sdy.sharding = (.*?)>\]", text)), *(a for t in sums for a in _moved(t))]
            flops += 2.0 * math.prod(shape) * contracted / _parts(split, sizes)
        elif name in _KINDS:  # all_slice moves nothing: every device keeps a part of what it has
            axes_moved = tuple(a for a in dict.fromkeys(_moved(text)) if sizes.get(a, 1) > 1)
            split = _axes(re.search(r"out_sharding=<@mesh, (\[.*?\])(?:, \w+=|>)", text))
            nbytes = math.prod(shape) * bits / 8 / _parts(split, sizes)
            if name == "sdy.reduce_scatter":  # counted by what goes in
                nbytes *= _parts(axes_moved, sizes)
            if axes_moved:
                found.append(Collective(_KINDS[name], axes_moved, nbytes))
    return Partition(results, tuple(found), flops)


def _moved(text: str) -> list[str]:
    """Returns the axes that a collective goes over, from its text."""
    return re.findall(r'"(\w+)"', text.split("out_sharding")[0])


def _axes(found: re.Match[str] | None) -> list[str]:
    return re.findall(r'"(\w+)"', found[1]) if found else []


def _parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(a, 1) for a in dict.fromkeys(axes))


def _text(spec: Spec | None, rank: int) -> str:
    """Returns a spec as Shardy writes it, "" for one that is open or says nothing of this rank."""
    if spec is None or len(spec) != rank:
        return ""
    return "[" + ", ".join("{" + ", ".join(json.dumps(a) for a in axes) + "}" for axes in spec) + "]"


def _spec(text: str, rank: int) -> Spec:
    found = re.search(r"\[(\{.*\})\]", text)
    dims = re.findall(r"\{([^{}]*)\}", found[1]) if found else []
    spec = tuple(tuple(re.findall(r'"(\w+)"', dim)) for dim in dims)
    return spec if len(spec) == rank else ((),) * rank


def fragment_signature(
    ops: Sequence[Op], avals: Sequence[Aval], inputs: Sequence[Ref], outputs: Sequence[Ref] = ()
) -> str:
    """Returns a name that equal ops on equal types share."""
    return _signature(ops, avals, dict.fromkeys(inputs, ()), dict.fromkeys(outputs, ()), ())


def _signature(
    ops: Sequence[Op], avals: Sequence[Aval], inputs: Mapping[Ref, Spec | None],
    outputs: Mapping[Ref, Spec | None], axes: Sequence[tuple[str, int]],
) -> str:
    """Returns a name that equal ops on equal types, with an equal border, share."""
    number: dict[Ref, int] = {}

    def local(r: Ref) -> str:
        if r in number:
            return f"%{number[r]}"
        number[r] = len(number)
        return f"%{number[r]}:{avals[r]}"

    out = hashlib.sha256(repr([(local(r), spec) for r, spec in inputs.items()]).encode())
    for op in ops:
        read = [repr(a) if isinstance(a, Literal) else local(a) for a in op.inputs]
        made = [local(r) for r in op.outputs]
        out.update(f"{op.primitive} {read} {made} {op.params!r}\n".encode())
    out.update(repr(([(local(r), spec) for r, spec in outputs.items()], tuple(axes))).encode())
    return out.hexdigest()


def exchanged_bytes(program: Program) -> float | None:
    """Returns the bytes that devices exchange inside stages in a step, by Shardy; None where it cannot tell."""
    total = 0.0
    for f in program.fragments:
        mesh = program.meshes[f.stage]
        if len(mesh.devices) == 1:
            continue
        avals = program.micro_avals if f.per_microbatch else program.avals
        inputs, outputs = ({p.ref: p.spec for p in ports} for ports in (f.inputs, f.outputs))
        try:
            found = partition(f.ops, avals, inputs, outputs, mesh.axes)
        except LoweringError:
            return None
        times = program.num_microbatches if f.per_microbatch else 1
        total += times * sum(c.nbytes for c in found.collectives)
    return total
