"""A plan made for one batch, cluster or trace of a step, fitted to another: decisions stay, what counts devices and examples follows.

  batch      must be a whole number of the plan's microbatches
  devices    the stage's site and kind must be there; where these have fewer devices, or more, all data axes of
             the stages on them shrink or grow alike, if that is a whole number and divides a microbatch
  cuts       the module at which a stage begins must be in the step
  specs      the state leaf must be there, with as many dimensions; one that an axis does not divide is replicated

What does not fit is told by the plan file's line, all at once.
"""

from __future__ import annotations

import dataclasses
import fractions
import json
from collections.abc import Iterator, Mapping, Sequence

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.plan import Plan, StagePlan
from hetjax.ir.suggest import nearest
from hetjax.passes.cutting import find_cuts
from hetjax.passes.plan_stages import batch_size_of

Key = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Misfit:
    """One decision that does not fit.

    Attributes:
      key: where it stands in the plan, e.g. ("stages", 1, "devices").
      why: the numbers, and what would do.
    """

    key: Key
    why: str


def fit_plan(plan: Plan, graph: Graph, cluster: Cluster, *, filename: str = "", text: str = "") -> Plan:
    """Returns the plan for this step and cluster, without the numbers it bore for the other.

    Args:
      plan: made for another batch, number of devices or trace.
      graph: of the step, labelled.
      cluster: the devices.
      filename, text: of the plan's file, for lines in the error.

    Raises:
      PlanError: what does not fit, line by line.
    """
    found = list(_batch_problems(plan, graph))
    stages, misfits = _placed(plan, graph, cluster)
    found += misfits
    found += _spec_problems(plan, graph)
    found += _cut_problems(plan, graph)
    if found:
        lines = lines_of(text) if text else {}
        raise PlanError("\n".join(
            [f"the plan {filename or plan.name!r} does not fit {graph.name} on {cluster.name}:"]
            + [f"  {_where(m.key, filename, lines)}: {m.why}" for m in found]
        ))  # fmt: skip
    same = stages == plan.stages and plan.batch_size == max(1, batch_size_of(graph))
    if same and plan.cluster_hash == cluster.hash and plan.name == graph.name:
        return plan
    kept = tuple(s for s in plan.sources if s[0] not in ("stage times", "step time", "memory"))
    return dataclasses.replace(
        plan, name=graph.name, cluster=cluster.name, cluster_hash=cluster.hash, stages=stages,
        batch_size=max(1, batch_size_of(graph)), warmups=(), predicted_s=None, sources=kept,
    )  # fmt: skip


def _batch_problems(plan: Plan, graph: Graph) -> Iterator[Misfit]:
    batch = max(1, batch_size_of(graph))
    if batch % plan.num_microbatches:
        legal = sorted(
            (m for m in range(1, batch + 1) if batch % m == 0), key=lambda m: abs(m - plan.num_microbatches)
        )
        near = ", ".join(map(str, sorted(legal[:3])))
        yield Misfit(
            ("num_microbatches",),
            f"{plan.num_microbatches} microbatches do not divide a batch of {batch}; nearest: {near}",
        )


def _placed(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[tuple[StagePlan, ...], list[Misfit]]:
    """Returns the stages on devices of this cluster, and those for which there are none."""
    groups = {(g.site, g.kind): g for g in cluster.groups()}
    wanted: dict[tuple[str, str], int] = {}
    for stage in plan.stages:
        key = (stage.site, stage.kind)
        wanted[key] = wanted.get(key, 0) + len(stage.devices)
    same = plan.cluster_hash == cluster.hash
    example = max(1, batch_size_of(graph)) // plan.num_microbatches or 1
    factors, misfits = {}, []
    for key, number in wanted.items():
        if key in groups:
            there = groups[key].num_devices
            mine = [s for s in plan.stages if (s.site, s.kind) == key]
            # On its own cluster a plan may leave devices out on purpose.
            factors[key] = fractions.Fraction(1) if same else _factor(mine, number, there, example)
    out, taken = [], dict.fromkeys(groups, 0)
    for s, stage in enumerate(plan.stages):
        key = (stage.site, stage.kind)
        if key not in groups:
            misfits.append(Misfit(("stages", s, "site"), _no_group(stage, cluster)))
            out.append(stage)
            continue
        factor = factors[key]
        if factor is None:
            there, first = groups[key].num_devices, taken[key]
            taken[key] += len(stage.devices)
            if taken[key] > there:
                misfits.append(Misfit(
                    ("stages", s, "devices"),
                    f"the stages take {wanted[key]} x {stage.kind} in {stage.site} and there are {there}; "
                    f"{max(0, there - first)} are left for this one, which has a mesh of "
                    f"{' x '.join(f'{n} {size}' for n, size in stage.axes)}, and no whole number of replicas of every "
                    "stage would fit",
                ))  # fmt: skip
            out.append(stage)
            continue
        if same and factor == 1:
            out.append(stage)
            continue
        axes = tuple((n, int(size * factor) if n == "data" else size) for n, size in stage.axes)
        number = int(len(stage.devices) * factor)
        devices = groups[key].devices[taken[key] : taken[key] + number]
        taken[key] += number
        out.append(dataclasses.replace(
            stage, devices=devices, axes=axes, predicted_s=None, peak_bytes=None, sent_bytes=None
        ))  # fmt: skip
    return tuple(out), misfits


def _factor(
    stages: Sequence[StagePlan], number: int, there: int, examples: int
) -> fractions.Fraction | None:
    """Returns by what the data axes of stages on one group change; None where they cannot be made to fit."""
    whole = fractions.Fraction(there, number)
    data = [dict(s.axes).get("data", 1) for s in stages]

    def works(factor: fractions.Fraction) -> bool:
        sizes = [n * factor for n in data]
        return all(n.denominator == 1 and n >= 1 and examples % int(n) == 0 for n in sizes)

    if whole >= 1:
        # More devices than the plan was made for are taken where all stages can grow alike.
        return whole if works(whole) else fractions.Fraction(1)
    parts = sorted({fractions.Fraction(k, n) for n in data for k in range(1, n)}, reverse=True)
    return next((f for f in parts if f <= whole and works(f)), None)


def _no_group(stage: StagePlan, cluster: Cluster) -> str:
    sites = [s.name for s in cluster.sites]
    listed = ", ".join(f"{g.num_devices} x {g.kind} in {g.site}" for g in cluster.groups())
    hint = nearest(stage.site, sites) if stage.site not in sites else ""
    return f"there is no {stage.kind} in {stage.site}{hint}; {cluster.name!r} has {listed}"


def _spec_problems(plan: Plan, graph: Graph) -> Iterator[Misfit]:
    shapes = {a.path: graph.avals[a.ref].shape for a in graph.inputs if a.role == "state"}
    for k, (path, spec) in enumerate(plan.state_specs):
        shape = shapes.get(path)
        if shape is None:
            yield Misfit(("state_specs", k), f"this step has no state leaf {path!r}{nearest(path, shapes)}")
        elif len(shape) != len(spec):
            yield Misfit(("state_specs", k), f"{path} has shape {list(shape)}, and the spec {len(spec)} dimensions")


def _cut_problems(plan: Plan, graph: Graph) -> Iterator[Misfit]:
    from hetjax.passes.one_microbatch import one_microbatch

    micro: Microbatching = one_microbatch(graph)
    for s, stage in enumerate(plan.stages):
        if stage.first is not None:
            try:
                find_cuts(graph, micro, [stage.first])
            except PlanError as error:
                first = str(error).splitlines()[0]
                key = "offset" if ".offset" in first else "block"
                yield Misfit(("stages", s, "first", key), first.split(": ", 1)[-1])


def _where(key: Key, filename: str, lines: Mapping[Key, int]) -> str:
    name = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in key).lstrip(".")
    while key and key not in lines:
        key = key[:-1]
    return f"{filename}:{lines[key]}: {name}" if key in lines and filename else name


def lines_of(text: str) -> dict[Key, int]:
    """Returns the line, from 1, on which each key of a JSON text begins; keys are paths from the top.

    The text is valid JSON.
    """
    out: dict[Key, int] = {}
    decode = json.JSONDecoder().raw_decode
    stack: list[list] = []  # [kind, current key or index, whether a key is awaited]
    line, at = 1, 0
    while at < len(text):
        char = text[at]
        if char == "\n":
            line += 1
        elif char in "{[":
            _mark(out, stack, line)
            stack.append([char, 0 if char == "[" else "", char == "{"])
        elif char in "}]":
            stack.pop()
        elif char == ",":
            top = stack[-1]
            if top[0] == "[":
                top[1] += 1
            else:
                top[2] = True
        elif char == '"':
            value, end = decode(text, at)
            if stack and stack[-1][0] == "{" and stack[-1][2]:
                stack[-1][1], stack[-1][2] = value, False
                out.setdefault(tuple(frame[1] for frame in stack), line)
            else:
                _mark(out, stack, line)
            at = end
            continue
        elif char not in " \t\r:":
            _mark(out, stack, line)
            while at + 1 < len(text) and text[at + 1] not in ",]} \t\r\n":
                at += 1
        at += 1
    return out


def _mark(out: dict[Key, int], stack: Sequence[list], line: int) -> None:
    if stack:
        out.setdefault(tuple(frame[1] for frame in stack), line)
