"""What an executed plan of the published set should take, in seconds and bytes.

Those plans ran under DeepSpeed's pipeline engine, whose source says how: transfers hold the device
(`rendezvous`), each rank sends its share of an activation and the receivers gather the whole, every
arrival makes the host wait and start anew, gradients are reduced after the last backward, without
overlap, tied embeddings once more, and then the optimizer runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hetjax.ir.cluster import Cluster
from hetjax.passes.bounds import lower_bound
from hetjax.passes.cost.collectives import collective_price
from hetjax.passes.cost.installation import PUBLISHED, Installation, StageBytes
from hetjax.passes.cost.profiles import LayerKey, Profiles
from hetjax.passes.cost.rendezvous import HeldSpan, rendezvous_1f1b
from hetjax.passes.cost.sailor import Model, PublishedPlan, Replica
from hetjax.passes.schedules.costs import PipelineCosts

# Models whose first and last layer share the embedding.
_TIED = ("OPT-350", "OPT-30", "GPT-Neo-2.7")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a plan should take.

    Attributes:
      iteration_s: one step.
      lower_bound_s: what no schedule of the same stages could beat.
      pipeline_s, sync_s, update_s: the parts of `iteration_s`.
      exposed_comm_s: what of it would be gone if nothing had to travel.
      bubble: share of the pipeline's device time without compute.
      peak_bytes: per stage, on the device that holds most.
      spans: the pipeline's tasks and transfers on the clock.
      sources: (what, "imported" or "analytic" or "given") pairs.
    """

    iteration_s: float
    lower_bound_s: float
    pipeline_s: float
    sync_s: float
    update_s: float
    exposed_comm_s: float
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[HeldSpan, ...]
    sources: tuple[tuple[str, str], ...]


def estimate(
    plan: PublishedPlan, model: Model, cluster: Cluster, installation: Installation | None = None
) -> Estimate:
    """Returns what a plan should take.

    Args:
      plan: the plan.
      model: profiles and sizes of its model.
      cluster: where it runs, from `hetjax.passes.cost.sailor.plan_cluster`.
      installation: the framework's constants; those of its device kinds when not given.

    Raises:
      PlanError: a layer, degree or microbatch size without profile.
    """
    host = installation or installation_of(plan)
    profiles = model.profiles.repaired()
    m, stages = plan.num_microbatches, plan.num_stages
    forward_s, backward_s, update_s = [], [], []
    for layers, replicas in zip(plan.layers, plan.replicas):
        times = [
            _stage_times(profiles, model.name, plan.microbatch, layers, r) for r in set(replicas)
        ]
        # Replicas meet every step, and a stage goes at the pace of its slowest.
        forward_s.append(max(t[0] for t in times))
        backward_s.append(max(t[1] for t in times))
        update_s.append(max(t[2] for t in times))
    transfer_s = [_transfer_s(plan, model, cluster, host, s) for s in range(stages - 1)]
    spans = rendezvous_1f1b(forward_s, backward_s, transfer_s, transfer_s, m)
    pipeline_s = spans[-1].end_s
    sync = [_sync_s(plan, model, cluster, host, s) for s in range(stages)]
    sync_s = max(sync) + _tied_s(plan, model, cluster, host)
    free = [0.0] * (stages - 1)
    alone_s = rendezvous_1f1b(forward_s, backward_s, free, free, m)[-1].end_s
    busy = sum(m * (f + b) for f, b in zip(forward_s, backward_s))
    costs = PipelineCosts(
        tuple(forward_s), tuple(backward_s), m, serialisation_s=tuple(transfer_s),
        sync_s=tuple(sync), update_s=tuple(update_s),
    )  # fmt: skip
    return Estimate(
        iteration_s=pipeline_s + sync_s + max(update_s),
        lower_bound_s=lower_bound(costs).lower_s,
        pipeline_s=pipeline_s,
        sync_s=sync_s,
        update_s=max(update_s),
        exposed_comm_s=pipeline_s - alone_s + sync_s,
        bubble=max(0.0, 1 - busy / (pipeline_s * stages)),
        peak_bytes=tuple(
            round(stage_bytes(plan, model, host.keeps_scores, s).peak(host)) for s in range(stages)
        ),
        spans=spans,
        sources=(
            ("layer times", "imported"), ("links", "imported"), ("layer sizes", "imported"),
            ("schedule", "analytic"), ("framework constants", "given"),
        ),
    )  # fmt: skip


def installation_of(plan: PublishedPlan) -> Installation:
    """Returns the constants for a plan's device kinds; the defaults where nothing was published."""
    kinds = [r.kind for stage in plan.replicas for r in stage]
    return next((PUBLISHED[k] for k in kinds if k in PUBLISHED), Installation())


def _stage_times(
    profiles: Profiles, model: str, microbatch: int, layers: Sequence[int], replica: Replica
) -> tuple[float, float, float]:
    times = [
        profiles.time(LayerKey(model, replica.kind, replica.tensor, microbatch, str(layer)))
        for layer in layers
    ]
    forward_s = sum(t.forward_s for t in times)
    return forward_s, sum(t.backward_s for t in times), sum(t.update_s for t in times)


def _devices(cluster: Cluster, name: str) -> list[int]:
    return [d.index for d in cluster.devices if d.node == name]


def _transfer_s(
    plan: PublishedPlan, model: Model, cluster: Cluster, host: Installation, s: int
) -> float:
    """Returns the seconds of one activation (or its gradient) between stages s and s + 1."""
    nbytes = plan.microbatch * model.size(1, plan.layers[s][-1]).output_bytes
    worst = 0.0
    for r in range(len(plan.replicas[s])):
        here, there = _devices(cluster, f"s{s}r{r}"), _devices(cluster, f"s{s + 1}r{r}")
        gather = collective_price(cluster, "all-gather", there, nbytes)
        worst = max(worst, cluster.link(here[0], there[0]).transfer_s(nbytes) + gather.seconds)
    return worst + host.host_s


def _sync_s(
    plan: PublishedPlan, model: Model, cluster: Cluster, host: Installation, s: int
) -> float:
    """Returns the seconds of a stage's gradient all-reduce over its replicas."""
    replicas = plan.replicas[s]
    if len(replicas) == 1:
        return 0.0
    tensor = min(r.tensor for r in replicas)
    parameters = sum(model.size(tensor, layer).parameters for layer in plan.layers[s])
    group = [_devices(cluster, f"s{s}r{r}")[0] for r in range(len(replicas))]
    price = collective_price(
        cluster, "all-reduce", group, 4 * parameters, beside=tensor, algorithm="ring"
    )
    return host.sync_passes * price.seconds


def _tied_s(plan: PublishedPlan, model: Model, cluster: Cluster, host: Installation) -> float:
    """Returns the seconds in which the first and last stage add up the embedding's gradient."""
    if plan.num_stages == 1 or model.name not in _TIED:
        return 0.0
    tensor = plan.replicas[0][0].tensor
    last = max(layer for stage in plan.layers for layer in stage)
    nbytes = 4 * min(model.size(tensor, 0).parameters, model.size(tensor, last).parameters)
    group = [_devices(cluster, f"s{s}r0")[0] for s in (0, plan.num_stages - 1)]
    price = collective_price(cluster, "all-reduce", group, nbytes, beside=tensor, algorithm="ring")
    return host.sync_passes * price.seconds


def stage_bytes(plan: PublishedPlan, model: Model, keeps_scores: bool, s: int) -> StageBytes:
    """Returns what the peak memory of a stage's devices is made of.

    Args:
      plan, model: the plan and its model.
      keeps_scores: whether attention scores are kept for the backward.
      s: the stage.
    """
    in_flight = min(plan.num_microbatches, plan.num_stages - s)
    tensor = min(r.tensor for r in plan.replicas[s])
    sizes = [model.size(tensor, layer) for layer in plan.layers[s]]
    stored = sum(size.stored_bytes for size in sizes)
    if not keeps_scores:
        # Scores are one float per head and pair of tokens, in every layer but the first and last.
        last = max(layer for t, layer in model.sizes if t == tensor)
        inner = sum(0 < layer < last for layer in plan.layers[s])
        stored -= inner * 4 * model.heads // tensor * model.sequence**2
    # The logits are what the last layer of all hands on; elsewhere this is one hidden state.
    logits = max(size.output_bytes for size in sizes)
    return StageBytes(
        sum(size.parameters for size in sizes),
        stored * in_flight * plan.microbatch,
        logits * plan.microbatch,
    )
