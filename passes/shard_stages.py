"""shard-stages: gives every port its spec on its stage's mesh."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import LoweringError, PassError
from hetjax.ir.graph import Aval, Graph, Ref
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.plan import Plan
from hetjax.ir.program import Feed, Fragment, Port, Program, Spec, StageMesh
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.partition import partition
from hetjax.passes.plan_stages import batch_size_of
from hetjax.passes.sequence_stages import SequenceStage, renewed


@dataclasses.dataclass(frozen=True)
class ShardStages:
    """Fixes what enters and leaves each fragment; XLA propagates inside.

    The batch axis is split over "data", state leaves as the plan says, with their gradients and
    moments alike. What a forward leaves for the backward of its own stage is split as it comes out of
    the forward where that has a "model" axis. Where the plan says `sequence` for a stage, what "model" does not
    split is split over it on another dimension than examples, and gathered where it must be whole
    (`hetjax.passes.split_activations`). Everything else is replicated. A dimension that a mesh axis does not divide is
    replicated on it, and the bundle's notes list it.
    """

    name: ClassVar[str] = "shard-stages"
    summary: ClassVar[str] = "split the batch over data and the parameters over model"
    requires: ClassVar[tuple[str, ...]] = ("graph", "microbatching", "plan", "program")

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None or bundle.program is None or bundle.microbatching is None:
            raise PassError(self.name, "needs a program; run cut-stages first")
        if bundle.plan is None:
            raise PassError(self.name, "needs a plan; run plan-stages first")
        sharder = _Sharder(bundle.graph, bundle.microbatching, bundle.plan, bundle.program)
        program = sharder.program()
        if program == bundle.program:
            return bundle
        bundle = bundle.replace(program=program)
        for sentence in dict.fromkeys(sharder.undivided):
            bundle = bundle.note("replicated", sentence)
        for sentence in sharder.sequences:
            bundle = bundle.note("sequence", sentence)
        return bundle


class _Sharder:
    def __init__(self, graph: Graph, micro: Microbatching, plan: Plan, program: Program):
        self.graph, self.micro, self.old = graph, micro, program
        by_path = dict(plan.state_specs)
        leaves = {a.ref: by_path[a.path] for a in graph.inputs if a.path in by_path}
        self.state_specs = follow_updates(graph, leaves)
        self.batch_size = batch_size_of(graph)
        self.undivided: list[str] = []
        self.path_of = {a.ref: a.path for a in graph.inputs}
        self.avals, self.micro_avals = list(program.avals), list(program.micro_avals)
        self.sequence_stages = [
            s for s, mesh in enumerate(program.meshes) if plan.stages[s].sequence and mesh.axis_size("model") > 1
        ]
        self.sequences: list[str] = []

    def program(self) -> Program:
        fragments = self.with_residuals(tuple(map(self.fragment, self.old.fragments)))
        for stage in self.sequence_stages:
            fragments = self.with_sequence(stage, fragments)
        feeds = tuple(map(self.feed, self.old.feeds))
        given = {(f.stage, p.ref): p for f in fragments for p in f.outputs if p.form == "step"}
        returns = tuple(
            r if r.port is None else dataclasses.replace(r, port=given[int(r.stage or 0), r.port.ref])
            for r in self.old.returns
        )
        return self.old.replace(
            fragments=fragments, feeds=feeds, returns=returns, avals=tuple(self.avals), micro_avals=tuple(self.micro_avals)
        )

    def fragment(self, fragment: Fragment) -> Fragment:
        mesh = self.old.meshes[fragment.stage]
        ports = lambda ps: tuple(dataclasses.replace(p, spec=self.spec(mesh, p)) for p in ps)  # noqa: E731
        return dataclasses.replace(
            fragment, inputs=ports(fragment.inputs), outputs=ports(fragment.outputs)
        )

    def with_residuals(self, fragments: tuple[Fragment, ...]) -> tuple[Fragment, ...]:
        """Returns the fragments with what stays on a tensor-parallel stage left as it is made.

        Gathering it at the end of the forward, to split it anew in the backward, would cost more than the
        sums that tensor parallelism needs.
        """
        specs: dict[tuple[int, Ref], Spec] = {}
        for f in fragments:
            mesh = self.old.meshes[f.stage]
            if f.phase == "forward" and mesh.axis_size("model") > 1:
                specs |= {(f.stage, r): spec for r, spec in self.residuals(f, fragments).items()}
        if not specs:
            return fragments

        return tuple(
            renewed(f, {r: spec for (stage, r), spec in specs.items() if stage == f.stage}) for f in fragments
        )

    def residuals(self, fragment: Fragment, fragments: tuple[Fragment, ...]) -> dict[Ref, Spec]:
        """Returns the specs of a forward's results that only its own stage reads, as they are made."""
        outputs = self.own_results(fragment, fragments)
        avals = self.avals_of(fragment)
        inputs = {p.ref: p.spec for p in fragment.inputs}
        mesh = self.old.meshes[fragment.stage]
        try:
            found = partition(fragment.ops, avals, inputs, outputs, mesh.axes)
        except LoweringError:
            return {}  # from text without equations: replicated, as it was
        return {
            r: self.divided(mesh, r, avals[r], spec)
            for (r, wanted), spec in zip(outputs.items(), found.results)
            if wanted is None
        }

    def avals_of(self, fragment: Fragment) -> list[Aval]:
        return self.micro_avals if fragment.per_microbatch else self.avals

    def own_results(self, fragment: Fragment, fragments: tuple[Fragment, ...]) -> dict[Ref, Spec | None]:
        """Returns the spec of each result of a forward, None where only its own stage reads it."""
        returned = {r.port.ref for r in self.old.returns if r.port is not None}
        abroad = {p.ref for f in fragments if f.stage != fragment.stage for p in f.inputs}
        # What several fragments read in different forms, or one reads for the whole batch, keeps its spec.
        form = "micro" if fragment.per_microbatch and self.old.num_microbatches > 1 else "step"
        mine = [p for f in fragments if f.stage == fragment.stage for p in (*f.inputs, *f.outputs)]
        forms = {r: {p.form for p in mine if p.ref == r} for r in {p.ref for p in fragment.outputs}}
        avals = self.avals_of(fragment)
        fixed = returned | abroad | set(self.state_specs)
        return {
            p.ref: None if len(forms[p.ref]) == 1 and p.form in ("micro", form) and p.ref not in fixed and avals[p.ref].ndim
            else p.spec
            for p in fragment.outputs
        }

    def with_sequence(self, stage: int, fragments: tuple[Fragment, ...]) -> tuple[Fragment, ...]:
        """Returns the fragments with a stage's whole activations split over its tensor-parallel devices."""
        mesh = self.old.meshes[stage]
        work = SequenceStage(
            self.graph, self.micro, self.old, fragments, stage, (self.avals, self.micro_avals), self.batch_axis, self.residuals,
            self.own_results,
        )
        try:
            found = work.best()
        except LoweringError as error:
            self.sequences.append(f"{mesh.name} stays as tensor parallelism has it: {error}")
            return fragments
        size = mesh.axis_size("model")
        self.sequences.append(
            f"{mesh.name}: {work.num_split} activations are split {size} ways between its tensor-parallel regions"
            if work.num_split else f"{mesh.name}: no activation between its layers can be split {size} ways"
        )
        return found

    def feed(self, feed: Feed) -> Feed:
        ref = self.graph.inputs[feed.argument].ref
        port = Port(ref, feed.form, (), axis=feed.axis)
        return dataclasses.replace(feed, spec=self.spec(self.old.meshes[feed.stage], port))

    def spec(self, mesh: StageMesh, port: Port) -> Spec:
        """Returns the spec of one value on a mesh."""
        aval = self.aval(port)
        if port.ref in self.state_specs:
            return self.divided(mesh, port.ref, aval, self.state_specs[port.ref])
        axis = self.batch_axis(port.ref, aval)
        if axis is None or port.form == "sum" or mesh.axis_size("data") == 1:
            return ((),) * aval.ndim
        spec = tuple(("data",) if d == axis else () for d in range(aval.ndim))
        return self.divided(mesh, port.ref, aval, spec)

    def aval(self, port: Port) -> Aval:
        sliced = port.form in ("micro", "concat", "last", "sum")
        return (self.old.micro_avals if sliced else self.old.avals)[port.ref]

    def batch_axis(self, ref: Ref, aval: Aval) -> int | None:
        """Returns the axis that counts examples, if the value has one."""
        typed = self.micro.types[ref]
        if typed.kind == "B" and typed.axis is not None:
            return typed.axis
        if typed.kind in ("B", "U") and self.batch_size > 1:
            # Not split, so never typed: the first axis as long as the batch is taken for it. Only speed depends on this.
            return next((d for d, n in enumerate(aval.shape) if n == self.batch_size), None)
        return None

    def divided(self, mesh: StageMesh, ref: Ref, aval: Aval, spec: Spec) -> Spec:
        """Returns the spec without mesh axes that do not divide their dimension or are not there."""
        out = []
        for n, axes in zip(aval.shape, spec, strict=True):
            size = 1
            for a in axes:
                size *= mesh.axis_size(a)
            if size > 1 and n % size:
                name = self.path_of.get(ref, f"%{ref}")
                self.undivided.append(
                    f"{name} {aval} on {mesh.name}: dimension of {n} does not divide over "
                    f"{'*'.join(axes)} of {size}, so it is replicated there"
                )
                axes = ()
            out.append(axes if size > 1 else ())
        return tuple(out)
