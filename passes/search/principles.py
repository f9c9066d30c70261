"""The principles: what experience says of good plans, as small functions that weigh or forbid a decision.

Each weighs one sort of decision: 0 forbids it, with the principle's reason; any other number multiplies its
prior. `hetjax plan --principles` lists them, `--without NAME` switches one off; `benchmarks/planner.py`
measures what each earns. That the batch is exact is no principle: no other plan can be built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hetjax.ir.errors import PlanError
from hetjax.ir.suggest import nearest
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import State
from hetjax.passes.search.space import Group, Micro

if TYPE_CHECKING:
    from hetjax.passes.search.tree import View

# A link that is slower than this part of the one inside the slower site is a slow link.
SLOW = 0.25


@dataclasses.dataclass(frozen=True)
class Principle:
    """One principle.

    Attributes:
      name: what `--without` calls it.
      summary: one line.
      decides: "micro"; "group", the devices of a stage by themselves; "next", the same after other stages;
        "count", how many stages in a row; "finish"; "options"; "edges"; "any".
      weigh: a decision's weight, from 0 to 1; None for principles that the code asks about by name.
      reason: why a decision of weight 0 is out of the question.
    """

    name: str
    summary: str
    decides: str
    weigh: Callable[..., float] | None = None
    reason: str = ""


# Decisions about the batch.


def _enough_microbatches(view: View, micro: Micro) -> float:
    stages = view.likely_stages(micro)
    return micro.num_microbatches / (micro.num_microbatches + stages - 1)


def _examples_enough(view: View, micro: Micro) -> float:
    if not micro.replicas:
        return 1.0
    share = micro.examples // micro.replicas
    paces = view.rates.paces
    here, best = paces.get(share), paces[0]
    if here is None:
        return 0.0
    return max((h / b for h, b in zip(here, best) if b > 0), default=0.0) ** 2


def _sketched(view: View, micro: Micro) -> float:
    return max(1e-3, view.quickest_sketch_s / view.sketch(micro).seconds) ** 2 if view.quickest_sketch_s < INF else 1.0


# Decisions about the devices of a stage, whatever comes before.


def _no_dense_over_slow(view: View, group: Group) -> float:
    # Where a compressed exchange is declared, the options decide.
    return 0.0 if view.spans_slow(group) and not view.problem.compressed else 1.0


def _tensor_in_node(view: View, group: Group) -> float:
    weight = 1.0
    for p in group.parts:
        if p.tensor > view.problem.pools[p.pool].per_node:
            weight *= min(1.0, view.bandwidth(p.pool, p.pool) / view.inner_bandwidth(p.pool))
    return weight


def _efficient_degrees(view: View, group: Group) -> float:
    return max(view.efficiency(group), 1e-3) ** 3


def _keeps_pace(view: View, group: Group) -> float:
    """Weighs how near one layer comes to the pace at which all devices together could work."""
    rates = view.rates
    ideal_s = group.examples * rates.total / max(1e-300, view.speed)
    return min(1.0, ideal_s / max(1e-300, rates.layer_s(group))) ** 3


def _equal_speed(view: View, group: Group) -> float:
    if len(group.parts) == 1:
        return 1.0
    times = [w[-1] for w in view.judge.works(group)]
    return (min(times) / max(times)) ** 2


# The same, after other stages.


def _sites_once(view: View, state: State, group: Group) -> float:
    here, last = view.facts(group), view.facts(state.groups[-1])
    if here.sites & last.sites or not view.sites_slow(here.sites, last.sites):
        return 1.0
    return 0.0 if any(view.facts(g).sites & here.sites for g in state.groups) else 1.0


def _alike(view: View, state: State, group: Group) -> float:
    here = view.facts(group)
    same = [f for f in map(view.facts, state.groups) if f.kinds == here.kinds]
    return 1.0 if not same or any(f.tensors == here.tensors for f in same) else 0.3


def _memory_first(view: View, state: State, group: Group) -> float:
    return 0.5 if view.facts(group).memory > 1.05 * view.facts(state.groups[-1]).memory else 1.0


def _near_next(view: View, state: State, group: Group) -> float:
    last, here = state.groups[-1].parts[-1].pool, group.parts[0].pool
    return 1.0 if last == here else max(0.2, view.bandwidth(last, here) / view.fastest_from(last))


# How many stages in a row, and when to stop.


def _whole_pool(view: View, state: State, count: int) -> float:
    assert state.pending is not None
    most = view.moves.counts(state.groups, state.pending)
    return 1.0 if count == most else 1.0 / most


def _use_all(view: View, state: State) -> float:
    """Weighs stopping by the share of the speed there is that the stages so far have."""
    left = view.moves.left(state.groups)
    speed = sum(view.rates.rate(g) for g in state.groups)
    rest = sum(n * pace for n, pace in zip(left, view.rates.paces[0]))
    return max(1e-3, (speed / (speed + rest)) ** 4)


# What memory and time are traded with, and where the stages meet.


def _dense_at_home(view: View, state: State, outfit: tuple[Group, ...]) -> float:
    dense = any(g.options.exchange == "dense" and view.spans_slow(g) for g in outfit)
    return 0.0 if dense else 1.0


def _only_when_short(view: View, state: State, outfit: tuple[Group, ...]) -> float:
    assert state.micro is not None
    plans = view.cutter.plans(state.micro.num_microbatches, state.groups)
    if any(groups == outfit for groups, _ in plans):
        return 1.0
    return 0.1


def _work_by_speed(view: View, state: State, edges: tuple[int, ...]) -> float:
    assert state.micro is not None
    plans = view.cutter.plans(state.micro.num_microbatches, state.groups)
    if not plans:
        return 1.0
    return 1.0 / (1 + min(sum(abs(a - b) for a, b in zip(edges, e)) for _, e in plans))


PRINCIPLES: tuple[Principle, ...] = (
    Principle("enough-microbatches", "prefer as many microbatches as leave a small bubble", "micro", _enough_microbatches),
    Principle("enough-examples", "prefer microbatches at which the devices work well", "micro", _examples_enough, "no profile has this microbatch"),
    Principle("sketched", "prefer divisions of which a sketch of the whole plan is quick", "micro", _sketched),
    Principle("no-dense-over-slow", "dense collectives do not cross a slow link", "group", _no_dense_over_slow, "its replicas would exchange dense gradients over a slow link"),
    Principle("no-dense-over-slow", "dense collectives do not cross a slow link", "options", _dense_at_home, "its replicas would exchange dense gradients over a slow link"),
    Principle("tensor-in-node", "tensor parallelism stays inside a node, the more so the slower the way out", "group", _tensor_in_node),
    Principle("efficient-degrees", "prefer degrees at which a device does most: data before tensor parallelism", "group", _efficient_degrees),
    Principle("keeps-pace", "no stage so weak that a single layer of it holds up all the others", "group", _keeps_pace),
    Principle("equal-speed", "unlike replicas of a stage should take equally long", "group", _equal_speed),
    Principle("sites-once", "a pipeline does not come back to a site over a slow link", "next", _sites_once, "the pipeline would come back to a site it left"),
    Principle("alike", "devices of a kind get stages alike", "next", _alike),
    Principle("memory-first", "memory-rich devices come early, where more microbatches are in flight", "next", _memory_first),
    Principle("near-next", "the next stage lies where the link is fast", "next", _near_next),
    Principle("whole-pool", "stages alike take all of a pool that they can", "count", _whole_pool),
    Principle("use-all", "do not stop while much speed is unused", "finish", _use_all),
    Principle("only-when-short", "recompute and shard state only where memory is short", "options", _only_when_short),
    Principle("work-by-speed", "layers in proportion to speed, not in equal numbers", "edges", _work_by_speed),
    Principle("bounds", "a decision that cannot lead to a better plan is dropped", "any"),
)  # fmt: skip


def active(without: Iterable[str] = ()) -> tuple[Principle, ...]:
    """Returns the principles without those named.

    Raises:
      PlanError: a name is unknown; says the nearest.
    """
    names = {p.name for p in PRINCIPLES}
    off = set(without)
    unknown = [f"unknown principle {n!r}{nearest(n, names)}" for n in sorted(off - names)]
    if unknown:
        raise PlanError(unknown)
    return tuple(p for p in PRINCIPLES if p.name not in off)


def normalised(weights: Sequence[float]) -> list[float]:
    """Returns weights that add up to 1."""
    total = math.fsum(weights)
    return [w / total for w in weights] if total > 0 else list(weights)
