"""Pipelines with known answers, and a seeded source of random ones: for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import random

from hetjax.passes.schedules.costs import PipelineCosts


@dataclasses.dataclass(frozen=True, slots=True)
class GoldenCase:
    """A pipeline whose makespans are known exactly.

    Attributes:
      name: "A" to "J".
      costs: the pipeline.
      gpipe, one_f_one_b, eager: makespans of the plain schedules.
      lower: the lower bound.
      best: the most Virtual-1F1B may take.
    """

    name: str
    costs: PipelineCosts
    gpipe: float
    one_f_one_b: float
    eager: float
    lower: float
    best: float


def _case(
    name: str, stages: int, microbatches: int, latency: dict[int, float], serialisation: dict[int, float],
    figures: tuple[float, float, float, float, float], forward: tuple[float, ...] = (),
) -> GoldenCase:
    forward = forward or (1.0,) * stages
    costs = PipelineCosts(
        forward, tuple(2 * f for f in forward), microbatches,
        tuple(latency.get(b, 0.0) for b in range(stages - 1)),
        tuple(serialisation.get(b, 0.0) for b in range(stages - 1)))
    return GoldenCase(name, costs, *figures)


# F = 1 and B = 2 unless given. F is bandwidth-bound: 145 is the best that was found by brute force over warm-ups.
GOLDEN = (
    _case("A", 4, 8, {}, {}, (33, 33, 33, 33, 33)),
    _case("B", 4, 8, {1: 1.5}, {}, (36, 45, 36, 36, 36)),
    _case("C", 4, 8, {1: 3}, {}, (39, 57, 40, 39, 39)),
    _case("D", 4, 32, {1: 3}, {}, (111, 201, 136, 111, 111)),
    _case("E", 4, 32, {1: 1}, {1: 2}, (142, 201, 137, 111, 111)),
    _case("F", 4, 32, {}, {1: 4}, (268, 235, 167, 144, 145)),
    _case("G", 2, 16, {0: 6}, {}, (63, 147, 108, 63, 63)),
    _case("H", 8, 32, {1: 3, 4: 3}, {}, (129, 213, 152, 129, 129)),
    _case("I", 4, 32, {1: 2}, {}, (106, 142.5, 104, 99, 99), (1.0, 1.0, 0.5, 0.5)),
    _case("J", 4, 32, {0: 1.5, 1: 1.5, 2: 1.5}, {}, (114, 183, 114, 114, 114)),
)


def random_pipeline(rng: random.Random, *, stages: tuple[int, int] = (2, 8)) -> PipelineCosts:
    """Returns a pipeline as a site with slow links might give it.

    Stages: 2 to 8. Forwards even over a factor of 3, backwards 1.5 to 2.5 times the forward, within the
    same factor of 3 of each other after scaling. Slow links: 0 to 3, on boundaries drawn without
    replacement; each is latency-bound (0.1 to 3 times the slowest stage's F + B), bandwidth-bound (its
    serialisation 0.1 to 1.5 times that), or both, with equal chance. Microbatches: 8 to 64.
    """
    count = rng.randint(*stages)
    forward = tuple(rng.uniform(1, 3) for _ in range(count))
    ratio = rng.uniform(1.5, 2.5)
    backward = tuple(f * ratio for f in forward)
    slowest = max(f + b for f, b in zip(forward, backward))
    latency, serialisation = [0.0] * (count - 1), [0.0] * (count - 1)
    for b in rng.sample(range(count - 1), min(count - 1, rng.randint(0, 3))):
        bound = rng.choice(("latency", "bandwidth", "both"))
        if bound != "bandwidth":
            latency[b] = rng.uniform(0.1, 3) * slowest
        if bound != "latency":
            serialisation[b] = rng.uniform(0.1, 1.5) * slowest
    return PipelineCosts(
        forward, backward, rng.randint(8, 64), tuple(latency), tuple(serialisation))


def budget_1f1b(costs: PipelineCosts, more: int) -> tuple[int, ...]:
    """Returns 1F1B's peak activations per device and `more`, for one stage per device."""
    stages, m = costs.num_stages, costs.num_microbatches
    return tuple(min(m, stages - s + more) for s in range(stages))
