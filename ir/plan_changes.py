"""Decisions of a plan changed by hand, as `Plan.with_` takes them; nothing is searched or priced here."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hetjax.ir.errors import PlanError
from hetjax.ir.suggest import nearest

if TYPE_CHECKING:
    from hetjax.ir.plan import Plan, StagePlan


def check_changes(stage: Any, spec: Any, fields: Mapping[str, Any]) -> None:
    """Looks whether changes are of the types that `Plan.with_` takes.

    Raises:
      PlanError: some are not; all of them at once.
    """
    found: list[str] = []

    def must(holds: bool, where: str, value: Any, words: str) -> None:
        if not holds:
            found.append(f"{where} is {value!r}; it must be {words}")

    for name, value in fields.items():
        if name in ("num_microbatches", "batch_size"):
            must(_whole(value), name, value, "a whole number")
        elif name in ("schedule", "name", "cluster", "microbatch_reason"):
            must(isinstance(value, str), name, value, "a string")
        elif name == "stages":
            must(_rows(value) and all(hasattr(s, "devices") for s in value), name, value, "StagePlans")
        elif name == "warmups":
            must(_rows(value) and all(map(_whole, value)), name, value, "whole numbers, one a stage")
        elif name in ("state_specs", "sources"):
            must(_rows(value) and all(_rows(v) and len(v) == 2 for v in value), name, value, "pairs")
        elif name == "predicted_s":
            must(value is None or _seconds(value), name, value, "seconds")
    must(stage is None or isinstance(stage, Mapping), "stage", stage, 'as {1: {"mesh": (3, 2)}}')
    for number, changes in stage.items() if isinstance(stage, Mapping) else ():
        must(_whole(number), "the number of a stage", number, "a whole number")
        if not isinstance(changes, Mapping) or not all(isinstance(k, str) for k in changes):
            must(False, f"stage {number!r}", changes, 'fields by name, as {"mesh": (3, 2)}')
            continue
        for name, value in changes.items():
            where = f"stage {number!r}: {name}"
            if name in ("mesh", "devices"):
                must(_rows(value) and all(map(_whole, value)), where, value, "whole numbers, as (3, 2)")
            elif name == "axes":
                good = _rows(value) and all(_rows(v) and len(v) == 2 and _whole(v[1]) for v in value)
                must(good, where, value, 'pairs, as (("data", 3), ("model", 2))')
            elif name == "first":
                good = value is None or isinstance(value, str) or hasattr(value, "block")
                must(good, where, value, "the path of a module or a Cut")
            elif name == "blocks":
                must(_rows(value), where, value, "paths of modules")
            elif name == "predicted_s":
                must(value is None or _seconds(value), where, value, "seconds")
            elif name == "sequence":
                must(isinstance(value, bool), where, value, "True or False")
    must(spec is None or isinstance(spec, Mapping), "spec", spec, 'as {"params/head/kernel": (None, "model")}')
    for path, value in spec.items() if isinstance(spec, Mapping) else ():
        must(isinstance(path, str), "the path of a spec", path, "a string")
        must(value is None or isinstance(value, Iterable), f"spec of {path!r}", value, "one entry per dimension")
    if found:
        raise PlanError("the plan cannot be changed so:\n" + "\n".join(f"  {p}" for p in found))


def _whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _seconds(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _rows(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, Mapping))


def changed_plan(
    plan: Plan,
    stage: Mapping[int, Mapping[str, Any]] | None,
    spec: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> Plan:
    """Returns the plan with some decisions changed; see `Plan.with_`.

    Raises:
      PlanError: a field, stage or axis does not exist; all of them at once.
    """
    problems: list[str] = []
    known = [f.name for f in dataclasses.fields(plan)]
    problems += [
        f"a plan has no {name!r}{nearest(name, known)}" for name in fields if name not in known
    ]
    stages = list(fields.get("stages", plan.stages))
    for number, changes in (stage or {}).items():
        if not 0 <= number < len(stages):
            problems.append(f"there is no stage {number}; the plan has 0 … {len(stages) - 1}")
            continue
        stages[number] = _changed_stage(number, stages[number], changes, problems)
    specs = dict(fields.get("state_specs", plan.state_specs))
    for path, value in (spec or {}).items():
        dims = _dims(path, value, problems)
        if any(dims):
            specs[path] = dims
        else:
            specs.pop(path, None)
    if problems:
        raise PlanError(
            f"plan {plan.name!r} cannot be changed so:\n" + "\n".join(f"  {p}" for p in problems)
        )
    return dataclasses.replace(
        plan, **{**fields, "stages": tuple(stages), "state_specs": tuple(sorted(specs.items()))}
    )


def _changed_stage(
    number: int, stage: StagePlan, changes: Mapping[str, Any], problems: list[str]
) -> StagePlan:
    from hetjax.ir.plan import Cut

    new = dict(changes)
    if "mesh" in new:
        sizes, names = tuple(new.pop("mesh")), [name for name, _ in stage.axes]
        if len(sizes) != len(names):
            problems.append(
                f"stage {number}: mesh {sizes} has {len(sizes)} sizes for axes {', '.join(names)}"
            )
        new["axes"] = tuple(zip(names, sizes))
    if isinstance(new.get("first"), str):
        new["first"] = Cut(new["first"])
    if "devices" in new:
        new["devices"] = tuple(new["devices"])
    known = [f.name for f in dataclasses.fields(stage)]
    wrong = [name for name in new if name not in known]
    problems += [
        f"stage {number}: a stage has no {name!r}{nearest(name, [*known, 'mesh'])}"
        for name in wrong
    ]
    return dataclasses.replace(stage, **{k: v for k, v in new.items() if k in known})


def _dims(path: str, value: Any, problems: list[str]) -> tuple[tuple[str, ...], ...]:
    """Returns a spec with every entry spelled out, from what people write: (None, "model")."""
    if value is None:
        return ()
    try:
        return tuple(
            () if dim is None else (dim,) if isinstance(dim, str) else tuple(map(str, dim))
            for dim in value
        )
    except TypeError:
        problems.append(
            f"spec of {path!r}: {value!r} is no spec; write one entry per dimension, (None, 'model')"
        )
        return ()
