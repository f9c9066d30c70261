"""label-blocks: says of every op which module of the user's model it belongs to."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.graph import Graph, Op

# Scopes that JAX and Flax add on their own and that name no module.
_NOT_MODULES = frozenset({"rematted_computation", "checkpoint", "remat", "checkpoint_name"})


@dataclasses.dataclass(frozen=True)
class LabelBlocks:
    """Labels each op with its module path.

    The path is the name scopes of the op ("GPT/block_0/attn"). Where a model sets no scopes, as nnx
    modules do not, a forward op takes the path of the parameter it reads ("model/blocks/0/attn"), and
    ops between two parameters that of the earlier one.
    """

    name: ClassVar[str] = "label-blocks"
    summary: ClassVar[str] = "name the Flax module of every op"

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            return bundle
        graph = label_blocks(bundle.graph)
        return bundle if graph is bundle.graph else bundle.replace(graph=graph)


def block_of_scopes(op: Op) -> str:
    """Returns the module path in the op's name stack, or ""."""
    names = (n for kind, n in op.scopes if kind == "scope")
    # einsum opens a scope named after its formula.
    return "/".join(n for n in names if n and n not in _NOT_MODULES and "->" not in n)


def _parameter_blocks(graph: Graph) -> list[str]:
    """Returns, for each forward op, the module whose parameter was read last."""
    module_of_ref = {
        a.ref: a.path.rpartition("/")[0]
        for a in graph.inputs
        if a.role == "state" and graph.avals[a.ref].is_inexact and graph.avals[a.ref].ndim
    }
    blocks, current = [], ""
    for op in graph.ops:
        if op.region != "forward":
            blocks.append("")
            continue
        read = [module_of_ref[r] for r in op.refs if r in module_of_ref]
        if read:
            current = read[0]
        for r in op.outputs:  # a parameter cast or transposed is still that parameter
            if read and len(op.refs) == 1:
                module_of_ref[r] = read[0]
        blocks.append(current)
    return blocks


def label_blocks(graph: Graph) -> Graph:
    """Returns the graph with every op's block set; the same object when they all were."""
    blocks = [block_of_scopes(op) for op in graph.ops]
    forward = [b for op, b in zip(graph.ops, blocks) if op.region == "forward"]
    if forward and sum(map(bool, forward)) < len(forward) / 2:
        blocks = _parameter_blocks(graph)
    if all(op.block == b for op, b in zip(graph.ops, blocks)):
        return graph
    return graph.replace(
        ops=tuple(dataclasses.replace(op, block=b) for op, b in zip(graph.ops, blocks))
    )
