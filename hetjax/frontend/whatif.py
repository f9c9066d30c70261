"""What a plan costs, and what it would cost with some decisions changed by hand: nothing is searched."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from hetjax.frontend.planning import Options, build_bundle
from hetjax.frontend.tracing import Traced
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.display import Shown
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Plan, StagePlan, verify_plan
from hetjax.ir.plan_changes import changed_plan
from hetjax.ir.suggest import nearest
from hetjax.passes.cost.estimate import ProgramEstimate, estimate_program
from hetjax.passes.cost.judge import Judge
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.pipeline import lower
from hetjax.passes.price_plan import PRICED, STAGE_TIME


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of two plans.

    Attributes:
      what: "step", "peak on s1".
      before, after: the number.
      unit: "s", "bytes", "share" or "".
    """

    what: str
    before: float | str
    after: float | str
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Delta(Shown):
    """How two plans of one step differ.

    Attributes:
      name: of the step.
      decisions: what was changed.
      costs: what that changed.
      over: sentences about stages that no longer fit into memory.
    """

    name: str
    decisions: tuple[Row, ...]
    costs: tuple[Row, ...]
    over: tuple[str, ...] = ()

    def cost(self, what: str) -> Row:
        """Returns one row of the costs by its name."""
        return next(r for r in self.costs if r.what == what)

    def __str__(self) -> str:
        from hetjax.render.delta_view import delta_picture

        return delta_picture(self.name, self.decisions, self.costs, self.over).text


@dataclasses.dataclass(frozen=True)
class Costing:
    """A plan with its step: what `Plan.with_` prices by.

    Attributes:
      traced: the call.
      cluster: the devices.
      options: what the user asked.
      bundle: planned and lowered.
      before: the costing it was changed from, or None.
    """

    traced: Traced
    cluster: Cluster
    options: Options
    bundle: Bundle
    before: Costing | None = None

    @functools.cached_property
    def estimate(self) -> ProgramEstimate:
        """Returns what the plan's program should take on its cluster."""
        return estimate_program(self.bundle, judge=Judge.at(self.options.profiles))

    @property
    def bound(self) -> Bundle:
        """Returns the bundle with its plan priced by this costing."""
        if self.bundle.plan is None:
            raise PlanError("the bundle holds no plan")
        return self.bundle.replace(plan=self.bundle.plan.costed_by(self))

    @functools.cached_property
    def delta(self) -> Delta | None:
        """Returns how it differs from the one it was changed from."""
        return None if self.before is None else delta_of(self.before, self)

    def changed(
        self,
        plan: Plan,
        stage: Mapping[int, Mapping[str, Any]] | None,
        spec: Mapping[str, Any] | None,
        fields: Mapping[str, Any],
    ) -> Plan:
        """Returns the plan with decisions changed, lowered and priced; see `Plan.with_`."""
        specs = self._with_followers(spec or {})
        new = changed_plan(plan, stage, specs, fields)
        stages = tuple(self._placed(k, s, plan) for k, s in enumerate(new.stages))
        new = dataclasses.replace(new, stages=stages)
        verify_plan(new, self.cluster)
        after = dataclasses.replace(self, bundle=self._lowered(_unpriced(new), plan), before=self)
        bound = after.bound.plan
        if bound is None:
            raise PlanError("nothing was lowered")
        return bound

    def _lowered(self, new: Plan, old: Plan) -> Bundle:
        if new.num_microbatches == old.num_microbatches:
            fresh = self.bundle.replace(plan=new, program=None, notes=())
            return lower(fresh, donate=self.options.donate, profiles=self.options.profiles)
        reason = f"{new.num_microbatches} tried by hand, proved exact"
        if new.num_microbatches == 1:
            reason = "one microbatch needs no proof"
        new = dataclasses.replace(new, microbatch_reason=reason, warmups=())
        return build_bundle(self.traced, self.cluster, dataclasses.replace(self.options, plan=new))

    def _placed(self, number: int, stage: StagePlan, old: Plan) -> StagePlan:
        """Returns a stage whose site and kind are those of its devices, its name of modules left out if cut anew."""
        if number >= old.num_stages:
            return stage
        before = old.stages[number]
        if stage.first != before.first or (
            number + 1 < old.num_stages and stage.blocks != before.blocks
        ):
            stage = dataclasses.replace(stage, blocks=())
        if stage.devices == before.devices or not stage.devices:
            return stage
        known = [d for d in stage.devices if 0 <= d < self.cluster.num_devices]
        if not known:
            return stage
        device = self.cluster.devices[known[0]]
        axes = stage.axes
        if axes == before.axes and math.prod(n for _, n in axes) != len(stage.devices):
            axes = (("data", len(stage.devices)), ("model", 1))
        return dataclasses.replace(stage, site=device.site, kind=device.kind, axes=axes)

    def _with_followers(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the specs by whole path, with those of what is updated together with each leaf."""
        graph = self.bundle.graph
        if graph is None:
            return dict(spec)
        leaves = {a.path: a for a in graph.inputs if a.role == "state"}
        out: dict[str, Any] = {}
        for name, value in spec.items():
            ends = [p for p in leaves if p == name or p.endswith("/" + name)]
            exact = [name] if name in leaves else ends
            if len(exact) != 1:
                what = (
                    f"{name!r} is the end of {len(ends)} paths"
                    if ends
                    else f"there is no state leaf {name!r}"
                )
                raise PlanError(f"spec: {what}{'' if ends else nearest(name, leaves)}")
            leaf = leaves[exact[0]]
            rank, entries = graph.avals[leaf.ref].ndim, None if value is None else tuple(value)
            if entries is not None and len(entries) != rank:
                raise PlanError(
                    f"spec of {leaf.path}: {len(entries)} entries for {graph.avals[leaf.ref]}, which has {rank} dimensions"
                )
            together = follow_updates(graph, {leaf.ref: True})
            shape = graph.avals[leaf.ref].shape
            out[leaf.path] = value
            out |= {
                a.path: value
                for a in leaves.values()
                if a.ref in together and graph.avals[a.ref].shape == shape and a.path not in spec
            }
        return out


def _unpriced(plan: Plan) -> Plan:
    """Returns the plan without the numbers that its decisions had; lowering writes those of the new ones."""
    stages = tuple(
        dataclasses.replace(s, predicted_s=None, peak_bytes=None, sent_bytes=None) for s in plan.stages
    )
    kept = tuple(s for s in plan.sources if s[0] not in PRICED and not s[0].startswith(STAGE_TIME))
    return dataclasses.replace(plan, stages=stages, predicted_s=None, sources=kept)


def delta_of(before: Costing, after: Costing) -> Delta:
    """Returns how the decisions and costs of two plans differ."""
    old, new = before.bundle.plan, after.bundle.plan
    if old is None or new is None:
        raise PlanError("a plan is missing")
    costs = tuple(_costs(before, after))
    return Delta(new.name, tuple(decisions_between(old, new)), costs, after.estimate.over)


def decisions_between(old: Plan, new: Plan) -> list[Row]:
    """Returns the decisions in which two plans differ."""
    decisions = [
        Row(name, str(getattr(old, name)), str(getattr(new, name)))
        for name in ("num_microbatches", "schedule", "batch_size", "warmups", "crossing_dtype", "sums")
        if getattr(old, name) != getattr(new, name)
    ]
    if old.num_stages != new.num_stages:
        decisions.append(Row("stages", str(old.num_stages), str(new.num_stages)))
    for k, (a, b) in enumerate(zip(old.stages, new.stages)):
        for name in ("devices", "kind", "site", "axes", "first"):
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                decisions.append(Row(f"s{k} {name}", _said(x), _said(y)))
    specs_before, specs_after = dict(old.state_specs), dict(new.state_specs)
    for path in sorted({*specs_before, *specs_after}):
        x, y = specs_before.get(path, ()), specs_after.get(path, ())
        if x != y:
            decisions.append(Row(path, _said(x) or "replicated", _said(y) or "replicated"))
    return decisions


def _costs(before: Costing, after: Costing) -> list[Row]:
    a, b = before.estimate, after.estimate
    rows = [
        Row("step", a.iteration_s, b.iteration_s, "s"),
        Row("lower bound", a.lower_bound_s, b.lower_bound_s, "s"),
        Row("gap to the bound", gap(a), gap(b), "share"),
        Row("bubble", a.bubble, b.bubble, "share"),
        Row("waiting for transfers", a.exposed_comm_s, b.exposed_comm_s, "s"),
        Row(
            "bytes between stages",
            crossing_bytes(before.bundle),
            crossing_bytes(after.bundle),
            "bytes",
        ),
    ]
    for k, (x, y) in enumerate(zip(a.peak_bytes, b.peak_bytes)):
        rows.append(Row(f"peak on s{k}", float(x), float(y), "bytes"))
    return rows


def gap(estimate: ProgramEstimate) -> float:
    """Returns by what share a step is longer than the bound that no order of its work can beat."""
    return estimate.iteration_s / estimate.lower_bound_s - 1 if estimate.lower_bound_s else 0.0


def crossing_bytes(bundle: Bundle) -> float:
    """Returns the bytes that cross between stages in one step."""
    program = bundle.program
    if program is None:
        return 0.0
    return float(
        sum(
            r.nbytes * (program.num_microbatches if r.form == "micro" else 1)
            for r in program.reshards
        )
    )


def _said(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"{getattr(value, 'block', '')} + {getattr(value, 'offset', 0)}"
    if (
        isinstance(value, tuple)
        and value
        and all(isinstance(v, tuple) and len(v) == 2 for v in value)
    ):
        return " x ".join(f"{a} {n}" for a, n in value)
    if isinstance(value, tuple) and value and all(isinstance(v, tuple) for v in value):
        return "(" + ", ".join("*".join(v) or "None" for v in value) + ")"
    return str(value) if value not in ((), None) else ""
