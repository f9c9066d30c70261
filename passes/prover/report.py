"""What a proof says, in numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import Microbatching
from hetjax.passes.prover.hoisting import handed_over

_NAMES = {
    "R": "the same in every microbatch", "B": "sliced along the batch", "S": "summed over microbatches",
    "Z": "zero", "U": "computed once, after the microbatches",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Summary:
    """A proof in numbers.

    Attributes:
      num_microbatches: M.
      proved: whether the numbers are shown to equal the whole batch's.
      reason: why not, or "".
      values: number of values by kind of `BatchType`.
      hoisted: number of values computed once at full batch and kept for the microbatches.
      hoisted_bytes: their bytes at full batch.
    """

    num_microbatches: int
    proved: bool
    reason: str
    values: dict[str, int]
    hoisted: int
    hoisted_bytes: int

    def __str__(self) -> str:
        verdict = "proved equal to the whole batch" if self.proved else f"refused: {self.reason}"
        kinds = ", ".join(f"{n} {_NAMES[k]}" for k, n in sorted(self.values.items()))
        return (
            f"{self.num_microbatches} microbatches: {verdict}. Values: {kinds}; {self.hoisted} "
            f"computed once at full batch ({self.hoisted_bytes:,} bytes)."
        )


def explain(microbatching: Microbatching, full: Graph) -> Summary:
    """Returns the numbers of a proof.

    Args:
      microbatching: what `prove` returned.
      full: the step at the whole batch.
    """
    refusal = microbatching.refusal
    kept = handed_over(full, microbatching.hoisted)
    return Summary(
        num_microbatches=microbatching.num_microbatches,
        proved=refusal is None,
        reason=refusal.reason if refusal else "",
        values=dict(Counter(t.kind for t in microbatching.types)),
        hoisted=len(kept),
        hoisted_bytes=sum(full.avals[r].nbytes for r in kept),
    )
