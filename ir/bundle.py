"""What a pass takes and returns, and what a `.hj` file holds; parts may be absent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hetjax.ir.display import Shown

if TYPE_CHECKING:
    from hetjax.ir.cluster import Cluster
    from hetjax.ir.graph import Graph
    from hetjax.ir.microbatching import Microbatching
    from hetjax.ir.plan import Plan
    from hetjax.ir.program import Program


@dataclasses.dataclass(frozen=True)
class Bundle(Shown):
    """A program under way through the passes.

    Attributes:
      graph: the step at full batch.
      cluster: the devices described.
      plan: the decisions taken so far.
      microbatching: the step at one microbatch, and the proof.
      program: what runs.
      notes: what passes found out and `explain` tells, (topic, sentence) pairs in order.
    """

    graph: Graph | None = None
    cluster: Cluster | None = None
    plan: Plan | None = None
    microbatching: Microbatching | None = None
    program: Program | None = None
    notes: tuple[tuple[str, str], ...] = ()

    def replace(self, **changes: Any) -> Bundle:
        return dataclasses.replace(self, **changes)

    def note(self, topic: str, sentence: str) -> Bundle:
        """Returns the bundle with one more note."""
        return self.replace(notes=(*self.notes, (topic, sentence)))
