"""cut-stages: from the plan's cuts to fragments, one set per stage."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.plan import Plan
from hetjax.ir.program import StageMesh
from hetjax.passes.cutting import find_cuts
from hetjax.passes.fragments import build_program
from hetjax.passes.placement import place


@dataclasses.dataclass(frozen=True)
class CutStages:
    """Cuts the graph where the plan says and builds each stage's fragments.

    Before: one graph. After: a program with fragments `s0/forward`, `s0/backward`, `s0/update`, …,
    whose ports name what each reads and gives; no specs, reshards or tasks yet.

    Attributes:
      stages: with no plan in the bundle, the number of stages to plan for first; 0 for one per group.
    """

    name: ClassVar[str] = "cut-stages"
    summary: ClassVar[str] = "cut the graph into stages and build their fragments"
    requires: ClassVar[tuple[str, ...]] = ("graph", "microbatching")

    stages: int = 0

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.program is not None:
            return bundle
        if bundle.plan is None:
            from hetjax.passes.plan_stages import PlanStages

            bundle = PlanStages(self.stages).apply(bundle)
        graph, micro, plan = bundle.graph, bundle.microbatching, bundle.plan
        if graph is None or micro is None or plan is None:
            raise PassError(self.name, "needs a graph and a microbatching")
        cuts = find_cuts(graph, micro, [s.first for s in plan.stages[1:] if s.first is not None])
        placement = place(graph, micro, plan.num_stages, cuts, whole_sums=plan.sums == "whole")
        return bundle.replace(program=build_program(graph, micro, placement, meshes_of(plan)))


def meshes_of(plan: Plan) -> tuple[StageMesh, ...]:
    """Returns the plan's stages as meshes."""
    return tuple(
        StageMesh(f"s{i}", s.kind, s.site, s.axes, s.devices) for i, s in enumerate(plan.stages)
    )
