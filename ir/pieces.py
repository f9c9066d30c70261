"""State leaves that a plan keeps in pieces: stacked layers, some rows on one stage, some on the next.

A graph then has one input and one result per piece. Pieces of a leaf stand side by side, and their
paths end with their rows: "state/params/layers/kernel[0:6]", "state/params/layers/kernel[6:12]".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from hetjax.ir.graph import Argument, Aval, Graph, Result

_ROWS = re.compile(r"^(.*)\[(\d+):(\d+)\]$", re.S)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the user's, and where a graph has it.

    Attributes:
      path: the user's own.
      positions: in the graph's inputs (or results); several where it is in pieces.
      edges: the first row of each piece and the number of rows; () where it is whole.
    """

    path: str
    positions: tuple[int, ...]
    edges: tuple[int, ...] = ()


def piece_path(path: str, start: int, stop: int) -> str:
    """Returns the path of rows [start, stop) of a leaf."""
    return f"{path}[{start}:{stop}]"


def leaves_of(items: Sequence[Argument] | Sequence[Result]) -> tuple[Leaf, ...]:
    """Returns the user's leaves that a graph's inputs or results stand for, in order."""
    out: list[Leaf] = []
    for k, item in enumerate(items):
        match = _ROWS.match(item.path)
        if match is None:
            out.append(Leaf(item.path, (k,)))
            continue
        path, start, stop = match[1], int(match[2]), int(match[3])
        last = out[-1] if out else None
        if start and last is not None and last.path == path and last.edges and last.edges[-1] == start:
            out[-1] = Leaf(path, (*last.positions, k), (*last.edges, stop))
        else:
            out.append(Leaf(path, (k,), (start, stop)))
    return tuple(out)


def leaf_aval(graph: Graph, leaf: Leaf) -> Aval:
    """Returns the type of a whole input leaf."""
    aval = graph.avals[graph.inputs[leaf.positions[0]].ref]
    return dataclasses.replace(aval, shape=(leaf.edges[-1], *aval.shape[1:])) if leaf.edges else aval
