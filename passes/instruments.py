"""Instruments that look on while passes run: verify, print, show differences, time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection

from hetjax.ir.bundle import Bundle
from hetjax.ir.text import print_bundle
from hetjax.passes.diffing import diff, render
from hetjax.passes.manager import Instrument, Step, record_phases
from hetjax.passes.registry import Pass

Write = Callable[[str], None]
# The parts of a bundle that print, as `Print` and the statistics name them.
PARTS = ("graph", "cluster", "plan", "microbatching", "program", "notes")


def changed_parts(before: Bundle, after: Bundle) -> tuple[str, ...]:
    """Returns the names of the parts that are other objects, and unequal."""
    return tuple(
        p
        for p in PARTS
        if getattr(before, p) is not getattr(after, p) and getattr(before, p) != getattr(after, p)
    )


def only(bundle: Bundle, parts: Collection[str]) -> Bundle:
    """Returns a bundle of some parts."""
    return Bundle(**{p: getattr(bundle, p) for p in PARTS if p in parts})


class VerifyEach(Instrument):
    """Verifies the input, and the bundle after each pass that changed it.

    Args:
      when: "each", or "end" for the result alone.
    """

    def __init__(self, when: str = "each"):
        self.when = when
        self.last: Bundle | None = None

    def begin(self, bundle: Bundle, passes: tuple[Pass, ...]) -> None:
        self.check(bundle, "in the input, before any pass")

    def after(self, step: Step, before: Bundle, after: Bundle) -> None:
        if self.when == "each":
            self.check(
                after, f"after pass '{step.name}', which had a valid input: a fault of that pass"
            )

    def finish(self, bundle: Bundle) -> None:
        self.check(bundle, "in the result")

    def check(self, bundle: Bundle, where: str) -> None:
        from hetjax.ir.errors import VerifyError
        from hetjax.ir.verify import verify_bundle

        if bundle is self.last:
            return
        try:
            verify_bundle(bundle)
        except VerifyError as error:
            error.add_note(f"found {where}")
            raise
        self.last = bundle


class Print(Instrument):
    """Prints the bundle after passes.

    Args:
      which: "changed" (after passes that changed something, and only the parts that changed), "all",
        or the names of passes.
      write: gets each text.
      before: print the input of these passes too.
    """

    def __init__(self, which: str | Collection[str], write: Write, *, before: bool = False):
        self.which, self.write, self.with_input = which, write, before

    def wanted(self, step: Step) -> bool:
        return self.which in ("all", "changed") or step.name in self.which

    def before(self, step: Step, bundle: Bundle) -> None:
        if self.with_input and self.wanted(step):
            self.show(f"before {_where(step)}", bundle)

    def after(self, step: Step, before: Bundle, after: Bundle) -> None:
        if not self.wanted(step):
            return
        if self.which != "changed":
            self.show(f"after {_where(step)}", after)
            return
        parts = changed_parts(before, after)
        if parts:
            self.show(f"after {_where(step)}, which changed {', '.join(parts)}", only(after, parts))

    def show(self, title: str, bundle: Bundle) -> None:
        self.write(f"// ----- {title} -----\n{print_bundle(bundle, scopes=False, nones=False)}")


def _where(step: Step) -> str:
    return f"{step.text} ({step.number} of {len(step.passes)})"


class Diff(Instrument):
    """Writes what each pass changed, op by op.

    Args:
      write: gets each text.
      side: two columns.
      colour: ANSI colours.
      width: of both columns.
    """

    def __init__(self, write: Write, *, side: bool = False, colour: bool = False, width: int = 160):
        self.write, self.side, self.colour, self.width = write, side, colour, width

    def after(self, step: Step, before: Bundle, after: Bundle) -> None:
        parts = changed_parts(before, after)
        if not parts:
            self.write(f"// ----- {_where(step)}: nothing changed -----")
            return
        # A part that was not there before differs from nothing: its size is said, not its every line.
        new = [p for p in parts if not getattr(before, p)]
        texts = [
            print_bundle(only(b, set(parts) - set(new)), scopes=False, nones=False)
            for b in (before, after)
        ]
        lines = diff(*texts)
        body = render(lines, side=self.side, colour=self.colour, width=self.width)
        for p in new:
            count = len(print_bundle(only(after, (p,)), nones=False).splitlines()) - 1
            body += f"\n+ {p}: {count} lines, new; --print={step.name} shows them"
        self.write(f"// ----- {_where(step)} changed {', '.join(parts)} -----\n{body}")


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long one pass took, and what it did.

    Attributes:
      number, text: the pass.
      seconds: of wall time, without the instruments.
      phases: (depth, name, seconds) of its parts.
      changed: the parts it changed.
      ops_before, ops_after: ops of graph and fragments together.
      bytes_between: bytes the program's reshards carry per step, after.
    """

    number: int
    text: str
    seconds: float
    phases: tuple[tuple[int, str, float], ...]
    changed: tuple[str, ...]
    ops_before: int
    ops_after: int
    bytes_between: int


class Time(Instrument):
    """Times passes; `timings` holds the result. Put it last, so that no other instrument is timed."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []
        self._recording = record_phases()
        self._phases: list[tuple[int, str, float]] = []
        self._start = 0.0

    def before(self, step: Step, bundle: Bundle) -> None:
        self._recording = record_phases()
        self._phases = self._recording.__enter__()
        self._start = time.perf_counter()

    def after(self, step: Step, before: Bundle, after: Bundle) -> None:
        seconds = time.perf_counter() - self._start
        self._recording.__exit__(None, None, None)
        self.timings.append(
            Timing(
                step.number,
                step.text,
                seconds,
                tuple(self._phases),
                changed_parts(before, after),
                count_ops(before),
                count_ops(after),
                bytes_between(after),
            )
        )

    def tree(self) -> str:
        """Returns a table of passes with their parts below them."""
        total = sum(t.seconds for t in self.timings) or 1e-12
        rows = [f"{'seconds':>9}  {'share':>6}  pass"]
        for t in self.timings:
            rows.append(f"{t.seconds:9.4f}  {t.seconds / total:6.1%}  {t.text}")
            rows.extend(
                f"{s:9.4f}  {s / total:6.1%}    {'  ' * depth}{name}" for depth, name, s in t.phases
            )
        return "\n".join([*rows, f"{total:9.4f}          in all"])

    def statistics(self) -> str:
        """Returns a table of what each pass did."""
        rows = [
            f"{'ops before':>10}  {'after':>8}  {'bytes between stages':>20}  {'changed':28}  pass"
        ]
        rows.extend(
            f"{t.ops_before:10d}  {t.ops_after:8d}  {t.bytes_between:20d}  {', '.join(t.changed) or '-':28}  {t.text}"
            for t in self.timings
        )
        return "\n".join(rows)

    def as_dict(self) -> list[dict[str, object]]:
        """Returns the timings as JSON holds them."""
        return [dataclasses.asdict(t) for t in self.timings]


def count_ops(bundle: Bundle) -> int:
    """Returns the ops of the graph and of the program's fragments."""
    graph = len(bundle.graph.ops) if bundle.graph is not None else 0
    program = sum(len(f.ops) for f in bundle.program.fragments) if bundle.program is not None else 0
    return graph + program


def bytes_between(bundle: Bundle) -> int:
    """Returns the bytes that reshards carry in one step."""
    if bundle.program is None:
        return 0
    times = bundle.program.num_microbatches
    return sum(r.nbytes * (times if r.form == "micro" else 1) for r in bundle.program.reshards)
