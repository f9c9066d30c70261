"""Running sums over layers of what stages take and hold, with what their options add.

  recompute            the forward once more; only the inputs of layers are kept
  sequence             one more all-gather in the backward; replicated activations are split
  optimizer sharded    the gradient reduce-scattered, parameters gathered: what an all-reduce moves
  all sharded          parameters gathered for each forward and backward, under the compute
  experts              all-to-all there and back, in forward and backward
"""

from __future__ import annotations

import dataclasses

from hetjax.passes.cost.collectives import Level, levels_price_s
from hetjax.passes.search.space import Group, Part
from hetjax.passes.search.table import prefix
from hetjax.passes.search.wires import Wires

# What the driver, collective libraries and fragmentation leave of a device's memory.
USABLE = 0.92


@dataclasses.dataclass(frozen=True, slots=True)
class PartTable:
    """Running sums over layers of one part of a group.

    Attributes:
      work, forward, update: seconds, of a microbatch's forward and backward, of the forward, of a step's
        optimizer.
      state: bytes that are always there.
      kept: bytes of one microbatch.
      passing: per layer, bytes that it needs while it runs (no running sums).
      usable: bytes there are.
      updating: bytes the update needs beside the state, when no microbatch is held any more.
    """

    work: list[float]
    forward: list[float]
    update: list[float]
    state: list[float]
    kept: list[float]
    passing: tuple[float, ...]
    usable: float
    updating: list[float] | None = None


class PartTables:
    """The running sums of one problem's groups; what was made once is kept.

    Args:
      wires: the problem's links.
      whole_sums: whether replicas that shard the optimizer have whole sums of gradients, and gather
        parameters after the update; else the exchange of gradients has that in it.
    """

    def __init__(self, wires: Wires, *, whole_sums: bool = False):
        self.problem = wires.problem
        self.whole_sums = whole_sums
        self.wires = wires
        self._tables: dict[Group, tuple[PartTable, ...] | None] = {}
        self._parts: dict[tuple, PartTable | None] = {}

    def of(self, group: Group) -> tuple[PartTable, ...] | None:
        """Returns the sums of a group's parts, or None where there are no numbers for one."""
        if group not in self._tables:
            found = [self._part_of(group, p) for p in group.parts]
            self._tables[group] = None if None in found else tuple(found)  # type: ignore[arg-type]
        return self._tables[group]

    def _part_of(self, group: Group, part: Part) -> PartTable | None:
        options = group.options
        # Without state or experts apart it is all the same how many fellows there are, and where.
        apart = options.sharding == "all" or (self.whole_sums and options.sharding == "optimizer")
        fellows = group.parts if apart or options.experts > 1 else ()
        among = group.replicas if options.sharding != "none" else 0
        key = (part.pool, part.tensor, part.share, options, among, fellows)
        if key not in self._parts:
            self._parts[key] = self._part(group, part)
        return self._parts[key]

    def _part(self, group: Group, part: Part) -> PartTable | None:
        table, pool = self.problem.table, self.problem.pools[part.pool]
        sequenced = table.sequenced if group.options.sequence else None
        if sequenced is not None and part.tensor in sequenced.tensors(pool.kind):
            table = sequenced  # else there is nothing that could be split
        if part.tensor not in table.tensors(pool.kind):
            return None  # the model cannot be split so far
        times, sizes = table.times(pool.kind, part.tensor, part.share), table.sizes(part.tensor)
        if times is None or sizes is None:
            return None
        options, replicas, share = group.options, group.replicas, part.share
        forward, backward = list(times.forward_s), list(times.backward_s)
        layers = range(len(forward))
        parameter, gradient, optimizer = table.state_bytes
        dense = [p - e for p, e in zip(sizes.parameters, sizes.expert_parameters)]
        mine = [d + e / options.experts for d, e in zip(dense, sizes.expert_parameters)]
        update = list(times.update_s)
        state = [(parameter + gradient + optimizer) * n for n in mine]
        if options.sharding == "optimizer":
            state = [(parameter + gradient + optimizer / replicas) * n for n in mine]
        if options.sharding == "all":
            state = [(parameter + gradient + optimizer) * n / replicas for n in mine]
        if options.sharding != "none":
            update = [u / replicas for u in update]
        if options.sharding == "optimizer" and self.whole_sums:
            steps = self.wires.levels(group.parts)
            update = [
                u + levels_price_s("all-gather", steps, replicas, parameter * n) for u, n in zip(update, mine)
            ]
        if options.sequence and sequenced is None:
            # Sums over tensor-parallel devices become a scatter and a gather; the backward gathers again.
            inner = (Level(part.tensor, self.wires.inner(part.pool), 1),)
            for nbytes in dict.fromkeys(table.gathered_bytes):
                gather_s = levels_price_s("all-gather", inner, part.tensor, share * nbytes / 2)
                backward = [b + gather_s * (g == nbytes) for b, g in zip(backward, table.gathered_bytes)]
        if options.experts > 1:
            steps = self.wires.levels(group.parts)
            for i in layers:
                nbytes = share * table.routed_bytes[i] / part.tensor
                seconds = levels_price_s("all-to-all", steps, options.experts, nbytes)
                forward[i] += seconds
                backward[i] += seconds
        passing = [0.0] * len(forward)
        if sizes.passing_bytes:
            passing = [share * e + o for e, o in zip(sizes.passing_bytes, sizes.passing_once_bytes)]
        kept = [
            share * (s - (r * (1 - 1 / part.tensor) if options.sequence else 0.0))
            for s, r in zip(sizes.stored_bytes, sizes.replicated_bytes)
        ]
        if options.recompute:
            backward = [b + f for b, f in zip(backward, forward)]
            passing = [p + k for p, k in zip(passing, kept)]
            split = part.tensor if options.sequence else 1
            kept = [share * table.output_bytes[max(0, i - 1)] / split for i in layers]
        if options.sharding == "all":
            steps = self.wires.levels(group.parts)
            for i in layers:
                gather_s = levels_price_s("all-gather", steps, replicas, parameter * mine[i])
                scatter_s = levels_price_s("reduce-scatter", steps, replicas, gradient * mine[i])
                forward[i] = max(forward[i], gather_s)
                backward[i] = max(backward[i], gather_s + scatter_s)
            # Two layers' parameters are whole at a time: the one in use and the next.
            passing = [p + 2 * parameter * n for p, n in zip(passing, mine)]
        return PartTable(
            prefix([f + b for f, b in zip(forward, backward)]), prefix(forward), prefix(update),
            prefix(state), prefix(kept), tuple(passing),
            USABLE * self.problem.cluster.kind(pool.kind).memory_bytes,
            prefix(sizes.updating_bytes) if sizes.updating_bytes else None,
        )  # fmt: skip
