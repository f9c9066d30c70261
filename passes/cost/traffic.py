"""Bytes that ops move through main memory, given that XLA fuses what is elementwise.

a = dot x w        writes a
b = exp a          fused with c: reads a, writes nothing
c = mul b b        writes c
d = dot c v        reads c
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hetjax.ir.graph import Aval, Op, Ref

# Ops that XLA does not merge with others: each reads its inputs and writes its outputs.
_OWN_KERNEL = frozenset(
    {
        "dot_general", "conv_general_dilated", "sort", "fft", "cholesky", "triangular_solve",
        "scatter", "scatter-add", "scatter_add", "gather", "dynamic_update_slice", "scan", "while",
        "cond", "custom_call", "ragged_dot", "top_k", "rng_bit_generator",
    }
)  # fmt: skip
# A reduction takes its producers in, but its consumers start from what it wrote.
_REDUCTIONS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "arg",
    "cum",
)


def own_kernel(op: Op) -> bool:
    """Returns whether the op is a kernel of its own."""
    return op.primitive in _OWN_KERNEL


def memory_traffic(
    ops: Sequence[Op], avals: Sequence[Aval], leaving: Collection[Ref]
) -> list[tuple[int, int]]:
    """Returns, per op, the bytes read and written.

    A fused op reads only what a kernel before it wrote, and writes only what leaves the ops given
    or what a kernel of its own reads.

    Args:
      ops: in order.
      avals: type of each ref.
      leaving: refs that are needed after these ops.
    """
    made: dict[Ref, Op] = {r: op for op in ops for r in op.outputs}
    read_by_kernel = {r for op in ops if own_kernel(op) for r in op.refs}
    kept = set(leaving)

    def written(ref: Ref) -> bool:
        op = made.get(ref)
        if op is None or ref in kept or ref in read_by_kernel:
            return True
        return own_kernel(op) or op.primitive.startswith(_REDUCTIONS)

    return [
        (
            sum(avals[r].nbytes for r in dict.fromkeys(op.refs) if written(r)),
            sum(avals[r].nbytes for r in op.outputs if written(r)),
        )
        for op in ops
    ]
