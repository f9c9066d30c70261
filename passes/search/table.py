"""The model as a table: seconds and bytes of each layer, by device kind, tensor degree and examples.

Where the numbers come from is the table's business: published profiles (`PublishedTable`), or the costs of
a traced or described model's layers under the roofline (`hetjax.passes.search.costed`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

from hetjax.passes.cost.profiles import LayerKey
from hetjax.passes.cost.sailor import Model


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one microbatch on one replica, per layer.

    Attributes:
      forward_s, backward_s: each layer's.
      update_s: each layer's optimizer, once a step.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of one layer on one of the devices that share it, per layer.

    Attributes:
      parameters: how many parameters there are.
      stored_bytes: what the forward of one example keeps for its backward.
      replicated_bytes: the part of it that every device of a replica keeps whole.
      expert_parameters: the part of the parameters that are experts'.
      passing_bytes, passing_once_bytes: what is there while the layer runs, for one example and
        whatever their number; () where that is not known.
      updating_bytes: what the update needs beside state and gradients; () where that is not known.
    """

    parameters: tuple[int, ...]
    stored_bytes: tuple[float, ...]
    replicated_bytes: tuple[float, ...]
    expert_parameters: tuple[int, ...]
    passing_bytes: tuple[float, ...] = ()
    passing_once_bytes: tuple[float, ...] = ()
    updating_bytes: tuple[float, ...] = ()


class ModelTable(Protocol):
    """What a search asks of a model.

    Attributes:
      name: the model's.
      layers: names, in order.
      output_bytes: what each layer hands on, per example.
      gathered_bytes: per layer and example, what the tensor-parallel devices of a replica sum up in a
        forward; 0 where the times hold it already and nothing else depends on it.
      routed_bytes: per layer and example, what travels to experts and back in a forward.
      experts: how many experts a layer has; 0 for none.
      state_bytes: (parameter, gradient, optimizer) bytes held per parameter.
      sequenced: the same layers where stages split what tensor parallelism leaves whole; None where the
        attributes above say what that costs. No layer takes less time there than here.
    """

    name: str
    layers: tuple[str, ...]
    output_bytes: tuple[int, ...]
    gathered_bytes: tuple[float, ...]
    routed_bytes: tuple[float, ...]
    experts: int
    state_bytes: tuple[float, float, float]

    @property
    def sequenced(self) -> ModelTable | None: ...

    def times(self, kind: str, tensor: int, share: int) -> LayerTimes | None:
        """Returns the seconds of all layers, or None where there are no numbers."""
        ...

    def sizes(self, tensor: int) -> LayerSizes | None:
        """Returns the bytes of all layers, or None where there are no numbers."""
        ...

    def tensors(self, kind: str) -> tuple[int, ...]:
        """Returns the tensor degrees there are numbers for, ascending."""
        ...

    def shares(self, kind: str, tensor: int) -> tuple[int, ...] | None:
        """Returns the examples per replica there are numbers for, or None where any number has."""
        ...


class PublishedTable:
    """A published model as a table.

    Args:
      model: with its profiles.
      repaired: whether noise that makes fewer examples take longer is taken out of the profiles.
    """

    sequenced = None

    def __init__(self, model: Model, *, repaired: bool):
        self.model = model
        self.name = model.name
        self._profiles = model.profiles.repaired() if repaired else model.profiles
        last = max(layer for _, layer in model.sizes)
        self.layers = tuple(str(n) for n in range(last + 1))
        self.output_bytes = tuple(model.size(1, n).output_bytes for n in range(last + 1))
        self.gathered_bytes = self.routed_bytes = (0.0,) * len(self.layers)
        self.experts = 0
        self.state_bytes = (4.0, 4.0, 8.0)  # float32, Adam
        self._degrees: dict[str, dict[int, list[int]]] = {}
        first = self.layers[0]
        for key, _ in self._profiles:
            if key.layer == first:
                self._degrees.setdefault(key.kind, {}).setdefault(key.tensor, []).append(key.microbatch)
        self._sized = {t for t, _ in model.sizes}

    def times(self, kind: str, tensor: int, share: int) -> LayerTimes | None:
        if share not in self._degrees.get(kind, {}).get(tensor, ()) or tensor not in self._sized:
            return None
        rows = [
            self._profiles.time(LayerKey(self.name, kind, tensor, share, layer)) for layer in self.layers
        ]
        return LayerTimes(
            tuple(r.forward_s for r in rows), tuple(r.backward_s for r in rows),
            tuple(r.update_s for r in rows),
        )  # fmt: skip

    def sizes(self, tensor: int) -> LayerSizes | None:
        if tensor not in self._sized:
            return None
        rows = [self.model.size(tensor, n) for n in range(len(self.layers))]
        nothing = (0,) * len(rows)
        return LayerSizes(
            tuple(r.parameters for r in rows), tuple(float(r.stored_bytes) for r in rows),
            tuple(map(float, nothing)), nothing,
        )  # fmt: skip

    def tensors(self, kind: str) -> tuple[int, ...]:
        return tuple(sorted(t for t in self._degrees.get(kind, ()) if t in self._sized))

    def shares(self, kind: str, tensor: int) -> tuple[int, ...]:
        return tuple(sorted(self._degrees.get(kind, {}).get(tensor, ())))


def prefix(values: Sequence[float]) -> list[float]:
    """Returns running sums, starting with 0."""
    return [0.0, *itertools.accumulate(values)]
