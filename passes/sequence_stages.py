"""Sequence parallelism on one stage: which dimension is split, in its forward, backward and what passes between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from hetjax.ir.graph import Aval, Graph, Ref
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.passes.cost.layers import step_layers
from hetjax.passes.cutting import live_values
from hetjax.passes.split_activations import (
    TRIED,
    Regions,
    constrained,
    is_split,
    moved_bytes,
    regions_of,
    split_values,
    splittable,
    with_dim,
)

Fragments = tuple[Fragment, ...]


def renewed(fragment: Fragment, specs: Mapping[Ref, Spec]) -> Fragment:
    """Returns a fragment whose ports have other specs, where there are some."""
    new = lambda ports: tuple(dataclasses.replace(p, spec=specs.get(p.ref, p.spec)) for p in ports)  # noqa: E731
    return dataclasses.replace(fragment, inputs=new(fragment.inputs), outputs=new(fragment.outputs))


class SequenceStage:
    """One stage whose activations are split.

    Args:
      graph, micro: the step.
      program: without specs.
      fragments: all of them, as tensor parallelism alone has them.
      stage: which.
      avals: types of all refs at full batch and at one microbatch; new ones are added.
      batch_axis: the dimension that counts examples.
      residuals: the specs of a forward's results as they are made.
      own_results: the spec of each result of a forward, None where only its own stage reads it.
    """

    def __init__(
        self, graph: Graph, micro: Microbatching, program: Program, fragments: Fragments, stage: int,
        avals: tuple[list[Aval], list[Aval]], batch_axis: Callable[[Ref, Aval], int | None],
        residuals: Callable[[Fragment, Fragments], dict[Ref, Spec]],
        own_results: Callable[[Fragment, Fragments], dict[Ref, Spec | None]],
    ):
        self.fragments, self.stage, self.mesh = fragments, stage, program.meshes[stage]
        self.full, self.micro_avals, self.batch_axis = *avals, batch_axis
        self.residuals, self.own_results = residuals, own_results
        self.size = self.mesh.axis_size("model")
        self.num_split = 0
        starts = {layer.op for layer in step_layers(graph, micro)}
        self.ends = frozenset().union(*(live for op, live in live_values(graph, micro) if op in starts))
        self.fed = frozenset(a.ref for a in graph.inputs)
        mine = [p for f in fragments if f.stage == stage for p in (*f.inputs, *f.outputs)]
        abroad = {p.ref for f in fragments if f.stage != stage for p in (*f.inputs, *f.outputs)}
        self.crossing = {p.ref for p in mine if p.ref in abroad} - self.fed
        forms: dict[Ref, set[str]] = {}
        for p in mine:
            forms.setdefault(p.ref, set()).add(p.form)
        returned = {r.port.ref for r in program.returns if r.port is not None}
        usual = "micro" if program.num_microbatches > 1 else "step"
        # A value that is put together from all microbatches, or handed out, keeps its split.
        self.ports = set(forms)
        self.free = {r for r, f in forms.items() if f <= {"micro", usual} and len(f) == 1} - returned - self.fed

    def avals_of(self, fragment: Fragment) -> list[Aval]:
        return self.micro_avals if fragment.per_microbatch else self.full

    def value(self, like: Ref) -> Ref:
        self.full.append(self.full[like])
        self.micro_avals.append(self.micro_avals[like])
        return len(self.full) - 1

    def best(self) -> Fragments:
        """Returns the fragments, split on the dimension for which least is exchanged.

        Raises:
          LoweringError: the ops cannot be lowered.
        """
        mine = [
            f for f in self.fragments
            if f.stage == self.stage and (f.phase in ("forward", "backward", "weight") or any(op.region == "forward" for op in f.ops))
        ]
        regions = [regions_of(f, self.mesh, self.avals_of(f), self.fed) for f in mine]
        # What suits the forward suits the backward; where there is none apart, all is in one fragment.
        ahead = [r for r in regions if r.fragment.phase == "forward"] or regions
        dims: dict[int, float] = {}
        tried: list[dict[Ref, Spec]] = []
        for k in range(TRIED):
            found, specs, num, seeds = self.split(ahead, k)
            if num and seeds not in tried:
                tried.append(seeds)
                dims[k] = sum(moved_bytes(f, self.mesh, self.avals_of(f), specs) for f in found)
        if not dims:
            return self.fragments
        found, specs, self.num_split, _ = self.split(regions, min(dims, key=dims.__getitem__))
        changed = {f.name: f for f in found}
        return tuple(
            renewed(changed.get(f.name, f), specs) if f.stage == self.stage else f for f in self.fragments
        )

    def split(self, regions: list[Regions], k: int) -> tuple[list[Fragment], dict[Ref, Spec], int, dict[Ref, Spec]]:
        """Returns the stage with the k-th dimension of what passes between layers split.

        Returns:
          Fragments, specs of ports that change, the number of values split, and those decided.
        """
        specs: dict[Ref, Spec] = {}
        decided: dict[Ref, Spec] = {}
        like: set[tuple[str, tuple[int, ...]]] = set()  # types of what the forward hands on
        out, num = [], 0
        for r in regions:
            f, avals = r.fragment, self.avals_of(r.fragment)
            values = {p.ref for p in f.inputs} | {x for op in f.ops for x in op.outputs}
            seeds: dict[Ref, Spec | None] = {p.ref: specs[p.ref] for p in f.inputs if p.ref in specs}
            for ref in sorted(values & (self.ends | self.crossing) - set(seeds)):
                if ref in self.ports and ref not in self.free:
                    continue
                aval = avals[ref]
                kind = (aval.dtype, aval.shape)
                if f.phase == "backward" and ref not in self.ends and kind not in like:
                    continue
                dims = splittable(r.plain.get(ref, ()), aval.shape, self.batch_axis(ref, aval), self.size)
                if not dims:
                    continue
                like.add(kind)
                seeds[ref] = decided[ref] = with_dim(r.plain[ref], dims[min(k, len(dims) - 1)])
            specs |= {p.ref: decided[p.ref] for p in (*f.inputs, *f.outputs) if p.ref in decided}
            if f.phase == "forward":
                seeds = {x: None for x, spec in self.own_results(f, self.fragments).items() if spec is None} | seeds
            if not any(seeds.values()):
                out.append(f)
                continue
            split = split_values(r, avals, seeds)
            num += len(split)
            new = constrained(r, avals, split, self.value)
            out.append(new)
            if f.phase == "forward":
                kept = self.residuals(renewed(new, specs), self.fragments)
                specs |= {x: spec for x, spec in kept.items() if is_split(spec) and x not in specs}
        return out, specs, num, decided
