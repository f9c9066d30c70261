"""What a search decides, in its own few words, and what makes a decision legal.

    pool        devices of one kind in one site                    96 x v100-16g in oslo
    part        replicas of a stage in one pool                    24 of 4-way tensor parallel, 2 examples each
    group       the devices of a stage: its parts and options      the parts, recompute, sharding of state
    outline     a whole plan: microbatches, groups in order, the layers at which they meet

A microbatch is G = batch / M examples; every part takes its share of it, so the batch is exact whatever is
chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.passes.search.table import ModelTable

# What a replica keeps of the state that its fellows have too: all of it, no optimizer state of theirs,
# nothing of theirs at all (gathered when needed).
SHARDINGS = ("none", "optimizer", "all")
EXCHANGES = ("dense", "compressed")


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one kind in one site.

    Attributes:
      site, kind: names.
      nodes: hosts.
      per_node: devices of each.
    """

    site: str
    kind: str
    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Replicas of a stage in one pool.

    Attributes:
      pool: position in `Problem.pools`.
      tensor: devices that share a replica's layers.
      replicas: how many.
      share: examples of a microbatch that each takes.
    """

    pool: int
    tensor: int
    replicas: int
    share: int

    @property
    def devices(self) -> int:
        return self.tensor * self.replicas


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a stage trades memory and time with.

    Attributes:
      recompute: whether the backward runs the forward again instead of keeping what it made.
      sharding: one of `SHARDINGS`.
      sequence: whether what tensor parallelism replicates is split along the sequence.
      experts: replicas that share the experts of a mixture; 1 where each has all.
      exchange: one of `EXCHANGES`, how gradients travel between replicas.
    """

    recompute: bool = False
    sharding: str = "none"
    sequence: bool = False
    experts: int = 1
    exchange: str = "dense"


PLAIN = Options()


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The devices of a stage and what they do with its state.

    Attributes:
      parts: in the order in which their replicas are numbered.
      options: see `Options`.
      replicas, devices: of all parts together.
    """

    parts: tuple[Part, ...]
    options: Options = PLAIN
    replicas: int = dataclasses.field(init=False, repr=False, compare=False, default=0)
    devices: int = dataclasses.field(init=False, repr=False, compare=False, default=0)
    _hash: int = dataclasses.field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Prices are looked up by group some hundred thousand times a second.
        object.__setattr__(self, "replicas", sum([p.replicas for p in self.parts]))
        object.__setattr__(self, "devices", sum([p.tensor * p.replicas for p in self.parts]))
        object.__setattr__(self, "_hash", hash((self.parts, self.options)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def examples(self) -> int:
        """Returns the examples of a microbatch."""
        return sum(p.replicas * p.share for p in self.parts)

    def with_options(self, options: Options) -> Group:
        return self if options == self.options else Group(self.parts, options)


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """A whole plan.

    Attributes:
      num_microbatches: M.
      groups: one per stage, in pipeline order.
      edges: the layer at which each stage starts, and the number of layers at the end.
    """

    num_microbatches: int
    groups: tuple[Group, ...]
    edges: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.groups)

    def used(self, num_pools: int) -> list[int]:
        """Returns how many devices of each pool are used."""
        out = [0] * num_pools
        for group in self.groups:
            for p in group.parts:
                out[p.pool] += p.devices
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Micro:
    """How the batch is divided.

    Attributes:
      num_microbatches: M.
      examples: of one microbatch, over all replicas of a stage.
      replicas: of every stage, where they must be equal; 0 where each stage may choose.
    """

    num_microbatches: int
    examples: int
    replicas: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be planned, and within which bounds.

    Attributes:
      table: the model's layers.
      cluster: where, with the links.
      pools: its devices; those that may not be used are left out.
      batch: examples of a step.
      alike: every stage has the same number of replicas with equal shares, as frameworks with one
        process grid want it.
      mixed: whether a stage may have parts in several pools.
      options: what stages may choose besides `PLAIN`.
      max_stages: the most stages; 0 for as many as there are layers.
      max_devices: the most devices in use; 0 for all.
      compressed: bytes of a compressed exchange over those of a dense one; 0 where none is declared.
      compress_passes: how often compressing and decompressing read or write all gradients' bytes.
      counts: the numbers of microbatches that may be; () for all that divide the batch.
      stage_pools: (stage, pools) pairs where a stage must be in one of these; others may be anywhere.
    """

    table: ModelTable
    cluster: Cluster
    pools: tuple[Pool, ...]
    batch: int
    alike: bool = False
    mixed: bool = True
    options: tuple[Options, ...] = ()
    max_stages: int = 0
    max_devices: int = 0
    compressed: float = 0.0
    compress_passes: float = 0.0
    counts: tuple[int, ...] = ()
    stage_pools: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlanError(f"the batch must have at least one example, not {self.batch}")
        if not self.pools:
            raise PlanError("there are no devices to plan for")

    @functools.cached_property
    def num_layers(self) -> int:
        return len(self.table.layers)

    @functools.cached_property
    def num_devices(self) -> int:
        return sum(p.devices for p in self.pools)

    @functools.cached_property
    def stage_limit(self) -> int:
        """Returns the most stages a plan may have."""
        most = min(self.num_layers, self.num_devices)
        return min(most, self.max_stages) if self.max_stages else most

    @functools.cached_property
    def device_limit(self) -> int:
        """Returns the most devices a plan may use."""
        return min(self.num_devices, self.max_devices) if self.max_devices else self.num_devices

    @functools.cached_property
    def twins(self) -> tuple[int, ...]:
        """Returns, per pool, the first pool that it could change places with.

        Pools are alike where kind and number of devices are, and every third pool sees both through
        equal links; plans that differ by an exchange of the two cost the same.
        """
        out: list[int] = []
        for i in range(len(self.pools)):
            out.append(next((j for j in range(i) if out[j] == j and self._alike(i, j)), i))
        return tuple(out)

    def allows(self, stage: int, group: Group) -> bool:
        """Returns whether a stage may have these devices."""
        pinned = [pools for s, pools in self.stage_pools if s == stage]
        return all(part.pool in pools for pools in pinned for part in group.parts)

    def _alike(self, i: int, j: int) -> bool:
        if any((i in pools) != (j in pools) for _, pools in self.stage_pools):
            return False
        a, b = self.pools[i], self.pools[j]
        if (a.kind, a.nodes, a.per_node) != (b.kind, b.nodes, b.per_node):
            return False
        if self.link_key(i, i) != self.link_key(j, j):
            return False
        others = (k for k in range(len(self.pools)) if k not in (i, j))
        return all(
            self.link_key(i, k) == self.link_key(j, k) and self.link_key(k, i) == self.link_key(k, j)
            for k in others
        )

    @functools.cached_property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """Returns, per pool, the first device of each of its nodes."""
        groups = {(g.site, g.kind): g for g in self.cluster.groups()}
        return tuple(
            tuple(node[0] for node in groups[p.site, p.kind].nodes) for p in self.pools
        )

    def link_key(self, a: int, b: int) -> tuple[float, float, str]:
        """Returns what tells the link between the nodes of two pools from others."""
        link = self.link(a, b)
        return (link.bandwidth_bytes_s, link.latency_s, link.duplex)

    def link(self, a: int, b: int):
        """Returns the link between a node of one pool and another node of the other (or the same)."""
        first = self.heads[a][0]
        second = self.heads[b][-1]
        return self.cluster.link(first, second)


def pools_of(cluster: Cluster) -> tuple[Pool, ...]:
    """Returns the pools of a cluster, in its own order of sites; nodes of unlike sizes are apart."""
    out = []
    for group in cluster.groups():
        sizes = sorted({len(n) for n in group.nodes}, reverse=True)
        if len(sizes) > 1:
            raise PlanError(
                f"site {group.site!r} has nodes with {' and '.join(map(str, sizes))} {group.kind}; "
                "describe nodes of unlike sizes as sites of their own"
            )
        out.append(Pool(group.site, group.kind, len(group.nodes), sizes[0]))
    return tuple(out)


def fits(pool: Pool, wanted: Sequence[tuple[int, int]]) -> bool:
    """Returns whether (tensor degree, replicas) pairs can be placed on a pool's nodes.

    A replica that fits in a node lies in one; a larger one takes whole nodes.
    """
    total = 0
    powers = pool.per_node & (pool.per_node - 1) == 0
    for tensor, replicas in wanted:
        total += tensor * replicas
        powers = powers and tensor & (tensor - 1) == 0
    if total > pool.devices:
        return False
    # Powers of two, the largest placed first, leave no gap.
    return powers or _packs(pool, sorted(wanted, reverse=True))


def _packs(pool: Pool, sizes: Sequence[tuple[int, int]]) -> bool:
    free = [pool.per_node] * pool.nodes
    for tensor, replicas in sizes:
        for _ in range(replicas):
            if tensor > pool.per_node:
                whole = [i for i, n in enumerate(free) if n == pool.per_node]
                need = -(-tensor // pool.per_node)
                if len(whole) < need:
                    return False
                for i in whole[:need]:
                    free[i] = 0
                continue
            spot = next((i for i, n in enumerate(free) if n >= tensor), None)
            if spot is None:
                return False
            free[spot] -= tensor
    return True


def placeable(problem: Problem, groups: Sequence[Group]) -> bool:
    """Returns whether all groups fit on the devices together."""
    if sum([g.devices for g in groups]) > problem.device_limit:
        return False
    wanted: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        for p in group.parts:
            wanted.setdefault(p.pool, []).append((p.tensor, p.replicas))
    return all([fits(problem.pools[pool], w) for pool, w in wanted.items()])


def problems_of(problem: Problem, outline: Outline) -> Iterator[str]:
    """Yields every reason why an outline is no legal plan."""
    edges, m = outline.edges, outline.num_microbatches
    if m < 1 or problem.batch % m:
        yield f"{m} microbatches do not divide a batch of {problem.batch}"
        return
    if problem.counts and m not in problem.counts:
        yield f"{m} microbatches are not among {', '.join(map(str, problem.counts))}"
    if len(edges) != outline.num_stages + 1 or edges[0] != 0 or edges[-1] != problem.num_layers:
        yield f"edges {edges} do not cut {problem.num_layers} layers in {outline.num_stages} stages"
    elif any(b <= a for a, b in itertools.pairwise(edges)):
        yield f"edges {edges} leave a stage without layers"
    for s, group in enumerate(outline.groups):
        if group.examples * m != problem.batch:
            yield (
                f"stage {s} takes {group.examples} examples of {m} microbatches, the batch has "
                f"{problem.batch}"
            )
        experts = group.options.experts
        if experts > 1 and (problem.table.experts % experts or group.replicas % experts):
            yield (
                f"stage {s} divides {problem.table.experts} experts among {experts} of its {group.replicas} replicas, "
                "which does not come out even"
            )
        if problem.alike and group.replicas != outline.groups[0].replicas:
            yield f"stage {s} has {group.replicas} replicas, stage 0 {outline.groups[0].replicas}"
        if problem.alike and len({p.share for p in group.parts}) > 1:
            yield f"stage {s} has replicas with unequal shares"
    for s, _ in problem.stage_pools:
        if s >= outline.num_stages or not problem.allows(s, outline.groups[s]):
            yield f"stage {s} is not where it must be"
    if not placeable(problem, outline.groups):
        yield "the stages take more devices than there are, or replicas that no node can hold"


def single_parts(problem: Problem, pool: int) -> Iterator[Part]:
    """Yields one replica of every tensor degree and share that there may be numbers for in a pool.

    Where any share has numbers, the powers of two and the whole batch stand for all.
    """
    kind = problem.pools[pool].kind
    for tensor in problem.table.tensors(kind):
        if tensor > problem.pools[pool].devices:
            continue
        shares = problem.table.shares(kind, tensor)
        if shares is None:
            doubled = [1 << i for i in range(problem.batch.bit_length())]
            shares = tuple(sorted({s for s in doubled if s <= problem.batch} | {problem.batch}))
        for share in shares:
            if share <= problem.batch:
                yield Part(pool, tensor, 1, share)
