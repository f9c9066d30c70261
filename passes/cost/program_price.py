"""What a program's fragments cost on a cluster: ops by roofline, collectives by link.

Collectives that XLA puts into a fragment are read off the shardings at its border:

  a product that contracts a split dimension of a parameter   all-reduce of its result, or reduce-scatter
                                                              where its result is constrained to parts
  a constraint that gives parts whole                         all-gather of the value
  a sum over a batch that is split over devices               all-reduce of it, each microbatch, or
                                                              reduce-scatter where it stays split
  state that replicas split among them                        all-gather of it, in each call
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Aval, Op, Ref, subgraphs
from hetjax.ir.program import Fragment, Program, StageMesh
from hetjax.passes.constraint_ops import constrained_spec
from hetjax.passes.cost.collectives import collective_price
from hetjax.passes.cost.memory import parts_of, port_bytes, replica_split, whole_bytes
from hetjax.passes.cost.roofline import FREE, Efficiency, Price
from hetjax.passes.cost.traffic import memory_traffic
from hetjax.passes.cost.value_splits import Splits, value_splits
from hetjax.passes.cost.work import Kernel, Work, gathered, kernel_price

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot")
# The source of a call's own seconds, beside what it computes.
CALL = "call"


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentPrice:
    """What one call of a fragment costs.

    Attributes:
      compute: the ops, by the analytic model.
      collective_s: collectives inside it, by the analytic model.
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
      collective_s, collective_bytes: of the collectives before and after it.
    """

    op: Op
    kernel: Kernel | None
    collective_s: float = 0.0
    collective_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside a fragment.

    Attributes:
      kind: one of `hetjax.passes.cost.collectives.COLLECTIVES`.
      axis: of the stage's mesh.
      nbytes: of the whole value on each device, as `collective_price` counts them.
      ref: the value.
    """

    kind: str
    axis: str
    nbytes: float
    ref: Ref


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
    axes = value_splits(fragment.ops, fragment.inputs, mesh).axes
    traffic = memory_traffic(fragment.ops, avals, [p.ref for p in fragment.outputs])
    exchanges = fragment_exchanges(program, fragment)
    out = []
    for i, (op, (read, written)) in enumerate(zip(fragment.ops, traffic)):
        if op.cost is None:
            raise PlanError(f"fragment {fragment.name} has ops without costs; run annotate-costs")
        parts = parts_of(frozenset().union(*(axes.get(r, frozenset()) for r in op.refs)), mesh)
        factors = product_factors(op, avals)
        kernel = None
        if factors is not None or read + written:
            dtype, precise = factors or ("", False)
            kernel = Kernel(op.cost.flops / parts, (read + written) / parts, dtype, precise)
        mine = exchanges.get(i, ())
        seconds = sum(exchange_s(e, mesh, cluster) for e in mine)
        out.append(OpWork(op, kernel, seconds, sum(e.nbytes for e in mine)))
    return out


def fragment_exchanges(program: Program, fragment: Fragment) -> dict[int, list[Exchange]]:
    """Returns the collectives of one call of a fragment, by the position of the op they belong to."""
    mesh = program.meshes[fragment.stage]
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    splits = value_splits(fragment.ops, fragment.inputs, mesh)
    gathers, results = _gathered(program, fragment), _completed(program, fragment, splits.axes)
    out: dict[int, list[Exchange]] = {}
    for i, op in enumerate(fragment.ops):
        found = [gathers.pop(r) for r in op.refs if r in gathers]
        found += _constraint_gathers(op, avals, splits, mesh)
        found += _product_reductions(i, fragment.ops, avals, splits, mesh)
        found += [results[r] for r in op.outputs if r in results]
        found = [e for e in found if e.nbytes and mesh.axis_size(e.axis) > 1]
        if found:
            out[i] = found
    return out


def _gathered(program: Program, fragment: Fragment) -> dict[Ref, Exchange]:
    """Returns the exchanges before an op first reads state that the replicas have split among them."""
    if fragment.phase == "update":
        return {}  # each updates its own part
    split = replica_split(program, fragment.stage)
    return {
        p.ref: Exchange("all-gather", "data", whole_bytes(program, fragment, p, given=False), p.ref)
        for p in fragment.inputs if p.ref in split
    }


def _completed(
    program: Program, fragment: Fragment, axes: Mapping[Ref, frozenset[str]]
) -> dict[Ref, Exchange]:
    """Returns the exchanges that complete results of which each replica has a part."""
    out = {}
    split = replica_split(program, fragment.stage) if fragment.phase == "update" else frozenset()
    # With one microbatch a gradient is no sum of several; an update reads it.
    updates = (f for f in program.fragments if f.phase == "update" and f.stage == fragment.stage)
    updated = {p.ref for f in updates for p in f.inputs}
    for p in fragment.outputs:
        if "data" not in axes.get(p.ref, ()):
            continue
        batched = any("data" in dim for dim in p.spec)
        if p.form == "sum" or (fragment.phase in ("backward", "weight") and (not batched or p.ref in updated)):
            # What is summed over a batch that is split is added up once it is made.
            kind = "reduce-scatter" if batched else "all-reduce"
            nbytes = whole_bytes(program, fragment, p, given=True)
            out[p.ref] = Exchange(kind, "data", nbytes, p.ref)
        elif split and not batched:  # an update of parts
            nbytes = port_bytes(program, fragment, p, given=True)
            out[p.ref] = Exchange("all-gather", "data", nbytes, p.ref)
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
    i: int, ops: Sequence[Op], avals: Sequence[Aval], splits: Splits, mesh: StageMesh
) -> Iterator[Exchange]:
    """Yields the exchanges after a product whose sums the devices have in parts."""
    made = ops[i].outputs[0] if i in splits.summed else None
    if made is None:
        return
    nbytes = avals[made].nbytes / parts_of(splits.axes[made], mesh)
    after = ops[i + 1] if i + 1 < len(ops) else ops[i]  # a constraint that keeps a part follows at once
    said = constrained_spec(after, mesh.axes) if made in after.refs else None
    for axis in sorted(splits.summed[i]):
        kept = said is not None and any(axis in dim for dim in said)
        yield Exchange("reduce-scatter" if kept else "all-reduce", axis, nbytes, made)


def _constraint_gathers(op: Op, avals: Sequence[Aval], splits: Splits, mesh: StageMesh) -> Iterator[Exchange]:
    """Yields the exchanges of a constraint that gives whole what the devices have in parts."""
    said = constrained_spec(op, mesh.axes)
    before = splits.specs.get(op.refs[0]) if said is not None else None
    if said is None or before is None:
        return
    now = {axis for dim in said for axis in dim}
    for axis in sorted({axis for dim in before for axis in dim} - now - {"data"}):
        yield Exchange("all-gather", axis, avals[op.outputs[0]].nbytes / parts_of(frozenset(now), mesh), op.refs[0])


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


def exchange_s(exchange: Exchange, mesh: StageMesh, cluster: Cluster) -> float:
    """Returns the seconds of a collective along an axis of a stage's mesh."""
    group, groups = axis_group(mesh, exchange.axis)
    node = cluster.devices[group[0]].node
    members = sum(cluster.devices[d].node == node for d in mesh.devices)
    inside = sum(cluster.devices[d].node == node for d in group)
    beside = max(1, min(groups, members // max(1, inside)))
    return collective_price(cluster, exchange.kind, group, exchange.nbytes, beside=beside).seconds
