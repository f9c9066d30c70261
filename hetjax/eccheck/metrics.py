"""An agent's numbers for Prometheus, read at each scrape from the state itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hetjax.eccheck.store import COMMITTED

if TYPE_CHECKING:
    from hetjax.eccheck.agent import Agent


class AgentCollector:
    """Collects from an agent; registered with prometheus-client.

    Args:
      agent: the agent.
    """

    def __init__(self, agent: Agent):
        self._agent = agent

    def collect(self) -> Iterator[Any]:
        """Yields the metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        agent = self._agent
        with agent.store.lock:
            entries = list(agent.store.entries.values())
        gauges = {
            "hetjax_agent_memory_bytes": ("memory held for checkpoints", agent.arena.capacity_bytes),
            "hetjax_agent_free_bytes": ("memory in no object", agent.arena.free_bytes),
            "hetjax_agent_epoch": ("newest start of the job seen", agent.store.epoch),
            "hetjax_agent_damaged_blocks": (
                "blocks a scrub found bad and nothing has repaired yet",
                sum(len(e.damaged) for e in entries),
            ),
            "hetjax_agent_uptime_seconds": ("time since the start", time.time() - agent.started_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        states = GaugeMetricFamily("hetjax_agent_objects", "objects by state", labels=["state"])
        for state, count in Counter(e.state for e in entries).items():
            states.add_metric([state], count)
        yield states
        newest = GaugeMetricFamily("hetjax_agent_newest_step", "newest committed step", labels=["name"])
        steps: dict[str, int] = {}
        for entry in entries:
            if entry.state == COMMITTED:
                steps[entry.name] = max(entry.step, steps.get(entry.name, entry.step))
        for name, step in steps.items():
            newest.add_metric([name], step)
        yield newest
        moved = CounterMetricFamily(
            "hetjax_agent_moved_bytes", "chunk bytes by what became of them", labels=["kind"]
        )
        for kind, num_bytes in dict(agent.counters).items():
            moved.add_metric([kind], num_bytes)
        yield moved
        yield CounterMetricFamily(
            "hetjax_agent_evictions", "committed objects that had to make room", agent.store.evictions
        )


def serve_metrics(agent: Agent, port: int) -> Any:
    """Starts the HTTP endpoint on the agent's interface; returns (server, thread)."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    host = agent.options.listen.rpartition(":")[0].strip("[]")
    return start_http_server(port, addr=host, registry=registry)
