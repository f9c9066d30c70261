"""What a program's fragments cost on a cluster: ops by roofline, collectives by link.

Collectives that XLA puts into a fragment are read off the shardings at its border:

  a product that contracts a split dimension of a parameter   all-reduce of its result
  a sum over a batch that is split over devices               all-reduce of it, each microbatch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from hetjax.ir.cluster import Cluster, DeviceKind
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Aval, Op, Ref, subgraphs
from hetjax.ir.program import Fragment, Program, Spec, StageMesh
from hetjax.passes.cost.collectives import collective_price
from hetjax.passes.cost.memory import parts_of, port_bytes, split_axes
from hetjax.passes.cost.roofline import FREE, Efficiency, Price, op_price
from hetjax.passes.cost.traffic import memory_traffic

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot")
# Ops that keep what is known of a parameter's sharding.
_LAYOUT = ("transpose", "convert_element_type", "copy", "stop_gradient", "optimization_barrier")


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentPrice:
    """What one call of a fragment costs.

    Attributes:
      compute: the ops.
      collective_s: all-reduces inside it.
    """

    compute: Price
    collective_s: float

    @property
    def seconds(self) -> float:
        return self.compute.seconds + self.collective_s


def fragment_price(
    program: Program,
    fragment: Fragment,
    cluster: Cluster,
    efficiency: Mapping[str, Efficiency] | None = None,
) -> FragmentPrice:
    """Returns the price of one call of a fragment.

    Args:
      program: what it belongs to.
      fragment: its ops have costs.
      cluster: where it runs.
      efficiency: by device kind; the platform's assumed curve where absent.

    Raises:
      PlanError: the ops have no costs, or the kind has not and does not emulate one of their dtypes.
    """
    mesh = program.meshes[fragment.stage]
    kind = cluster.kind(mesh.kind)
    curve = (efficiency or {}).get(kind.name)
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    axes = split_axes(fragment.ops, fragment.inputs)
    traffic = memory_traffic(fragment.ops, avals, [p.ref for p in fragment.outputs])
    specs: dict[Ref, Spec] = {p.ref: p.spec for p in fragment.inputs if any(p.spec)}
    compute, collective_s = FREE, 0.0
    for op, (read, written) in zip(fragment.ops, traffic):
        if op.cost is None:
            raise PlanError(f"fragment {fragment.name} has ops without costs; run annotate-costs")
        split = frozenset().union(*(axes.get(r, frozenset()) for r in op.refs))
        parts = parts_of(split, mesh)
        dtype = product_dtype(op, avals, kind)
        if dtype is None and read + written == 0:
            continue  # fused into another op, whose bytes are counted there
        try:
            price = op_price(
                kind, op.cost.flops / parts, (read + written) / parts, dtype or "f32",
                product=dtype is not None, efficiency=curve,
            )  # fmt: skip
        except PlanError as error:
            where = f" ({op.block}, {op.source})" if op.block or op.source else ""
            raise PlanError(f"stage {fragment.stage}, {op.primitive}{where}: {error}") from None
        compute = compute + price
        collective_s += _product_reduction_s(op, avals, specs, split, mesh, cluster)
    collective_s += sum(
        _axis_reduction_s("data", port_bytes(program, fragment, p, given=True), mesh, cluster)
        for p in fragment.outputs
        if p.form == "sum" and "data" in axes.get(p.ref, ())
    )
    return FragmentPrice(compute, collective_s)


def product_dtype(op: Op, avals: Sequence[Aval], kind: DeviceKind) -> str | None:
    """Returns what a matrix product computes in, or None for other ops.

    Under JAX's default precision a TPU multiplies f32 in bf16, and a GPU that has tf32 uses it.
    """
    if op.primitive not in _PRODUCTS:
        inner = (o for graph in subgraphs(op) for o in graph.ops if o.primitive in _PRODUCTS)
        nested = next(iter(inner), None)
        if nested is None:
            return None
        graph = next(g for g in subgraphs(op) if nested in g.ops)
        return product_dtype(nested, graph.avals, kind)
    dtype = next((avals[r].dtype for r in op.refs), "f32")
    if dtype == "f32" and op.param("precision") is None:
        if kind.platform == "tpu":
            return "bf16"
        return "tf32" if "tf32" in dict(kind.peak_flops) else "f32"
    return dtype


def _product_reduction_s(
    op: Op,
    avals: Sequence[Aval],
    specs: dict[Ref, Spec],
    split: frozenset[str],
    mesh: StageMesh,
    cluster: Cluster,
) -> float:
    """Returns the seconds of the all-reduce after a product; keeps `specs` up to date."""
    if op.primitive in _LAYOUT and op.refs and op.refs[0] in specs:
        spec = specs[op.refs[0]]
        order = op.param("permutation")
        specs[op.outputs[0]] = spec if order is None else tuple(spec[d] for d in order)
    if op.primitive != "dot_general":
        return 0.0
    contracting, _ = op.param("dimension_numbers", (((), ()), ((), ())))
    reduced = {
        axis
        for operand, dims in zip(op.inputs, contracting)
        if isinstance(operand, int) and operand in specs
        for d in dims
        for axis in specs[operand][d]
    }
    nbytes = avals[op.outputs[0]].nbytes / parts_of(split - reduced, mesh)
    return sum(_axis_reduction_s(axis, nbytes, mesh, cluster) for axis in sorted(reduced))


def axis_group(mesh: StageMesh, axis: str) -> tuple[tuple[int, ...], int]:
    """Returns the devices of one group along a mesh axis, and how many groups share their nodes."""
    names = [name for name, _ in mesh.axes]
    grid = np.array(mesh.devices).reshape([size for _, size in mesh.axes])
    rows = np.moveaxis(grid, names.index(axis), -1).reshape(-1, mesh.axis_size(axis))
    return tuple(int(d) for d in rows[0]), len(rows)


def _axis_reduction_s(axis: str, nbytes: float, mesh: StageMesh, cluster: Cluster) -> float:
    if mesh.axis_size(axis) < 2 or not nbytes:
        return 0.0
    group, groups = axis_group(mesh, axis)
    node = cluster.devices[group[0]].node
    members = sum(cluster.devices[d].node == node for d in mesh.devices)
    inside = sum(cluster.devices[d].node == node for d in group)
    beside = max(1, min(groups, members // max(1, inside)))
    return collective_price(cluster, "all-reduce", group, nbytes, beside=beside).seconds
