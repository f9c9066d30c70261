"""prove-microbatching: shows that the microbatches add up to the whole batch, or names what stops it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.microbatching import Microbatching
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.prover import prove


@dataclasses.dataclass(frozen=True)
class ProveMicrobatching:
    """Types every value of a step that was traced at two batch sizes.

    Before: a microbatching that holds the step traced at one microbatch, no types.
    After:  every value typed, what must be computed at full batch hoisted, or a refusal kept.
    A bundle without a second trace gets one microbatch, which needs no proof.

    Attributes:
      accept: whether what cannot be proved runs with its meaning per microbatch.
    """

    name: ClassVar[str] = "prove-microbatching"
    summary: ClassVar[str] = "prove that microbatches add up to the whole batch"
    requires: ClassVar[tuple[str, ...]] = ("graph.regions",)

    accept: bool = False

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            raise PassError(self.name, "needs a graph")
        untyped = bundle.microbatching
        if untyped is None:
            return bundle.replace(microbatching=one_microbatch(bundle.graph))
        if untyped.types:
            return bundle
        return bundle.replace(
            microbatching=_proved(bundle, untyped, accept=self.accept)
        )


def _proved(bundle: Bundle, untyped: Microbatching, *, accept: bool) -> Microbatching:
    if bundle.graph is None:
        raise PassError("prove-microbatching", "needs a graph")
    micro = prove(bundle.graph, untyped.graph, untyped.num_microbatches)
    if micro.refusal is None or not accept:
        return micro
    return prove(bundle.graph, untyped.graph, untyped.num_microbatches, accept=True)
