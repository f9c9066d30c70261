"""Decisions fixed by hand before a search: where a stage is, how a leaf of the state is split.

    stage[1]=v100                          stage 1 on a kind, or in a site, of this name (or its beginning)
    stage[1].sequence=true                 whether what tensor parallelism leaves whole on stage 1 is split too
    params/.../kernel=(None,tp)            every leaf whose path has these parts, "..." for any in between
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Graph
from hetjax.ir.plan import Plan
from hetjax.ir.suggest import nearest
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.search.space import Pool

# What people call the axes of a mesh.
_AXES = {"tp": "model", "model": "model", "dp": "data", "data": "data"}
_STAGE = re.compile(r"\s*stage\[(\d+)\]\s*=\s*(\S+)\s*")
_SEQUENCE = re.compile(r"\s*stage\[(\d+)\]\.sequence\s*=\s*(true|false)\s*")
_SPEC = re.compile(r"\s*([^=\s]+)\s*=\s*\((.*)\)\s*")

Entry = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pins:
    """What is fixed.

    Attributes:
      stages: (stage, name of a kind or site) pairs.
      specs: (pattern of a leaf's path, axes by dimension) pairs.
      sequences: (stage, whether its sequence is in parts) pairs.
    """

    stages: tuple[tuple[int, str], ...] = ()
    specs: tuple[tuple[str, tuple[Entry, ...]], ...] = ()
    sequences: tuple[tuple[int, bool], ...] = ()

    @property
    def splits(self) -> bool:
        """Returns whether something is split over tensor-parallel devices."""
        return any(on for _, on in self.sequences) or any("model" in entry for _, spec in self.specs for entry in spec)


def read_pins(texts: Sequence[str]) -> Pins:
    """Returns the pins that texts stand for.

    Raises:
      PlanError: one is no pin; all of them.
    """
    stages, specs, sequences, wrong = [], [], [], []
    for text in texts:
        if found := _STAGE.fullmatch(text):
            stages.append((int(found[1]), found[2]))
        elif found := _SEQUENCE.fullmatch(text):
            sequences.append((int(found[1]), found[2] == "true"))
        elif found := _SPEC.fullmatch(text):
            entries = [e.strip() for e in found[2].split(",") if e.strip()]
            unknown = [a for e in entries if e != "None" for a in e.split("*") if a not in _AXES]
            if unknown:
                wrong.append(f"--pin {text!r}: unknown axis {unknown[0]!r}{nearest(unknown[0], _AXES)}")
            axes = (() if e == "None" else tuple(_AXES.get(a, a) for a in e.split("*")) for e in entries)
            specs.append((found[1], tuple(axes)))
        else:
            wrong.append(f"--pin {text!r} is no pin; write stage[1]=KIND, stage[1]=SITE, stage[1].sequence=true or PATH=(None,tp)")
    if wrong:
        raise PlanError("\n".join(wrong))
    return Pins(tuple(stages), tuple(specs), tuple(sequences))


def pinned_pools(pins: Pins, pools: Sequence[Pool]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns the pools each pinned stage may be in.

    Raises:
      PlanError: no device has that kind or site, or there are too few devices for so many stages.
    """
    out, wrong = [], []
    devices = sum(p.devices for p in pools)
    for stage, name in pins.stages:
        exact = [i for i, p in enumerate(pools) if name in (p.kind, p.site)]
        found = exact or [i for i, p in enumerate(pools) if p.kind.startswith(name)]
        if not found:
            names = [n for p in pools for n in (p.kind, p.site)]
            wrong.append(
                f"--pin stage[{stage}]={name}: no kind or site is called so{nearest(name, names)}; there are "
                + ", ".join(f"{p.devices} x {p.kind} in {p.site}" for p in pools)
            )
        if stage >= devices:
            wrong.append(
                f"--pin stage[{stage}]={name}: stages are counted from 0 and each takes a device or more; "
                f"{devices} devices make stages 0 to {devices - 1}"
            )
        out.append((stage, tuple(found)))
    if wrong:
        raise PlanError("\n".join(wrong))
    return tuple(out)


def pin_specs(plan: Plan, pins: Pins, graph: Graph) -> Plan:
    """Returns the plan with the pinned leaves, and what is updated with them, split as they must be, and sequences.

    Raises:
      PlanError: a pattern matches no leaf, or leaves of another number of dimensions; a stage whose sequence is
        to be in parts is not there, or has no tensor-parallel devices.
    """
    leaves = [a for a in graph.inputs if a.role == "state"]
    specs, stages, wrong = dict(plan.state_specs), list(plan.stages), []
    for number, on in pins.sequences:
        if number >= len(stages):
            wrong.append(
                f"--pin stage[{number}].sequence: the best plan has stages 0 to {len(stages) - 1}; for one with so many, "
                f"pin the place of that stage as well: --pin stage[{number}]=KIND"
            )
        elif on and dict(stages[number].axes).get("model", 1) < 2:
            wrong.append(f"--pin stage[{number}].sequence: stage {number} has no tensor-parallel devices to split it over")
        else:
            stages[number] = dataclasses.replace(stages[number], sequence=on)
    for pattern, spec in pins.specs:
        matching = [a for a in leaves if _matches(pattern, a.path)]
        if not matching:
            wrong.append(f"--pin {pattern}: no leaf of the state has such a path{nearest(pattern, [a.path for a in leaves])}")
        mine = [a for a in matching if graph.avals[a.ref].ndim == len(spec)]
        if matching and not mine:
            a = matching[0]
            wrong.append(f"--pin {pattern}: {a.path} is {graph.avals[a.ref]}, and the pin has {len(spec)} dimensions")
        for a in mine:
            together = follow_updates(graph, {a.ref: True})
            shape = graph.avals[a.ref].shape
            for other in leaves:
                if other.ref == a.ref or (other.ref in together and graph.avals[other.ref].shape == shape):
                    specs[other.path] = spec
    if wrong:
        raise PlanError("\n".join(wrong))
    kept = {path: spec for path, spec in specs.items() if any(spec)}
    return dataclasses.replace(plan, state_specs=tuple(sorted(kept.items())), stages=tuple(stages))


def _matches(pattern: str, path: str) -> bool:
    """Returns whether a path ends with a pattern, whose "..." stands for any parts."""
    parts = [".*" if p == "..." else re.escape(p) for p in pattern.split("/")]
    body = "/".join(parts).replace("/.*/", "/(?:.*/)?")
    return re.fullmatch(f"(?:.*/)?{body}", path) is not None
