"""Single ops, timed on one device: the step's own matrix products, and copies; what curves are fitted to."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from hetjax.calibrate.timing import made_up, time_calls
from hetjax.ir import _jax
from hetjax.ir.cluster import DeviceKind
from hetjax.ir.exporter import export_jaxpr
from hetjax.ir.graph import Graph, Op
from hetjax.passes.cost.layers import signature
from hetjax.passes.cost.program_price import OpWork, product_factors
from hetjax.passes.cost.roofline import ASSUMED, Efficiency, fit_efficiency
from hetjax.passes.cost.store import Measured, ProfileStore
from hetjax.passes.cost.work import Kernel, Work, computed_dtype, work_price

# More sizes than this tell nothing new.
MOST_PRODUCTS = 12


def products(graph: Graph) -> list[tuple[Op, OpWork, str]]:
    """Returns the different products of a graph with their work and signature, spread over their sizes."""
    found: dict[str, tuple[Op, OpWork, str]] = {}
    for op in graph.ops:
        factors = product_factors(op, graph.avals) if op.primitive == "dot_general" else None
        if factors is None or op.cost is None or op.eqn is None:
            continue
        # Costs count the full batch; the graph may be of a microbatch.
        moved = sum(graph.aval(a).nbytes for a in op.inputs)
        moved += sum(graph.avals[r].nbytes for r in op.outputs)
        (contracted, _), _ = op.param("dimension_numbers")
        depth = math.prod(graph.aval(op.inputs[0]).shape[d] for d in contracted)
        flops = 2.0 * graph.avals[op.outputs[0]].size * depth
        work = OpWork(op, Kernel(flops, float(moved), *factors))
        name = signature("forward", [work], graph.avals, {}, ())
        found.setdefault(name, (op, work, name))
    ranked = sorted(found.values(), key=lambda x: x[1].kernel.flops if x[1].kernel else 0.0)
    if len(ranked) <= MOST_PRODUCTS:
        return ranked
    step = (len(ranked) - 1) / (MOST_PRODUCTS - 1)
    return [ranked[round(i * step)] for i in range(MOST_PRODUCTS)]


def time_product(op: Op, graph: Graph, device: Any) -> Any:
    """Returns the `Timing` of one op on one device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    mesh = Mesh(np.array([device]), ("data",))
    refs = list(dict.fromkeys(op.refs))
    closed = export_jaxpr("product", [op], refs, list(op.outputs), graph.avals)
    arguments = [made_up(graph.avals[r], mesh, ()) for r in refs]
    compiled = jax.jit(_jax.jaxpr_function(closed)).lower(*arguments).compile()
    return time_calls(functools.partial(compiled, *arguments), budget_s=0.1)


def fitted(store: ProfileStore, kind: DeviceKind, copies: Sequence[tuple[int, float]]) -> Efficiency:
    """Returns a kind's curve from the single products of a store and from copies.

    Args:
      store: with products measured on the kind, and what a call takes.
      kind: the device kind.
      copies: (bytes, seconds); none keeps what the store has, or what is assumed.
    """
    base = store.efficiency.get(kind.name, ASSUMED[kind.platform])
    call = store.calls.get((kind.name, 1))
    spent_s = call.seconds(2) if call else 0.0
    net = [(float(n), max(s - spent_s, s / 5)) for n, s in copies]
    by_dtype: dict[str, list[tuple[float, float]]] = {}
    for m, kernel in _single_products(store, kind.name):
        dtype = computed_dtype(kernel.dtype, kernel.precise, kind)
        by_dtype.setdefault(dtype, []).append((kernel.flops, store.net_s(m)))
    curve = base
    for dtype, rows in sorted(by_dtype.items()):
        if len(rows) > 1:
            curve = fit_efficiency(kind, dtype, rows, net, base=curve)
    return _with_overheads(store, kind, curve)


def _with_overheads(store: ProfileStore, kind: DeviceKind, curve: Efficiency) -> Efficiency:
    """Returns the curve with the launch and ramp that fit the measured layers best.

    A kernel that is one of many in a compiled call starts quicker than one that is alone, so what
    single ops take beyond their work says too much: shares of it are tried.
    """
    layers = [
        m for m in store.measured.values()
        if m.kind == kind.name and m.layer != "product" and m.source == "measured"
    ]  # fmt: skip
    if not layers:
        return curve

    def error(choice: Efficiency) -> float:
        ratios = (
            (work_price(m.work, kind, choice).seconds + m.work.collective_s) / store.net_s(m)
            for m in layers
        )
        return sum(abs(math.log(max(r, 1e-9))) for r in ratios)

    shares = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
    choices = (
        dataclasses.replace(curve, launch_s=a * curve.launch_s, ramp_s=b * curve.ramp_s)
        for a in shares
        for b in shares
    )
    return min(choices, key=error)


def _single_products(store: ProfileStore, kind: str) -> Iterator[tuple[Measured, Kernel]]:
    for m in store.measured.values():
        one = m.work.kernels[0] if len(m.work.kernels) == 1 else None
        if m.kind == kind and m.layer == "product" and one is not None and m.source == "measured":
            yield m, one


def product_work(work: OpWork) -> Work:
    """Returns a product as work of its own."""
    return Work("forward", (work.kernel,) if work.kernel else ())
