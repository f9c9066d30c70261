"""Schedules executed in real time: modelled compute, emulated links, real arrays through the same executor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hetjax.frontend.realtime import run_lists
from hetjax.passes.bounds import lower_bound
from hetjax.passes.schedules import PipelineCosts, schedule
from hetjax.passes.simulator import Transfer, simulate

STAGES, MICROBATCHES = 4, 32


def slow_middle(unit_s: float) -> PipelineCosts:
    """Returns four balanced stages whose middle link takes one stage's forward and backward."""
    return PipelineCosts((unit_s,) * 4, (2 * unit_s,) * 4, MICROBATCHES, (0.0, 3 * unit_s, 0.0))


def without_values(unit_s: float) -> dict[str, float]:
    """Returns wall seconds of 1F1B and Virtual-1F1B, executed without values, with what they should be."""
    costs = slow_middle(unit_s)
    out = {"bound": lower_bound(costs).lower_s}
    for name in ("1f1b", "virtual-1f1b"):
        lists = schedule(name, costs)
        start = time.perf_counter()
        run_lists(lists, costs)
        out[name], out[f"{name} simulated"] = time.perf_counter() - start, simulate(lists, costs).makespan_s
    return out


def three_sites(unit_s: float) -> tuple[float, float]:
    """Returns wall and simulated seconds of eight stages on three sites whose links share one uplink."""
    lines = [(f"{b}>", f"{b}<") for b in range(7)]
    lines[2], lines[5] = (("up 1", "core"), ("down 1", "core back")), (("up 2", "core"), ("down 2", "core back"))
    costs = PipelineCosts(
        (unit_s,) * 8, (2 * unit_s,) * 8, MICROBATCHES, (0, 0, 2 * unit_s, 0, 0, 3 * unit_s, 0),
        (0, 0, unit_s, 0, 0, 0.5 * unit_s, 0), lines=tuple(lines))
    lists = schedule("virtual-1f1b", costs)
    start = time.perf_counter()
    run_lists(lists, costs)
    return time.perf_counter() - start, simulate(lists, costs).makespan_s


def make_step(width: int = 64, depth: int = 8) -> tuple[Callable[..., Any], Any, Any]:
    """Returns (step, state, batch) of a residual network in Flax, 4 examples a microbatch."""
    import jax
    import optax
    from flax import linen as nn
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(depth):
                y = nn.Dense(2 * width, name=f"up_{i}")(nn.LayerNorm(name=f"norm_{i}")(x))
                x = x + nn.Dense(width, name=f"down_{i}")(nn.gelu(y))
            return nn.Dense(10, name="head")(x)

    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(4 * MICROBATCHES, width)).astype(np.float32),
        "y": rng.integers(0, 10, 4 * MICROBATCHES).astype(np.int32),
    }
    model = Net()
    params = model.init(jax.random.key(0), batch["x"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, state, batch


def distance(ours: Any, theirs: Any) -> float:
    """Returns the largest difference of a leaf over what `hetjax check` allows it; at most 1 is equal."""
    import jax

    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)]
    largest = max(np.abs(b).max() for _, b in pairs)
    return max(float(np.abs(a - b).max() / (1e-6 * np.abs(b).max() + 1e-7 * largest)) for a, b in pairs)


class Executed:
    """The step of `make_step` on four stages, compiled once, run with any schedule and any times.

    Args:
      split: whether its backward is in two halves.
    """

    def __init__(self, split: bool):
        import jax

        import hetjax

        self.step, self.state, self.batch = make_step()
        self.parallel = hetjax.parallelize(
            self.step, num_stages=STAGES, num_microbatches=MICROBATCHES, mesh="1,1",
            schedule="zb-h1" if split else "1f1b")
        self.parallel(self.state, self.batch)
        self.plain, _ = jax.jit(self.step)(self.state, self.batch)

    def run(self, name: str, costs: PipelineCosts) -> tuple[float, float, float, float]:
        """Returns wall seconds, simulated seconds, bubble, and how far parameters are from plain jit's."""
        import jax

        from hetjax.frontend.calls import flatten_call, rebuild_result
        from hetjax.frontend.entry import Entry
        from hetjax.frontend.realtime import timeline
        from hetjax.passes.schedule_tasks import weave
        from hetjax.runtime.executor import Emulation

        old = self.parallel._latest
        assert old is not None
        lists = schedule(name, costs)
        program = old.program.replace(tasks=weave(old.program, lists), schedule=name)
        whole = not any(f.phase == "weight" for f in program.fragments)
        seconds = {"forward": costs.forward_s, "backward": costs.backward_s if whole else costs.input_s, "weight": costs.weight_s}
        work_s = {f.name: seconds[f.phase][f.stage] if f.phase in seconds else 0.0 for f in program.fragments}
        links = {}
        for r in program.reshards:
            boundary, way = min(r.source, r.target), 0 if r.source < r.target else 1
            links[r.name] = Transfer(costs.route(boundary, way), costs.serialisation_s[boundary], costs.latency_s[boundary])
        entry = Entry(old.bundle.replace(program=program), old.structure, old.returned)
        entry.adopt(old, emulation=Emulation(work_s, links))
        leaves, _ = flatten_call((self.state, self.batch), {}, False)
        for _ in range(2):  # the first step starts threads
            start = time.perf_counter()
            results = jax.block_until_ready(entry.run(leaves))
            wall_s = time.perf_counter() - start
        ours, _ = rebuild_result(old.structure, old.returned, results, (self.state, self.batch), {})
        assert entry.executor is not None
        bubble = timeline(entry.executor.times, STAGES).bubble
        return wall_s, simulate(lists, costs).makespan_s, bubble, distance(ours, self.plain)

    def dispatch(self, rounds: int) -> tuple[float, float]:
        """Returns seconds per step by one dispatcher and by threads, nothing modelled; medians in turn."""
        import jax

        from hetjax.frontend.calls import flatten_call
        from hetjax.frontend.entry import Entry

        old = self.parallel._latest
        assert old is not None
        threads = Entry(old.bundle, old.structure, old.returned)
        threads.adopt(old, threads=True)
        leaves, _ = flatten_call((self.state, self.batch), {}, False)
        took: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for kept, entry in zip(took, (old, threads)):
                start = time.perf_counter()
                jax.block_until_ready(entry.run(leaves))
                kept.append(time.perf_counter() - start)
        return statistics.median(took[0]), statistics.median(took[1])


def one_stage(rounds: int) -> float:
    """Returns what a step on one device takes over what it takes under plain jit: the median of pairs."""
    import jax

    import hetjax
    from hetjax.ir.cluster import Cluster

    step, state, batch = make_step(width=256)
    batch = jax.device_put(batch, jax.devices()[0])
    ours = hetjax.parallelize(step, num_stages=1, num_microbatches=1, mesh="1,1", cluster=Cluster.local())
    both = [(fn, fn(state, batch)[0]) for fn in (jax.jit(step), ours)]
    ratios = []
    for k in range(rounds):
        took = [0.0, 0.0]
        for which in (k % 2, 1 - k % 2):  # neither is always second
            fn, old = both[which]
            start = time.perf_counter()
            jax.block_until_ready(fn(old, batch))
            took[which] = time.perf_counter() - start
        ratios.append(took[1] / took[0])
    return statistics.median(ratios)
