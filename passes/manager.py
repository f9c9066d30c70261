"""Runs passes in order, with instruments that look on: one manager for decorator, command and notebook."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.passes.facts import FACTS, missing
from hetjax.passes.pipeline_text import pass_text, resolve
from hetjax.passes.registry import Pass


@dataclasses.dataclass(frozen=True)
class Step:
    """One pass in its pipeline.

    Attributes:
      number: 1-based position.
      passes: the whole pipeline.
    """

    number: int
    passes: tuple[Pass, ...]

    @property
    def one(self) -> Pass:
        """The pass that runs in this step."""
        return self.passes[self.number - 1]

    @property
    def name(self) -> str:
        return self.one.name

    @property
    def text(self) -> str:
        """The pipeline string of this pass alone."""
        return pass_text(self.one)


class Instrument:
    """Looks on while a pipeline runs; subclasses override what they need."""

    def begin(self, bundle: Bundle, passes: tuple[Pass, ...]) -> None:
        """Called once, with the input."""

    def before(self, step: Step, bundle: Bundle) -> None:
        """Called before a pass, with what it will get."""

    def after(self, step: Step, before: Bundle, after: Bundle) -> None:
        """Called after a pass; `before is after` when it changed nothing."""

    def failed(self, step: Step, bundle: Bundle, error: BaseException) -> None:
        """Called when a pass, or the check after it, raised; with what the pass got."""

    def finish(self, bundle: Bundle) -> None:
        """Called once, with the result."""


# Times of the phases inside the pass that is running: (depth, name, seconds), in order of their start.
_PHASES: contextvars.ContextVar[list[tuple[int, str, float]] | None] = contextvars.ContextVar(
    "hetjax_phases", default=None
)
_DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("hetjax_phase_depth", default=0)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Times a part of a pass under `name`; costs next to nothing when nobody measures."""
    phases = _PHASES.get()
    if phases is None:
        yield
        return
    depth = _DEPTH.get()
    position = len(phases)
    phases.append((depth, name, 0.0))
    token = _DEPTH.set(depth + 1)
    start = time.perf_counter()
    try:
        yield
    finally:
        _DEPTH.reset(token)
        phases[position] = (depth, name, time.perf_counter() - start)


@contextlib.contextmanager
def record_phases() -> Iterator[list[tuple[int, str, float]]]:
    """Yields the list that `phase` writes to meanwhile."""
    phases: list[tuple[int, str, float]] = []
    token = _PHASES.set(phases)
    try:
        yield phases
    finally:
        _PHASES.reset(token)


_AMBIENT: contextvars.ContextVar[tuple[Instrument, ...]] = contextvars.ContextVar(
    "hetjax_instruments", default=()
)


@contextlib.contextmanager
def ambient(instruments: Sequence[Instrument]) -> Iterator[None]:
    """Adds instruments to every pipeline run meanwhile, however deep in the call."""
    token = _AMBIENT.set((*_AMBIENT.get(), *instruments))
    try:
        yield
    finally:
        _AMBIENT.reset(token)


def run_pipeline(
    bundle: Bundle, passes: str | Sequence[Pass], instruments: Sequence[Instrument] = ()
) -> Bundle:
    """Returns what the passes make of the bundle.

    Args:
      bundle: the input; it must be valid.
      passes: a pipeline string, or passes.
      instruments: told before and after each pass, in order (after: in reverse order); those of
        `ambient` come after them.

    Raises:
      ParseError: the pipeline string is wrong.
      PassError: a pass requires what the bundle does not have, or gave back no bundle.
      Exception: whatever a pass raised, with a note that names the pass and its position.
    """
    passes = resolve(passes)
    instruments = (*instruments, *_AMBIENT.get())
    for i in instruments:
        i.begin(bundle, passes)
    for number in range(1, len(passes) + 1):
        bundle = _run_one(Step(number, passes), bundle, instruments)
    for i in instruments:
        i.finish(bundle)
    return bundle


def _run_one(step: Step, bundle: Bundle, instruments: Sequence[Instrument]) -> Bundle:
    for i in instruments:
        i.before(step, bundle)
    try:
        _check_requirements(step.one, bundle)
        result = step.one.apply(bundle)
        if not isinstance(result, Bundle):
            raise PassError(step.name, f"apply() must return a Bundle, not {type(result).__name__}")
        for i in reversed(instruments):
            i.after(step, bundle, result)
    except Exception as error:
        error.add_note(f"in pass {step.number} of {len(step.passes)}: {step.text}")
        for i in instruments:
            i.failed(step, bundle, error)
        raise
    return result


def _check_requirements(p: Pass, bundle: Bundle) -> None:
    requires: Any = getattr(p, "requires", ())
    unknown = [name for name in requires if name not in FACTS]
    if unknown:
        raise PassError(p.name, f"requires unknown facts {unknown}; known: {', '.join(FACTS)}")
    if problems := missing(requires, bundle):
        raise PassError(p.name, "; ".join(problems))
