"""A decoder-only transformer described by its shapes, as layers for a `CostedTable`: nothing was measured."""

from __future__ import annotations

import dataclasses

from hetjax.passes.search.costed import LayerCost


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """The shapes of a decoder with grouped-query attention and a gated MLP.

    Attributes:
      name: of the model.
      blocks, hidden, heads, kv_heads, ffn, vocab: its shapes.
      tokens: of one example.
      itemsize: bytes of an activation and of a parameter in use.
    """

    name: str
    blocks: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tokens: int
    itemsize: int = 2

    @property
    def parameters(self) -> int:
        return sum(c.parameters for c in decoder_layers(self))


# The shapes that Meta published with Llama 3 (2024), 70B, at half its sequence length.
DECODER_70B = Decoder("decoder-70b", 80, 8192, 64, 8, 28672, 128256, 4096)


def decoder_layers(shape: Decoder) -> tuple[LayerCost, ...]:
    """Returns the embedding, the two halves of every block, and the head, for one example.

    Each half multiplies each token with each of its parameters (2 FLOPs each); the attention attends causally
    (2 * tokens**2 * hidden FLOPs, the half of what full attention takes). With attention that keeps no
    scores a block keeps, per token, the inputs of both norms and their outputs, which lie whole on every
    tensor-parallel device; query, key, value and the attention's output; gate, up and their product.
    """
    s, h, n = shape.tokens, shape.hidden, shape.itemsize
    keys = h * shape.kv_heads // shape.heads
    out = n * s * h
    weights = 2 * h * (h + keys)
    kept = n * s * (4 * h + 2 * keys)
    attention = LayerCost(
        "attention", flops=2.0 * weights * s + 2.0 * s * s * h, traffic_bytes=2.0 * kept, parameters=weights + h,
        stored_bytes=float(kept), replicated_bytes=2.0 * out, output_bytes=out, gathered_bytes=float(out),
        products=6,
    )  # fmt: skip
    weights = 3 * h * shape.ffn
    kept = n * s * (2 * h + 3 * shape.ffn)
    mlp = LayerCost(
        "mlp", flops=2.0 * weights * s, traffic_bytes=2.0 * kept, parameters=weights + h, stored_bytes=float(kept),
        replicated_bytes=2.0 * out, output_bytes=out, gathered_bytes=float(out), products=3,
    )  # fmt: skip
    embed = LayerCost(
        "embed", flops=0.0, traffic_bytes=2.0 * out, parameters=shape.vocab * h, stored_bytes=4.0 * s,
        replicated_bytes=4.0 * s, output_bytes=out, gathered_bytes=float(out),
    )  # fmt: skip
    # Logits in float32, kept for the loss.
    logits = 4.0 * s * shape.vocab
    head = LayerCost(
        "head", flops=2.0 * s * h * shape.vocab, traffic_bytes=2.0 * logits, parameters=shape.vocab * h + h,
        stored_bytes=logits + 2.0 * out, replicated_bytes=2.0 * out, output_bytes=4, gathered_bytes=float(out),
    )  # fmt: skip
    halves = [
        dataclasses.replace(half, name=f"block{i}.{half.name}")
        for i in range(shape.blocks)
        for half in (attention, mlp)
    ]
    return (embed, *halves, head)
