"""Published layer times as samples for the residual forest.

What a layer of those models computes is counted from its published size: a product of every weight
with every token, attention over all pairs of tokens, activations written once and read once. The
tables hold forward, backward (twice the forward's work) and Adam's update; layers of one stage that
are tensor parallel add up their results twice a pass, as Megatron's do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Node, Site
from hetjax.passes.cost.collectives import collective_price
from hetjax.passes.cost.forest import Sample
from hetjax.passes.cost.group import Group
from hetjax.passes.cost.profiles import LayerKey, LayerTime
from hetjax.passes.cost.sailor import KINDS, LayerSize, Model, inside_link
from hetjax.passes.cost.work import Kernel, Work, gathered

# Which of their machines a GPU was in.
CLUSTERS = {
    "GH-96": "clariden", "Titan-RTX": "mit", "RTX-2080": "mit", "RTX-3090": "mit",
    "A100-40": "cloud", "V100-16": "cloud", "A100-80": "a100-80",
}  # fmt: skip
_FLOAT = 4
# Kernels of a transformer block besides its products: norms, biases, activation, softmax, masks, residuals.
_SMALL_KERNELS = 12
_PRODUCTS = 4  # query-key-value, projection, up, down


def published_samples(folder: str | Path, model: Model) -> list[Sample]:
    """Returns a sample per kind of layer and pass of a published model whose shape is published too.

    Layers that do the same are one sample, with the mean of their times.

    Args:
      folder: of the published data.
      model: from `hetjax.passes.cost.sailor.read_model`.
    """
    if not (model.heads and model.sequence):
        return []
    gpus = {kind: gpu for gpu, kind in KINDS.items()}
    last = max(layer for _, layer in model.sizes)
    groups: dict[tuple[str, int], tuple[Group, Cluster]] = {}
    times: dict[tuple[Work, str, Group], list[float]] = {}
    counts: dict[tuple[str, int, int], int] = {}
    for key, _ in model.profiles:
        at = (key.kind, key.tensor, key.microbatch)
        counts[at] = counts.get(at, 0) + 1
    for key, time in model.profiles:
        # A table with another number of layers is of another model.
        whole = counts[key.kind, key.tensor, key.microbatch] == last + 1
        if not whole or (key.tensor, int(key.layer)) not in model.sizes:
            continue
        gpu = gpus[key.kind]
        if (gpu, key.tensor) not in groups:
            groups[gpu, key.tensor] = _group(folder, gpu, key.tensor)
        group, cluster = groups[gpu, key.tensor]
        for seconds, work in _passes(model, key, time, last, cluster):
            if seconds > 0:
                times.setdefault((work, gpu, group), []).append(seconds)
    return [
        Sample(work, presets.KINDS[KINDS[gpu]], group, statistics.fmean(seconds), CLUSTERS[gpu])
        for (work, gpu, group), seconds in times.items()
    ]


def _group(folder: str | Path, gpu: str, tensor: int) -> tuple[Group, Cluster]:
    link = inside_link(folder, gpu, tensor)
    kind = presets.KINDS[KINDS[gpu]]
    node = Node("node", kind.name, tensor, "site", link.name)
    cluster = Cluster("node", (kind,), (Site("site"),), (node,), (link,))
    return Group(1, tensor, 1, link if tensor > 1 else None), cluster


def _passes(
    model: Model, key: LayerKey, time: LayerTime, last: int, cluster: Cluster
) -> Iterator[tuple[float, Work]]:
    """Yields (measured seconds, work) of a layer's forward, backward and update."""
    layer, b, t = int(key.layer), key.microbatch, key.tensor
    size = model.sizes[t, layer]
    kernels = list(_forward(model, size, layer, last, b, t))
    exchanged = float(b * size.output_bytes) if t > 1 and 0 < layer < last else 0.0
    once = collective_price(cluster, "all-reduce", range(t), exchanged).seconds
    forward = gathered("forward", kernels, collective_s=2 * once, collective_bytes=2 * exchanged)
    yield time.forward_s, forward
    if layer == 0:  # the tables hold no measurement of the embedding's backward
        yield time.update_s, _adam(size)
        return
    twice = (Kernel(k.flops, k.nbytes, k.dtype, count=2 * k.count) for k in kernels)
    yield (
        time.backward_s,
        gathered("backward", twice, collective_s=2 * once, collective_bytes=2 * exchanged),
    )
    yield time.update_s, _adam(size)


def _adam(size: LayerSize) -> Work:
    # It reads parameter, gradient and two moments and writes all but the gradient.
    kernel = Kernel(10.0 * size.parameters, 7.0 * _FLOAT * size.parameters)
    return Work("update", (kernel,))


def _forward(
    model: Model, size: LayerSize, layer: int, last: int, b: int, t: int
) -> Iterator[Kernel]:
    tokens = b * model.sequence
    if layer == 0:  # rows of a table, and positions added
        yield Kernel(tokens, 3.0 * b * size.output_bytes)
        return
    moved = 2.0 * b * size.stored_bytes  # written once, read once
    if layer == last:
        yield Kernel(2.0 * size.parameters * tokens, _FLOAT * size.parameters + moved, "f32")
        return
    hidden = size.output_bytes / _FLOAT / model.sequence
    weights = size.parameters / _PRODUCTS
    rows = 2.0 * tokens * hidden * _FLOAT
    yield Kernel(2.0 * weights * tokens, _FLOAT * weights + rows, "f32", count=_PRODUCTS)
    scores = b * model.heads / t * model.sequence**2
    yield Kernel(2.0 * scores * hidden / model.heads, _FLOAT * scores, "f32", count=2)
    yield Kernel(moved / _FLOAT / _SMALL_KERNELS, moved / _SMALL_KERNELS, count=_SMALL_KERNELS)
