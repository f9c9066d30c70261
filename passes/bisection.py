"""Finds the first bad pass of a pipeline, and the first bad rewrite of that pass, by halving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.passes.manager import run_pipeline
from hetjax.passes.registry import Pass
from hetjax.passes.rewrites import limit_rewrites

# Says whether a bundle is good.
Check = Callable[[Bundle], bool]


@dataclasses.dataclass(frozen=True)
class Blame:
    """What a bisection found.

    Attributes:
      number: 1-based position of the bad pass.
      one: the pass.
      crashed: what it raised, when it raised; "" when it gave back something bad.
      rewrite: (position, name, where) of its first bad rewrite; None when it makes none, or is bad
        without any.
      num_rewrites: how many it makes in all.
      good, bad: the last good bundle, and the bad one; None when the pass crashed.
      checks: how often the check ran.
    """

    number: int
    one: Pass
    crashed: str
    rewrite: tuple[int, str, str] | None
    num_rewrites: int
    good: Bundle
    bad: Bundle | None
    checks: int


class _Run:
    """Prefixes of a pipeline, each run once."""

    def __init__(self, bundle: Bundle, passes: Sequence[Pass], check: Check):
        self.bundles, self.passes, self.check = [bundle], passes, check
        self.crashed: dict[int, str] = {}
        self.checks = 0

    def is_bad(self, bundle: Bundle) -> bool:
        self.checks += 1
        return not self.check(bundle)

    def prefix_is_bad(self, n: int) -> bool:
        """Runs the first n passes, going on from the longest prefix run so far."""
        while len(self.bundles) <= n:
            number = len(self.bundles)
            if number - 1 in self.crashed:
                return True
            try:
                self.bundles.append(
                    run_pipeline(self.bundles[-1], self.passes[number - 1 : number])
                )
            except Exception as error:
                self.crashed[number - 1] = f"{type(error).__name__}: {error}"
                return True
        return self.is_bad(self.bundles[n])


def _first_bad(good: int, bad: int, is_bad: Callable[[int], bool]) -> int:
    """Returns the first bad number above `good`, given that `bad` is bad."""
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_bad(middle):
            bad = middle
        else:
            good = middle
    return bad


def bisect(bundle: Bundle, passes: Sequence[Pass], check: Check) -> Blame | None:
    """Returns which pass and rewrite make a bundle bad; None when the result is good.

    Args:
      bundle: the input, good by the check.
      passes: the pipeline.
      check: says whether a bundle is good. A pass that raises is bad too.

    Raises:
      PassError: the input is bad already.
    """
    run = _Run(bundle, passes, check)
    if run.prefix_is_bad(0):
        raise PassError("bisect", "the input fails the check before any pass runs")
    if not run.prefix_is_bad(len(passes)):
        return None
    # A crash bounds the search: no prefix beyond it exists.
    bad = min(run.crashed, default=len(passes) - 1) + 1
    number = _first_bad(0, bad, run.prefix_is_bad)
    one, good = passes[number - 1], run.bundles[number - 1]
    result = run.bundles[number] if len(run.bundles) > number else None
    rewrite, count, good, result = _first_bad_rewrite(run, good, result, one)
    return Blame(
        number, one, run.crashed.get(number - 1, ""), rewrite, count, good, result, run.checks
    )


def _first_bad_rewrite(
    run: _Run, before: Bundle, after: Bundle | None, one: Pass
) -> tuple[tuple[int, str, str] | None, int, Bundle, Bundle | None]:
    results: dict[int, Bundle] = {}

    def limited(n: int | None) -> list[tuple[str, str]]:
        with limit_rewrites(n) as log:
            try:
                found = run_pipeline(before, [one])
                if n is not None:
                    results[n] = found
            except Exception:
                pass
        return log.names

    def is_bad(n: int) -> bool:
        limited(n)
        return n not in results or run.is_bad(results[n])

    names = limited(None)
    if not names or is_bad(0):
        return None, len(names), before, after
    n = _first_bad(0, len(names), is_bad)
    # The pass may ask for other rewrites once some are refused: what it asked for under this limit counts.
    asked = limited(n)
    name, where = asked[n - 1] if len(asked) >= n else names[n - 1]
    return (n, name, where), len(names), results[n - 1], results.get(n)
