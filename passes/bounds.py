"""What no order of tasks can beat: lower bounds on the makespan of a pipeline step, with their proofs.

Notation: stage s, M microbatches, c = serialisation + latency of a link one way, B the whole backward
(the input gradient I where backwards are split), k_s the most activations stage s may hold. Microbatches
go through every stage in ascending order, forwards and backwards (`check_schedule` demands it).

Head and tail. Nothing starts on stage s before head_s = sum_{u<s} (F_u + c_u). After the last backward
of s, tail_s = B_{s-1} + c_{s-1} + tail_{s-1} must still follow, and not less than sync_s + update_s.

Chain. One microbatch goes all the way: head_s + F_s + 2c_s + ... + B_s + tail_s.

Stage. A device does all its work between the earliest head and the least tail of its stages. Line: the
same for everything that is serialised on it.

Window. Let f_s(n) be the least time from the start of F_s(i) to the end of B_s(i+n-1), for n successive
microbatches, with all of them going through s and everything behind it. Then

  f_s(n) >= n (F_s + B_s)                                                          (work of s itself)
  f_s(n) >= j F_s + F_s + g_s(x) + B_s + r B_s      for all j + x + r = n, x >= 1
  g_s(n) >= j ser_s + 2 c_s + f_{s+1}(x) + r ser_s  for all j + x + r = n, x >= 1

The second line: F_s(i+j) starts j F_s after F_s(i) at the earliest; the x microbatches from i+j on take
g_s(x) from the end of the first one's forward to the arrival of the last one's gradient; and after
B_s(i+j+x-1) the r backwards that remain take r B_s. g_s is the same for the link, which serialises.

Memory. If s may hold k activations, F_s(i+k) starts after B_s(i) ends (after W_s(i), if split). So let
P(j) be the least time from the start of F_s(i) to the start of F_s(i+j). Between them there are j forwards
and the backwards of i, ..., i+j-k, and the microbatches a, ..., i+j-k have gone all the way:

  P(j) >= j F_s + max(0, j-k+1) B_s
  P(j) >= P(a) + f_s(j-k-a+1)       for a <= j-k
  P(j) >= P(a) + P(j-a)

Q(r), from the end of B_s(i) to the end of B_s(i+r), is the same with time reversed. Then
f_s(n) >= P(j) + f_s(x) + Q(r) for all j + x + r = n, x >= 1, which is what replaces j F_s and r B_s above.

The bound is max_s head_s + f_s(M) + tail_s. It is never above the true optimum: the tests compare it with
exhaustive search over all orders of small pipelines.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hetjax.passes.schedules.costs import PipelineCosts


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the makespan in seconds; each holds by itself, `lower_s` is the largest.

    Attributes:
      chain_s: one microbatch all the way.
      stage_s: the busiest device.
      link_s: the busiest line.
      window_s: the recursion above, without memory limits.
      memory_s: the recursion with the limits of the costs; equal to window_s where there are none.
      sync_s: the bounds above without synchronisation and optimizer cost this much less, at most.
      lower_s: the largest.
      devices_s: the stage bound of each device.
      lines_s: (line, link bound) pairs, slowest first.
    """

    chain_s: float
    stage_s: float
    link_s: float
    window_s: float
    memory_s: float
    sync_s: float
    lower_s: float
    devices_s: tuple[float, ...]
    lines_s: tuple[tuple[str, float], ...]

    @property
    def binding(self) -> str:
        """Returns which bound is the largest, in words; the plainest of equal ones."""
        if self.chain_s >= self.lower_s:
            return "one microbatch all the way"
        if self.stage_s >= self.lower_s:
            return f"the work of device {self.devices_s.index(self.stage_s)}"
        if self.link_s >= self.lower_s:
            return f"line {self.lines_s[0][0]}"
        return "the memory limit" if self.memory_s > self.window_s else "stages and links together"


def lower_bound(costs: PipelineCosts, *, split: bool = False) -> Bounds:
    """Returns what no order of this placement's tasks can beat.

    Args:
      costs: the pipeline. Synchronisation and update count when they are not zero.
      split: whether backwards may be run as I and W, which frees the upstream stages earlier.
    """
    plain = costs.replace(sync_s=(), update_s=()) if any(costs.sync_s) or any(costs.update_s) else costs
    found = _all(costs, split)
    without = found if plain is costs else _all(plain, split)
    return dataclasses.replace(found, sync_s=found.lower_s - without.lower_s)


def _all(costs: PipelineCosts, split: bool) -> Bounds:
    stages, m = costs.num_stages, costs.num_microbatches
    fwd, link = costs.forward_s, _link_s(costs)
    bwd = costs.input_s if split else costs.backward_s
    weight = costs.weight_s if split else (0.0,) * stages
    head, tail = [0.0] * stages, [0.0] * stages
    for s in range(stages):
        # After its last backward a stage owes the weight gradient of that microbatch, sync and update.
        own = weight[s] + costs.sync_s[s] + costs.update_s[s]
        if s:
            head[s] = head[s - 1] + fwd[s - 1] + link[s - 1]
            own = max(own, link[s - 1] + bwd[s - 1] + tail[s - 1])
        tail[s] = own
    chain = head[-1] + fwd[-1] + bwd[-1] + tail[-1]
    devices = []
    for d in range(costs.num_devices):
        here = costs.stages_of(d)
        work = sum(m * (fwd[s] + bwd[s]) for s in here)
        whole = work + sum(m * weight[s] + costs.update_s[s] for s in here)
        devices.append(head[here[0]] + max(work + min(tail[s] for s in here), whole))
    window = _recursion(costs, fwd, bwd, weight, None, head, tail)
    memory = window
    if costs.max_in_flight is not None:
        memory = _recursion(costs, fwd, bwd, weight, costs.max_in_flight, head, tail)
    lines = _lines(costs, fwd, bwd, head, tail)
    stage, link = max(devices), max((t for _, t in lines), default=0.0)
    lower = max(chain, stage, link, window, memory)
    return Bounds(chain, stage, link, window, memory, 0.0, lower, tuple(devices), lines)


def _link_s(costs: PipelineCosts) -> tuple[float, ...]:
    return tuple(c if costs.crosses(b) else 0.0 for b, c in enumerate(costs.link_s))


def _lines(costs: PipelineCosts, fwd, bwd, head, tail) -> tuple[tuple[str, float], ...]:
    """Returns each line's bound: what comes before, all it carries, what must follow."""
    m, stages = costs.num_microbatches, costs.num_stages
    link = _link_s(costs)
    # There and back from the arrival at stage s, for one microbatch.
    inner = [0.0] * (stages + 1)
    for s in reversed(range(stages)):
        inner[s] = fwd[s] + bwd[s] + (2 * link[s] + inner[s + 1] if s < stages - 1 else 0.0)
    users: dict[str, list[tuple[float, float, float]]] = {}
    for b in filter(costs.crosses, range(stages - 1)):
        ser, lat = costs.serialisation_s[b], costs.latency_s[b]
        start = head[b] + fwd[b]
        end = bwd[b] + tail[b]
        for name in costs.route(b, 0):
            users.setdefault(name, []).append((start, m * ser, lat + inner[b + 1] + ser + lat + end))
        for name in costs.route(b, 1):
            users.setdefault(name, []).append((start + ser + lat + inner[b + 1], m * ser, lat + end))
    found = {
        name: min(u[0] for u in uses) + sum(u[1] for u in uses) + min(u[2] for u in uses)
        for name, uses in users.items()}
    return tuple(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _recursion(costs: PipelineCosts, fwd, bwd, weight, limits, head, tail) -> float:
    """Returns max_s head_s + f_s(M) + tail_s of the module's recursion."""
    m, stages = costs.num_microbatches, costs.num_stages
    best, f = 0.0, [0.0] * (m + 1)
    for s in reversed(range(stages)):
        if s == stages - 1:
            f = [n * (fwd[s] + bwd[s]) for n in range(m + 1)]
        else:
            crossing = 0.0
            if costs.crosses(s):
                f = _with_ends(costs.serialisation_s[s], f, costs.serialisation_s[s])
                crossing = 2 * costs.link_s[s]
            inner = [0.0] + [f[n] + (crossing + fwd[s] + bwd[s]) for n in range(1, m + 1)]
            through = _with_ends(fwd[s], inner, bwd[s])
            f = [max(n * (fwd[s] + bwd[s]), through[n]) for n in range(m + 1)]
        k = m if limits is None else limits[costs.device_of[s]]
        if k < m:
            f = _within_memory(np.array(f), fwd[s], bwd[s], weight[s], k)
        best = max(best, head[s] + f[m] + tail[s])
    return best


def _with_ends(before: float, inner: list[float], after: float) -> list[float]:
    """Returns, for n from 0 on, the largest j before + inner[x] + r after with j + x + r = n, x >= 1."""
    first, out = [0.0, *inner[1:2]], [0.0, *inner[1:2]]
    for n in range(2, len(inner)):
        first.append(max(inner[n], first[-1] + before))
        out.append(max(first[n], out[-1] + after))
    return out


def _within_memory(f: np.ndarray, fwd: float, bwd: float, weight: float, k: int) -> list[float]:
    """Returns the window f of a stage that may hold k activations."""
    size = len(f)
    starts, ends = np.zeros(size), np.zeros(size)  # P and Q
    gone = f + weight
    for j in range(1, size):
        back = max(0, j - k + 1)
        p = j * fwd + back * (bwd + weight)
        q = j * bwd + back * (fwd + weight)
        if back:
            through = gone[back:0:-1]  # f(j-k-a+1) + W for a from 0 on
            p = max(p, (starts[:back] + through).max())
            q = max(q, (ends[:back] + through).max())
        half = j // 2
        if half:
            p = max(p, (starts[1:half + 1] + starts[j - 1:j - half - 1:-1]).max())
            q = max(q, (ends[1:half + 1] + ends[j - 1:j - half - 1:-1]).max())
        starts[j], ends[j] = p, q
    first, out = np.zeros(size), [0.0] * size
    for n in range(1, size):
        first[n] = (starts[:n] + f[n:0:-1]).max()
    for n in range(1, size):
        out[n] = float((first[n:0:-1] + ends[:n]).max())
    return out
