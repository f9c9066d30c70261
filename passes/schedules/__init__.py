"""Pipeline schedules: pure functions from plain numbers to task lists, and the proof that they end."""

from hetjax.passes.schedules.check import check_schedule, peak_in_flight
from hetjax.passes.schedules.costs import PipelineCosts, split_stages
from hetjax.passes.schedules.registry import SCHEDULES, schedule, schedule_info

__all__ = [
    "SCHEDULES", "PipelineCosts", "check_schedule", "peak_in_flight", "schedule", "schedule_info",
    "split_stages",
]
