"""The devices that share a stage, as far as they matter to what a layer takes on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hetjax.ir.cluster import Cluster, Link
from hetjax.ir.program import StageMesh
from hetjax.passes.cost.collectives import levels


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Devices of one kind that run a stage together.

    Attributes:
      data, model: sizes of the mesh's axes.
      nodes: how many nodes the devices lie on.
      link: the slowest link among them; None for one device.
    """

    data: int = 1
    model: int = 1
    nodes: int = 1
    link: Link | None = None

    @property
    def num_devices(self) -> int:
        return self.data * self.model


def group_of(cluster: Cluster, devices: Sequence[int], data: int, model: int) -> Group:
    """Returns the group that devices of a cluster form.

    Args:
      cluster: where they are.
      devices: positions.
      data, model: sizes of the mesh's axes.
    """
    nodes = len({cluster.devices[d].node for d in devices})
    found = [level.link for level in levels(cluster, devices)]
    return Group(data, model, nodes, min(found, key=lambda x: x.bandwidth_bytes_s, default=None))


def mesh_group(cluster: Cluster, mesh: StageMesh) -> Group:
    """Returns the group of a stage's mesh."""
    return group_of(cluster, mesh.devices, mesh.axis_size("data"), mesh.axis_size("model"))
