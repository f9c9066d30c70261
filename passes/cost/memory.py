"""Bytes a program holds on each device, by liveness.

  state          parameters, optimizer, whatever comes back updated
  gradients      accumulators of sums over microbatches
  activations    what a forward leaves for its backward, per microbatch in flight
  temporaries    the most that is live at once inside a fragment, beyond what it takes and gives; state that is
                 split over replicas is whole while it is used
  transfers      values received from other stages, and those hoisted out of the microbatches

Values inside a fragment are taken to be split as `value_splits` says; what XLA fuses is not counted, as in
`traffic`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hetjax.ir.graph import Aval, Graph, Op, Ref
from hetjax.ir.program import Fragment, Port, Program, StageMesh
from hetjax.passes.cost.traffic import memory_traffic
from hetjax.passes.cost.value_splits import value_splits

_HALF = ("bf16", "f16")
# XLA gathers gradients into all-reduces of at most this much before it adds them up (its default).
_BUCKET_BYTES = 30 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentMemory:
    """Bytes of one compiled call on one device.

    Attributes:
      argument_bytes, output_bytes: what it takes and gives.
      temporary_bytes: the most that is live at once beyond those.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one device of a stage; see the module's text.

    Attributes:
      parameters, optimizer: of the state held there.
      gradients: accumulators.
      activations: of one microbatch.
      in_flight: how many microbatches are held at once.
      transfers: received values of one microbatch and of the step, and hoisted ones.
      temporaries: of the largest forward or backward.
      update: what the update needs beyond state and gradients: new values and temporaries.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    in_flight: int
    transfers: int
    temporaries: int
    update: int

    @property
    def static_bytes(self) -> int:
        """What is there from the first microbatch to the last."""
        return self.parameters + self.optimizer + self.gradients + self.transfers + self.temporaries

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        running = self.activations * self.in_flight + self.transfers + self.temporaries
        return self.parameters + self.optimizer + self.gradients + max(running, self.update)


def parts_of(axes: frozenset[str], mesh: StageMesh) -> int:
    """Returns into how many parts those axes split."""
    return math.prod(mesh.axis_size(a) for a in axes)


def replica_split(program: Program, stage: int) -> frozenset[Ref]:
    """Returns the state that a stage splits over the replicas of its "data" axis, to gather it for use.

    State is what a result replaces, changed or not; a batch is split over that axis too, and never gathered.
    """
    if program.meshes[stage].axis_size("data") < 2:
        return frozenset()
    state = {r.updates for r in program.results if r.updates is not None}
    return frozenset(
        feed.argument for feed in program.feeds
        if feed.stage == stage and feed.argument in state and any("data" in dim for dim in feed.spec)
    )


def whole_bytes(program: Program, fragment: Fragment, port: Port, *, given: bool) -> int:
    """Returns `port_bytes` of a value that the replicas of the "data" axis do not split."""
    spec = tuple(tuple(a for a in dim if a != "data") for dim in port.spec)
    return port_bytes(program, fragment, dataclasses.replace(port, spec=spec), given=given)


def port_bytes(program: Program, fragment: Fragment, port: Port, *, given: bool) -> int:
    """Returns the bytes of one port's value on one device.

    Args:
      program: what the fragment belongs to.
      fragment: whose port.
      port: the port.
      given: whether it is an output.
    """
    mesh, m = program.meshes[fragment.stage], program.num_microbatches
    micro, full = program.micro_avals[port.ref], program.avals[port.ref]
    if port.form == "sum":
        # Half precisions are summed in float32.
        nbytes = micro.nbytes * 2 if micro.dtype in _HALF else micro.nbytes
    elif port.form == "micro":
        nbytes = micro.nbytes * (m if given and not fragment.per_microbatch else 1)
    elif port.form == "concat":
        nbytes = micro.nbytes * m
    elif port.form == "last":
        nbytes = micro.nbytes
    else:
        nbytes = (micro if fragment.per_microbatch and given else full).nbytes
    return math.ceil(nbytes / math.prod(mesh.parts(port.spec)))


def fragment_memory(program: Program, fragment: Fragment) -> FragmentMemory:
    """Returns the bytes of one fragment on one device of its mesh."""
    mesh = program.meshes[fragment.stage]
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    taken = sum(port_bytes(program, fragment, p, given=False) for p in fragment.inputs)
    given = [port_bytes(program, fragment, p, given=True) for p in fragment.outputs]
    # A sum's old value is an argument too.
    taken += sum(n for n, p in zip(given, fragment.outputs) if p.form == "sum")
    axes = value_splits(fragment.ops, fragment.inputs, mesh).axes
    # A value that is only summed up leaves as part of its accumulator.
    leaving = {p.ref for p in fragment.outputs if p.form != "sum"}
    kept = {p.ref for p in fragment.inputs} | leaving
    parts = {r: parts_of(a, mesh) for r, a in axes.items()}
    split = replica_split(program, fragment.stage) if fragment.phase != "update" else frozenset()
    gathered = {
        p.ref: whole_bytes(program, fragment, p, given=False) for p in fragment.inputs if p.ref in split
    }
    temporary = live_peak(fragment.ops, avals, kept, leaving, parts, gathered)
    if mesh.axis_size("data") > 1:
        reduced = [
            whole_bytes(program, fragment, p, given=True)
            for p in fragment.outputs
            if p.form == "sum" and "data" in axes.get(p.ref, ())
        ]
        bucket = min(sum(reduced), max([_BUCKET_BYTES, *reduced]))
        # What goes into an all-reduce and what comes out of it are there at once.
        temporary = max(temporary, 2 * bucket)
    return FragmentMemory(taken, sum(given), temporary)


def live_peak(
    ops: Sequence[Op],
    avals: Sequence[Aval],
    kept: set[Ref],
    leaving: set[Ref],
    parts: Mapping[Ref, int],
    gathered: Mapping[Ref, int] | None = None,
) -> int:
    """Returns the most bytes of written values that are live at once.

    Args:
      ops: in order.
      avals: type of each ref.
      kept: refs that are not counted: arguments and results.
      leaving: refs that are read after these ops.
      parts: into how many parts a ref is split; 1 when absent.
      gathered: bytes of the arguments that are gathered from other devices while they are read.
    """
    traffic = memory_traffic(ops, avals, leaving)
    last_use = {r: i for i, op in enumerate(ops) for r in op.refs}
    # A fused op reads its inputs where its own consumers run: they live until then.
    for i in reversed(range(len(ops))):
        if traffic[i][1] == 0:
            until = max((last_use.get(r, i) for r in ops[i].outputs), default=i)
            for r in ops[i].refs:
                last_use[r] = max(last_use[r], until)
    ends: dict[int, list[int]] = {}
    live = peak = 0
    waiting = dict(gathered or {})
    for i, op in enumerate(ops):
        for r in op.refs:
            if r in waiting:
                nbytes = waiting.pop(r)
                live += nbytes
                ends.setdefault(last_use[r], []).append(nbytes)
        if traffic[i][1]:
            for r in op.outputs:
                if r in kept or r not in last_use:
                    continue
                nbytes = avals[r].nbytes // parts.get(r, 1)
                live += nbytes
                ends.setdefault(last_use[r], []).append(nbytes)
        peak = max(peak, live)
        live -= sum(ends.pop(i, ()))
    return peak


def stage_memory(graph: Graph, program: Program, stage: int, in_flight: int) -> StageMemory:
    """Returns the bytes on one device of a stage.

    Args:
      graph: the step, for the paths of its state.
      program: what runs.
      stage: position in `Program.meshes`.
      in_flight: microbatches whose activations are held at once.
    """
    mesh = program.meshes[stage]
    mine = [f for f in program.fragments if f.stage == stage]
    state = {"parameters": 0, "optimizer": 0}
    for feed in program.feeds:
        argument = graph.inputs[feed.argument]
        if feed.stage == stage and argument.role != "batch":
            nbytes = graph.avals[argument.ref].nbytes / math.prod(mesh.parts(feed.spec))
            state["optimizer" if "opt_state" in argument.path else "parameters"] += math.ceil(
                nbytes
            )
    fed = {graph.inputs[f.argument].ref for f in program.feeds if f.stage == stage}
    sums: dict[Ref, int] = {}
    forward: dict[Ref, int] = {}
    backward_reads: set[Ref] = set()
    received: dict[tuple[Ref, str], int] = {}
    temporaries = update = hoisted = 0
    made = {p.ref for f in mine for p in f.outputs}
    for fragment in mine:
        memory = fragment_memory(program, fragment)
        for port in fragment.outputs:
            nbytes = port_bytes(program, fragment, port, given=True)
            if port.form == "sum":
                sums[port.ref] = nbytes
            elif fragment.phase == "forward":
                forward[port.ref] = nbytes
            elif fragment.phase == "prologue":
                hoisted += nbytes
        for port in fragment.inputs:
            if port.ref not in made and port.ref not in fed:
                key = (port.ref, port.form)
                received[key] = port_bytes(program, fragment, port, given=False)
            if fragment.phase in ("backward", "weight"):
                backward_reads.add(port.ref)
        if fragment.per_microbatch:
            temporaries = max(temporaries, memory.temporary_bytes)
        elif fragment.phase == "update":
            reused = sum(
                port_bytes(program, fragment, fragment.inputs[i], given=False)
                for i in fragment.donated
            )
            update = max(update, memory.output_bytes - reused + memory.temporary_bytes)
    # What is received for the forward and read again by the backward is held like an activation.
    held = {r for f in mine if f.phase == "forward" for p in f.inputs for r in (p.ref,)}
    held &= backward_reads
    activations = sum(n for r, n in forward.items() if r in backward_reads)
    activations += sum(n for (r, _), n in received.items() if r in held)
    transfers = hoisted + sum(n for (r, _), n in received.items() if r not in held)
    return StageMemory(
        state["parameters"],
        state["optimizer"],
        sum(sums.values()),
        activations,
        in_flight,
        transfers,
        temporaries,
        update,
    )
