"""A traced step as the table a search asks: what its layers compute, send and hold, at any share.

The step is cut at every layer, and every layer's ops are priced as those of a stage would be. What an
op moves is taken apart into what every example adds (activations) and what is there once (parameters,
their gradients), so that one trace gives the seconds of any number of examples:

  seconds(share) = sum over kernels of roofline(flops * share, once + each * share)
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster, DeviceKind
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Op
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.passes.constraint_ops import constrained_spec
from hetjax.passes.cost.collectives import levels_price_s
from hetjax.passes.cost.layers import Layer
from hetjax.passes.cost.memory import stage_memory
from hetjax.passes.cost.program_price import fragment_ops
from hetjax.passes.cost.roofline import ASSUMED, Efficiency, op_price
from hetjax.passes.cost.work import computed_dtype
from hetjax.passes.cutting import cut_candidates
from hetjax.passes.partition import Collective, Partition, partition
from hetjax.passes.plan_stages import batch_size_of
from hetjax.passes.search.costed import hosts_of, tensor_levels
from hetjax.passes.search.table import LayerSizes, LayerTimes
from hetjax.passes.split_activations import is_split
from hetjax.planning.layered import LayerCut, choose_layer_specs, cut_layers, split_layers

# Types of values that are there once, however many examples there are; see `hetjax.ir.microbatching`.
_ONCE = ("R", "S", "Z")
# What a layer's forward takes at least: a step may have all its work in the update, and a search divides by speeds.
_LEAST_S = 1e-9
# Degrees of tensor parallelism that are looked at.
MAX_TENSOR = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledKernel:
    """One kernel, by the number of examples it is run for.

    Attributes:
      flops: per example.
      once_flops, once_bytes: whatever the number.
      each_bytes: per example.
      dtype, precise: as in `hetjax.passes.cost.work.Kernel`.
    """

    flops: float
    once_flops: float
    once_bytes: float
    each_bytes: float
    dtype: str
    precise: bool


# Kernels with their number.
Kernels = tuple[tuple[ScaledKernel, int], ...]
Exchanges = tuple[tuple[str, float, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer asks of each of the devices that share it.

    Attributes:
      forward, backward, update: kernels of a microbatch's forward and backward, of a step's update.
      ahead, back: (collective, bytes per example, how many) of tensor-parallel devices, in a microbatch's
        forward and backward.
    """

    forward: Kernels
    backward: Kernels
    update: Kernels
    ahead: Exchanges = ()
    back: Exchanges = ()


class TracedTable:
    """The layers of a traced step as a `ModelTable`.

    Args:
      step: graph and microbatching, from `hetjax.frontend.planning.choose_microbatching`.
      cluster: whose kinds and links count.
      efficiency: curves by device kind; the platform's assumed one where absent.
      max_tensor: the highest degree of tensor parallelism; 1 for none.
      least_tensor: the lowest.
    """

    experts = 0

    def __init__(
        self, step: Bundle, cluster: Cluster, *, efficiency: Mapping[str, Efficiency] | None = None,
        max_tensor: int = MAX_TENSOR, least_tensor: int = 1,
    ):
        graph, micro = step.graph, step.microbatching
        if graph is None or micro is None:
            raise PlanError("a table is made of a graph and its microbatching")
        self._efficiency = efficiency or {}
        self._examples = max(1, batch_size_of(graph)) / micro.num_microbatches
        self._kinds = {k.name: k for k in cluster.kinds}
        self._hosts = hosts_of(cluster)
        self._max_tensor, self._least_tensor = max_tensor, least_tensor
        self._degrees: dict[int, Degree | None] = {}
        self._sequenced: TracedTable | None = None
        self._whole: TracedTable | None = None  # where this is the one in parts, that without
        self._more = 1.0  # how much more is held than was counted
        self._cut = cut_layers(step, cluster.kinds[0])
        self.name = graph.name
        whole = self._degree(1)
        assert whole is not None
        self.cuts: tuple[Layer, ...] = whole.layers
        self.layers = tuple(layer.name for layer in whole.layers)
        crossing = {c.op: c.nbytes for c in cut_candidates(graph, micro).places}
        ends = [crossing[layer.op] / self._examples for layer in whole.layers[1:]]
        self.output_bytes = (*(max(1, round(n)) for n in ends), 1)
        self.gathered_bytes = self.routed_bytes = (0.0,) * len(self.layers)
        # Held per parameter of four bytes: parameters, gradients and optimizer as the step has them.
        most = max(1, sum(whole.parameters))
        # One microbatch has no sums to add gradients to, but replicas exchange them all the same.
        gradients = sum(whole.gradients) or most
        self.state_bytes = (4.0, 4.0 * gradients / most, 4.0 * sum(whole.optimizer) / most)
        self.times = functools.lru_cache(maxsize=4096)(self._times)
        self.sizes = functools.lru_cache(maxsize=64)(self._sizes)

    def tensors(self, kind: str) -> tuple[int, ...]:
        """Returns powers of two within a node over which some parameter can be split."""
        most = min(self._max_tensor, self._hosts[kind].per_node)
        degrees = (1 << i for i in range(most.bit_length()))
        wanted = (t for t in degrees if self._least_tensor <= t <= most)
        return tuple(t for t in wanted if self._degree(t) is not None)

    def shares(self, kind: str, tensor: int) -> None:
        return None

    @property
    def sequenced(self) -> TracedTable | None:
        """Returns the table of the same layers whose stages split what tensor parallelism leaves whole."""
        if self._whole is None and self._sequenced is None:
            table = self._sequenced = copy.copy(self)
            table._whole, table._degrees = self, {}
            table.times = functools.lru_cache(maxsize=4096)(table._times)
            table.sizes = functools.lru_cache(maxsize=64)(table._sizes)
        return self._sequenced

    def _times(self, kind: str, tensor: int, share: int) -> LayerTimes | None:
        degree = self._degree(tensor)
        if degree is None:
            return None
        device, curve = self._kinds[kind], self._efficiency.get(kind)
        levels = tensor_levels(self._hosts[kind], tensor)

        @functools.cache  # equal layers have equal kernels
        def seconds(kernels: Kernels) -> float:
            return sum(n * _seconds(k, share, device, curve) for k, n in kernels)

        @functools.cache
        def exchange_s(exchanges: Exchanges) -> float:
            return sum(n * levels_price_s(kind_, levels, tensor, share * each) for kind_, each, n in exchanges)

        forward, backward, update = [], [], []
        try:
            for work in degree.works:
                forward.append(max(_LEAST_S, seconds(work.forward) + exchange_s(work.ahead)))
                backward.append(seconds(work.backward) + exchange_s(work.back))
                update.append(seconds(work.update))
        except PlanError:
            return None  # the kind lacks a dtype
        if self._whole is not None:
            # A search rules out by the times of plain stages; that parts are faster is for the full judgement.
            whole = self._whole.times(kind, tensor, share)
            assert whole is not None
            forward, backward = (
                [max(a, b) for a, b in zip(*pair)] for pair in ((forward, whole.forward_s), (backward, whole.backward_s))
            )
            update = list(whole.update_s)
        return LayerTimes(tuple(forward), tuple(backward), tuple(update))

    def _sizes(self, tensor: int) -> LayerSizes | None:
        degree = self._degree(tensor)
        if degree is None:
            return None
        held = zip(degree.parameters, degree.gradients, degree.optimizer)
        more = lambda values: tuple(self._more * n for n in values)  # noqa: E731
        per = sum(self.state_bytes) if any(degree.gradients) else self.state_bytes[0] + self.state_bytes[2]
        nothing = (0.0,) * len(self.layers)
        return LayerSizes(
            tuple(round(self._more * sum(h) / per) for h in held), more(degree.kept), nothing,
            (0,) * len(self.layers), more(degree.passing), more(degree.passing_once), more(degree.updating),
        )  # fmt: skip

    def _degree(self, tensor: int) -> Degree | None:
        if tensor not in self._degrees:
            if self._whole is None:
                specs = choose_layer_specs(self._cut, tensor, self._ranking(tensor))
                found = _make(self._cut, tensor, self._examples, specs) if tensor == 1 or specs else None
            else:
                whole = self._whole._degree(tensor) if tensor > 1 else None
                specs = () if whole is None else tuple((path, spec) for path, (_, spec) in whole.specs.items())
                found = _make(self._cut, tensor, self._examples, specs, sequence=True) if specs else None
            self._degrees[tensor] = found
        return self._degrees[tensor]

    def hold_more(self, factor: float) -> None:
        """Counts all memory so many times, where plans judged in full hold more than layers did one by one."""
        for table in (self, self.sequenced):
            if table is not None:
                table._more *= factor
                table.sizes.cache_clear()

    def tensor_specs(self, tensor: int) -> Mapping[str, tuple[int, Spec]]:
        """Returns (layer, spec) by path of the state leaves that a stage splits over so many devices."""
        degree = self._degree(tensor)
        return {} if degree is None else degree.specs

    @functools.cached_property
    def homes(self) -> Mapping[str, int]:
        """Returns the layer of each leaf of the state, by path."""
        graph = self._cut.step.graph
        assert graph is not None
        return {a.path: self._cut.homes[a.ref] for a in graph.inputs if a.role == "state" and a.ref in self._cut.homes}

    def _ranking(self, tensor: int) -> Callable[[Partition], float]:
        """Returns what ranks the ways to split a layer: by the kind with the fastest nodes of that size."""
        names = [n for n, host in self._hosts.items() if host.per_node >= tensor] or list(self._hosts)
        name = max(names, key=lambda n: self._hosts[n].inner.bandwidth_bytes_s)
        kind, levels = self._kinds[name], tensor_levels(self._hosts[name], tensor)
        curve = self._efficiency.get(name) or ASSUMED[kind.platform]
        speed = curve.top * kind.peak("f32")

        def seconds(found: Partition) -> float:
            moved = sum(levels_price_s(c.kind, levels, tensor, c.nbytes) for c in found.collectives)
            return 3 * found.product_flops / speed + 2 * moved

        return seconds

    def why_not(self, kind: str) -> str:
        """Returns why nothing is known of a kind, "" where something is."""
        degree = self._degree(1)
        assert degree is not None
        try:
            for work in degree.works:
                for k, _ in (*work.forward, *work.backward, *work.update):
                    _seconds(k, 1, self._kinds[kind], None)
        except PlanError as error:
            return str(error)
        return ""


@dataclasses.dataclass(frozen=True)
class Degree:
    """A step's layers on so many tensor-parallel devices each.

    Attributes:
      layers: where they start.
      works: what each computes.
      parameters, gradients, optimizer: bytes of each layer's state on one device.
      kept, passing: bytes of each layer per example: what waits for the backward, what is there
        while the layer runs;
      passing_once: whatever the number of examples.
      updating: bytes of each layer's update beside state and gradients.
      specs: (layer, spec) by path of the state leaves that are split.
    """

    layers: tuple[Layer, ...]
    works: tuple[LayerWork, ...]
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    kept: tuple[float, ...]
    passing: tuple[float, ...]
    passing_once: tuple[float, ...]
    updating: tuple[float, ...]
    specs: Mapping[str, tuple[int, Spec]]


def _make(
    cut: LayerCut, tensor: int, examples: float, specs: tuple[tuple[str, Spec], ...], *, sequence: bool = False
) -> Degree | None:
    """Returns the layers split `tensor` ways, None where there is no sequence that can be split so."""
    bundle, layers = split_layers(cut, tensor, specs, sequence=sequence), cut.layers
    program, plan = bundle.program, bundle.plan
    if bundle.graph is None or program is None or plan is None or bundle.cluster is None:
        raise PlanError("the step is not cut")
    if sequence and not _in_parts(program):
        return None
    memory = [stage_memory(bundle.graph, program, s, 1) for s in range(len(layers))]
    works = _works(cut.step, program, bundle.cluster, len(layers), examples)
    ref_of = {a.path: a.ref for a in bundle.graph.inputs}
    # While a layer's backward runs its gradients are there beside the sums they are added to.
    once = [min(m.temporaries, m.gradients or m.parameters) for m in memory]
    return Degree(
        layers, works, tuple(m.parameters for m in memory), tuple(m.gradients for m in memory),
        tuple(m.optimizer for m in memory), tuple(m.activations / examples for m in memory),
        tuple((m.temporaries + m.transfers - n) / examples for m, n in zip(memory, once)),
        tuple(map(float, once)),
        tuple(float(m.update) for m in memory),
        {path: (cut.homes.get(ref_of[path], 0), spec) for path, spec in plan.state_specs},
    )  # fmt: skip


def _in_parts(program: Program) -> bool:
    """Returns whether some activation is constrained to parts."""
    return any(
        is_split(constrained_spec(op, program.meshes[f.stage].axes)) for f in program.fragments for op in f.ops
    )


def _works(
    step: Bundle, program: Program, cluster: Cluster, num: int, examples: float
) -> tuple[LayerWork, ...]:
    phases = ("forward", "backward", "update")
    kernels = [{p: collections.Counter() for p in phases} for _ in range(num)]
    exchanges = [{p: collections.Counter() for p in phases} for _ in range(num)]
    once = _once(step)
    for fragment in program.fragments:
        phase = "backward" if fragment.phase == "weight" else fragment.phase
        if phase not in phases:
            continue  # once a step, before all else
        ops = fragment_ops(program, fragment, cluster)
        scale = examples if phase != "update" else 0.0
        for work in ops:
            if work.kernel is not None:
                kernel = _scaled(work.op, work.kernel, program, fragment, once, scale)
                kernels[fragment.stage][phase][kernel] += work.kernel.count
        if phase != "update":
            for c in _collectives(program, fragment):
                exchanges[fragment.stage][phase][c.kind, c.nbytes / examples] += 1
    listed = [{p: tuple(sorted(k[p].items(), key=repr)) for p in phases} for k in kernels]
    moved = [{p: tuple((*c, n) for c, n in sorted(e[p].items())) for p in phases} for e in exchanges]
    return tuple(
        LayerWork(k["forward"], k["backward"], k["update"], m["forward"], m["backward"])
        for k, m in zip(listed, moved)
    )


def _once(step: Bundle) -> Sequence[bool]:
    """Returns, per ref, whether its value is there once, whatever the number of examples."""
    assert step.microbatching is not None
    return [t.kind in _ONCE for t in step.microbatching.types]


def _scaled(op: Op, kernel, program: Program, fragment: Fragment, once, examples: float) -> ScaledKernel:
    """Returns a kernel taken apart into what is there once and what each of `examples` adds."""
    if not examples:
        return ScaledKernel(0.0, kernel.flops, kernel.nbytes, 0.0, kernel.dtype, kernel.precise)
    refs = dict.fromkeys((*op.refs, *op.outputs))
    if all(r < len(once) and once[r] for r in refs):
        return ScaledKernel(0.0, kernel.flops, kernel.nbytes, 0.0, kernel.dtype, kernel.precise)
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    total = sum(avals[r].nbytes for r in refs) or 1
    held = sum(avals[r].nbytes for r in refs if r < len(once) and once[r])
    kept = kernel.nbytes * held / total
    return ScaledKernel(
        kernel.flops / examples, 0.0, kept, (kernel.nbytes - kept) / examples, kernel.dtype,
        kernel.precise,
    )  # fmt: skip


def _collectives(program: Program, fragment: Fragment) -> Sequence[Collective]:
    """Returns what the devices of a fragment exchange, as Shardy has it."""
    mesh = program.meshes[fragment.stage]
    if mesh.axis_size("model") < 2:
        return ()
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    inputs, outputs = ({p.ref: p.spec for p in ports} for ports in (fragment.inputs, fragment.outputs))
    return partition(fragment.ops, avals, inputs, dict(outputs), mesh.axes).collectives


def _seconds(k: ScaledKernel, share: int, kind: DeviceKind, curve: Efficiency | None) -> float:
    dtype = computed_dtype(k.dtype, k.precise, kind) if k.dtype else "f32"
    return op_price(
        kind, k.once_flops + share * k.flops, k.once_bytes + share * k.each_bytes, dtype,
        product=bool(k.dtype), efficiency=curve,
    ).seconds  # fmt: skip
