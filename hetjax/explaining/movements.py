"""Everything a step moves: between stages, inside them, and state that is read away from its home."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from hetjax.explaining.naming import Names
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Ref
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.passes.cost.collectives import levels
from hetjax.passes.cost.program_price import axis_group, exchange_s, fragment_exchanges
from hetjax.passes.simulator_program import program_transfers


@dataclasses.dataclass(frozen=True)
class Movement:
    """One value that moves.

    Attributes:
      what: the value by the user's name.
      kind: "transfer" (between stages), "carried state" (read away from its home) or a collective's, "all-reduce".
      where: "s0 > s1" or "s1, axis model".
      link: the link's name.
      nbytes: of the whole value, once.
      times: per step.
      seconds: of one, predicted.
      fragment: whose reading or giving it is.
      module, source: of the op that makes the value.
      spec_before, spec_after: at both ends.
    """

    what: str
    kind: str
    where: str
    link: str
    nbytes: int
    times: int
    seconds: float
    fragment: str
    module: str
    source: str
    spec_before: Spec = ()
    spec_after: Spec = ()

    @property
    def step_bytes(self) -> int:
        return self.nbytes * self.times


def movements(bundle: Bundle) -> list[Movement]:
    """Returns what a step moves, largest first.

    Raises:
      PlanError: the bundle is not complete.
    """
    graph, program, cluster = bundle.graph, bundle.program, bundle.cluster
    if graph is None or program is None or cluster is None:
        raise PlanError(
            "what moves is known of a complete program only; give FILE.py:build or a lowered step.hj"
        )
    names = Names(graph)
    found = [
        *_transfers(program, cluster, names),
        *_carried(bundle, program, cluster, names),
        *(m for f in program.fragments for m in _collectives(program, f, cluster, names)),
    ]
    return sorted(found, key=lambda m: (-m.step_bytes, m.where, m.what))


def _made(names: Names, ref: Ref) -> tuple[str, str]:
    op = names.maker(ref)
    return (op.block, op.source) if op is not None else ("", "")


def _transfers(program: Program, cluster: Cluster, names: Names) -> Iterator[Movement]:
    prices = program_transfers(program, cluster)
    for r in program.reshards:
        source, target = program.meshes[r.source], program.meshes[r.target]
        link = cluster.link(source.devices[-1], target.devices[0])
        price = prices[r.name]
        reader = next(
            (
                f.name
                for f in program.fragments
                if f.stage == r.target and any(p.ref == r.ref for p in f.inputs)
            ),
            "",
        )
        yield Movement(
            names.of(r.ref),
            "transfer",
            f"{source.name} > {target.name}",
            link.name,
            r.nbytes,
            program.num_microbatches if r.form == "micro" else 1,
            price.serialisation_s + price.latency_s,
            reader,
            *_made(names, r.ref),
            r.source_spec,
            r.target_spec,
        )


def _carried(
    bundle: Bundle, program: Program, cluster: Cluster, names: Names
) -> Iterator[Movement]:
    """State leaves that another stage than their home reads: they travel each step."""
    graph = bundle.graph
    if graph is None:
        return
    home = {
        r.updates: ret.stage
        for r, ret in zip(program.results, program.returns)
        if r.updates is not None and ret.stage is not None
    }
    for feed in program.feeds:
        at = home.get(feed.argument)
        if at is None or at == feed.stage:
            continue
        argument = graph.inputs[feed.argument]
        source, target = program.meshes[at], program.meshes[feed.stage]
        link = cluster.link(source.devices[-1], target.devices[0])
        nbytes = graph.avals[argument.ref].nbytes
        yield Movement(
            argument.path,
            "carried state",
            f"{source.name} > {target.name}",
            link.name,
            nbytes,
            1,
            link.transfer_s(nbytes),
            "",
            "",
            "",
            (),
            feed.spec,
        )


def _collectives(
    program: Program, f: Fragment, cluster: Cluster, names: Names
) -> Iterator[Movement]:
    """Collectives that XLA puts inside a fragment, read off the shardings at its border."""
    mesh = program.meshes[f.stage]
    times = program.num_microbatches if f.per_microbatch else 1
    for exchanges in fragment_exchanges(program, f).values():
        for e in exchanges:
            steps = levels(cluster, axis_group(mesh, e.axis)[0])
            yield Movement(
                names.of(e.ref), e.kind, f"{mesh.name}, axis {e.axis}", steps[-1].link.name if steps else "",
                math.ceil(e.nbytes), times, exchange_s(e, mesh, cluster), f.name, *_made(names, e.ref),
            )  # fmt: skip


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|kB|KB|KiB|MB|MiB|GB|GiB|TB|TiB)?\s*")
_UNITS = {
    "B": 1,
    "kB": 1e3,
    "KB": 1e3,
    "KiB": 2**10,
    "MB": 1e6,
    "MiB": 2**20,
    "GB": 1e9,
    "GiB": 2**30,
    "TB": 1e12,
    "TiB": 2**40,
}


def parse_size(text: str) -> float:
    """Returns the bytes of "64MiB" or "1.5 GB".

    Raises:
      PlanError: it is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise PlanError(f"{text!r} is not a size such as 64MiB, 1.5GB or 4096")
    return float(match[1]) * _UNITS[match[2] or "B"]
