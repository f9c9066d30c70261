"""One value: where it is, how it is split there, who decided so, and what other splits would cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hetjax.explaining.naming import Names, names_of
from hetjax.explaining.propagation import Propagation, propagate
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import HetjaxError, PlanError
from hetjax.ir.graph import Argument, Graph, Ref
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.manager import run_pipeline
from hetjax.passes.pipeline import LOWERING

# What is done again when the plan's specs change.
_RELOWER = ",".join(name for name in LOWERING if name != "plan-stages")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value is.

    Attributes:
      stage: "s0".
      fragment: whose border or inside.
      how: "fed", "read", "given" or "inside".
      spec: mesh axes per dimension.
      device_bytes: on one device.
      chosen_by: who decided the spec, in words.
      propagation: for values inside a fragment, what Shardy found.
    """

    stage: str
    fragment: str
    how: str
    spec: Spec
    device_bytes: int
    chosen_by: str
    propagation: Propagation | None = None


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another way to split a state leaf (and what follows it), with its price.

    Attributes:
      spec: the other spec.
      step_s: predicted seconds of a step with it, less those now.
      peak_bytes: the most any device holds with it, less that now.
      refused: why it cannot be, or "".
    """

    spec: Spec
    step_s: float
    peak_bytes: int
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class ValueFacts:
    """What is known of a value.

    Attributes:
      name: the user's path, or "%12 (…)".
      ref: the value.
      type: at full batch, and in one microbatch where that differs.
      role: of an input, else "".
      module, source: of the op that makes it.
      places: everywhere it is.
      alternatives: other splits, best first; of state leaves only.
    """

    name: str
    ref: Ref
    type: str
    role: str
    module: str
    source: str
    places: tuple[Place, ...]
    alternatives: tuple[Alternative, ...]


def explain_value(bundle: Bundle, name: str, *, price: bool = True) -> ValueFacts:
    """Returns what is known of a value.

    Args:
      bundle: complete.
      name: "%12", or the path of an input or output, or its unambiguous end.
      price: lower and estimate the step again for each alternative.

    Raises:
      PlanError: there is no such value, or the bundle is not complete.
    """
    names = names_of(bundle)
    graph, program = names.graph, bundle.program
    if program is None:
        raise PlanError(
            "where a value is, is known of a complete program only; give FILE.py:build or a lowered step.hj"
        )
    ref = names.find(name)
    argument = next((a for a in graph.inputs if a.ref == ref), None)
    full, micro = program.avals[ref], program.micro_avals[ref]
    op = names.maker(ref)
    alternatives: tuple[Alternative, ...] = ()
    if price and argument is not None and argument.role == "state":
        alternatives = tuple(_alternatives(bundle, graph, argument))
    return ValueFacts(
        names.of(ref),
        ref,
        str(full) if full == micro else f"{full}, in one microbatch {micro}",
        argument.role if argument else "",
        op.block if op else "",
        op.source if op else "",
        tuple(_places(bundle, names, program, ref, argument)),
        alternatives,
    )


def _places(
    bundle: Bundle, names: Names, program: Program, ref: Ref, argument: Argument | None
) -> list[Place]:
    out: list[Place] = []

    def add(
        stage: int,
        fragment: str,
        how: str,
        spec: Spec,
        nbytes: int,
        by: str,
        found: Propagation | None = None,
    ) -> None:
        mesh = program.meshes[stage]
        share = math.ceil(nbytes / math.prod(mesh.parts(spec))) if spec else nbytes
        out.append(Place(mesh.name, fragment, how, spec, share, by, found))

    if argument is not None:
        position = names.graph.inputs.index(argument)
        for feed in program.feeds:
            if feed.argument == position:
                table = program.micro_avals if feed.form == "micro" else program.avals
                add(
                    feed.stage,
                    "",
                    "fed",
                    feed.spec,
                    table[ref].nbytes,
                    _chosen_by(bundle, names.graph, argument, feed.spec),
                )
    for f in program.fragments:
        avals = program.micro_avals if f.per_microbatch else program.avals
        ports = [("read", p) for p in f.inputs] + [("given", p) for p in f.outputs]
        at_border = False
        for how, p in ports:
            if p.ref == ref and not (argument is not None and how == "read"):
                at_border = True
                add(
                    f.stage,
                    f.name,
                    how,
                    p.spec,
                    avals[ref].nbytes,
                    _border_choice(bundle, names.graph, ref, p.spec),
                )
        if not at_border and any(ref in op.outputs for op in f.ops):
            out.append(_inside(program, f, ref))
    return out


def _inside(program: Program, f: Fragment, ref: Ref) -> Place:
    mesh = program.meshes[f.stage]
    avals = program.micro_avals if f.per_microbatch else program.avals
    try:
        found = propagate(program, f, ref)
    except HetjaxError as error:
        return Place(
            mesh.name,
            f.name,
            "inside",
            (),
            avals[ref].nbytes,
            f"propagation by Shardy; it cannot be shown: {error}",
        )
    share = (
        math.ceil(avals[ref].nbytes / math.prod(mesh.parts(found.spec)))
        if found.spec
        else avals[ref].nbytes
    )
    return Place(
        mesh.name,
        f.name,
        "inside",
        found.spec,
        share,
        "propagation by Shardy from the fragment's border",
        found,
    )


def _searched(bundle: Bundle) -> str:
    plan = bundle.plan
    if plan is None:
        return "the program as it was given"
    made = dict(plan.sources).get("state_specs", "")
    if made == "given":
        return "the user, in the plan"
    if plan.seed is not None:
        return f"the search (seed {plan.seed}, {plan.evaluations} evaluations)"
    return "the planner's rule for matrix products (column, then row parallel)"


def _chosen_by(bundle: Bundle, graph: Graph, argument: Argument, spec: Spec) -> str:
    if argument.role == "batch":
        return (
            "shard-stages: the batch axis is split over 'data'"
            if any(spec)
            else "shard-stages: nothing to split it over"
        )
    if any(spec):
        specs = dict(bundle.plan.state_specs) if bundle.plan else {}
        leaders = [
            a.path
            for a in graph.inputs
            if a.path in specs
            and a.path != argument.path
            and a.ref in _followers(graph, argument.ref)
        ]
        if argument.path not in specs and leaders:
            return f"it follows {leaders[0]}, with which it is updated"
        return _searched(bundle)
    undivided = [
        s for t, s in bundle.notes if t == "replicated" and s.startswith(argument.path + " ")
    ]
    return undivided[0] if undivided else "replicated: neither plan nor rule splits it"


def _border_choice(bundle: Bundle, graph: Graph, ref: Ref, spec: Spec) -> str:
    if not any(spec):
        return "replicated at the fragment's border"
    axes = {a for dim in spec for a in dim}
    if axes == {"data"}:
        return "shard-stages: its batch axis is split over 'data'"
    leaders = [
        a.path for a in graph.inputs if a.role == "state" and a.ref in _followers(graph, ref)
    ]
    return f"it follows {leaders[0]}" if leaders else "shard-stages"


def _followers(graph: Graph, ref: Ref) -> set[Ref]:
    """Returns the values that are updated together with a leaf, itself included."""
    return set(follow_updates(graph, {ref: True}))


def _alternatives(bundle: Bundle, graph: Graph, leaf: Argument) -> list[Alternative]:
    """Returns the other splits of a state leaf over a model axis, each lowered and estimated."""
    plan = bundle.plan
    if plan is None or bundle.cluster is None or bundle.microbatching is None:
        return []
    aval, now = graph.avals[leaf.ref], dict(plan.state_specs).get(leaf.path, ())
    axes = {a: n for s in plan.stages for a, n in s.axes if n > 1 and a != "data"}
    whole: Spec = ((),) * aval.ndim
    specs: list[Spec] = [whole] if any(now) else []
    for axis, size in axes.items():
        for d, n in enumerate(aval.shape):
            spec = tuple((axis,) if k == d else () for k in range(aval.ndim))
            if spec != now and n % size == 0:
                specs.append(spec)
    if not specs:
        return []
    before = estimate_program(bundle)
    followers = _followers(graph, leaf.ref)
    paths = {a.path for a in graph.inputs if a.role == "state" and a.ref in followers} | {leaf.path}
    out = []
    for spec in specs:
        kept = {p: s for p, s in plan.state_specs if p not in paths}
        if any(spec):
            kept |= dict.fromkeys(paths, spec)
        changed = bundle.replace(
            plan=dataclasses.replace(plan, state_specs=tuple(sorted(kept.items()))), program=None
        )
        try:
            after = estimate_program(run_pipeline(changed, _RELOWER))
        except HetjaxError as error:
            out.append(Alternative(spec, math.inf, 0, str(error).splitlines()[0]))
            continue
        out.append(
            Alternative(
                spec,
                after.iteration_s - before.iteration_s,
                max(after.peak_bytes) - max(before.peak_bytes),
            )
        )
    return sorted(out, key=lambda a: (a.step_s, a.peak_bytes))


def as_dict(facts: ValueFacts) -> dict[str, Any]:
    """Returns the facts as JSON holds them; edges as sentences."""
    out = dataclasses.asdict(facts)
    for place, original in zip(out["places"], facts.places):
        found = original.propagation
        if found is not None:
            place["propagation"] = {
                "spec": found.spec,
                "origins": found.origins,
                "paths": {axis: list(map(str, edges)) for axis, edges in found.paths.items()},
            }
    return out
