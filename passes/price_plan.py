"""price-stages and price-step: what a plan should take and hold, written into it.

Numbers that a plan already bears stay, so that a plan read from a file lowers to the program it was
made with: `schedule` goes by the stages' times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError, PlanError
from hetjax.ir.plan import Plan
from hetjax.ir.program import Program
from hetjax.passes.cost.estimate import estimate_program, fragment_prices
from hetjax.passes.cost.judge import ANALYTIC, MEASURED, Judge
from hetjax.passes.cost.program_price import CALL, FragmentPrice

# What the two passes say the source of; where stages differ, each has a line of its own besides.
PRICED = ("stage times", "sent bytes", "step time", "memory")
STAGE_TIME = "time of stage "

_KNOWN = (MEASURED, CALL)
_MOSTLY = 0.9


@dataclasses.dataclass(frozen=True)
class PriceStages:
    """Gives every stage of the plan its seconds and the bytes it sends, where they are not known.

    It runs before `schedule`, which hides links behind these seconds.

    Attributes:
      profiles: a profile store of `hetjax calibrate` to price by; "" prices by data sheets.
    """

    name: ClassVar[str] = "price-stages"
    summary: ClassVar[str] = "write each stage's seconds and sent bytes into the plan"
    requires: ClassVar[tuple[str, ...]] = ("plan", "cluster", "program")

    profiles: str = ""

    def apply(self, bundle: Bundle) -> Bundle:
        plan, cluster, program = bundle.plan, bundle.cluster, bundle.program
        if plan is None or cluster is None or program is None:
            raise PassError(self.name, "needs a plan, a cluster and a program")
        sent = _sent_bytes(program)
        priced = [
            dataclasses.replace(s, sent_bytes=n if s.sent_bytes is None else s.sent_bytes)
            for s, n in zip(plan.stages, sent)
        ]
        sources = plan.sources
        if priced != list(plan.stages):
            sources = _with_source(sources, "sent bytes", "analytic")
        if any(s.predicted_s is None for s in plan.stages):
            judge = Judge.at(self.profiles)
            try:
                seconds, made = _stage_seconds(bundle, program, judge)
            except PlanError as error:
                return bundle.note("price", f"the stages are not priced: {error}")
            priced = [
                dataclasses.replace(s, predicted_s=t if s.predicted_s is None else s.predicted_s)
                for s, t in zip(priced, seconds)
            ]
            sources = _with_source(sources, "stage times", _weakest(made))
            # Where stages differ, each says where its own time comes from.
            if len(set(made)) > 1:
                for s, name in enumerate(made):
                    sources = _with_source(sources, f"{STAGE_TIME}{s}", name)
        return _replaced(bundle, dataclasses.replace(plan, stages=tuple(priced), sources=sources))


@dataclasses.dataclass(frozen=True)
class PriceStep:
    """Gives the plan the seconds of its step and every stage its peak bytes, where they are not known.

    Attributes:
      profiles: as in price-stages.
    """

    name: ClassVar[str] = "price-step"
    summary: ClassVar[str] = "write the step's seconds and each stage's peak bytes into the plan"
    requires: ClassVar[tuple[str, ...]] = ("plan", "cluster", "program.tasks")

    profiles: str = ""

    def apply(self, bundle: Bundle) -> Bundle:
        plan = bundle.plan
        if plan is None:
            raise PassError(self.name, "needs a plan")
        if plan.predicted_s is not None and all(s.peak_bytes is not None for s in plan.stages):
            return bundle
        judge = Judge.at(self.profiles)
        try:
            found = estimate_program(bundle, judge=judge)
        except PlanError as error:
            return bundle.note("price", f"the step is not priced: {error}")
        for s, dtype in found.emulated:
            kind = plan.stages[s].kind
            bundle = bundle.note("price", f"stage {s} computes in {dtype}, which {kind} emulates, and is priced so")
        sources, predicted_s = plan.sources, plan.predicted_s
        if predicted_s is None:
            predicted_s = found.iteration_s
            sources = _with_source(sources, "step time", source_of(found.fragments.values()))
        stages = tuple(
            dataclasses.replace(s, peak_bytes=n) if s.peak_bytes is None else s
            for s, n in zip(plan.stages, found.peak_bytes)
        )
        if stages != plan.stages:
            sources = _with_source(sources, "memory", "analytic")
        changed = dataclasses.replace(plan, stages=stages, predicted_s=predicted_s, sources=sources)
        return _replaced(bundle, changed)


def _stage_seconds(
    bundle: Bundle, program: Program, judge: Judge | None
) -> tuple[list[float], list[str]]:
    """Returns the seconds of one microbatch per stage, and where each of them comes from."""
    seconds = [0.0] * len(program.meshes)
    prices = fragment_prices(bundle, judge=judge)
    # A step that is neither cut nor split is one fragment, and has no microbatches to run it for.
    mine = [f for f in program.fragments if f.per_microbatch] or list(program.fragments)
    for f in mine:
        seconds[f.stage] += prices[f.name].seconds
    made = [
        source_of(prices[f.name] for f in mine if f.stage == s) for s in range(len(program.meshes))
    ]
    return seconds, made


def source_of(prices: Iterable[FragmentPrice]) -> str:
    """Returns "measured" where that is what nine tenths of the seconds are, else "analytic".

    Prologues are never measured alone, and take next to nothing; the estimate's own `sources` say the
    exact shares.
    """
    shares = [(n in _KNOWN, s) for p in prices for n, s in p.sources or ((ANALYTIC, p.seconds),)]
    total = sum(s for _, s in shares)
    known = sum(s for measured, s in shares if measured)
    return "measured" if total and known >= _MOSTLY * total else "analytic"


def _weakest(made: Iterable[str]) -> str:
    return "measured" if set(made) == {"measured"} else "analytic"


def _sent_bytes(program: Program) -> list[int]:
    """Returns, per stage, the bytes of one microbatch to the next stage, or back, whichever is more."""
    ways = [[0, 0] for _ in program.meshes]
    for r in program.reshards:
        if r.form in ("micro", "concat"):
            for b in range(min(r.source, r.target), max(r.source, r.target)):
                ways[b][r.source > r.target] += r.nbytes
    return [max(way) for way in ways]


def _with_source(
    sources: tuple[tuple[str, str], ...], what: str, source: str
) -> tuple[tuple[str, str], ...]:
    """Returns the sources with one more, unless it is there."""
    return sources if what in dict(sources) else (*sources, (what, source))


def _replaced(bundle: Bundle, plan: Plan) -> Bundle:
    return bundle if plan == bundle.plan else bundle.replace(plan=plan)
