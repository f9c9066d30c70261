"""The event simulator: what a set of task lists takes, task by task, before it runs.

What is assumed, and nothing else:

- A device runs the F, B, I, W, prologue and update tasks of its list in the list's order, one at a
  time, each as soon as the device is free and what it reads has arrived.
- A transfer never occupies a device. It is posted the moment its value exists, waits for its line,
  holds the line for its serialisation, and arrives a latency later; the line is free for the next one
  meanwhile (latency is pipelined). Lines serve in order of posting; ties go to the lower device.
- A line is one direction of a link (full duplex), or both directions, or an uplink that several
  boundaries share: whatever bears the same name in `PipelineCosts.lines`. A transfer may need several
  lines; it then waits until all are free. A reshard may hold some of them for less long than others.
- Between stages on one device nothing travels.
- A gradient synchronisation (`sync`) is posted when the task before it in the list ends, uses the
  device's own network and no compute, and the `update` tasks of its stage wait for it.
- An activation is held from the start of its forward to the end of its backward (of W if split).

Lists may hold explicit `send` and `recv` tasks, as a `Program` does; then only those move values: a
send is posted when the list reaches it, and the tasks of the same stage and microbatch after the recv
wait for what it receives. Lists without them are taken to send every activation and gradient across
each boundary at once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from hetjax.ir.display import Shown
from hetjax.ir.errors import VerifyError
from hetjax.ir.program import Task
from hetjax.passes.schedules.check import find_deadlock
from hetjax.passes.schedules.costs import PipelineCosts

_ON_DEVICE = ("F", "B", "I", "W", "prologue", "update")


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """What one explicit send of a reshard costs.

    Attributes:
      lines: the lines it occupies, from one moment on.
      serialisation_s: seconds until the last of them is free.
      latency_s: seconds until it arrives after that.
      line_s: seconds it occupies each line; () where all are occupied to the end.
    """

    lines: tuple[str, ...]
    serialisation_s: float
    latency_s: float
    line_s: tuple[float, ...] = ()

    @property
    def slowest(self) -> tuple[str, ...]:
        """Returns the lines that are occupied to the end."""
        if not self.line_s:
            return self.lines
        return tuple(n for n, s in zip(self.lines, self.line_s) if s >= self.serialisation_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One task, transfer or synchronisation on the clock.

    Attributes:
      task: the task; a transfer without a task of its own bears the task that made its value.
      place: "device 0", "line 0>1" ("line a + b" where a transfer holds several to the end) or "network 0".
      device: whose list it comes from.
      start_s, end_s: when. A transfer starts when it gets the line and ends when it arrives.
      posted_s: when a transfer or synchronisation could first have started; start_s for tasks.
    """

    task: Task
    place: str
    device: int
    start_s: float
    end_s: float
    posted_s: float


@dataclasses.dataclass(frozen=True)
class Timeline(Shown):
    """What the simulator returns.

    Attributes:
      makespan_s: when the last task ends.
      spans: per device, its compute tasks in order.
      transfers: transfers and synchronisations, in order of posting.
      busy_s: per device, seconds of compute.
      exposed_comm_s: per device, seconds it stood still while something it waited for travelled.
      held: per device, (time, activations held from then on).
      held_bytes: per device, the same in bytes, where `activation_bytes` was given.
    """

    makespan_s: float
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Span, ...]
    busy_s: tuple[float, ...]
    exposed_comm_s: tuple[float, ...]
    held: tuple[tuple[tuple[float, int], ...], ...]
    held_bytes: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def bubble(self) -> float:
        """Returns the share of all device time that no task uses, from 0 to 1."""
        whole = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    @property
    def bubble_within(self) -> float:
        """Returns the same share between each device's own first and last task.

        This is what is left of the bubble when a device may start the next step once it has updated.
        """
        whole = sum(items[-1].end_s - items[0].start_s for items in self.spans if items)
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Returns the most activations each device holds at once."""
        return tuple(max((n for _, n in steps), default=0) for steps in self.held)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Returns the most bytes each device holds at once."""
        return tuple(max((n for _, n in steps), default=0.0) for steps in self.held_bytes)


@dataclasses.dataclass(slots=True)
class _Node:
    """A task or a transfer with what it waits for; filled in while the clock runs."""

    task: Task
    device: int
    seconds: float
    lines: tuple[str, ...] = ()  # () for a task on its device
    latency_s: float = 0.0
    line_s: tuple[float, ...] = ()  # () for lines held to the end
    missing: int = 0
    ready_s: float = 0.0
    readers: list[int] = dataclasses.field(default_factory=list)
    start_s: float = -1.0
    end_s: float = -1.0
    last_need: int = -1


def simulate(
    tasks: Sequence[Sequence[Task]],
    costs: PipelineCosts,
    *,
    transfers: Mapping[str, Transfer] | None = None,
    work_s: Mapping[str, float] | None = None,
    activation_bytes: Sequence[float] = (),
    static_bytes: Sequence[float] = (),
) -> Timeline:
    """Returns when each task of the lists runs.

    Args:
      tasks: one list per device, as `hetjax.passes.schedules.schedule` makes them or as a `Program`
        holds them.
      costs: seconds per stage and boundary.
      transfers: what a send costs, by the task's `work`; needed where the lists hold sends.
      work_s: seconds of tasks by their `work`; tasks it does not name take what `costs` says for
        their kind and stage (a prologue takes nothing).
      activation_bytes: bytes of one microbatch's activations, per stage.
      static_bytes: bytes that are always there (parameters, optimizer), per device.

    Raises:
      VerifyError: the tasks wait for each other; the message names the circle. Or a send or recv has
        no partner or no cost.
    """
    circle = find_deadlock(tasks)
    if circle:
        raise VerifyError(circle)
    nodes, queues = _build(tasks, costs, transfers or {}, work_s or {})
    posted = _run(nodes, queues)
    return _report(nodes, queues, posted, costs, activation_bytes, static_bytes)


def _build(
    tasks: Sequence[Sequence[Task]], costs: PipelineCosts, prices: Mapping[str, Transfer],
    work_s: Mapping[str, float],
) -> tuple[list[_Node], list[list[int]]]:
    """Returns all nodes and, per device, the compute nodes in order."""
    seconds = {
        "F": costs.forward_s, "B": costs.backward_s, "I": costs.input_s, "W": costs.weight_s,
        "update": costs.update_s, "prologue": (0.0,) * costs.num_stages,
    }
    nodes: list[_Node] = []
    queues: list[list[int]] = []
    at: dict[tuple[str, int, int | None], int] = {}
    sends: dict[tuple[str, int | None], int] = {}
    receives: list[tuple[str, int | None, int]] = []
    explicit = any(task.kind in ("send", "recv") for items in tasks for task in items)
    problems: list[str] = []

    def add(node: _Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def link(before: int, after: int) -> None:
        nodes[before].readers.append(after)
        nodes[after].missing += 1

    for device, items in enumerate(tasks):
        queue: list[int] = []
        # What later tasks of a (stage, microbatch) still have to wait for.
        arrivals: dict[tuple[int, int | None], list[tuple[str, int | None]]] = {}
        syncs: dict[int, list[int]] = {}
        for task in items:
            key = (task.stage, task.microbatch)
            if task.kind in _ON_DEVICE:
                n = add(_Node(task, device, work_s.get(task.work, seconds[task.kind][task.stage])))
                at[task.kind, task.stage, task.microbatch] = n
                queue.append(n)
                wanted = arrivals.get(key, []) + (arrivals.get((task.stage, None), []) if key[1] is not None else [])
                receives += [(work, mb, n) for work, mb in wanted]
                if task.kind == "update":
                    for s in syncs.get(task.stage, ()):
                        link(s, n)
            elif task.kind == "recv":
                arrivals.setdefault(key, []).append((task.work, task.microbatch))
            elif task.kind in ("send", "sync"):
                if task.kind == "sync":
                    n = add(_Node(task, device, costs.sync_s[task.stage], (f"network {device}",)))
                    syncs.setdefault(task.stage, []).append(n)
                else:
                    price = prices.get(task.work)
                    if price is None:
                        problems.append(f"s{task.stage}/{task}: no cost is given for {task.work!r}")
                        continue
                    n = add(_Node(
                        task, device, price.serialisation_s, price.lines, price.latency_s, price.line_s))
                    sends[task.work, task.microbatch] = n
                if queue:
                    link(queue[-1], n)
            else:
                problems.append(f"s{task.stage}/{task}: unknown task kind {task.kind!r}")
        queues.append(queue)
    for work, mb, reader in receives:
        if (work, mb) not in sends:
            problems.append(f"recv of {work!r}, microbatch {mb}: nobody sends it")
        else:
            link(sends[work, mb], reader)
    if problems:
        raise VerifyError(problems)
    if not explicit:
        _cross_boundaries(nodes, at, costs, add, link)
    return nodes, queues


def _cross_boundaries(nodes, at, costs: PipelineCosts, add, link) -> None:
    """Adds the transfer of every activation and gradient from stage to stage."""
    last = costs.num_stages - 1
    for (kind, stage, mb), n in list(at.items()):
        if kind not in ("F", "B", "I"):
            continue
        boundary, target, way = (stage, stage + 1, 0) if kind == "F" else (stage - 1, stage - 1, 1)
        if not 0 <= target <= last:
            continue
        kinds = ("F",) if kind == "F" else ("B", "I")
        reader = next((at[k, target, mb] for k in kinds if (k, target, mb) in at), None)
        if reader is None:
            continue
        if costs.crosses(boundary):
            t = add(_Node(
                nodes[n].task, nodes[n].device, costs.serialisation_s[boundary],
                costs.route(boundary, way), costs.latency_s[boundary]))
            link(n, t)
            link(t, reader)
        else:
            link(n, reader)


def _run(nodes: list[_Node], queues: list[list[int]]) -> list[int]:
    """Runs the clock; returns the transfers in order of posting."""
    head = [0] * len(queues)
    free = [0.0] * len(queues)
    line_free: dict[str, float] = {}
    posted: list[int] = []
    # (time, 0: something ended or arrived / 1: a line is asked for, device, node)
    events: list[tuple[float, int, int, int]] = []

    def ask(n: int) -> None:
        heapq.heappush(events, (nodes[n].ready_s, 1, nodes[n].device, n))

    def start_next(device: int) -> None:
        queue = queues[device]
        if head[device] == len(queue):
            return
        n = queue[head[device]]
        node = nodes[n]
        if node.missing or node.start_s >= 0:
            return
        node.start_s = max(node.ready_s, free[device])
        node.end_s = free[device] = node.start_s + node.seconds
        heapq.heappush(events, (node.end_s, 0, device, n))

    for n, node in enumerate(nodes):
        if node.lines and not node.missing:
            ask(n)
    for device in range(len(queues)):
        start_next(device)
    while events:
        now, kind, device, n = heapq.heappop(events)
        node = nodes[n]
        if kind == 1:
            posted.append(n)
            node.start_s = max(now, *(line_free.get(name, 0.0) for name in node.lines))
            done = node.start_s + node.seconds
            if node.line_s:
                line_free.update((name, node.start_s + s) for name, s in zip(node.lines, node.line_s))
            else:
                line_free.update((name, done) for name in node.lines)
            node.end_s = done + node.latency_s
            heapq.heappush(events, (node.end_s, 0, device, n))
            continue
        for r in node.readers:
            reader = nodes[r]
            reader.missing -= 1
            if now >= reader.ready_s:
                reader.ready_s, reader.last_need = now, n
            if not reader.missing:
                if reader.lines:
                    ask(r)
                else:
                    start_next(reader.device)
        if not node.lines:
            head[device] += 1
            start_next(device)
    return posted


def _report(
    nodes: list[_Node], queues: list[list[int]], posted: list[int], costs: PipelineCosts,
    activation_bytes: Sequence[float], static_bytes: Sequence[float],
) -> Timeline:
    spans, busy, exposed, held, held_bytes = [], [], [], [], []
    for device, queue in enumerate(queues):
        items, idle, before = [], 0.0, 0.0
        split = {nodes[n].task.stage for n in queue if nodes[n].task.kind == "W"}
        steps: list[tuple[float, int, float]] = []
        for n in queue:
            node = nodes[n]
            task = node.task
            items.append(Span(task, f"device {device}", device, node.start_s, node.end_s, node.start_s))
            if node.last_need >= 0 and nodes[node.last_need].lines and node.start_s > before:
                idle += node.start_s - max(before, nodes[node.last_need].ready_s)
            before = node.end_s
            size = activation_bytes[task.stage] if activation_bytes else 0.0
            if task.kind == "F":
                steps.append((node.start_s, 1, size))
            elif task.kind == "W" or (task.kind == "B" and task.stage not in split):
                steps.append((node.end_s, -1, -size))
        # Tasks do not overlap, so list order is time order; what ends at t frees before what starts at t.
        count, total = 0, static_bytes[device] if static_bytes else 0.0
        counts, sizes = [(0.0, 0)], [(0.0, total)]
        for t, change, size in steps:
            count, total = count + change, total + size
            counts.append((t, count))
            sizes.append((t, total))
        spans.append(tuple(items))
        busy.append(sum(s.end_s - s.start_s for s in items))
        exposed.append(idle)
        held.append(tuple(counts))
        held_bytes.append(tuple(sizes) if activation_bytes or static_bytes else ())
    travel = tuple(
        Span(nodes[n].task, _place(nodes[n]), nodes[n].device, nodes[n].start_s, nodes[n].end_s, nodes[n].ready_s)
        for n in posted)
    ends = [s.end_s for items in spans for s in items[-1:]] + [s.end_s for s in travel if s.task.kind == "sync"]
    return Timeline(
        max(ends, default=0.0), tuple(spans), travel, tuple(busy), tuple(exposed), tuple(held),
        tuple(held_bytes))


def _place(node: _Node) -> str:
    if node.task.kind == "sync":
        return node.lines[0]
    slowest = Transfer(node.lines, node.seconds, node.latency_s, node.line_s).slowest
    return f"line {' + '.join(slowest)}"


def prefetch_depths(timeline: Timeline) -> dict[tuple[int, str], int]:
    """Returns how many transfers ahead of need a stage must be ready to receive.

    That is the most transfers that have got their line while the tasks that read them have not
    started; fewer receive buffers would hold a transfer back that the schedule counts on.

    Args:
      timeline: of lists without explicit sends.

    Returns:
      by receiving stage and kind of value: "F" for activations, "B" for gradients.
    """
    moves: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for span in timeline.transfers:
        task = span.task
        if task.kind in ("F", "B", "I"):
            ahead = task.kind == "F"
            key = (task.stage + (1 if ahead else -1), "F" if ahead else "B")
            moves.setdefault(key, []).append((span.start_s, 1))
    for span in (span for spans in timeline.spans for span in spans):
        key = (span.task.stage, "B" if span.task.kind == "I" else span.task.kind)
        if key in moves:
            moves[key].append((span.start_s, -1))
    depths = {}
    for key, steps in moves.items():
        count, depths[key] = 0, 1
        for _, change in sorted(steps):  # what starts at t frees its buffer before what is sent at t
            count += change
            depths[key] = max(depths[key], count)
    return depths


def with_step_tasks(tasks: Sequence[Sequence[Task]], costs: PipelineCosts) -> tuple[tuple[Task, ...], ...]:
    """Returns the lists with each stage's `sync` and `update` where they first can go.

    A stage's sync follows its last backward, so that it overlaps what the other stages still run;
    updates come at the end of a device's list, in the order in which their syncs were posted. A stage
    whose sync and update take no time gets neither.
    """
    out = []
    for items in tasks:
        last = {t.stage: i for i, t in enumerate(items) if t.kind in ("B", "I", "W")}
        done = {i: stage for stage, i in last.items()}
        new: list[Task] = []
        for i, task in enumerate(items):
            new.append(task)
            if i in done and costs.sync_s[done[i]]:
                new.append(Task("sync", done[i]))
        new += [
            Task("update", stage) for stage in sorted(last, key=lambda s: last[s])
            if costs.sync_s[stage] or costs.update_s[stage]]
        out.append(tuple(new))
    return tuple(out)
