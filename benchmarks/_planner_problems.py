"""The planning problems of `benchmarks/planner.py`: analytic, nothing in them was measured."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Link, Node, Site
from hetjax.passes.search.costed import CostedTable
from hetjax.passes.search.decoder import DECODER_70B, Decoder, decoder_layers
from hetjax.passes.search.space import Options, Problem, pools_of

# (site, device kind, nodes of eight, link of a node's eight ports)
FOUR_SITES = (
    ("oslo", "h100-80g", 12, "infiniband-ndr"), ("lyon", "a100-80g", 32, "infiniband-hdr"),
    ("turin", "a100-40g", 32, "infiniband-hdr"), ("porto", "mi250x", 16, "infiniband-hdr"),
)  # fmt: skip
# The shapes that Meta published with Llama 2 (2023), 7B.
DECODER_7B = Decoder("decoder-7b", 32, 4096, 32, 32, 11008, 32000, 4096)
# Parameters in bfloat16, gradients in float32, master copy and two moments in float32.
_STATE_BYTES = (2.0, 4.0, 12.0)
_OPTIONS = tuple(
    Options(recompute=again, sharding=sharding, sequence=sequence)
    for again in (False, True)
    for sharding in ("none", "optimizer")
    for sequence in (False, True)
)[1:]


def cluster_of(sites: Sequence[tuple[str, str, int, str]], wan: Link) -> Cluster:
    """Returns a cluster: nodes of eight devices, eight ports a node, one link like `wan` between any two sites."""
    kinds = sorted({kind for _, kind, _, _ in sites})
    inner = sorted({presets.KIND_LINK[kind] for kind in kinds})
    links = [presets.LINKS[name] for name in inner]
    for name, _, _, port in sites:
        one = presets.LINKS[port]
        links.append(dataclasses.replace(one, name=f"{name}-lan", bandwidth_bytes_s=8 * one.bandwidth_bytes_s))
    for b, (second, *_) in enumerate(sites):
        for first, *_ in sites[:b]:
            links.append(dataclasses.replace(wan, name=f"{first}-{second}", between=(first, second)))
    nodes = [
        Node(f"{name}{i}", kind, 8, name, presets.KIND_LINK[kind])
        for name, kind, count, _ in sites
        for i in range(count)
    ]
    names = tuple(Site(name, f"{name}-lan") for name, *_ in sites)
    return Cluster("sites", tuple(presets.KINDS[k] for k in kinds), names, tuple(nodes), tuple(links))


def decoder_problem(cluster: Cluster, shape: Decoder, batch: int, **more) -> Problem:
    """Returns the problem of training a decoder on all devices of a cluster."""
    table = CostedTable(
        shape.name, decoder_layers(shape), cluster, dtype="bf16", state_bytes=_STATE_BYTES, max_tensor=8
    )
    more = {"options": _OPTIONS, "max_stages": 24, **more}
    return Problem(table, cluster, pools_of(cluster), batch, **more)


def four_sites(batch: int = 16384) -> Problem:
    """Returns 736 devices of four kinds in four sites, 100 Gbit/s and 5 ms apart, and a 70B decoder.

    A batch of 16,384 sequences of 4,096 tokens is 67 million tokens; DeepSeek-V3 (2024) was trained with 63.
    """
    return decoder_problem(cluster_of(FOUR_SITES, Link("", 12.5e9, 5e-3)), DECODER_70B, batch)


def scaled_sites(devices: int) -> Problem:
    """Returns four sites of four kinds with so many devices in all, and a batch that grows with them."""
    share = devices // 32
    sites = [(name, kind, share, port) for name, kind, _, port in FOUR_SITES]
    return decoder_problem(cluster_of(sites, Link("", 12.5e9, 5e-3)), DECODER_70B, 16 * devices)


def slamb_ratio(shape: Decoder) -> float:
    """Returns the bytes of `hetjax.slamb` with a tenth of the first moment over those of dense gradients."""
    import hetjax

    h, keys = shape.hidden, shape.hidden * shape.kv_heads // shape.heads
    block = [(h, h), (h, keys), (h, keys), (h, h), (h, shape.ffn), (h, shape.ffn), (shape.ffn, h), (h,), (h,)]
    shapes = [(shape.vocab, h), *block * shape.blocks, (h, shape.vocab)]
    return hetjax.slamb_bytes(shapes, compress_ratio=0.1).of_dense(100)


def two_sites(wan_bytes_s: float, compressed: float, batch: int = 32) -> Problem:
    """Returns two sites of eight H100 each, a link between them, and a 7B decoder with a compressed exchange declared.

    An update of SLAMB takes 1.7 times one of LAMB (docs/slamb.md, measured), for which XLA counts 20
    reads and writes of all gradients' bytes: 14 more.
    """
    sites = [("east", "h100-80g", 1, "infiniband-ndr"), ("west", "h100-80g", 1, "infiniband-ndr")]
    options = tuple(
        Options(recompute=again, sharding="optimizer", exchange=exchange)
        for again in (False, True)
        for exchange in ("dense", "compressed")
    )
    return decoder_problem(
        cluster_of(sites, Link("", wan_bytes_s, 5e-3)), DECODER_7B, batch, options=options,
        compressed=compressed, compress_passes=14.0, max_stages=8,
    )  # fmt: skip


def random_sites(seed: int) -> Problem:
    """Returns a decoder on two to four sites of one to three nodes of eight, with links between them of 0.1 to 12.5 GB/s."""
    rng = random.Random(seed)
    chosen = rng.sample(FOUR_SITES, rng.randint(2, 4))
    sites = [(name, kind, rng.randint(1, 3), port) for name, kind, _, port in chosen]
    wan = Link("", 10 ** rng.uniform(8.0, 10.1), 10 ** rng.uniform(-3.0, -1.5))
    return decoder_problem(cluster_of(sites, wan), DECODER_7B, rng.choice((64, 256, 1024)), max_stages=8)
