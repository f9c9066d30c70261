"""Proves that microbatches add up to the whole batch, or names the op that stops them."""

from hetjax.passes.prover.analysis import prove
from hetjax.passes.prover.report import Summary, explain

__all__ = ["Summary", "explain", "prove"]
