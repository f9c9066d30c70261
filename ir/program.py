"""The MPMD program: fragments on meshes of their own, reshards between them, one task list a mesh.

A step becomes, for each stage, up to one fragment per phase and level:

  prologue   once, before the microbatches: step-level values, hoisted values at full batch
  forward    once per microbatch
  backward   once per microbatch; accumulates what is summed over the batch
  weight     once per microbatch, after the backward, where the backward is split: it passes the
             gradient on, and this one accumulates
  update     once, after the microbatches: optimizer, metrics; level n+1 reads what other stages
             made at level n

Values are refs of the graph. How a fragment receives one is its *form*:

  step     one value per step
  micro    this microbatch's value (sliced for it, where it exists at full batch)
  sum      the accumulated sum over microbatches, times `scale`
  concat   the values of all microbatches, concatenated on `axis`
  last     the value of the last microbatch, times `scale`
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from hetjax.ir.display import Shown
from hetjax.ir.graph import Aval, Op, Ref, Result

PHASES = ("prologue", "forward", "backward", "weight", "update")
FORMS = ("step", "micro", "sum", "concat", "last")

# One mesh axis (or several, or none) per dimension, as in a PartitionSpec with every entry spelled out.
Spec = tuple[tuple[str, ...], ...]

# Bounds of a block per dimension, (start, stop), in the whole value.
Block = tuple[tuple[int, ...], tuple[int, ...]]

# Task kinds. "B" is a whole backward; "I" and "W" are its input-gradient and weight-gradient halves.
TASK_KINDS = ("F", "B", "I", "W", "prologue", "send", "recv", "sync", "update")


@dataclasses.dataclass(frozen=True, slots=True)
class StageMesh(Shown):
    """The devices of one stage, as a mesh.

    Attributes:
      name: "s0".
      kind: the device kind's name, one per mesh: XLA compiles for one kind.
      site: the site's name.
      axes: (name, size) pairs, e.g. (("data", 2), ("model", 1)).
      devices: positions in the cluster's device order, in row-major order of the axes.
    """

    name: str
    kind: str
    site: str
    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]

    def axis_size(self, name: str) -> int:
        return dict(self.axes).get(name, 1)

    def parts(self, spec: Spec) -> tuple[int, ...]:
        """Returns into how many parts each dimension is split."""
        sizes = dict(self.axes)
        out = []
        for axes in spec:
            n = 1
            for a in axes:
                n *= sizes[a]
            out.append(n)
        return tuple(out)

    def blocks(self, spec: Spec, shape: tuple[int, ...]) -> dict[int, Block]:
        """Returns the block of a value that each device holds.

        Args:
          spec: how the value is split; () splits nothing.
          shape: of the whole value. A dimension that does not divide is split into blocks of the
            rounded-up size, the last ones shorter or empty.
        """
        sizes = dict(self.axes)
        out: dict[int, Block] = {}
        for device, place in zip(self.devices, itertools.product(*(range(n) for _, n in self.axes))):
            at = dict(zip(sizes, place))
            start, stop = [], []
            for n, axes in zip(shape, spec or ((),) * len(shape)):
                index, parts = 0, 1
                for a in axes:
                    index, parts = index * sizes[a] + at[a], parts * sizes[a]
                size = -(-n // parts)
                start.append(min(n, index * size))
                stop.append(min(n, (index + 1) * size))
            out[device] = (tuple(start), tuple(stop))
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a fragment.

    Attributes:
      ref: the value.
      form: one of `FORMS`; outputs are "step", "micro" or "sum" (an accumulator).
      spec: its sharding on the fragment's mesh.
      scale: factor that turns the sum (or last value) into the step's value.
      axis: concatenation axis for "concat", slicing axis where a "micro" input exists at full batch.
    """

    ref: Ref
    form: str
    spec: Spec
    scale: float = 1.0
    axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Fragment(Shown):
    """Ops that one mesh runs as one compiled call.

    Attributes:
      name: "s1/forward", "s0/update1".
      stage: position in `Program.meshes`.
      phase: one of `PHASES`.
      level: 0, or more where stages exchange values within a phase.
      ops: in order; per-microbatch phases hold the ops of the microbatch graph, the others those
        of the full graph.
      inputs, outputs: ports. An output of form "sum" is an accumulator, added to and handed on.
      donated: positions in `inputs` whose buffers may be reused.
    """

    name: str
    stage: int
    phase: str
    level: int
    ops: tuple[Op, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    donated: tuple[int, ...] = ()

    @property
    def per_microbatch(self) -> bool:
        return self.phase in ("forward", "backward", "weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous block of a value that travels from one device to another.

    A device of either mesh may pass on what earlier pieces of its reshard brought it; so a block
    crosses between the meshes once, and is completed inside the target mesh.

    Attributes:
      source, target: device positions in the cluster's order.
      start, stop: the block's bounds per dimension, in the whole value.
    """

    source: int
    target: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Reshard:
    """A value that goes from one stage's mesh to another's.

    Attributes:
      name: "x3:s0>s1".
      ref: the value.
      form: "micro" (once per microbatch), "step" or "sum" (once per step).
      source, target: stages.
      source_spec, target_spec: its sharding at both ends.
      nbytes: bytes of the whole value, once.
      pieces: what travels between which devices; () leaves it to the runtime's device_put.
    """

    name: str
    ref: Ref
    form: str
    source: int
    target: int
    source_spec: Spec
    target_spec: Spec
    nbytes: int
    pieces: tuple[Piece, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One entry of a mesh's task list.

    Attributes:
      kind: one of `TASK_KINDS`.
      stage: whose list it is in.
      microbatch: its number, or None for tasks that run once per step.
      work: the fragment or reshard it runs, by name.
    """

    kind: str
    stage: int
    microbatch: int | None = None
    work: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclasses.dataclass(frozen=True, slots=True)
class Feed:
    """An input leaf and one stage that reads it.

    Attributes:
      argument: position in `Graph.inputs`.
      stage: the stage.
      form: "step" (whole) or "micro" (sliced on `axis`, one slice per microbatch).
      spec: its sharding there.
      axis: the batch axis for "micro".
    """

    argument: int
    stage: int
    form: str
    spec: Spec
    axis: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Return:
    """Where an output leaf comes from.

    Attributes:
      result: position in `Graph.outputs`.
      stage: the stage that holds it, or None when it is a literal or an input leaf handed back.
      port: its form there (sum, concat and last are completed by the runtime), or None.
    """

    result: int
    stage: int | None = None
    port: Port | None = None


@dataclasses.dataclass(frozen=True)
class Program(Shown):
    """A step, cut, sharded and scheduled.

    Attributes:
      name: the function's name.
      num_microbatches: M.
      schedule: the schedule's name.
      meshes: one per stage.
      avals: types at full batch, by ref.
      micro_avals: types at one microbatch, by ref.
      fragments, reshards: by name, in order.
      tasks: one tuple of tasks per mesh, in the order that mesh runs them.
      feeds, returns: how inputs enter and outputs leave.
      results: the graph's outputs, for paths.
    """

    name: str
    num_microbatches: int
    schedule: str
    meshes: tuple[StageMesh, ...]
    avals: tuple[Aval, ...]
    micro_avals: tuple[Aval, ...]
    fragments: tuple[Fragment, ...]
    reshards: tuple[Reshard, ...] = ()
    tasks: tuple[tuple[Task, ...], ...] = ()
    feeds: tuple[Feed, ...] = ()
    returns: tuple[Return, ...] = ()
    results: tuple[Result, ...] = ()

    def replace(self, **changes: Any) -> Program:
        return dataclasses.replace(self, **changes)

    def fragment(self, name: str) -> Fragment:
        return next(f for f in self.fragments if f.name == name)

    def __str__(self) -> str:
        from hetjax.ir.text import print_program

        return print_program(self)
