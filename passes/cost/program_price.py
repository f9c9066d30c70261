"""What a program's fragments cost on a cluster: ops by roofline, collectives by link.

Collectives that XLA puts into a fragment are read off the shardings at its border:

  a product that contracts a split dimension of a parameter   all-reduce of its result
  a sum over a batch that is split over devices               all-reduce of it, each microbatch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Aval, Op, Ref, subgraphs
from hetjax.ir.program import Fragment, Program, Spec, StageMesh
from hetjax.passes.cost.collectives import collective_price
from hetjax.passes.cost.memory import parts_of, port_bytes, split_axes
from hetjax.passes.cost.roofline import FREE, Efficiency, Price
from hetjax.passes.cost.traffic import memory_traffic
from hetjax.passes.cost.work import Kernel, Work, gathered, kernel_price

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot")
# The source of a call's own seconds, beside what it computes.
CALL = "call"
# Ops that keep what is known of a parameter's sharding.
_LAYOUT = ("transpose", "convert_element_type", "copy", "stop_gradient", "optimization_barrier")


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentPrice:
    """What one call of a fragment costs.

    Attributes:
      compute: the ops, by the analytic model.
      collective_s: all-reduces inside it, by the analytic model.
      judged_s: what measurements say instead; None where there are none.
      uncertainty: standard deviation of log(seconds), where a forest says it; else 0.
      sources: (source, seconds from it) pairs: "measured", "analytic", "analytic x forest", "call".
      host_s: seconds of all processors of the host together, where devices are CPUs and measured.
    """

    compute: Price
    collective_s: float
    judged_s: float | None = None
    uncertainty: float = 0.0
    sources: tuple[tuple[str, float], ...] = ()
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        if self.judged_s is not None:
            return self.judged_s
        return self.compute.seconds + self.collective_s


@dataclasses.dataclass(frozen=True, slots=True)
class OpWork:
    """What one op of a fragment does on one device.

    Attributes:
      op: the op.
      kernel: what it computes and moves; None where another op's kernel takes it in.
      collective_s, collective_bytes: of the all-reduce after it.
    """

    op: Op
    kernel: Kernel | None
    collective_s: float = 0.0
    collective_bytes: float = 0.0


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
    return price_ops(
        program, fragment, cluster, fragment_ops(program, fragment, cluster), efficiency
    )


def price_ops(
    program: Program,
    fragment: Fragment,
    cluster: Cluster,
    ops: Iterable[OpWork],
    efficiency: Mapping[str, Efficiency] | None = None,
) -> FragmentPrice:
    """Returns `fragment_price` of a fragment whose ops are known already."""
    kind = cluster.kind(program.meshes[fragment.stage].kind)
    curve = (efficiency or {}).get(kind.name)
    compute, collective_s = FREE, 0.0
    for work in ops:
        collective_s += work.collective_s
        if work.kernel is None:
            continue
        try:
            compute = compute + kernel_price(work.kernel, kind, curve)
        except PlanError as error:
            op = work.op
            where = f" ({op.block}, {op.source})" if op.block or op.source else ""
            raise PlanError(f"stage {fragment.stage}, {op.primitive}{where}: {error}") from None
    return FragmentPrice(compute, collective_s)


def fragment_work(program: Program, fragment: Fragment, cluster: Cluster) -> Work:
    """Returns what one call of a fragment does on one device of its mesh.

    Raises:
      PlanError: the ops have no costs.
    """
    return work_of(fragment.phase, fragment_ops(program, fragment, cluster))


def work_of(phase: str, ops: Iterable[OpWork]) -> Work:
    """Returns the work of several ops together."""
    ops = list(ops)
    return gathered(
        phase,
        (w.kernel for w in ops if w.kernel is not None),
        collective_s=sum(w.collective_s for w in ops),
        collective_bytes=sum(w.collective_bytes for w in ops),
    )


def fragment_ops(program: Program, fragment: Fragment, cluster: Cluster) -> list[OpWork]:
    """Returns what each op of a fragment does on one device of its mesh, in order.

    Raises:
      PlanError: the ops have no costs.
    """
    mesh = program.meshes[fragment.stage]
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    axes = split_axes(fragment.ops, fragment.inputs)
    traffic = memory_traffic(fragment.ops, avals, [p.ref for p in fragment.outputs])
    specs: dict[Ref, Spec] = {p.ref: p.spec for p in fragment.inputs if any(p.spec)}
    # What is summed over a batch that is split is added up once it is made.
    sums = {
        p.ref: port_bytes(program, fragment, p, given=True)
        for p in fragment.outputs
        if p.form == "sum" and "data" in axes.get(p.ref, ())
    }
    out = []
    for op, (read, written) in zip(fragment.ops, traffic):
        if op.cost is None:
            raise PlanError(f"fragment {fragment.name} has ops without costs; run annotate-costs")
        split = frozenset().union(*(axes.get(r, frozenset()) for r in op.refs))
        parts = parts_of(split, mesh)
        factors = product_factors(op, avals)
        kernel = None
        if factors is not None or read + written:
            dtype, precise = factors or ("", False)
            flops = op.cost.flops / parts
            kernel = Kernel(flops, (read + written) / parts, dtype, precise)
        reductions = list(_product_reductions(op, avals, specs, split, mesh))
        reductions += [("data", float(sums[r])) for r in op.outputs if r in sums]
        out.append(
            OpWork(
                op,
                kernel,
                sum(_axis_reduction_s(axis, nbytes, mesh, cluster) for axis, nbytes in reductions),
                sum(nbytes for axis, nbytes in reductions if mesh.axis_size(axis) > 1),
            )
        )
    return out


def product_factors(op: Op, avals: Sequence[Aval]) -> tuple[str, bool] | None:
    """Returns what a matrix product takes and whether a precision is asked for; None for other ops."""
    if op.primitive in _PRODUCTS:
        dtype = next((avals[r].dtype for r in op.refs), "f32")
        return dtype, op.param("precision") is not None
    for graph in subgraphs(op):
        for inner in graph.ops:
            found = product_factors(inner, graph.avals)
            if found is not None:
                return found
    return None


def _product_reductions(
    op: Op,
    avals: Sequence[Aval],
    specs: dict[Ref, Spec],
    split: frozenset[str],
    mesh: StageMesh,
) -> Iterator[tuple[str, float]]:
    """Yields (axis, bytes) of the all-reduces after a product; keeps `specs` up to date."""
    if op.primitive in _LAYOUT and op.refs and op.refs[0] in specs:
        spec = specs[op.refs[0]]
        order = op.param("permutation")
        specs[op.outputs[0]] = spec if order is None else tuple(spec[d] for d in order)
    if op.primitive != "dot_general":
        return
    contracting, _ = op.param("dimension_numbers", (((), ()), ((), ())))
    reduced = {
        axis
        for operand, dims in zip(op.inputs, contracting)
        if isinstance(operand, int) and operand in specs
        for d in dims
        for axis in specs[operand][d]
    }
    nbytes = avals[op.outputs[0]].nbytes / parts_of(split - reduced, mesh)
    for axis in sorted(reduced):
        yield axis, nbytes


def num_arrays(program: Program, fragment: Fragment) -> int:
    """Returns how many arrays a compiled fragment takes and gives."""
    m = program.num_microbatches
    taken = sum(m if p.form == "concat" else 1 for p in fragment.inputs)
    given = 0
    for p in fragment.outputs:
        if p.form == "sum":  # the accumulator comes in, too
            taken += 1
        given += m if p.form == "micro" and not fragment.per_microbatch else 1
    return taken + given


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
