"""Pipeline schedules: pure functions from plain numbers to task lists, and the proof that they end."""

from hetjax.passes.schedules.check import check_schedule, peak_in_flight
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.registry import SCHEDULES, schedule

__all__ = ["SCHEDULES", "PipelineCosts", "check_schedule", "peak_in_flight", "schedule"]
