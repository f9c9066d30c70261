"""What a host's own work costs: its processors together, hand-overs between its devices, calls of a step."""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax.calibrate.timing import time_calls, time_cold
from hetjax.ir.cluster import DeviceKind
from hetjax.passes.cost.host import HostTime
from hetjax.passes.cost.processors import work_together

_ARRAYS = (2, 130)  # of a launched call
_HANDED = (1, 17)  # arrays of a hand-over
_LEAVES = (4, 68)  # of a step's state
_SMALL, _LARGE = 64, 2**21  # bytes handed over


def time_host(
    kind: DeviceKind, devices: Sequence[Any], work: Callable[[Any], Callable[[], Any]] | None = None
) -> HostTime:
    """Returns what driving devices from this process costs.

    Args:
      kind: of the devices.
      devices: local ones.
      work: returns a call on one device that is much of what the devices will do; None for a loop
        that no memory slows.
    """
    processors, together = processors_of(kind), 0.0
    if 1 < processors <= len(devices):
        together = time_together([(work or _loop)(d) for d in devices[:processors]])
    host = HostTime(processors, together, *_launch(devices), *_hand_over(devices))
    step_s, leaf_s = _step(devices[0], host)
    return dataclasses.replace(host, step_s=step_s, leaf_s=leaf_s)


def processors_of(kind: DeviceKind) -> int:
    """Returns the processors that CPU devices of this host share; 0 for other kinds."""
    if kind.platform != "cpu":
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def time_together(calls: Sequence[Callable[[], Any]]) -> float:
    """Returns the work of all processors at once in that of one alone.

    Args:
      calls: the same work on as many devices as there are processors.
    """
    found = []
    for _ in range(3):
        alone, all_ = time_calls(calls[0]), time_calls(lambda: [call() for call in calls])
        busy = min(max(1.0, alone.host_s / alone.seconds), float(len(calls)))
        found.append(work_together(len(calls), busy, all_.seconds / alone.seconds))
    return statistics.median(found)


def _loop(device: Any) -> Callable[[], Any]:
    """Returns a call that computes on a few numbers again and again, in one thread."""
    import jax
    import jax.numpy as jnp

    x = jax.device_put(jnp.linspace(0.1, 1.0, 2048), device)
    spin = lambda x: jax.lax.fori_loop(0, 400, lambda _, y: jnp.tanh(y) + 0.5 * y, x)  # noqa: E731
    return functools.partial(jax.jit(spin).lower(x).compile(), x)


def _launch(devices: Sequence[Any]) -> tuple[float, float, float]:
    """Returns the dispatcher's seconds of a launch, of each array in it, and of each further shard."""
    spread = devices[: min(4, len(devices))]
    few, many = (time_cold(_nothing(devices[:1], n)) for n in _ARRAYS)
    array_s = max(0.0, (many - few) / (_ARRAYS[1] - _ARRAYS[0]))
    launch_s = max(0.0, few - _ARRAYS[0] * array_s)
    if len(spread) < 2:
        return launch_s, array_s, 0.0
    wide = time_cold(_nothing(spread, _ARRAYS[1]))
    return launch_s, array_s, max(0.0, (wide - many) / _ARRAYS[1] / (len(spread) - 1))


def _nothing(devices: Sequence[Any], arrays: int) -> Callable[[], Any]:
    """Returns a call on devices that takes and gives so many arrays and computes next to nothing."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    whole = NamedSharding(Mesh(np.array(list(devices)), ("data",)), PartitionSpec())
    given = [jax.device_put(jnp.zeros(8), whole) for _ in range(arrays // 2)]
    function = jax.jit(lambda *xs: [x + 1 for x in xs], out_shardings=[whole] * len(given))
    return functools.partial(function.lower(*given).compile(), *given)


def _hand_over(devices: Sequence[Any]) -> tuple[float, float, float]:
    """Returns the dispatcher's seconds of one hand-over and of each array, and what copying a byte takes."""
    import jax
    import jax.numpy as jnp

    if len(devices) < 2:
        return 0.0, 0.0, 0.0
    source, target = devices[0], devices[1]

    def hand_over(count: int, nbytes: int) -> Callable[[], Any]:
        arrays = [jax.device_put(jnp.zeros(nbytes // 4, "float32"), source) for _ in range(count)]
        return lambda: jax.device_put(arrays, [target] * count)

    few, many = (time_cold(hand_over(n, _SMALL)) for n in _HANDED)
    array_s = max(0.0, (many - few) / (_HANDED[1] - _HANDED[0]))
    small, large = (time_calls(hand_over(1, n), budget_s=0.15).host_s for n in (_SMALL, _LARGE))
    byte_s = max(0.0, (large - small) / (_LARGE - _SMALL))
    return max(0.0, few - _HANDED[0] * array_s), array_s, byte_s


def _step(device: Any, host: HostTime) -> tuple[float, float]:
    """Returns the dispatcher's seconds of a call of a parallel step, and of each leaf, beside its launch."""
    took = []
    for count in _LEAVES:
        arrays = 2 * count + 2
        took.append(max(0.0, time_cold(_small_step(device, count)) - host.launching_s(1, arrays)))
    leaf_s = max(0.0, (took[1] - took[0]) / (2 * (_LEAVES[1] - _LEAVES[0])))
    return max(0.0, took[0] - leaf_s * (2 * _LEAVES[0] + 2)), leaf_s


def _small_step(device: Any, leaves: int) -> Callable[[], Any]:
    """Returns a call of a step that computes next to nothing, on a state of so many leaves."""
    import jax
    import jax.numpy as jnp

    import hetjax
    from hetjax.ir.cluster import Cluster

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
        def loss(params: dict[str, Any]) -> Any:
            return sum((p.sum() for p in params.values()), jnp.float32(0)) * batch.mean()

        value, grads = jax.value_and_grad(loss)(state)
        return {k: p - grads[k] for k, p in state.items()}, value

    one = Cluster.local([device])
    parallel = hetjax.parallelize(step, cluster=one, num_stages=1, num_microbatches=1)
    state = {f"p{k}": jnp.ones(4) for k in range(leaves)}
    batch = jnp.ones((2, 2))
    placed, _ = parallel(state, batch)
    return lambda: parallel(placed, batch)
