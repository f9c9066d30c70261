"""The simulated timeline of a planned step as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

import json

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import LoweringError
from hetjax.passes.simulator import Timeline
from hetjax.passes.simulator_program import simulate_plan


def timeline_of(bundle: Bundle) -> Timeline:
    """Returns when each task of the bundle's plan runs, by its predicted times.

    Raises:
      LoweringError: it has no plan or no cluster.
      PlanError: the plan predicts no times.
    """
    if bundle.plan is None or bundle.cluster is None:
        raise LoweringError(
            "a timeline needs a plan and its cluster; run -p default with --cluster FILE"
        )
    timeline, _, _ = simulate_plan(bundle.plan, bundle.cluster, bundle.program)
    return timeline


def emit_chrome_trace(bundle: Bundle) -> str:
    """Returns the trace as JSON; see `timeline_of` for what it raises."""
    from hetjax.emit.gantt import chrome_trace

    timeline = timeline_of(bundle)
    names = [f"s{i}" for i in range(len(timeline.spans))]
    return json.dumps(chrome_trace(timeline, names)) + "\n"
