"""Resharding: how a value goes from one mesh to another with every byte crossing slow links once."""

from hetjax.passes.reshard_plan.bound import Bound, lower_bound
from hetjax.passes.reshard_plan.clock import Clock, simulate_route
from hetjax.passes.reshard_plan.crossing import (
    Crossing,
    activation_crossing,
    crossing,
    crossing_speed,
)
from hetjax.passes.reshard_plan.layout import Layout, layout
from hetjax.passes.reshard_plan.planner import (
    ReshardPlan,
    cheapest_spec,
    plan_layouts,
    plan_naive,
    plan_reshard,
    price_pieces,
)

__all__ = [
    "Bound", "Clock", "Crossing", "Layout", "ReshardPlan", "activation_crossing", "cheapest_spec", "crossing",
    "crossing_speed", "layout", "lower_bound", "plan_layouts", "plan_naive", "plan_reshard", "price_pieces",
    "simulate_route",
]
