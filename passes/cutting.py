"""Where a forward may be cut, what each stretch costs, and the best cuts by dynamic programming."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Graph, Ref, users
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.plan import Cut
from hetjax.ir.suggest import nearest
from hetjax.passes.op_kinds import FORWARD, classify, rounds_of

# More candidates than this cost time and decide nothing; the ones with the fewest bytes are kept.
MAX_CANDIDATES = 400

# The least share of an even stage's time that a stage should have.
LEAST_SHARE = 0.1

# How much slower the slowest stage may be for cuts that send fewer bytes than any place nearby.
BALANCE_FOR_BYTES = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A place to cut: before the forward op at `op`.

    Attributes:
      op: position in `Graph.ops` of the first op of the later stage.
      flops_before: forward FLOPs of everything before it, at one microbatch.
      nbytes: bytes of the values that would cross, at one microbatch.
      num_values: how many values those are.
      cut: the same place by module path.
    """

    op: int
    flops_before: int
    nbytes: int
    num_values: int
    cut: Cut


@dataclasses.dataclass(frozen=True)
class Candidates:
    """All places to cut, and the whole.

    Attributes:
      places: in program order.
      total_flops: forward FLOPs at one microbatch.
    """

    places: tuple[Candidate, ...]
    total_flops: int


def _cut_ops(graph: Graph, micro: Microbatching) -> list[int]:
    """Returns the forward ops that cuts fall between: those of the first update where there are several."""
    kinds = classify(graph, micro)
    rounds = rounds_of(graph, kinds)
    forward = [i for i, k in enumerate(kinds) if k == FORWARD and rounds[i] == 0]
    return [i for i in forward if graph.ops[i].region != "update"] or forward


def cut_candidates(graph: Graph, micro: Microbatching) -> Candidates:
    """Returns every place where the forward may be cut.

    A value crosses a cut when a forward op before it makes it from parameters and the batch, and a
    forward op after it reads it. Values free of parameters are computed again on the other side and
    do not cross.
    """
    flops, places, seen = 0, [], {}
    for i, live in live_values(graph, micro):
        op = graph.ops[i]
        offset = seen.setdefault(op.block, 0)
        seen[op.block] += 1
        if live:
            avals = [micro.graph.avals[r] for r in live]
            places.append(
                Candidate(i, flops, sum(a.nbytes for a in avals), len(avals), Cut(op.block, offset))
            )
        if op.cost is not None:
            flops += op.cost.flops // micro.num_microbatches
    if len(places) > MAX_CANDIDATES:
        limit = sorted(c.nbytes for c in places)[MAX_CANDIDATES - 1]
        places = [c for c in places if c.nbytes <= limit]
    return Candidates(tuple(places), flops)


def live_values(graph: Graph, micro: Microbatching) -> Iterator[tuple[int, frozenset[Ref]]]:
    """Yields, for every forward op by its position in `Graph.ops`, the values that would cross a cut before it."""
    forward = _cut_ops(graph, micro)
    position = {i: p for p, i in enumerate(forward)}
    readers = users(graph)
    last = {
        r: max((position[u] for u in readers.get(r, ()) if u in position), default=-1)
        for i in forward
        for r in graph.ops[i].outputs
    }
    live: frozenset[Ref] = frozenset()
    for p, i in enumerate(forward):
        yield i, live
        live = frozenset(r for r in (*live, *graph.ops[i].outputs) if last[r] > p)


def cheap_places(candidates: Candidates, num_stages: int) -> tuple[Candidate, ...]:
    """Returns the places that no place nearby beats in bytes.

    Nearby is half of an even stage's work to either side, so that a model of at least as many blocks
    as stages is cut between blocks: a cut inside one sends a second activation beside the residual.
    """
    reach = candidates.total_flops / num_stages / 2
    return tuple(
        c for c in candidates.places
        if not any(
            abs(o.flops_before - c.flops_before) <= reach and o.nbytes < c.nbytes
            for o in candidates.places
        )
    )


def find_cuts(graph: Graph, micro: Microbatching, cuts: Sequence[Cut]) -> list[int]:
    """Returns the positions in `Graph.ops` that cuts by module path stand for.

    Raises:
      PlanError: a cut names a module or an offset that the forward does not have; all of them, each
        by its key in the plan, with the nearest module.
    """
    where: dict[tuple[str, int], int] = {}
    counts: dict[str, int] = {}
    for i in _cut_ops(graph, micro):
        op = graph.ops[i]
        where[op.block, counts.setdefault(op.block, 0)] = i
        counts[op.block] += 1
    lost = []
    for s, c in enumerate(cuts, 1):
        if c.block not in counts:
            lost.append(
                f"stages[{s}].first.block: this step has no module {c.block!r}"
                f"{nearest(c.block, counts)}"
            )
        elif (c.block, c.offset) not in where:
            lost.append(
                f"stages[{s}].first.offset: module {c.block!r} has forward ops 0 … "
                f"{counts[c.block] - 1}, and the plan cuts before op {c.offset}"
            )
    if lost:
        names = ", ".join(sorted(b for b in counts if b)[:12])
        raise PlanError("\n".join(lost) + f"\nthe step's modules are: {names}; plan again for it")
    return [where[c.block, c.offset] for c in cuts]


def best_cuts(
    candidates: Candidates, speeds: Sequence[float], bytes_s: Sequence[float] = (),
    latencies_s: Sequence[float] = (),
) -> list[Candidate]:
    """Returns the cuts that minimise the slowest stage plus the time of the crossings.

    The objective, per microbatch, is max over stages of 3 * FLOPs / speed (a backward costs two
    forwards) + sum over cuts of 2 * (latency + bytes / bandwidth): what a 1F1B pipeline pays for each
    microbatch when nothing hides its links. Solved exactly over the candidates: for each bound on
    the slowest stage, the cheapest crossings by dynamic programming.

    Args:
      candidates: the places.
      speeds: FLOP/s of each stage.
      bytes_s: bandwidth of the link after each stage but the last, bytes per second.
      latencies_s: its latency, seconds.

    Raises:
      PlanError: there are fewer places than cuts.
    """
    num_stages = len(speeds)
    if num_stages == 1:
        return []
    if len(candidates.places) < num_stages - 1:
        raise PlanError(
            f"{num_stages} stages need {num_stages - 1} cuts, but the forward has "
            f"{len(candidates.places)} places to cut; ask for at most {len(candidates.places) + 1} stages"
        )
    anywhere = _cut_at(candidates.places, candidates.total_flops, speeds, bytes_s, latencies_s)
    cheap = _cut_at(
        cheap_places(candidates, num_stages), candidates.total_flops, speeds, bytes_s, latencies_s
    )
    if anywhere is None:
        raise PlanError("no set of cuts leaves work for every stage; ask for fewer stages")
    return cheap[1] if cheap is not None and cheap[0] <= BALANCE_FOR_BYTES * anywhere[0] else anywhere[1]


def _cut_at(
    places: Sequence[Candidate], total_flops: int, speeds: Sequence[float],
    bytes_s: Sequence[float], latencies_s: Sequence[float],
) -> tuple[float, list[Candidate]] | None:
    """Returns (seconds of the slowest stage, cuts) of the best cuts at the places given, or None."""
    num_stages = len(speeds)
    if len(places) < num_stages - 1:
        return None
    edges = np.array([0, *(c.flops_before for c in places), total_flops], float)
    crossing = np.array([c.nbytes for c in places], float)
    bandwidth = np.array(bytes_s or [np.inf] * (num_stages - 1))
    latency = np.array(latencies_s or [0.0] * (num_stages - 1))
    n = len(edges)
    stretch = edges[None, :] - edges[:, None]  # [from, to], FLOPs
    stretch[np.tril_indices(n)] = np.inf
    price = 2 * (latency[:, None] + crossing[None, :] / bandwidth[:, None])  # [cut, place]
    times = [3 * stretch / v for v in speeds]  # seconds of stage s between two edges
    ideal = 3 * total_flops / sum(speeds)
    # A stage that was asked for gets work worth the name, where the places allow it: in a tiny model a cut before the scalar loss would else always be cheapest.
    fair = [np.where(t < LEAST_SHARE * ideal, np.inf, t) for t in times]
    found = _best(fair, price, crossing, ideal, n) or _best(times, price, crossing, ideal, n)
    if found is None:
        return None
    slowest = max(times[s][a, b] for s, (a, b) in enumerate(zip([0, *found], [*found, n - 1])))
    return float(slowest), [places[e - 1] for e in found]


def _best(
    times: Sequence[np.ndarray], price: np.ndarray, crossing: np.ndarray, ideal: float, n: int
) -> list[int] | None:
    """Returns the edges of the best cuts, or None when no cuts leave work for every stage."""
    best: tuple[float, float, list[int]] | None = None
    for bound in ideal * np.geomspace(1.0, max(2.0, n), 200):
        if best is not None and bound > best[0]:
            break
        found = _cheapest(times, price, bound, n)
        if found is None:
            continue
        slowest = max(
            times[s][a, b] for s, (a, b) in enumerate(zip([0, *found], [*found, n - 1]))
        )
        total = slowest + sum(price[k, e - 1] for k, e in enumerate(found))
        nbytes = sum(crossing[e - 1] for e in found)
        if best is None or (total, nbytes) < best[:2]:
            best = (total, nbytes, found)
    return None if best is None else best[2]


def _cheapest(
    times: Sequence[np.ndarray], price: np.ndarray, bound: float, n: int
) -> list[int] | None:
    """Returns the edges of the cheapest cuts with no stage over `bound`, or None."""
    num_stages = len(times)
    cost = np.where(times[0][0] <= bound, 0.0, np.inf)  # [edge] stage 0 ends there
    back = []
    for s in range(1, num_stages):
        start = cost.copy()
        start[[0, n - 1]] = np.inf
        start[1 : n - 1] += price[s - 1] + 1e-15 * np.arange(n - 2)
        table = start[:, None] + np.where(times[s] <= bound, 0.0, np.inf)
        back.append(table.argmin(axis=0))
        cost = table.min(axis=0)
    if not np.isfinite(cost[n - 1]):
        return None
    edges, at = [], n - 1
    for choice in reversed(back):
        at = int(choice[at])
        edges.append(at)
    return edges[::-1]
