"""A plan: every decision about how a step is cut, sharded and scheduled, and nothing else.

Keyed by module path, never by op number, so that it survives another trace of the same step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetjax.ir.cluster import Cluster
from hetjax.ir.display import Shown
from hetjax.ir.errors import PlanError, VerifyError
from hetjax.ir.program import Spec
from hetjax.ir.suggest import nearest

VERSION = 1
# Decisions that `Plan.with_` prices, beside those about stages and specs.
REPRICED = ("num_microbatches", "schedule", "warmups", "state_specs", "per_microbatch", "crossing_dtype", "sums")
# Narrower types in which activations may cross between stages, by explicit choice.
CROSSING_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
# What a backward may compute again: nothing, elementwise ops, everything from what its layers were given,
# everything from what its stage was given.
RECOMPUTE = ("", "cheap", "layer", "stage")
# How sums over examples are made: in parts, or in plain jit's order.
SUMS = ("", "whole")
# Where a number comes from.
SOURCES = ("measured", "imported", "analytic", "given")


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The first forward op of a stage.

    Attributes:
      block: the module path of the op's block.
      offset: its position among that block's forward ops.
    """

    block: str
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan(Shown):
    """One stage.

    Attributes:
      devices: positions in the cluster, row-major over the axes.
      site, kind: of all its devices.
      axes: (name, size) pairs of its mesh, e.g. (("data", 2), ("model", 1)).
      first: where it starts; None for the first stage.
      blocks: module paths in it, for people.
      predicted_s: forward and backward of one microbatch, or None.
      peak_bytes: the most that one of its devices holds, or None.
      sent_bytes: what one microbatch sends to the next stage or gets back as gradient, the larger
        of the two, or None.
      sequence: whether what tensor parallelism leaves whole is split over its devices too, on another
        dimension than that of examples.
    """

    devices: tuple[int, ...]
    site: str
    kind: str
    axes: tuple[tuple[str, int], ...]
    first: Cut | None = None
    blocks: tuple[str, ...] = ()
    predicted_s: float | None = None
    peak_bytes: int | None = None
    sent_bytes: int | None = None
    sequence: bool = False


@dataclasses.dataclass(frozen=True)
class Plan(Shown):
    """How one step runs on one cluster.

    Attributes:
      name: the step's name.
      cluster: the cluster's name.
      cluster_hash: `Cluster.hash` of it.
      num_microbatches: M.
      batch_size: of the whole step.
      schedule: "1f1b", "gpipe", …
      warmups: per stage, how many forwards precede its first backward; () leaves it to the
        schedule.
      per_microbatch: True when the step's meaning is per microbatch by the user's choice.
      stages: in pipeline order.
      state_specs: (path, spec) of the state leaves whose split is decided, sorted by path; what is updated
        with them follows, the rest is replicated.
      layer_edges: per loop over layers, in program order: 0, the first layer of each later part of it, and
        the number of layers; () where no loop is split.
      recompute: what backwards compute again instead of keeping it: one of `RECOMPUTE`.
      recompute_stages: the stages that do; () for all.
      microbatch_reason: why that number of microbatches.
      seed, evaluations: of the search that found it, or None.
      sources: (what, one of `SOURCES`) pairs.
      predicted_s: the whole step, or None.
      sums: how sums over examples are made: "" in parts, by each device and microbatch, or "whole", in plain
        jit's order.
      crossing_dtype: one of `CROSSING_DTYPES`, to which activations and their gradients are rounded
        for the way between stages; "" sends them as they are.
    """

    name: str
    cluster: str
    cluster_hash: str
    num_microbatches: int
    batch_size: int
    schedule: str
    stages: tuple[StagePlan, ...]
    warmups: tuple[int, ...] = ()
    per_microbatch: bool = False
    state_specs: tuple[tuple[str, Spec], ...] = ()
    layer_edges: tuple[tuple[int, ...], ...] = ()
    recompute: str = ""
    recompute_stages: tuple[int, ...] = ()
    microbatch_reason: str = ""
    seed: int | None = None
    evaluations: int | None = None
    sources: tuple[tuple[str, str], ...] = ()
    predicted_s: float | None = None
    crossing_dtype: str = ""
    sums: str = ""

    def with_(
        self,
        *,
        stage: Mapping[int, Mapping[str, Any]] | None = None,
        spec: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Plan:
        """Returns the plan with some decisions changed; all others stay, nothing is searched.

        A plan that came with its step (`train_step.plan`, `hetjax.rehearse(…).plan`) is lowered and priced
        anew where only `REPRICED` decisions change, and `delta` of the new one tells what that changed.
        Any other, or with other fields changed, has what is given and else the numbers it had.

            plan.with_(num_microbatches=8, schedule="gpipe")
            plan.with_(stage={1: {"mesh": (3, 2), "first": "GPT/block_2"}})
            plan.with_(spec={"state/params/head/kernel": (None, "model")})

        Args:
          stage: by number, fields of `StagePlan` to change; "mesh" gives the sizes of its axes.
          spec: by path of a state leaf, one entry per dimension; None for replicated. What is updated
            with the leaf follows it where the step is known.
          changes: other fields of the plan.

        Raises:
          PlanError: there is no such field, stage, leaf or axis, or the plan cannot be had so.
          MicrobatchError: the step cannot be split into so many microbatches.
        """
        from hetjax.ir.plan_changes import changed_plan, check_changes

        check_changes(stage, spec, changes)
        decided = bool(stage or spec or changes) and set(changes) <= set(REPRICED)
        if self.costing is not None and decided:
            return self.costing.changed(self, stage, spec, changes)
        return changed_plan(self, stage, spec, changes)

    def costed_by(self, costing: Any) -> Plan:
        """Returns an equal plan that `costing` prices; it has `changed`, `estimate`, `bundle` and `delta`."""
        plan = dataclasses.replace(self)
        object.__setattr__(plan, "_costing", costing)
        return plan

    @property
    def costing(self) -> Any:
        """Returns what prices the plan, None where only the decisions are known. Not part of the plan."""
        return self.__dict__.get("_costing")

    @property
    def delta(self) -> Any:
        """Returns how its costs differ from those of the plan it was made of by `with_`, or None."""
        return None if self.costing is None else self.costing.delta

    def __getstate__(self) -> dict[str, Any]:
        # What prices a plan holds the user's function; a plan in another process has its decisions alone.
        return {k: v for k, v in self.__dict__.items() if k != "_costing"}

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @functools.cached_property
    def hash(self) -> str:
        """Returns the SHA-256 of the canonical JSON; processes compare it before they run."""
        text = json.dumps(_encode(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Returns JSON that reads back to an equal plan; docs/plan.schema.json describes it."""
        return json.dumps(_encode(self), indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, filename: str = "<json>") -> Plan:
        """Returns the plan that JSON text holds.

        Raises:
          ParseError: the text is not JSON.
          PlanError: it holds no plan of this version; every problem with its key.
        """
        from hetjax.ir.plan_json import read_plan

        return read_plan(text, filename)

    def save(self, path: str | Path) -> None:
        """Writes the plan's JSON to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Returns the plan in a JSON file.

        Raises:
          PlanError: the file cannot be read or holds no plan.
          ParseError: the file is not JSON.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan file {path}: {error}") from None
        return cls.from_json(text, str(path))

    def __str__(self) -> str:
        many, split = self.num_stages != 1, self.num_microbatches != 1
        took = f", predicted {self.predicted_s:.4g} s" if self.predicted_s is not None else ""
        lines = [
            f"plan {self.name} on {self.cluster}: {self.num_stages} stage{'s' * many}, "
            f"{self.schedule}, batch {self.batch_size} in {self.num_microbatches} "
            f"microbatch{'es' * split}{took}"
        ]
        for i, stage in enumerate(self.stages):
            mesh = " x ".join(f"{name} {size}" for name, size in stage.axes)
            ends = dict.fromkeys((*stage.blocks[:1], *stage.blocks[-1:]))
            span = f": {' … '.join(ends)}" if ends else ""
            devices = f"{len(stage.devices)} x {stage.kind} in {stage.site} ({mesh})"
            again = f", recomputes by {self.recompute}" * (self.recompute != "" and i in (self.recompute_stages or (i,)))
            parts = ", sequence in parts" * stage.sequence
            lines.append(f"  stage {i}: {devices}{span}{parts}{again}")
        return "\n".join(lines)


def _encode(plan: Plan) -> dict[str, Any]:
    return {"hetjax_plan": VERSION, **dataclasses.asdict(plan)}


def verify_plan(plan: Plan, cluster: Cluster) -> None:
    """Checks that a plan can run on a cluster.

    Raises:
      VerifyError: devices that do not exist or serve two stages, a stage of mixed kinds or sites,
        axes that do not multiply to its devices, a batch that microbatches do not divide, warm-ups
        for another number of stages; every one.
    """
    found: list[str] = []
    if plan.cluster_hash and plan.cluster_hash != cluster.hash:
        found.append(
            f"it was made for cluster {plan.cluster!r} as it was then ({plan.cluster_hash[:12]}); "
            f"the one given is {cluster.name!r} ({cluster.hash[:12]}); plan again for it"
        )
    batch, parts = plan.batch_size, plan.num_microbatches
    if parts < 1 or batch < 1:
        found.append(f"batch_size {batch} and num_microbatches {parts} must both be positive")
    elif batch % parts:
        legal = (m for m in range(1, batch + 1) if batch % m == 0)
        near = ", ".join(map(str, sorted(sorted(legal, key=lambda m: abs(m - parts))[:3])))
        found.append(f"{parts} microbatches do not divide a batch of {batch}; nearest: {near}")
    if not plan.stages:
        found.append("the plan has no stage")
    if plan.warmups and len(plan.warmups) != len(plan.stages):
        found.append(f"warmups has {len(plan.warmups)} numbers for {len(plan.stages)} stages")
    found += [
        f"warmups[{i}] is {k}; a stage starts with at least one forward"
        for i, k in enumerate(plan.warmups)
        if k < 1
    ]
    if plan.crossing_dtype and plan.crossing_dtype not in CROSSING_DTYPES:
        known = nearest(str(plan.crossing_dtype), CROSSING_DTYPES) or f"; it may be {', '.join(CROSSING_DTYPES)}"
        found.append(f"crossing_dtype is {plan.crossing_dtype!r}{known}")
    if plan.recompute not in RECOMPUTE:
        known = nearest(str(plan.recompute), RECOMPUTE) or f"; it may be {', '.join(map(repr, RECOMPUTE))}"
        found.append(f"recompute is {plan.recompute!r}{known}")
    found += [
        f"recompute_stages: there is no stage {s}" for s in plan.recompute_stages if s >= len(plan.stages)
    ]
    if plan.sums not in SUMS:
        found.append(f"sums is {plan.sums!r}; it may be '' or 'whole'")
    user: dict[int, int] = {}
    for i, stage in enumerate(plan.stages):
        found += _stage_problems(i, stage, cluster)
        for device in stage.devices:
            if user.setdefault(device, i) != i:
                found.append(
                    f"device {device} serves stages {user[device]} and {i}; a device serves one"
                )
    axes_of = {axis for stage in plan.stages for axis, _ in stage.axes}
    for path, spec in plan.state_specs:
        found += [
            f"state_specs[{path!r}]: no stage has a mesh axis {axis!r}{nearest(axis, axes_of)}"
            for dim in spec
            for axis in dim
            if axis not in axes_of
        ]
    if found:
        raise VerifyError([f"plan {plan.name!r}: {text}" for text in found])


def _stage_problems(i: int, stage: StagePlan, cluster: Cluster) -> list[str]:
    out = []
    if not stage.devices:
        out.append(f"stage {i} has no device")
    missing = [d for d in stage.devices if not 0 <= d < cluster.num_devices]
    if missing:
        last = cluster.num_devices - 1
        out.append(f"stage {i}: devices {missing} do not exist; {cluster.name!r} has 0 … {last}")
    if len(set(stage.devices)) != len(stage.devices):
        out.append(f"stage {i} names a device twice: {list(stage.devices)}")
    present = [cluster.devices[d] for d in stage.devices if d not in missing]
    for what, said in (("kind", stage.kind), ("site", stage.site)):
        names = sorted({getattr(d, what) for d in present})
        known = [x.name for x in (cluster.kinds if what == "kind" else cluster.sites)]
        if said not in known:
            out.append(f"stages[{i}].{what}: unknown {what} {said!r}{nearest(said, known)}")
        if len(names) > 1:
            out.append(f"stage {i} mixes {what}s {', '.join(names)}; a stage has one")
        elif names and names[0] != said:
            out.append(f"stage {i} says {what} {said!r}, but its devices are {names[0]!r}")
    size = math.prod(n for _, n in stage.axes)
    if size != len(stage.devices):
        mesh = " x ".join(f"{name} {n}" for name, n in stage.axes)
        out.append(f"stage {i}: a mesh of {mesh} has {size} devices, not {len(stage.devices)}")
    if stage.sequence and dict(stage.axes).get("model", 1) < 2:
        out.append(f"stages[{i}].sequence: there are no tensor-parallel devices to split over; give it a model axis of 2 or more")
    if (i == 0) != (stage.first is None):
        out.append(f"stage {i}: first must {'be null' if i == 0 else 'name a cut'}")
    return out
