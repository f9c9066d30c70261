"""What is known about splitting a step's batch: the type of every value, and the verdict.

A step traced at batch B and at B/M has the same ops and refs. For a value with full-batch value V
and per-microbatch values v_0 … v_{M-1} the type says how V is had from the v_m:

  R, p   replicated: every v_m equals V * M^p
  B, p   batch-sliced on `axis`: v_m equals slice_m(V) * M^p
  S, p   batch-sum: V equals M^-p * sum_m v_m
  Z      zero in both
  U      step-level: defined only once all microbatches have run, from the values at full batch
"""

from __future__ import annotations

import dataclasses

from hetjax.ir.graph import Graph, Ref


@dataclasses.dataclass(frozen=True, slots=True)
class BatchType:
    """How a value relates to its microbatches; see the module's text.

    Attributes:
      kind: "R", "B", "S", "Z" or "U".
      power: p above.
      axis: the batch axis, for kind "B".
    """

    kind: str
    power: int = 0
    axis: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a step may not be split.

    Attributes:
      reason: in words a Flax user understands.
      op: position of the op in `Graph.ops`, or None when the step cannot be traced at B/M.
      equation: its primitive.
      block: its module path.
      source: "file.py:41".
    """

    reason: str
    op: int | None = None
    equation: str = ""
    block: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Microbatching:
    """A step seen at one microbatch, with the proof that M of them equal the whole.

    Attributes:
      num_microbatches: M.
      graph: the step traced at B/M; ops and refs match those of the full graph one to one. The
        full graph itself where M is 1.
      types: one `BatchType` per ref; () before prove-microbatching has run.
      hoisted: refs of values that do not depend on parameters and are computed once, at full batch,
        and then sliced (kind B) or used whole (kind R).
      positions: refs that number the examples within a microbatch, from 0, for indexing into it. Of
        kind B, but no slices of the full value: they are never joined, and what runs at full batch
        reads them only where the full graph alone makes them.
      resliced: refs made once all microbatches have run forward, at full batch, by a loss head that couples
        examples; the backwards read slices of them (kind B) or all of it (kind R).
      refusal: None when proved (or accepted), else the first reason found.
      accepted: True when the user chose `per_microbatch` semantics over a refusal. Types then say how
        the microbatches' results are put together: S,1 is their average.
      chained: (input, output) refs of state that the forward renews from batch statistics, when
        accepted: each microbatch hands its output to the next as input, and the last one's is kept.
    """

    num_microbatches: int
    graph: Graph
    types: tuple[BatchType, ...]
    hoisted: frozenset[Ref] = frozenset()
    positions: frozenset[Ref] = frozenset()
    refusal: Refusal | None = None
    accepted: bool = False
    resliced: frozenset[Ref] = frozenset()
    chained: tuple[tuple[Ref, Ref], ...] = ()
