"""All rules: importing this module fills `batch_types.RULES`."""

import hetjax.passes.prover.contractions
import hetjax.passes.prover.control
import hetjax.passes.prover.elementwise
import hetjax.passes.prover.indexing
import hetjax.passes.prover.randomness
import hetjax.passes.prover.reductions
import hetjax.passes.prover.shapes  # noqa: F401
