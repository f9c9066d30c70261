"""What a notebook asks: pictures of what is planned and of what ran, all without a device.

from hetjax import notebook
notebook.gantt(train_step)
"""

from hetjax.notebook.views import (
    cluster_map,
    compare,
    gantt,
    memory,
    roofline,
    save_dot,
    save_trace,
    search,
    sharding,
    shardings,
    stages,
    stepper,
)

__all__ = [
    "cluster_map", "compare", "gantt", "memory", "roofline", "save_dot", "save_trace", "search", "sharding",
    "shardings", "stages", "stepper",
]  # fmt: skip
