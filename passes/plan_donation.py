"""plan-donation: says which input buffers a fragment may overwrite."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Graph
from hetjax.ir.program import Fragment, Program


@dataclasses.dataclass(frozen=True)
class PlanDonation:
    """Marks inputs whose last use is the fragment that replaces them.

    An update fragment may overwrite a state leaf when it returns the new one and no later task
    reads the old. Accumulators are always overwritten and need no mark.

    Attributes:
      state: whether state leaves may be donated at all (the caller's choice, as with jax.jit).
    """

    name: ClassVar[str] = "plan-donation"
    summary: ClassVar[str] = "reuse the buffers of the old state for the new"
    requires: ClassVar[tuple[str, ...]] = ("graph", "program")

    state: bool = False

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.program is None or bundle.graph is None:
            raise PassError(self.name, "needs a graph and a program; run cut-stages first")
        program = plan_donation(bundle.graph, bundle.program, self.state)
        return bundle if program is bundle.program else bundle.replace(program=program)


def plan_donation(graph: Graph, program: Program, state: bool) -> Program:
    """Returns the program with `donated` set on its fragments; the same object when nothing changes."""
    leaf = {
        graph.inputs[r.updates].ref: r.atom for r in graph.outputs
        if r.updates is not None and isinstance(r.atom, int)
    }
    passed_on = {r.atom for r in graph.outputs if isinstance(r.atom, int)}
    fragments = tuple(_donate(program, k, f, leaf if state else {}, passed_on) for k, f in enumerate(program.fragments))
    return program if fragments == program.fragments else program.replace(fragments=fragments)


def _donate(
    program: Program, k: int, fragment: Fragment, leaf: dict[int, int], passed_on: set[int]
) -> Fragment:
    if fragment.phase != "update":
        return dataclasses.replace(fragment, donated=())
    later = program.fragments[k + 1 :]
    read_later = {p.ref for f in later for p in f.inputs}
    elsewhere = {p.ref for f in program.fragments if f.stage != fragment.stage for p in f.inputs}
    given = {p.ref for p in fragment.outputs}
    donated = tuple(
        i for i, port in enumerate(fragment.inputs)
        if port.ref in leaf
        and leaf[port.ref] in given
        and leaf[port.ref] != port.ref
        and port.ref not in read_later | elsewhere | passed_on
        and program.avals[port.ref] == program.avals[leaf[port.ref]]
    )
    return dataclasses.replace(fragment, donated=donated)
