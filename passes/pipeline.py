"""The default pipeline, from a traced step to a program: what the decorator, command and notebook run."""

from __future__ import annotations

import json

from hetjax.ir.bundle import Bundle
from hetjax.passes.manager import run_pipeline

# In order. Microbatching is chosen and proved between the two, because it traces the step again.
ANALYSIS = ("inline-calls", "label-regions", "label-blocks", "annotate-costs")
LOWERING = (
    "plan-stages", "cut-stages", "split-backward", "shard-stages", "insert-reshards", "optimise-reshards",
    "compress-crossings", "price-stages", "schedule", "plan-donation", "price-step", "verify",
)


def analyse(bundle: Bundle) -> Bundle:
    """Returns the bundle with its graph inlined, labelled and costed."""
    return run_pipeline(bundle, ",".join(ANALYSIS))


def lower(bundle: Bundle, *, donate: bool = False, profiles: str = "") -> Bundle:
    """Returns the bundle with a complete program; it needs a graph, a microbatching and a plan.

    Args:
      bundle: analysed and planned.
      donate: whether old state buffers may be reused.
      profiles: the profile store to price by; "" prices by data sheets.
    """
    recompute = bundle.plan.recompute if bundle.plan is not None else ""
    whole = bundle.plan is not None and bundle.plan.sums == "whole"
    return run_pipeline(bundle, lowering(donate=donate, profiles=profiles, recompute=recompute, whole_sums=whole))


def lowering(*, donate: bool = False, profiles: str = "", recompute: str = "", whole_sums: bool = False) -> str:
    """Returns the pipeline of `lower`."""
    options = {"plan-donation": "{state}"} if donate else {}
    if profiles:
        by = f"{{profiles={json.dumps(profiles)}}}"
        options |= {"price-stages": by, "price-step": by}
    names = [name for name in LOWERING if name != "plan-stages"]
    if recompute:
        names.insert(names.index("cut-stages") + 1, "recompute-residuals")
        options["recompute-residuals"] = f"{{mode={recompute}}}"
    if whole_sums:
        names.insert(names.index("shard-stages") + 1, "whole-sums")
    return ",".join(n + options.get(n, "") for n in names)
