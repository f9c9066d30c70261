"""Plans in the form that Sailor's tools read."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from hetjax.passes.cost.sailor import KINDS
from hetjax.passes.search.space import Outline, Problem

_GPU_OF = {kind: gpu for gpu, kind in KINDS.items()}


def sailor_plan(problem: Problem, outline: Outline, seconds: float) -> dict[str, Any]:
    """Returns a plan as their simulator takes it; a replica is a node of as many GPUs as it needs.

    Args:
      problem: its pools' sites are named ZONE/GPU.
      outline: the plan; equal shares.
      seconds: of a step.
    """
    stages, used = [], Counter()
    for group in outline.groups:
        replicas = []
        for p in group.parts:
            gpu, zone = _GPU_OF[problem.pools[p.pool].kind], problem.pools[p.pool].site.split("/")[0]
            replicas += [[[[gpu, p.tensor, zone]], p.tensor]] * p.replicas
            used[gpu] += p.devices
        stages.append(replicas)
    edges = outline.edges
    return {
        "pipeline_list": [
            {
                "num_stages": outline.num_stages,
                "layers_per_stage": [list(range(a, b)) for a, b in itertools.pairwise(edges)],
                "tmp_per_stage": stages,
                "dp": [g.replicas for g in outline.groups],
            }
        ],
        "mbs": outline.groups[0].parts[0].share,
        "gbs": problem.batch,
        "estimated_throughput": 1 / seconds,
        "used_gpus": dict(used),
    }
