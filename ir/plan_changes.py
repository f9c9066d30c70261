"""Decisions of a plan changed by hand, as `Plan.with_` takes them; nothing is searched or priced here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hetjax.ir.errors import PlanError
from hetjax.ir.suggest import nearest

if TYPE_CHECKING:
    from hetjax.ir.plan import Plan, StagePlan


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
