"""Builds a program's fragments from a placement: which ops each holds and what passes between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from hetjax.ir.graph import Argument, Graph, Op, Ref, definitions
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.program import Feed, Fragment, Port, Program, Return, StageMesh
from hetjax.passes.op_kinds import BACKWARD, CLONE, FORWARD, ONCE, UPDATE
from hetjax.passes.placement import Placement

Order = tuple[int, int, int]
_PHASE_NAMES = ("forward", "backward", "update")
_PROLOGUE: Order = (-1, -1, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    """One fragment before it has a name; sorts in an order in which fragments may run."""

    order: Order
    stage: int

    @property
    def phase(self) -> str:
        return "prologue" if self.order == _PROLOGUE else _PHASE_NAMES[self.order[1]]

    @property
    def name(self) -> str:
        rnd, _, level = self.order
        suffix = f"{level}" if level else ""
        return f"s{self.stage}/{self.phase}{suffix}{f'.r{rnd}' if rnd > 0 else ''}"

    @property
    def sort_key(self) -> tuple[Order, int]:
        return self.order, -self.stage if self.order[1] == 1 else self.stage


class _Draft:
    """What a fragment needs and gives, while it is being put together."""

    def __init__(self) -> None:
        self.ops: set[int] = set()
        self.inputs: dict[tuple[Ref, str], Port] = {}
        self.outputs: dict[tuple[Ref, str], Port] = {}


class _Builder:
    def __init__(self, graph: Graph, micro: Microbatching, placement: Placement):
        self.graph, self.micro, self.placement = graph, micro, placement
        self.defined = definitions(graph)
        self.argument_of: dict[Ref, int] = {a.ref: i for i, a in enumerate(graph.inputs)}
        self.drafts: dict[_Key, _Draft] = {}
        self.feeds: dict[tuple[int, int, str], Feed] = {}
        self.whole = micro.num_microbatches == 1

    def draft(self, key: _Key) -> _Draft:
        return self.drafts.setdefault(key, _Draft())

    # -- who makes a value -------------------------------------------------------------------------

    def maker(self, ref: Ref, stage: int) -> _Key | None:
        """Returns the fragment from which `stage` takes a value; None for inputs and clones."""
        if ref not in self.defined:
            return None
        i = self.defined[ref]
        kind = self.placement.kinds[i]
        if kind == ONCE:
            return _Key(_PROLOGUE, stage)
        if kind == CLONE:
            return None
        at = self.placement.stages[i]
        s = stage if stage in at else min(at, key=lambda t: (self.placement.orders[i, t], t))
        return _Key(self.placement.orders[i, s], s)

    # -- demands -----------------------------------------------------------------------------------

    def build(self) -> None:
        for i, kind in enumerate(self.placement.kinds):
            if kind in (FORWARD, BACKWARD, UPDATE):
                for s in self.placement.stages[i]:
                    self.draft(_Key(self.placement.orders[i, s], s)).ops.add(i)
        for key in sorted(self.drafts, key=lambda k: k.sort_key, reverse=True):
            self.close(key)
        for key in [k for k in self.drafts if k.order == _PROLOGUE]:
            self.close(key)

    def close(self, key: _Key) -> None:
        """Adds to a fragment the clones it needs, and demands everything else as inputs."""
        draft = self.draft(key)
        stack = [r for i in draft.ops for r in self.graph.ops[i].refs]
        seen: set[Ref] = set()
        while stack:
            ref = stack.pop()
            if ref in seen:
                continue
            seen.add(ref)
            i = self.defined.get(ref)
            if i is not None and i in draft.ops:
                continue
            if i is not None and self.placement.kinds[i] == CLONE:
                draft.ops.add(i)
                stack.extend(self.graph.ops[i].refs)
                continue
            if key.order == _PROLOGUE and i is not None:
                # Step-level values of the prologue come from its own ops alone.
                draft.ops.add(i)
                stack.extend(self.graph.ops[i].refs)
                continue
            self.demand(key, ref)

    def demand(self, key: _Key, ref: Ref) -> Port:
        """Records that fragment `key` reads `ref`; returns the input port."""
        draft = self.draft(key)
        port = self.input_port(key, ref)
        slot = (ref, port.form)
        if slot in draft.inputs:
            return draft.inputs[slot]
        draft.inputs[slot] = port
        maker = self.maker(ref, key.stage)
        if maker is None:
            self.feed(ref, key.stage, port)
            return port
        source = self.draft(maker)
        if maker.order == _PROLOGUE and self.defined[ref] not in source.ops:
            source.ops.add(self.defined[ref])
        form = {"concat": "micro", "last": "micro"}.get(port.form, port.form)
        source.outputs.setdefault((ref, form), Port(ref, form, (), port.scale, port.axis))
        return port

    def input_port(self, key: _Key, ref: Ref) -> Port:
        """Returns how fragment `key` receives `ref`."""
        per_microbatch = key.phase in ("forward", "backward") and not self.whole
        kind_of_value = self.micro.types[ref]
        i = self.defined.get(ref)
        made_per_microbatch = (
            not self.whole and i is not None and self.placement.kinds[i] in (FORWARD, BACKWARD)
        )
        if per_microbatch:
            sliced = kind_of_value.kind == "B" and not made_per_microbatch
            if made_per_microbatch or sliced:
                return Port(ref, "micro", (), axis=kind_of_value.axis if sliced else None)
            return Port(ref, "step", ())
        if not made_per_microbatch:
            return Port(ref, "step", ())
        scale = float(self.micro.num_microbatches) ** -kind_of_value.power
        if kind_of_value.kind == "S":
            return Port(ref, "sum", (), scale=scale)
        if kind_of_value.kind == "B":
            return Port(ref, "concat", (), scale=scale, axis=kind_of_value.axis)
        return Port(ref, "last", (), scale=scale)

    def feed(self, ref: Ref, stage: int, port: Port) -> None:
        argument = self.argument_of[ref]
        form = "micro" if port.form == "micro" else "step"
        self.feeds.setdefault(
            (argument, stage, form), Feed(argument, stage, form, (), port.axis)
        )

    # -- results -----------------------------------------------------------------------------------

    def returns(self) -> list[Return]:
        out = []
        for k, result in enumerate(self.graph.outputs):
            atom = result.atom
            if not isinstance(atom, int) or atom in self.argument_of:
                out.append(Return(k))
                continue
            i = self.defined[atom]
            kind = self.placement.kinds[i]
            if kind == UPDATE or (self.whole and kind in (FORWARD, BACKWARD)):
                at = self.placement.stages[i]
                stage = at[0]
                if result.updates is not None:
                    home = self.placement.homes.get(self.graph.inputs[result.updates].ref, stage)
                    stage = home if home in at else stage
                maker = _Key(self.placement.orders[i, stage], stage)
                port = Port(atom, "step", ())
                self.draft(maker).outputs.setdefault((atom, "step"), port)
                out.append(Return(k, stage, port))
                continue
            # Made per microbatch, once, or by clones: completed (or computed) by an update fragment.
            stage = self.placement.stages[i][0] if self.placement.stages[i] else self.result_home(k)
            key = _Key((0, 2, 0), stage)
            if kind == CLONE:
                self.draft(key).ops.add(i)
            else:
                self.demand(key, atom)
            port = Port(atom, "step", ())
            self.draft(key).outputs.setdefault((atom, "step"), port)
            out.append(Return(k, stage, port))
        return out

    def result_home(self, k: int) -> int:
        updates = self.graph.outputs[k].updates
        if updates is None:
            return 0
        return self.placement.homes.get(self.graph.inputs[updates].ref, 0)


def build_program(
    graph: Graph, micro: Microbatching, placement: Placement, meshes: Sequence[StageMesh]
) -> Program:
    """Returns the program's fragments, feeds and returns; specs, reshards and tasks come later.

    Args:
      graph: the full graph.
      micro: its microbatching.
      placement: where every op runs.
      meshes: one per stage.
    """
    builder = _Builder(graph, micro, placement)
    returns = builder.returns()
    builder.build()
    fragments = [
        _fragment(builder, key, builder.drafts[key])
        for key in sorted(builder.drafts, key=lambda k: k.sort_key)
        if builder.drafts[key].ops or builder.drafts[key].outputs
    ]
    feeds = tuple(builder.feeds[k] for k in sorted(builder.feeds))
    micro_avals = micro.graph.avals
    return Program(
        graph.name, micro.num_microbatches, "", tuple(meshes), graph.avals, micro_avals,
        tuple(fragments), feeds=feeds, returns=tuple(returns), results=graph.outputs,
    )


def _fragment(builder: _Builder, key: _Key, draft: _Draft) -> Fragment:
    source = builder.micro.graph if key.phase in ("forward", "backward") else builder.graph
    ops: tuple[Op, ...] = tuple(source.ops[i] for i in sorted(draft.ops))
    made = {r for op in ops for r in op.outputs}
    outputs = []
    for (ref, form), port in sorted(draft.outputs.items()):
        if form == "sum" and builder.whole:
            port = dataclasses.replace(port, form="step")
        if ref in made or (ref, form) not in draft.outputs or form in ("step", "micro", "sum"):
            outputs.append(port)
    return Fragment(
        key.name, key.stage, key.phase, key.order[2] if key.order != _PROLOGUE else 0, ops,
        tuple(p for _, p in sorted(draft.inputs.items())), tuple(outputs),
    )


def arguments_of(graph: Graph, indices: Iterable[int]) -> list[Argument]:
    """Returns the input leaves at the given positions."""
    return [graph.inputs[i] for i in indices]
