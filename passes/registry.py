"""All passes by name, each imported when it is first asked for.

A pass is a frozen dataclass:

    @dataclasses.dataclass(frozen=True)
    class CutStages:
        \"\"\"Cuts the forward into stages by work and device speed.

        Attributes:
          stages: how many; 0 takes the plan's.
        \"\"\"

        name: ClassVar[str] = "cut-stages"
        summary: ClassVar[str] = "cut the forward into stages by work and device speed"
        requires: ClassVar[tuple[str, ...]] = ("graph.regions", "cluster")
        stages: int = 0

        def apply(self, bundle: Bundle) -> Bundle: ...

Its fields are its options. `requires` (optional) names parts of the bundle or facts of
`hetjax.passes.facts` that must hold before it runs. It may assume a valid bundle, leaves a valid
one, and returns the same object when nothing changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import ClassVar, Protocol, runtime_checkable

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.suggest import nearest

# Third-party passes: an entry point of this group, its name the pass's name, its value "module:Class".
ENTRY_POINT_GROUP = "hetjax.passes"

# name -> "module:Class", in the order of the default pipeline where a pass has a place in it.
PASSES: dict[str, str] = {
    "inline-calls": "hetjax.passes.inline_calls:InlineCalls",
    "lift-draws": "hetjax.passes.lift_draws:LiftDraws",
    "lift-slices": "hetjax.passes.lift_slices:LiftSlices",
    "label-regions": "hetjax.passes.label_regions:LabelRegions",
    "label-blocks": "hetjax.passes.label_blocks:LabelBlocks",
    "split-scans": "hetjax.passes.split_scans:SplitScans",
    "annotate-costs": "hetjax.passes.annotate_costs:AnnotateCosts",
    "prove-microbatching": "hetjax.passes.prove_microbatching:ProveMicrobatching",
    "one-microbatch": "hetjax.passes.one_microbatch:OneMicrobatch",
    "plan-stages": "hetjax.passes.plan_stages:PlanStages",
    "cut-stages": "hetjax.passes.cut_stages:CutStages",
    "whole-sums": "hetjax.passes.whole_sums:WholeSums",
    "recompute-residuals": "hetjax.passes.recompute_residuals:RecomputeResiduals",
    "split-backward": "hetjax.passes.split_backward:SplitBackward",
    "shard-stages": "hetjax.passes.shard_stages:ShardStages",
    "insert-reshards": "hetjax.passes.insert_reshards:InsertReshards",
    "optimise-reshards": "hetjax.passes.optimise_reshards:OptimiseReshards",
    "compress-crossings": "hetjax.passes.compress_crossings:CompressCrossings",
    "price-stages": "hetjax.passes.price_plan:PriceStages",
    "schedule": "hetjax.passes.schedule_tasks:Schedule",
    "plan-donation": "hetjax.passes.plan_donation:PlanDonation",
    "price-step": "hetjax.passes.price_plan:PriceStep",
    "verify": "hetjax.passes.verify:Verify",
}

# name -> pipeline string it stands for.
ALIASES: dict[str, str] = {
    "default": (
        "inline-calls,label-regions,label-blocks,annotate-costs,prove-microbatching,plan-stages,cut-stages,"
        "split-backward,shard-stages,insert-reshards,optimise-reshards,compress-crossings,price-stages,schedule,"
        "plan-donation,price-step,verify"
    ),
}


@runtime_checkable
class Pass(Protocol):
    """What every pass offers; see the module's text."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def apply(self, bundle: Bundle) -> Bundle: ...


@functools.cache
def third_party_passes() -> dict[str, str]:
    """Returns the passes installed packages declare, name to "module:Class"; ours are never replaced."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {e.name: e.value for e in found if e.name not in PASSES}


def pass_names() -> list[str]:
    """Returns the names of all passes: ours in pipeline order, then third-party ones by name."""
    return [*PASSES, *sorted(third_party_passes())]


def pass_class(name: str) -> type:
    """Returns the class of the pass called `name`, importing it now.

    Raises:
      PassError: there is no such pass, or its module does not hold it.
    """
    target = PASSES.get(name) or third_party_passes().get(name)
    if target is None:
        raise PassError(name, f"there is no such pass{nearest(name, pass_names())}")
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PassError(name, f"cannot be loaded from {target}: {error}") from error
    if getattr(cls, "name", None) != name:
        raise PassError(
            name, f"{target} calls itself {getattr(cls, 'name', None)!r}; both names must agree"
        )
    return cls
