"""A plan for devices one does not have, run in the time they should take."""

from __future__ import annotations

from hetjax.ir.cluster import Cluster
from hetjax.ir.program import Program
from hetjax.passes.cost.program_price import fragment_price
from hetjax.passes.simulator_program import program_transfers
from hetjax.runtime.executor import Emulation


def cluster_emulation(cluster: Cluster, program: Program) -> Emulation:
    """Returns what a program's work and transfers take on a cluster, by the cost model.

    Raises:
      PlanError: a device kind cannot compute in a dtype of its stage.
    """
    work_s = {f.name: fragment_price(program, f, cluster).seconds for f in program.fragments}
    return Emulation(work_s, program_transfers(program, cluster))
