"""`hetjax.check`: a step under plain jit and under hetjax, judged leaf by leaf, as one value to look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetjax.frontend.axis import bind_axis, describe
from hetjax.frontend.compare import F32, Difference, Tolerance, worst
from hetjax.frontend.parity import (
    Case,
    StepParity,
    in_double_precision,
    on_plain_devices,
    side_by_side,
)
from hetjax.ir.display import Shown
from hetjax.ir.errors import HetjaxError, LoweringError, MicrobatchError

NUM_WORST = 8
# In double precision rounding is near 1e-16: what is past these is a mistake. They hold for every float leaf.
DOUBLE = Tolerance(1e-9, 1e-10)


@dataclasses.dataclass(frozen=True)
class CheckReport(Shown):
    """How some steps of hetjax compare with plain jit.

    Attributes:
      name: of the step.
      steps: one comparison per step taken.
      tolerance: bounds given in place of the defaults.
      refusal: why hetjax refused the step, or None.
      stats: stages, microbatches and bytes between stages of the plan that ran; {} where none did.
      notes: what to know of how it was run.
    """

    name: str
    steps: tuple[StepParity, ...] = ()
    tolerance: Tolerance | None = None
    refusal: MicrobatchError | LoweringError | None = None
    stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Returns whether every leaf of every step is equal within its bound."""
        return self.refusal is None and bool(self.steps) and all(s.ok for s in self.steps)

    @property
    def differences(self) -> list[Difference]:
        """Returns how every leaf of every step compares."""
        return [d for s in self.steps for d in s.differences]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as `hetjax check --json` prints it."""
        computed_in = self.steps[0].computed_in if self.steps else None
        bound = self.tolerance or computed_in or F32
        out: dict[str, Any] = {
            "ok": self.ok, "refused": self.refusal is not None, "name": self.name, "steps": len(self.steps),
            "max_abs": None, "max_rel": None, "worst": [], "rtol": bound.rtol, "atol": bound.atol,
            "stages": self.stats.get("stages"), "microbatches": self.stats.get("microbatches"),
            "bytes_between_stages": self.stats.get("bytes_between_stages"),
            "residual_bytes": self.stats.get("residual_bytes"), "groups": [], "notes": list(self.notes),
        }  # fmt: skip
        if self.refusal is not None:
            error = self.refusal
            return out | {
                "reason": getattr(error, "reason", str(error)), "error": str(error),
                "equation": getattr(error, "equation", ""), "module": getattr(error, "module_path", ""),
                "source": getattr(error, "source", ""),
            }  # fmt: skip
        summary = _summary(self)
        return out | summary | {"notes": [*out["notes"], *(n for n in summary["notes"] if n not in out["notes"])]}

    def __str__(self) -> str:
        facts = self.as_dict()
        if self.refusal is not None:
            return f"check of {self.name}: refused: {facts['reason']}"
        verdict = "equal" if self.ok else "UNEQUAL"
        lines = [
            f"check of {self.name}: {verdict} to plain jit over {len(self.steps)} steps"
            + (f" ({facts['stages']} stages, {facts['microbatches']} microbatches)" if self.stats else "")
        ]
        lines += [
            f"  {g['group']}: {g['leaves']} leaves, at most {g['of_bound']:.3g} of the bound"
            + ("" if g["ok"] else ", UNEQUAL")
            for g in facts["groups"]
        ]
        return "\n".join([*lines, *(f"  note: {n}" for n in facts["notes"])])


def check(
    step: Callable[..., Any],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int = 3,
    framework: str = "linen",
    name: str = "",
    tolerance: Tolerance | None = None,
    **options: Any,
) -> CheckReport:
    """Returns how a step compares with itself under plain jit, every leaf of state and outputs.

    Args:
      step, state, batches, framework: as `hetjax.frontend.parity.Case` says.
      steps: how many steps.
      name: of the step, for print.
      tolerance: bounds in place of the defaults.
      options: of `parallelize`.

    Raises:
      HetjaxError: the step has another form, or there are fewer batches than steps.
    """
    case = Case(step, state, batches, {"framework": framework})
    return run_check(case, steps, name or getattr(step, "__name__", "step"), tolerance, options)


def run_check(
    case: Case,
    num_steps: int,
    name: str,
    tolerance: Tolerance | None,
    options: Mapping[str, Any],
    *,
    notes: tuple[str, ...] = (),
    double: bool = False,
    plain_devices: int | None = None,
    progress: Callable[[StepParity], None] | None = None,
) -> CheckReport:
    """Returns the report of a case; `progress` is called after every step.

    With `double` both sides compute in double precision, and `DOUBLE` bounds every float leaf where no
    tolerance is given. With `plain_devices` plain jit on so many devices stands in hetjax's place, and no
    options are read.
    """
    if double:
        import jax

        if options.get("axis_name") is not None:
            raise HetjaxError("an axis is not bound in double precision: check without --double, or without --axis-name")
        wide = in_double_precision(case)
        notes = (*notes, "in double precision: the step's equations on 64-bit floats, its random bits as they are")
        with jax.enable_x64(True):
            return run_check(
                wide, num_steps, name, tolerance or DOUBLE, options, notes=notes, plain_devices=plain_devices, progress=progress
            )
    from hetjax.frontend.decorator import parallelize

    done: list[StepParity] = []
    if plain_devices is not None:
        notes = (*notes, f"plain jit on {plain_devices} devices, the batch split over them, in hetjax's place")
        for parity in side_by_side(case, on_plain_devices(case, plain_devices), num_steps, tolerance=tolerance):
            done.append(parity)
            if progress:
                progress(parity)
        return CheckReport(name, tuple(done), tolerance, None, {}, notes)
    try:
        parallel = parallelize(case.step, **options)
        if options.get("axis_name") is not None:  # plain jit needs the axis bound too
            axis = options["axis_name"], options.get("replicas", 1)
            notes = (*notes, describe(*axis))
            case = dataclasses.replace(case, step=bind_axis(case.step, *axis))
        for parity in side_by_side(case, parallel, num_steps, tolerance=tolerance):
            done.append(parity)
            if progress:
                progress(parity)
    except (MicrobatchError, LoweringError) as error:
        return CheckReport(name, (), tolerance, error, notes=notes)
    told = parallel._in_use().bundle.notes
    notes = (*notes, *(f"{topic}: {sentence}" for topic, sentence in told if topic in ("stages", "sums")))
    return CheckReport(name, tuple(done), tolerance, None, parallel.stats(), notes)


def _summary(report: CheckReport) -> dict[str, Any]:
    flat = [(p.step, d) for p in report.steps for d in p.differences]
    differences = [d for _, d in flat]
    step_of = {id(d): step for step, d in flat}
    float_leaves = [d for d in differences if d.rule not in ("exact", "structure")]
    unequal = [d for d in differences if not d.ok]
    shown = worst(unequal or float_leaves, NUM_WORST)
    groups = []
    for name in dict.fromkeys(d.group for d in differences):
        members = [d for d in differences if d.group == name]
        top = worst(members, 1)[0]
        groups.append({
            "group": name, "leaves": len(members) // len(report.steps), "rules": sorted({d.rule for d in members}),
            "max_abs": max(d.max_abs for d in members), "of_bound": top.excess, "ok": top.ok,
        })  # fmt: skip
    notes = sorted({f"{d.path}: {d.note}" for d in differences if d.note and d.ok})
    if any(d.rule == "normalised" for d in differences):
        notes.append(
            "the optimizer divides by the size of the gradient: parameters whose gradient is rounding noise "
            "were judged by their moments (rule 'normalised')"
        )
    only_parameters = unequal and all(
        d.rule == "leaf" and d.path.startswith("state/") for d in unequal
    )
    if only_parameters and any(d.rule == "moment" for d in differences):
        notes.append(
            "only parameters differ and every moment is equal: an optimizer that normalises in a way not known "
            "here amplifies rounding; compare with optax.sgd, or give --rtol"
        )
    return {
        "notes": [*report.notes, *notes],
        "max_abs": max((d.max_abs for d in differences), default=0.0),
        "max_rel": max((d.max_rel for d in differences), default=0.0),
        "worst": [{"step": step_of[id(d)], **_leaf(d)} for d in shown], "groups": groups,
    }  # fmt: skip


def _leaf(d: Difference) -> dict[str, Any]:
    return {
        "path": d.path, "rule": d.rule, "max_abs": d.max_abs, "max_rel": d.max_rel, "size": d.size,
        "allowed": d.allowed, "ok": d.ok, "note": d.note,
    }  # fmt: skip
