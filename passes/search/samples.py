"""Small random planning problems, seeded: for tests and benchmarks that compare with exhaustive search."""

from __future__ import annotations

import dataclasses
import random

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Link, Node, Site
from hetjax.passes.search.costed import CostedTable, LayerCost
from hetjax.passes.search.space import Options, Problem, pools_of

_KINDS = ("v100-16g", "a100-40g", "a100-80g", "rtx-3090", "t4", "h100-80g")
# Everything a stage may choose, one at a time and together.
_OPTIONS = (
    Options(recompute=True), Options(sharding="optimizer"), Options(sharding="all"), Options(sequence=True),
    Options(experts=2), Options(exchange="compressed"),
)  # fmt: skip


def random_problem(seed: int, *, devices: int = 8, layers: int = 6, sites: int = 3) -> Problem:
    """Returns a problem with at most so many devices, layers and sites, every dimension of the space on.

    Layers are unlike each other; some do not fit without recomputation or sharding; links between sites
    are from a hundredth of a node's to as fast.

    Args:
      seed: of everything.
      devices, layers, sites: the most.
    """
    rng = random.Random(seed)
    cluster = _cluster(rng, devices, sites)
    experts = rng.choice((0, 0, 2, 4))
    num = rng.randint(2, layers)
    scale = 10 ** rng.uniform(-0.5, 0.8)
    costs = tuple(_layer(rng, i, scale, experts) for i in range(num))
    table = CostedTable(
        f"random {seed}", costs, cluster, experts=experts, max_tensor=rng.choice((1, 2, 2, 4)),
    )  # fmt: skip
    options = tuple(o for o in _OPTIONS if experts or o.experts == 1)
    chosen = tuple(sorted(rng.sample(range(len(options)), rng.randint(1, 3))))
    return Problem(
        table, cluster, pools_of(cluster), rng.choice((4, 6, 8, 12, 16)),
        options=tuple(options[i] for i in chosen), compressed=0.1, max_stages=rng.choice((2, 3, 3, 4)),
    )  # fmt: skip


def _cluster(rng: random.Random, devices: int, sites: int) -> Cluster:
    num_sites = rng.randint(1, sites)
    left = rng.randint(max(2, num_sites), devices)
    links = [Link("node", 10 ** rng.uniform(10.0, 11.3), 5e-6)]
    nodes, names = [], []
    for s in range(num_sites):
        mine = left if s == num_sites - 1 else rng.randint(1, left - (num_sites - 1 - s))
        left -= mine
        kind = rng.choice(_KINDS)
        per_node = rng.choice([n for n in (1, 2, 4) if mine % n == 0])
        count = mine // per_node
        names.append(Site(f"site{s}", f"lan{s}" if count > 1 else ""))
        if count > 1:
            links.append(Link(f"lan{s}", 10 ** rng.uniform(9.0, 10.5), 2e-5))
        nodes += [Node(f"n{s}.{i}", kind, per_node, f"site{s}", "node") for i in range(count)]
    for a in range(num_sites):
        for b in range(a):
            speed, latency_s = 10 ** rng.uniform(8.0, 10.0), 10 ** rng.uniform(-4.5, -2.0)
            links.append(Link(f"wan{b}{a}", speed, latency_s, (f"site{b}", f"site{a}")))
    kinds = tuple(presets.KINDS[k] for k in sorted({n.kind for n in nodes}))
    return Cluster("random", kinds, tuple(names), tuple(nodes), tuple(links))


def _layer(rng: random.Random, i: int, scale: float, experts: int) -> LayerCost:
    parameters = round(scale * 10 ** rng.uniform(7.0, 8.3))
    hidden = round(10 ** rng.uniform(5.5, 6.8))
    stored = hidden * rng.randint(10, 40)
    routed = experts > 0 and rng.random() < 0.5
    return LayerCost(
        f"layer{i}", flops=2 * parameters * 10 ** rng.uniform(2.3, 3.3), traffic_bytes=3.0 * stored,
        parameters=parameters, stored_bytes=float(stored), replicated_bytes=stored * rng.uniform(0.1, 0.5),
        output_bytes=hidden, gathered_bytes=2.0 * hidden, products=rng.randint(2, 8),
        expert_parameters=parameters // 2 if routed else 0, routed_bytes=2.0 * hidden if routed else 0.0,
    )  # fmt: skip


def scaled(problem: Problem, **changes) -> Problem:
    """Returns a problem with some fields changed."""
    return dataclasses.replace(problem, **changes)
