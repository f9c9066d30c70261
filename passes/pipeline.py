"""The default pipeline, from a traced step to a program: what the decorator, command and notebook run."""

from __future__ import annotations

from hetjax.ir.bundle import Bundle

# In order. Microbatching is chosen and proved between the two, because it traces the step again.
ANALYSIS = ("inline-calls", "label-regions", "label-blocks", "annotate-costs")
LOWERING = (
    "plan-stages", "cut-stages", "shard-stages", "insert-reshards", "schedule", "plan-donation",
)


def analyse(bundle: Bundle) -> Bundle:
    """Returns the bundle with its graph inlined, labelled and costed."""
    from hetjax.passes.annotate_costs import AnnotateCosts
    from hetjax.passes.inline_calls import InlineCalls
    from hetjax.passes.label_blocks import LabelBlocks
    from hetjax.passes.label_regions import LabelRegions

    for step in (InlineCalls(), LabelRegions(), LabelBlocks(), AnnotateCosts()):
        bundle = step.apply(bundle)
    return bundle


def lower(bundle: Bundle, *, donate: bool = False) -> Bundle:
    """Returns the bundle with a complete program; it needs a graph, a microbatching and a plan.

    Args:
      bundle: analysed and planned.
      donate: whether old state buffers may be reused.
    """
    from hetjax.passes.cut_stages import CutStages
    from hetjax.passes.insert_reshards import InsertReshards
    from hetjax.passes.plan_donation import PlanDonation
    from hetjax.passes.schedule_tasks import Schedule
    from hetjax.passes.shard_stages import ShardStages

    for step in (CutStages(), ShardStages(), InsertReshards(), Schedule(), PlanDonation(state=donate)):
        bundle = step.apply(bundle)
    return bundle
