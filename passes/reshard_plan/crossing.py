"""What a value costs on its way between two stages, for whoever weighs plans before there is a program."""

from __future__ import annotations

import dataclasses
import functools

from hetjax.ir.cluster import Cluster
from hetjax.ir.program import Spec, StageMesh
from hetjax.passes.reshard_plan.planner import plan_reshard, price_pieces

# Sizes between which a crossing's seconds are taken to grow evenly.
SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 24


@dataclasses.dataclass(frozen=True)
class Crossing:
    """What one value costs between two meshes.

    Attributes:
      held_s: (wire, seconds it is held) pairs; wires of a cluster are shared by all stages.
      delay_s: from the moment the slowest wire is free until the last byte is there.
      strategy: the way the planner chose.
    """

    held_s: tuple[tuple[str, float], ...]
    delay_s: float
    strategy: str

    @property
    def serialisation_s(self) -> float:
        """Returns the seconds of the slowest wire: no two values pass in less than twice that."""
        return max((s for _, s in self.held_s), default=0.0)

    @property
    def seconds(self) -> float:
        return self.serialisation_s + self.delay_s


@functools.lru_cache(maxsize=65536)
def crossing(
    cluster: Cluster, source: StageMesh, source_spec: Spec, target: StageMesh, target_spec: Spec,
    shape: tuple[int, ...], itemsize: int,
) -> Crossing:
    """Returns what a value of known sharding costs between two meshes; see `plan_reshard`."""
    plan = plan_reshard(cluster, source, source_spec, target, target_spec, shape, itemsize)
    own = source.blocks(source_spec, shape)
    held_s, delay_s = price_pieces(cluster, plan.pieces, own, itemsize)
    return Crossing(tuple(sorted(held_s.items())), delay_s, plan.route.strategy)


def activation_crossing(
    cluster: Cluster, source: StageMesh, target: StageMesh, nbytes: int, batch: int
) -> Crossing:
    """Returns what `nbytes` of activations cost, split over the axis "data" where it divides the batch.

    Args:
      cluster: where both meshes are.
      source, target: one stage's mesh and the other's; that is how `shard-stages` splits both.
      nbytes: of one microbatch; counted up to a multiple of the batch.
      batch: examples of one microbatch, 0 or 1 where nothing is split.
    """
    batch = max(1, batch)
    ends = []
    for mesh in (source, target):
        split = mesh.axis_size("data") > 1 and batch % mesh.axis_size("data") == 0
        ends += [mesh, (("data",) if split else (), ())]
    return crossing(cluster, *ends, (batch, -(-nbytes // batch)), 1)


@functools.lru_cache(maxsize=4096)
def crossing_speed(
    cluster: Cluster, source: StageMesh, target: StageMesh, batch: int
) -> tuple[float, float]:
    """Returns bytes per second and seconds of latency of activations from one mesh to another."""
    small, large = (
        activation_crossing(cluster, source, target, n, batch).seconds
        for n in (SMALL_BYTES, LARGE_BYTES)
    )
    slope_s = max(1e-15, (large - small) / (LARGE_BYTES - SMALL_BYTES))
    return 1 / slope_s, max(0.0, small - SMALL_BYTES * slope_s)
