"""What each reshard carries on each link, beside the bytes and seconds no plan can go below."""

from __future__ import annotations

import dataclasses

from hetjax.ir.blocks import elements
from hetjax.ir.cluster import Cluster
from hetjax.ir.dtypes import dtype_itemsize
from hetjax.ir.program import Piece, Program
from hetjax.passes.reshard_plan import layout, lower_bound
from hetjax.passes.simulator_program import program_transfers


@dataclasses.dataclass(frozen=True)
class LinkBytes:
    """One reshard, once.

    Attributes:
      reshard: its name.
      links: (link, bytes it carries) pairs, most bytes first.
      crossing: bytes that go from one mesh to the other.
      unique: bytes the target mesh needs and lacks: the least that can cross.
      seconds, bound_s: predicted, and the time no way can beat.
      pieces: how many; 0 where whole copies carry it.
    """

    reshard: str
    links: tuple[tuple[str, int], ...]
    crossing: int
    unique: int
    seconds: float
    bound_s: float
    pieces: int


def link_bytes(program: Program, cluster: Cluster) -> list[LinkBytes]:
    """Returns what every reshard carries on each link, in the program's order."""
    prices = program_transfers(program, cluster)
    out = []
    for r in program.reshards:
        aval = (program.avals if r.form == "step" else program.micro_avals)[r.ref]
        source, target = program.meshes[r.source], program.meshes[r.target]
        size = dtype_itemsize(aval.dtype)
        bound = lower_bound(
            cluster, layout(source, r.source_spec, aval.shape), layout(target, r.target_spec, aval.shape), size)
        pieces = r.pieces
        if not pieces:  # whole copies: every target device gets its block from the first source device
            blocks = target.blocks(r.target_spec, aval.shape)
            pieces = tuple(Piece(source.devices[0], d, *b) for d, b in blocks.items())
        links: dict[str, int] = {}
        crossing = 0
        for p in pieces:
            nbytes = elements((p.start, p.stop)) * size
            if p.source == p.target or not nbytes:
                continue
            name = cluster.link(p.source, p.target).name
            links[name] = links.get(name, 0) + nbytes
            crossing += nbytes if p.source in source.devices and p.target in target.devices else 0
        price = prices[r.name]
        out.append(LinkBytes(
            r.name, tuple(sorted(links.items(), key=lambda x: -x[1])), crossing, int(bound.crossing),
            price.serialisation_s + price.latency_s, bound.seconds, len(r.pieces)))
    return out
