"""`hetjax.rehearse`: what a step would take on a cluster one does not have, from a laptop."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetjax.frontend.decorator import parallelize
from hetjax.frontend.parallel_function import ParallelFunction
from hetjax.frontend.whatif import Costing, gap
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.display import Shown
from hetjax.ir.errors import ClusterError, PlanError
from hetjax.ir.plan import Plan
from hetjax.passes.cost.estimate import ProgramEstimate
from hetjax.render.units import human_bytes, human_seconds


@dataclasses.dataclass(frozen=True)
class Rehearsal(Shown):
    """A step on a cluster, by the cost model alone.

    Attributes:
      plan: it can be changed by `with_`.
      cluster: that need not exist.
      bundle: planned and lowered.
      estimate: the judgement in full.
      prices: per device-hour, by device kind; as given.
      currency: of the prices.
    """

    plan: Plan
    cluster: Cluster
    bundle: Bundle
    estimate: ProgramEstimate
    prices: Mapping[str, float]
    currency: str

    @property
    def step_s(self) -> float:
        """Returns the seconds of one step."""
        return self.estimate.iteration_s

    @property
    def lower_bound_s(self) -> float:
        """Returns the seconds that no order of the same work could beat."""
        return self.estimate.lower_bound_s

    @property
    def gap(self) -> float:
        """Returns by what share the step is longer than the bound."""
        return gap(self.estimate)

    @property
    def fits(self) -> bool:
        """Returns whether every device holds what it must."""
        return not self.estimate.over

    @property
    def device_hours(self) -> dict[str, float]:
        """Returns device-hours of one step by kind, of the devices the plan uses, idle time included."""
        out: dict[str, float] = {}
        for stage in self.plan.stages:
            out[stage.kind] = out.get(stage.kind, 0.0) + len(stage.devices) * self.step_s / 3600
        return out

    @property
    def price(self) -> float | None:
        """Returns what one step costs, None where a kind in use has no price."""
        if not set(self.device_hours) <= set(self.prices):
            return None
        return sum(hours * self.prices[kind] for kind, hours in self.device_hours.items())

    def __str__(self) -> str:
        lines = [
            f"rehearsal of {self.plan.name} on {self.cluster.name}: {human_seconds(self.step_s)} a step, "
            f"at least {human_seconds(self.lower_bound_s)} in any order (gap {self.gap:.1%})"
        ]
        for s, (stage, peak) in enumerate(zip(self.plan.stages, self.estimate.peak_bytes)):
            has = self.cluster.kind(stage.kind).memory_bytes
            lines.append(
                f"  s{s}: {len(stage.devices)} x {stage.kind} in {stage.site}, peak {human_bytes(peak)} of {human_bytes(has)} a device"
            )
        lines += [f"  does not fit: {sentence}" for sentence in self.estimate.over]
        return "\n".join([*lines, "  " + self.price_words])

    @property
    def price_words(self) -> str:
        """Returns the price of a thousand steps in words, and what it is made of."""
        hours = ", ".join(f"{1000 * h:.4g} {kind}" for kind, h in self.device_hours.items())
        words = f"1,000 steps take {hours} device-hours"
        if self.price is None:
            missing = ", ".join(sorted(set(self.device_hours) - set(self.prices)))
            return f"{words}; no price is given for {missing} (prices={{kind: per device-hour}})"
        return f"{words}, {1000 * self.price:.4g} {self.currency}".rstrip()


def rehearse(
    step: Callable[..., Any],
    cluster: Cluster | str | Path,
    *args: Any,
    prices: Mapping[str, float] | None = None,
    currency: str = "",
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Rehearsal:
    """Returns what a step would take: memory, time, price and gap to the bound. No device is touched.

    Args:
      step: the train step, or one made parallel.
      cluster: a `Cluster` or a TOML file.
      args, kwargs: the step's arguments; `jax.ShapeDtypeStruct`s will do, so that no model is too large.
      prices: per device-hour, by device kind.
      currency: of the prices, for print.
      options: of `parallelize`: num_stages, num_microbatches, mesh, schedule, plan, per_microbatch,
        batch_argnums.

    Raises:
      PlanError, MicrobatchError, ClusterError: as planning on that cluster would.
    """
    if not isinstance(cluster, (Cluster, str, Path)):
        raise ClusterError(f"cluster is a {type(cluster).__name__}; give a Cluster or the name of a TOML file")
    if prices is not None and not isinstance(prices, Mapping):
        raise PlanError(f"prices is {prices!r}; give one per device kind, as {{'a100-80g': 1.8}}")
    unfit = {
        k: v
        for k, v in (prices or {}).items()
        if not isinstance(v, numbers.Real) or not 0 <= v < math.inf
    }
    if unfit:
        raise PlanError(f"prices must be finite numbers, zero or more; they are {unfit}")
    described = Cluster.from_toml(cluster) if not isinstance(cluster, Cluster) else cluster
    unknown = set(prices or {}) - {k.name for k in described.kinds}
    if unknown:
        kinds = ", ".join(k.name for k in described.kinds)
        raise PlanError(
            f"prices are given for {', '.join(sorted(unknown))}; {described.name!r} has {kinds}"
        )
    plain = step.plain if isinstance(step, ParallelFunction) else step
    planned = parallelize(plain, cluster=described, **(options or {})).plan_for(*args, **kwargs)
    costing: Costing = planned.costing
    return Rehearsal(
        planned, described, costing.bundle, costing.estimate, dict(prices or {}), currency
    )
