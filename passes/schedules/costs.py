"""What a schedule is made from: plain numbers, no model and no devices.

    device 0        boundary 0        device 1        boundary 1        device 2
    stage 0   --- latency, serialisation --->   stage 1   --- ... --->   stage 2

A microbatch goes forward through stages 0, 1, ..., S-1 and its gradient comes back through S-1, ..., 0.
A boundary carries the activation one way and its gradient the other way. Serialisation is the time the
link is busy with one transfer (bytes over bandwidth); latency is the time a transfer is under way on
top of that, during which the link may carry the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from hetjax.ir.errors import PlanError

Route = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineCosts:
    """The numbers of one pipeline step.

    Attributes:
      forward_s: seconds of one microbatch's forward, per stage.
      backward_s: seconds of one microbatch's whole backward (input and weight gradient), per stage.
      num_microbatches: M.
      latency_s: seconds of latency one way, per boundary (stages - 1 of them); () means none.
      serialisation_s: seconds the link is occupied by one transfer, per boundary; () means none.
      max_in_flight: the most microbatches whose activations a device may hold at once, per device,
        counted over all of its stages; None means no limit.
      weight_share: the share of the backward that is weight gradient (W); the rest is input
        gradient (I). Only schedules that split the backward use it.
      device_of: the device that runs each stage; () means stage i on device i.
      lines: per boundary, what its activations and what its gradients travel on: the name of a line,
        or of several that one transfer occupies at once (the sender's port, the receiver's). A line
        carries one transfer at a time, first come first served: two boundaries with one name share
        an uplink, one name for both directions makes a half-duplex link. () means full duplex and a
        line of its own per direction and pair of devices, named "0>1".
      sync_s: seconds of gradient synchronisation across replicas, per stage; () means none. It uses
        the device's network, not its compute units.
      update_s: seconds of the optimizer, per stage; () means none.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    num_microbatches: int
    latency_s: tuple[float, ...] = ()
    serialisation_s: tuple[float, ...] = ()
    max_in_flight: tuple[int, ...] | None = None
    weight_share: float = 0.5
    device_of: tuple[int, ...] = ()
    lines: tuple[tuple[Route, Route], ...] = ()
    sync_s: tuple[float, ...] = ()
    update_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        boundaries = max(num_stages - 1, 0)
        defaults = {
            "latency_s": (0.0,) * boundaries, "serialisation_s": (0.0,) * boundaries,
            "device_of": tuple(range(num_stages)),
            "sync_s": (0.0,) * num_stages, "update_s": (0.0,) * num_stages,
        }
        for name, default in defaults.items():
            object.__setattr__(self, name, tuple(getattr(self, name)) or default)
        for name in ("forward_s", "backward_s"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.lines:
            pairs = itertools.pairwise(self.device_of)
            object.__setattr__(self, "lines", tuple((f"{a}>{b}", f"{b}>{a}") for a, b in pairs))
        if self.max_in_flight is not None:
            object.__setattr__(self, "max_in_flight", tuple(self.max_in_flight))
        problems = _problems(self)
        if problems:
            raise PlanError("these pipeline costs cannot be scheduled:\n" + "\n".join(
                f"  {p}" for p in problems))

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def num_devices(self) -> int:
        return max(self.device_of) + 1

    @property
    def link_s(self) -> tuple[float, ...]:
        """Returns the seconds one transfer takes on an idle line, per boundary."""
        return tuple(x + y for x, y in zip(self.serialisation_s, self.latency_s))

    def crosses(self, boundary: int) -> bool:
        """Returns whether stage `boundary` and the next are on different devices."""
        return self.device_of[boundary] != self.device_of[boundary + 1]

    def route(self, boundary: int, way: int) -> tuple[str, ...]:
        """Returns the lines a transfer over a boundary occupies; way 0 is forward, 1 is back."""
        names = self.lines[boundary][way]
        return (names,) if isinstance(names, str) else names

    @property
    def input_s(self) -> tuple[float, ...]:
        """Returns the seconds of the input-gradient half (I) per stage."""
        return tuple(b * (1 - self.weight_share) for b in self.backward_s)

    @property
    def weight_s(self) -> tuple[float, ...]:
        """Returns the seconds of the weight-gradient half (W) per stage."""
        return tuple(b * self.weight_share for b in self.backward_s)

    @property
    def placement(self) -> str:
        """Returns "line", "loop", "vee" or "other": how the stages lie on the devices."""
        devices = self.num_devices
        there = tuple(range(devices))
        if self.device_of == there:
            return "line"
        if self.device_of == there * (self.num_stages // devices):
            return "loop"
        return "vee" if self.device_of == there + there[::-1] else "other"

    def stages_of(self, device: int) -> tuple[int, ...]:
        return tuple(s for s, d in enumerate(self.device_of) if d == device)

    def limit(self, device: int) -> int | None:
        """Returns the most activations the device may hold, or None where nothing limits it."""
        return None if self.max_in_flight is None else self.max_in_flight[device]

    def replace(self, **changes) -> PipelineCosts:
        return dataclasses.replace(self, **changes)


def split_stages(costs: PipelineCosts, chunks: int, layout: str = "loop") -> PipelineCosts:
    """Returns the costs of the same devices with `chunks` equal stages on each.

        loop, 2 chunks, 3 devices:   0 1 2 | 3 4 5      stage 3 is back on device 0
        vee, 2 chunks, 3 devices:    0 1 2 | 5 4 3      stage 3 follows stage 2 on device 2

    A boundary between neighbours costs what it cost before (the activation is as large). In a loop,
    the way from the last device back to the first is priced as one line of its own, with the sum of
    all latencies and the slowest serialisation, since it passes all links. In a vee that way does
    not exist. `max_in_flight` counts activations of a chunk from here on, `chunks` times as many.

    Args:
      costs: one stage per device.
      chunks: stages per device.
      layout: "loop" or "vee" (2 chunks).

    Raises:
      PlanError: there is more than one stage on a device already, or the layout does not fit.
    """
    devices = costs.num_stages
    if costs.device_of != tuple(range(devices)):
        raise PlanError("only a pipeline with one stage per device, in order, can be split in chunks")
    if chunks < 1 or layout not in ("loop", "vee") or (layout == "vee" and chunks != 2):
        raise PlanError(f"{chunks} chunks in a {layout}: give at least 1 in a loop, exactly 2 in a vee")
    if chunks == 1:
        return costs
    there = list(range(devices))
    device_of = there * chunks if layout == "loop" else there + there[::-1]
    latency, serialisation = [], []
    for a, b in itertools.pairwise(device_of):
        if abs(a - b) == 1:
            latency.append(costs.latency_s[min(a, b)])
            serialisation.append(costs.serialisation_s[min(a, b)])
        else:
            latency.append(0.0 if a == b else sum(costs.latency_s))
            serialisation.append(0.0 if a == b else max(costs.serialisation_s))

    def share(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[d] / chunks for d in device_of)

    caps = costs.max_in_flight
    return PipelineCosts(
        share(costs.forward_s), share(costs.backward_s), costs.num_microbatches, tuple(latency),
        tuple(serialisation), None if caps is None else tuple(k * chunks for k in caps),
        costs.weight_share, tuple(device_of), sync_s=share(costs.sync_s), update_s=share(costs.update_s))


def _problems(costs: PipelineCosts) -> list[str]:
    """Returns every reason why these numbers make no pipeline."""
    out = []
    stages = costs.num_stages
    if stages == 0:
        return ["forward_s is empty; give one number per stage"]
    for name, expected in (
        ("backward_s", stages), ("sync_s", stages), ("update_s", stages), ("device_of", stages),
        ("latency_s", stages - 1), ("serialisation_s", stages - 1), ("lines", stages - 1),
    ):
        if len(getattr(costs, name)) != expected:
            what = "stage" if expected == stages else "boundary between stages"
            out.append(
                f"{name} has {len(getattr(costs, name))} entries, expected {expected}: one per {what}"
                f" of the {stages} in forward_s")
    for name in ("forward_s", "backward_s", "latency_s", "serialisation_s", "sync_s", "update_s"):
        out += _negative(name, getattr(costs, name))
    if not isinstance(costs.num_microbatches, int) or costs.num_microbatches < 1:
        out.append(f"num_microbatches is {costs.num_microbatches!r}; it must be an integer of at least 1")
    if not 0 <= costs.weight_share <= 1:
        out.append(f"weight_share is {costs.weight_share}; it is a share, from 0 to 1")
    out += [
        f"lines[{i}] is {pair!r}; it must be a pair: what activations travel on, what gradients travel on"
        for i, pair in enumerate(costs.lines) if not isinstance(pair, (tuple, list)) or len(pair) != 2
    ]
    devices = set(costs.device_of)
    if devices != set(range(len(devices))):
        out.append(f"device_of names devices {sorted(devices)}; number them 0, 1, ... without gaps")
    elif costs.max_in_flight is not None:
        if len(costs.max_in_flight) != len(devices):
            out.append(
                f"max_in_flight has {len(costs.max_in_flight)} entries, expected {len(devices)}: one"
                " per device")
        for d, k in enumerate(costs.max_in_flight):
            if not isinstance(k, int) or k < 1:
                out.append(f"max_in_flight[{d}] is {k!r}; a device must hold at least one microbatch")
    if not out:
        # Twice a step without any overlap: what bounds, schedules and simulator add up stays below it.
        every = (costs.forward_s, costs.backward_s, costs.latency_s, costs.latency_s, costs.serialisation_s,
                 costs.serialisation_s, costs.sync_s, costs.update_s)
        if not math.isfinite(2.0 * costs.num_microbatches * sum(map(sum, every))):
            out.append("the seconds of a step add up to more than a float can hold")
    return out


def _negative(name: str, values: Sequence[float]) -> list[str]:
    return [
        f"{name}[{i}] is {v!r}; it must be a finite number of seconds, zero or more"
        for i, v in enumerate(values) if not (isinstance(v, (int, float)) and math.isfinite(v) and v >= 0)
    ]
