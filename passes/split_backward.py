"""split-backward: cuts each stage's backward into input gradient (I) and weight gradient (W)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError, PlanError
from hetjax.ir.graph import Op, Ref
from hetjax.ir.program import Fragment, Port, Program
from hetjax.passes.schedules import schedule_info

# Ops that cost less to run again than their result costs to keep from I until W.
CHEAP = frozenset({
    "add", "and", "broadcast_in_dim", "convert_element_type", "copy", "eq", "expand_dims", "ge", "gt",
    "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "reshape", "select_n", "sign",
    "squeeze", "stop_gradient", "sub", "transpose",
})


@dataclasses.dataclass(frozen=True)
class SplitBackward:
    """Splits backwards where the schedule runs them in two halves.

    Before: `s1/backward` gives a gradient to stage 0 and adds to the stage's weight gradients.
    After:  `s1/backward` gives the gradient, and what `s1/weights` needs of its values;
            `s1/weights` adds to the weight gradients, and runs whenever the schedule likes.

    Attributes:
      always: splits whatever the plan's schedule is.
    """

    name: ClassVar[str] = "split-backward"
    summary: ClassVar[str] = "cut the backward into input and weight gradients"

    always: bool = False

    def apply(self, bundle: Bundle) -> Bundle:
        program = bundle.program
        if program is None:
            raise PassError(self.name, "needs a program; run cut-stages first")
        kind = bundle.plan.schedule if bundle.plan else program.schedule
        wanted = self.always or (kind not in ("", "auto") and schedule_info(kind).split)
        if not wanted or program.num_microbatches == 1 or is_split(program):
            return bundle
        if bundle.plan is not None and bundle.plan.sums == "whole":
            raise PlanError(
                f"schedule {kind or 'asked for'} runs weight gradients apart from the backward, and with sums='whole' they "
                "all wait for the update; use another schedule, or sums=''"
            )
        split = split_backward(program)
        return bundle if split is program else bundle.replace(program=split)


def is_split(program: Program) -> bool:
    """Returns whether the program has backwards in two halves."""
    return any(f.phase == "weight" for f in program.fragments)


def split_backward(program: Program) -> Program:
    """Returns the program with every stage's backward in two fragments.

    An op goes to W when only accumulators read its result, directly or through other ops. On the first
    stage no gradient is passed on, so that all of its backward is W; I stays, without ops.

    Args:
      program: fragments without specs, reshards or tasks.
    """
    fragments: list[Fragment] = []
    for f in program.fragments:
        fragments += _halves(program, f) if f.phase == "backward" and not f.level else [f]
    return program.replace(fragments=tuple(fragments)) if len(fragments) > len(program.fragments) else program


def _halves(program: Program, fragment: Fragment) -> list[Fragment]:
    made: dict[Ref, int] = {r: i for i, op in enumerate(fragment.ops) for r in op.outputs}
    passed = [p for p in fragment.outputs if p.form != "sum"]
    first = _ancestors(fragment.ops, made, (p.ref for p in passed))
    kept = [p for p in fragment.outputs if p.form != "sum" or p.ref not in made or made[p.ref] in first]
    sums = tuple(p for p in fragment.outputs if p not in kept)
    if not sums:
        return [fragment]
    second = set(range(len(fragment.ops))) - first
    again, residuals = _residuals(program, fragment, made, first, second, {p.ref for p in passed})
    ops_i = tuple(op for i, op in enumerate(fragment.ops) if i in first)
    ops_w = tuple(op for i, op in enumerate(fragment.ops) if i in second | again)
    outputs_i = tuple(sorted(
        (*kept, *(Port(r, "micro", ()) for r in residuals if not any(p.ref == r and p.form == "micro" for p in kept))),
        key=lambda p: (p.ref, p.form)))
    inputs_w = tuple(sorted(
        (*_read(fragment, ops_w), *(Port(r, "micro", ()) for r in residuals)), key=lambda p: (p.ref, p.form)))
    return [
        dataclasses.replace(fragment, ops=ops_i, inputs=_read(fragment, ops_i, kept), outputs=outputs_i),
        Fragment(
            f"s{fragment.stage}/weights", fragment.stage, "weight", 0, ops_w, inputs_w, sums),
    ]


def _ancestors(ops: tuple[Op, ...], made: dict[Ref, int], refs) -> set[int]:
    """Returns the ops that the given values are made by, through any number of ops."""
    found: set[int] = set()
    stack = list(refs)
    while stack:
        i = made.get(stack.pop())
        if i is not None and i not in found:
            found.add(i)
            stack += ops[i].refs
    return found


def _residuals(
    program: Program, fragment: Fragment, made: dict[Ref, int], first: set[int], second: set[int],
    passed: set[Ref],
) -> tuple[set[int], list[Ref]]:
    """Returns which ops of I run again in W, and which values of I are kept for it."""
    again: set[int] = set()
    residuals: list[Ref] = []
    given = {p.ref for p in fragment.inputs}
    stack = [r for i in second for r in fragment.ops[i].refs]
    seen: set[Ref] = set()
    while stack:
        ref = stack.pop()
        i = made.get(ref)
        if ref in seen or i is None or i in second:
            continue
        seen.add(ref)
        op = fragment.ops[i]
        # Free of what other ops of I make, or of a value that is passed on anyway.
        at_hand = all(r in given or r in passed or r in residuals or made.get(r) in again for r in op.refs)
        if op.primitive in CHEAP and at_hand and ref not in passed:
            again.add(i)
            stack += op.refs
        else:
            residuals.append(ref)
    return again, sorted(residuals)


def _read(fragment: Fragment, ops: tuple[Op, ...], outputs=()) -> tuple[Port, ...]:
    refs = {r for op in ops for r in op.refs} | {p.ref for p in outputs}
    return tuple(p for p in fragment.inputs if p.ref in refs)
