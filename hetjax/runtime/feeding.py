"""Brings a call's leaves to the stages that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetjax.ir.graph import Graph, Ref
from hetjax.ir.program import Program
from hetjax.runtime.executor import Executor


class Feeder:
    """Places inputs for an executor.

    Args:
      graph: for captured arrays.
      program: for its microbatches.
      executor: whose slots are filled.
    """

    def __init__(self, graph: Graph, program: Program, executor: Executor):
        self._num = program.num_microbatches
        self._consts: list[tuple[int, Any]] = []
        self._whole: list[tuple[int, Any, int]] = []  # argument, sharding, slot
        self._sliced: list[tuple[int, Any, list[int], int]] = []
        self._dtypes = {a.ref: graph.avals[a.ref] for a in graph.inputs}
        for argument, form, sharding, slots, axis in executor.feed_slots:
            ref: Ref = graph.inputs[argument].ref
            if ref in graph.consts:
                import jax

                self._consts.append((slots[0], jax.device_put(_plain(graph.consts[ref]), sharding)))
            elif form == "micro" and axis is not None:
                self._sliced.append((argument, sharding, slots, axis))
            elif form == "micro":
                self._whole += [(argument, sharding, slot) for slot in slots]
            else:
                self._whole.append((argument, sharding, slots[0]))
        self._slicers: dict[Any, Any] = {}
        self.bytes_between_stages, self.transfers = _carried(graph, program)

    def feed(self, leaves: Sequence[Any]) -> tuple[dict[int, Any], list[tuple[int, Any]]]:
        """Returns the placed leaves by argument (at the first stage that reads each), and the feeds."""
        import jax

        placed: dict[int, Any] = {}
        feeds = list(self._consts)
        sources, shardings, slots, arguments = [], [], [], []
        for argument, sharding, slot in self._whole:
            leaf = leaves[argument]
            held = getattr(leaf, "sharding", None)
            if held is sharding or (held is not None and held == sharding):
                feeds.append((slot, leaf))
                placed.setdefault(argument, leaf)
            else:
                sources.append(leaf)
                shardings.append(sharding)
                slots.append(slot)
                arguments.append(argument)
        pieces: dict[tuple[int, int], list[Any]] = {}
        for argument, sharding, targets, axis in self._sliced:
            key = (argument, axis)
            if key not in pieces:
                pieces[key] = self._slices(leaves[argument], axis)
            sources += pieces[key]
            shardings += [sharding] * self._num
            slots += targets
            arguments += [-1] * self._num
        if sources:
            for slot, argument, array in zip(slots, arguments, jax.device_put(sources, shardings)):
                feeds.append((slot, array))
                if argument >= 0:
                    placed.setdefault(argument, array)
        return placed, feeds

    def _slices(self, leaf: Any, axis: int) -> list[Any]:
        """Returns the microbatches of a batch leaf: views of host arrays, one launch on a device."""
        import jax
        from jax import lax

        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(leaf)
            width = leaf.shape[axis] // self._num
            index = (slice(None),) * axis
            return [leaf[(*index, slice(m * width, (m + 1) * width))] for m in range(self._num)]
        key = (leaf.shape, leaf.dtype, axis)
        if key not in self._slicers:
            width = leaf.shape[axis] // self._num
            self._slicers[key] = jax.jit(
                lambda x: [
                    lax.slice_in_dim(x, m * width, (m + 1) * width, axis=axis) for m in range(self._num)
                ]
            )
        return self._slicers[key](leaf)


def _carried(graph: Graph, program: Program) -> tuple[int, int]:
    """Returns bytes and number of state leaves that each step takes to a stage other than their home."""
    home = {
        r.updates: ret.stage for r, ret in zip(program.results, program.returns)
        if r.updates is not None and ret.stage is not None
    }
    moved = [
        graph.avals[graph.inputs[f.argument].ref].nbytes for f in program.feeds
        if f.argument in home and home[f.argument] != f.stage
    ]
    return sum(moved), len(moved)


def _plain(const: Any) -> Any:
    """Returns a captured array in a form that device_put takes."""
    import jax

    return const if isinstance(const, (jax.Array, np.ndarray)) else np.asarray(const)
