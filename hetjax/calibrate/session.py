"""One calibration: what is to be measured, what of it is known already, measuring the rest, fitting.

Every measurement is in the store's file before the next one starts, so that a session that is
interrupted or killed loses one measurement and the next session goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetjax.calibrate.host import time_host
from hetjax.calibrate.layered import (
    Unit,
    analysed_step,
    legal_counts,
    step_at,
    units,
    usual_sizes,
)
from hetjax.calibrate.products import fitted, product_work, products, time_product
from hetjax.calibrate.timing import (
    Timing,
    empty_calls,
    fragment_call,
    time_calls,
    time_copies,
    time_transfers,
)
from hetjax.frontend.tracing import Traced
from hetjax.ir.cluster import Cluster, DeviceKind, Link
from hetjax.ir.errors import HetjaxError, PlanError
from hetjax.ir.graph import Graph
from hetjax.passes.cost.forest import ResidualForest, train_forest
from hetjax.passes.cost.judge import forest_path
from hetjax.passes.cost.program_price import OpWork
from hetjax.passes.cost.splits import SplitScore, leaving_clusters_out, within_clusters
from hetjax.passes.cost.store import Measured, ProfileStore, update_store
from hetjax.passes.plan_stages import batch_size_of
from hetjax.planning.layered import Layered, layered
from hetjax.runtime.compiler import compile_program

COPY_BYTES = tuple(4**k * 2**14 for k in range(6))  # 16 KiB … 16 MiB
TRANSFER_BYTES = tuple(8**k * 2**12 for k in range(5))  # 4 KiB … 16 MiB


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure; None leaves a choice to hetjax.

    Attributes:
      tensor, data: degrees of tensor and data parallelism.
      sizes: microbatch sizes.
    """

    tensor: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to measure: a layer's call, or a single product.

    Attributes:
      name: for people.
      measured: all of it but the numbers.
      unit, product: which of the two; `at` says where a unit is compiled.
    """

    name: str
    measured: Measured
    unit: Unit | None = None
    product: tuple[Any, Graph] | None = None
    at: Layered | None = None


@dataclasses.dataclass(frozen=True)
class Agenda:
    """What a session measures.

    Attributes:
      items: in order, each once.
      kind: of the local devices.
      devices: them.
      cluster: their description's name.
      skipped: sentences about what was asked for and cannot be measured.
    """

    items: tuple[Item, ...]
    kind: DeviceKind
    devices: tuple[Any, ...]
    cluster: str
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a session came to.

    Attributes:
      store: with everything.
      measured: items measured now; `known` were known before.
      forest: trained on the store; None where there is too little.
      scores: (what was held out, score) pairs, where there is enough for it.
    """

    store: ProfileStore
    measured: int
    known: int
    forest: ResidualForest | None
    scores: tuple[tuple[str, SplitScore], ...]


def versions() -> str:
    """Returns the versions that decide what a layer compiles to."""
    from importlib.metadata import version

    return f"jax {version('jax')}, jaxlib {version('jaxlib')}"


def local_devices(cluster: Cluster) -> tuple[DeviceKind, tuple[Any, ...]]:
    """Returns the kind and the devices of the first node that is at hand.

    Raises:
      ClusterError: the cluster's devices are not at hand.
      PlanError: the local devices are of several kinds.
    """
    from hetjax.ir.accelerator import match_devices

    at_hand = match_devices(cluster)
    first = cluster.nodes[0]
    mine = tuple(d for d, c in zip(at_hand, cluster.devices) if c.node == first.name)
    return cluster.kind(first.kind), mine


def agenda(
    traced: Traced, cluster: Cluster, request: Request, progress: Callable[[str], None] | None = None
) -> Agenda:
    """Returns what is to be measured of a step on the local devices.

    Args:
      traced: the step.
      cluster: describes the local devices.
      request: degrees and sizes.
      progress: told what is being prepared.

    Raises:
      MicrobatchError: a size does not divide the batch.
      PlanError: a degree that no local devices can have.
    """
    kind, devices = local_devices(cluster)
    batch = batch_size_of(traced.graph)
    analysed = analysed_step(traced, kind)
    if not batch and request.sizes:
        raise PlanError("microbatch sizes are asked for, but no argument carries a batch")
    counts = legal_counts(batch, request.sizes or usual_sizes(batch)) if batch else [1]
    degrees = _degrees(request, len(devices))
    made = versions()
    found: dict[Any, Item] = {}
    skipped: list[str] = []
    for count in counts:
        if progress:
            progress(f"tracing microbatches of {batch // count if batch else 'the whole batch'}")
        try:
            step = step_at(traced, analysed, count)
        except HetjaxError as error:
            skipped.append(f"microbatches of {batch // count}: {str(error).splitlines()[0]}")
            continue
        if step.microbatching is not None:
            for op, work, name in products(step.microbatching.graph):
                m = Measured(
                    name, kind.name, "forward", 0.0, product_work(work), layer="product",
                    step=traced.graph.name, microbatch=batch // count, versions=made,
                    cluster=cluster.name,
                )  # fmt: skip
                found.setdefault(m.key, Item(f"product {_shape(work)}", m, None, (op, step.microbatching.graph)))
        for data, model in degrees:
            if batch and (batch // count) % data:
                skipped.append(f"microbatches of {batch // count} do not divide over {data} devices")
                continue
            link = cluster.link(0, 1) if data * model > 1 else None
            cut = layered(step, kind, data, model, link)
            if model > 1 and cut.bundle.plan is not None and not cut.bundle.plan.state_specs:
                skipped.append(f"no parameter of this step can be split {model} ways")
                continue
            for unit in units(cut):
                m = Measured(
                    unit.signature, kind.name, unit.phase, 0.0, unit.work, data, model, 1, link,
                    unit.layer, traced.graph.name, unit.microbatch, versions=made,
                    cluster=cluster.name,
                )  # fmt: skip
                name = f"{unit.layer} {unit.phase}, {unit.microbatch} on {data} x {model}"
                found.setdefault(m.key, Item(name, m, unit, None, cut))
    return Agenda(tuple(found.values()), kind, devices, cluster.name, tuple(dict.fromkeys(skipped)))


def _shape(work: OpWork) -> str:
    return f"of {work.kernel.flops:.3g} FLOPs" if work.kernel else ""


def _degrees(request: Request, num_devices: int) -> list[tuple[int, int]]:
    """Returns the (data, model) pairs to measure.

    Raises:
      PlanError: a degree asked for takes more devices than there are.
    """
    usual = tuple(n for n in (1, 2, 4) if n <= num_devices)
    data, tensor = request.data or usual, request.tensor or usual
    pairs = [(d, t) for t in tensor for d in data]
    wrong = [n for n in (*data, *tensor) if n < 1 or n > num_devices]
    if wrong:
        raise PlanError(
            f"degree {wrong[0]} asked for, and there are {num_devices} local devices; "
            f"give 1 … {num_devices}"
        )
    fitting = [(d, t) for d, t in pairs if d * t <= num_devices]
    if request.data is None and request.tensor is None:
        # Both at once only where it was asked for: each alone shows what it costs.
        fitting = [(d, t) for d, t in fitting if 1 in (d, t)]
    return sorted(fitting, key=lambda p: (p[0] * p[1], p))


def run(
    agenda: Agenda, path: Path, progress: Callable[[str, int, int], None] | None = None
) -> Outcome:
    """Measures what the store at `path` does not know, saving each, then fits.

    Args:
      agenda: what to measure.
      path: of the store; made when it is not there.
      progress: told (what comes next, done, total).
    """
    kind = agenda.kind
    store = update_store(path, lambda s: dataclasses.replace(s, kinds={**s.kinds, kind.name: kind}))
    todo = [item for item in agenda.items if item.measured.key not in store.measured]
    known = len(agenda.items) - len(todo)
    done = known
    total = len(agenda.items)
    _surroundings(agenda, path, progress, (done, total))
    for item, measure in _ready(todo, agenda):
        if progress:
            progress(item.name, done, total)
        timing, arrays = measure()
        m = dataclasses.replace(
            item.measured, seconds=timing.seconds, host_s=timing.host_s, spread=timing.spread,
            runs=timing.runs, arrays=arrays,
        )
        store = update_store(path, lambda s, m=m: s.adding(m))
        done += 1
    if progress:
        progress("fitting", done, total)
    return fit(path, kind, agenda.devices, len(todo), known)


def _ready(
    todo: Sequence[Item], agenda: Agenda
) -> Iterator[tuple[Item, Callable[[], tuple[Timing, int]]]]:
    """Yields (item, what measures it), the layers of one mesh and size compiled together."""
    by_cut: dict[int, list[Item]] = {}
    for item in todo:
        by_cut.setdefault(id(item.at), []).append(item)
    for items in by_cut.values():
        cut = items[0].at
        if cut is None:
            for item in items:
                if item.product is not None:
                    yield item, functools.partial(_time_product, *item.product, agenda.devices[0])
            continue
        size = cut.data * cut.model
        program = cut.bundle.program
        if program is None:
            raise PlanError("the step is not cut")
        wanted = {item.unit.fragment.name for item in items if item.unit}
        few = program.replace(fragments=tuple(f for f in program.fragments if f.name in wanted))
        rows = [agenda.devices[d % size] for d in range(len(program.meshes) * size)]
        compiled, meshes = compile_program(few, rows)
        for item, unit in ((i, i.unit) for i in items):
            if unit is None:
                continue
            name, stage = unit.fragment.name, unit.fragment.stage
            call, arrays = fragment_call(compiled[name], meshes[stage])
            yield item, functools.partial(_time_unit, call, arrays)


def _heaviest(agenda: Agenda) -> Callable[[Any], Callable[[], Any]] | None:
    """Returns what compiles the layer with most work on one device for any device; None without layers."""
    alone = [i for i in agenda.items if i.at and i.unit and i.at.data * i.at.model == 1]
    if not alone:
        return None
    item = max(alone, key=lambda i: sum(k.flops for k in i.measured.work.kernels))
    cut, unit = item.at, item.unit
    program = cut.bundle.program if cut else None
    if unit is None or program is None:
        return None
    few = program.replace(fragments=(unit.fragment,))

    def call_on(device: Any) -> Callable[[], Any]:
        compiled, meshes = compile_program(few, [device] * len(program.meshes))
        return fragment_call(compiled[unit.fragment.name], meshes[unit.fragment.stage])[0]

    return call_on


def _time_product(op: Any, graph: Graph, device: Any) -> tuple[Timing, int]:
    return time_product(op, graph, device), 3


def _time_unit(call: Callable[[], Any], arrays: int) -> tuple[Timing, int]:
    return time_calls(call), arrays


def _surroundings(
    agenda: Agenda, path: Path, progress: Callable[[str, int, int], None] | None, at: tuple[int, int]
) -> None:
    """Measures what calls, and transfers between local devices, take, where the store does not know."""
    store, kind = ProfileStore.load(path), agenda.kind
    sizes = sorted({i.measured.data * i.measured.model for i in agenda.items} | {1})
    calls = dict(store.calls)
    for size in sizes:
        if (kind.name, size) not in calls:
            if progress:
                progress(f"empty calls on {size} devices", *at)
            calls[kind.name, size] = empty_calls(agenda.devices[:size])
    links, hosts = dict(store.links), dict(store.hosts)
    if kind.name not in links and len(agenda.devices) > 1:
        if progress:
            progress("transfers between local devices", *at)
        rows = time_transfers(agenda.devices[0], agenda.devices[1], TRANSFER_BYTES)
        links[kind.name] = link_of("inside", rows, "hetjax calibrate, device to device")
    if kind.name not in hosts or not hosts[kind.name].drives:
        if progress:
            progress("hand-overs and calls of this host", *at)
        hosts[kind.name] = time_host(kind, agenda.devices, _heaviest(agenda))
    update_store(
        path,
        lambda s: dataclasses.replace(
            s, calls={**s.calls, **calls}, links={**s.links, **links}, hosts={**s.hosts, **hosts}
        ),
    )


def link_of(name: str, rows: Sequence[tuple[int, float]], source: str) -> Link:
    """Returns the link that (bytes, seconds) of messages describe.

    The latency is nine tenths of what the quickest message takes.
    """
    latency_s = 0.9 * min(s for _, s in rows)
    curve = tuple((n, n / (s - latency_s)) for n, s in sorted(rows))
    return Link(name, curve[-1][1], latency_s, curve=curve, source=source)


def fit(
    path: Path, kind: DeviceKind, devices: Sequence[Any], measured: int, known: int
) -> Outcome:
    """Fits the kind's curve and trains the forest on the whole store, and saves both."""
    store = ProfileStore.load(path)
    if measured or kind.name not in store.efficiency:
        curve = fitted(store, kind, time_copies(devices[0], COPY_BYTES))
        store = update_store(
            path, lambda s: dataclasses.replace(s, efficiency={**s.efficiency, kind.name: curve})
        )
    return trained(path, store, measured, known)


def trained(path: Path, store: ProfileStore, measured: int = 0, known: int = 0) -> Outcome:
    """Trains the forest on a store and saves it beside it; scores both splits."""
    samples = store.samples()
    scores: list[tuple[str, SplitScore]] = []
    try:
        forest = train_forest(samples)
    except PlanError:
        return Outcome(store, measured, known, None, ())
    forest.save(forest_path(path))
    if len(samples) >= 20:
        scores.append(("within clusters", within_clusters(samples, trees=60)))
        across = leaving_clusters_out(samples, trees=60)
        if across.num_samples:
            scores.append(("a cluster left out", across))
    return Outcome(store, measured, known, forest, tuple(scores))
