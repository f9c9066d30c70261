"""A model's table from what its layers compute and hold: by roofline and links, for any degree and share.

The layers come from a traced step or from the shapes of a model described; nothing was measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hetjax.ir.cluster import Cluster, DeviceKind, Link
from hetjax.passes.cost.collectives import Level, levels_price_s
from hetjax.passes.cost.roofline import Efficiency, op_price
from hetjax.passes.search.table import LayerSizes, LayerTimes


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs, for one example on one device.

    Attributes:
      name: of the layer.
      flops: of a forward.
      traffic_bytes: through main memory in a forward, parameters aside.
      parameters: how many.
      stored_bytes: what the forward keeps for the backward,
      replicated_bytes: of it, what tensor-parallel devices all keep.
      output_bytes: what it hands on.
      gathered_bytes: what tensor-parallel devices sum up in a forward.
      products: matrix products in it, each launched by itself.
      expert_parameters: of the parameters, those of experts.
      routed_bytes: what travels to experts and back in a forward.
    """

    name: str
    flops: float
    traffic_bytes: float
    parameters: int
    stored_bytes: float
    replicated_bytes: float
    output_bytes: int
    gathered_bytes: float = 0.0
    products: int = 1
    expert_parameters: int = 0
    routed_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """Where the devices of a kind sit: how many in a node, the link inside it, the one between nodes."""

    per_node: int
    inner: Link
    outer: Link | None


# A backward multiplies twice for each product of the forward.
_BACKWARD = 2.0
# Gradient, two moments and parameter are read, three of them written.
_UPDATE_READS = 7


class CostedTable:
    """A table by roofline; see `ModelTable`.

    Args:
      name: the model's.
      layers: their costs.
      cluster: its kinds and the links tensor parallelism uses.
      dtype: what the products compute in.
      state_bytes: (parameter, gradient, optimizer) bytes per parameter.
      experts: of a layer with experts.
      max_tensor: the highest tensor degree that the layers can be split in.
      efficiency: by device kind; the platform's assumed one where absent.
      traffic: bytes of an element that the update reads and writes.
    """

    sequenced = None

    def __init__(
        self,
        name: str,
        layers: Sequence[LayerCost],
        cluster: Cluster,
        *,
        dtype: str = "f32",
        state_bytes: tuple[float, float, float] = (4.0, 4.0, 8.0),
        experts: int = 0,
        max_tensor: int = 8,
        efficiency: Mapping[str, Efficiency] | None = None,
    ):
        self.name = name
        self.costs = tuple(layers)
        self.layers = tuple(c.name for c in layers)
        # A model repeats its blocks: each sort of layer is priced once.
        nameless = [dataclasses.replace(c, name="") for c in layers]
        self._sorts = tuple(dict.fromkeys(nameless))
        self._sort = tuple(self._sorts.index(c) for c in nameless)
        self.output_bytes = tuple(c.output_bytes for c in layers)
        self.gathered_bytes = tuple(c.gathered_bytes for c in layers)
        self.routed_bytes = tuple(c.routed_bytes for c in layers)
        self.experts = experts
        self.state_bytes = state_bytes
        self.dtype = dtype
        self.max_tensor = max_tensor
        self._efficiency = efficiency or {}
        self._kinds = {k.name: k for k in cluster.kinds}
        self._hosts = hosts_of(cluster)
        self._remember()

    def _remember(self) -> None:
        self.times = functools.lru_cache(maxsize=4096)(self._times)
        self.sizes = functools.lru_cache(maxsize=64)(self._sizes)
        self.tensors = functools.lru_cache(maxsize=64)(self._tensors)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("times", "sizes", "tensors")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()

    def _tensors(self, kind: str) -> tuple[int, ...]:
        """Returns powers of two up to what the model allows and twice a node holds."""
        most = min(self.max_tensor, 2 * self._hosts[kind].per_node)
        return tuple(1 << i for i in range(most.bit_length()) if 1 << i <= most)

    def shares(self, kind: str, tensor: int) -> None:
        return None

    def _times(self, kind: str, tensor: int, share: int) -> LayerTimes | None:
        forward, backward, update = [], [], []
        device, curve = self._kinds[kind], self._efficiency.get(kind)
        levels = tensor_levels(self._hosts[kind], tensor)
        for cost in self._sorts:
            seconds, backward_s = self._compute_s(device, cost, tensor, share, curve)
            # Each sum of a forward has its counterpart in the backward.
            sum_s = levels_price_s("all-reduce", levels, tensor, share * cost.gathered_bytes)
            forward.append(seconds + sum_s)
            backward.append(backward_s + sum_s)
            moved = _UPDATE_READS * sum(self.state_bytes) / 4 * cost.parameters / tensor
            update.append(op_price(device, 0.0, moved, "f32", product=False, efficiency=curve).seconds)
        return LayerTimes(*(tuple([row[i] for i in self._sort]) for row in (forward, backward, update)))

    def _compute_s(
        self, device: DeviceKind, cost: LayerCost, tensor: int, share: int, curve: Efficiency | None
    ) -> tuple[float, float]:
        n = max(1, cost.products)
        weights = self.state_bytes[0] * (cost.parameters - cost.expert_parameters) / tensor
        nbytes = (share * cost.traffic_bytes / tensor + weights) / n
        flops = share * cost.flops / tensor / n
        ahead = op_price(device, flops, nbytes, self.dtype, efficiency=curve).seconds
        back = op_price(device, flops, nbytes, self.dtype, efficiency=curve).seconds
        return n * ahead, _BACKWARD * n * back

    def _sizes(self, tensor: int) -> LayerSizes | None:
        costs = self.costs
        return LayerSizes(
            tuple(-(-c.parameters // tensor) for c in costs),
            tuple((c.stored_bytes - c.replicated_bytes) / tensor + c.replicated_bytes for c in costs),
            tuple(c.replicated_bytes for c in costs),
            tuple(-(-c.expert_parameters // tensor) for c in costs),
        )


def hosts_of(cluster: Cluster) -> dict[str, Host]:
    """Returns where the devices of each kind sit, by the first group of each."""
    found: dict[str, Host] = {}
    for group in cluster.groups():
        heads = [node[0] for node in group.nodes]
        first = heads[0]
        outer = cluster.link(first, heads[1]) if len(heads) > 1 else None
        found.setdefault(group.kind, Host(len(group.nodes[0]), cluster.link(first, first), outer))
    return found


def tensor_levels(host: Host, tensor: int) -> tuple[Level, ...]:
    """Returns the levels of a collective over the devices that share a replica's layers."""
    inside = min(tensor, host.per_node)
    out: list[Level] = [Level(inside, host.inner, 1)] if inside > 1 else []
    if tensor > inside and host.outer is not None:
        out.append(Level(tensor // inside, host.outer, inside))
    return tuple(out)
