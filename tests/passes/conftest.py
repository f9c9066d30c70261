"""Traces small steps at two batch sizes, for the tests of the prover."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Step:
    """A function traced whole and at one microbatch, proved; `values` are its flat inputs."""

    full: Any
    proof: Any
    values: list[Any]

    @property
    def refusal(self):
        return self.proof.refusal

    def outputs(self) -> list[str]:
        """Returns each result's type as text: "R0", "B1@0", "S1", "U", "Z", "hoisted"."""
        return [self.type_of(r.atom) for r in self.full.outputs]

    def type_of(self, atom) -> str:
        if not isinstance(atom, int):
            return "literal"
        t = self.proof.types[atom]
        text = t.kind + (str(t.power) if t.kind in "RBS" else "") + (f"@{t.axis}" if t.kind == "B" else "")
        return f"{text} hoisted" if atom in self.proof.hoisted else text

    def execute(self):
        from hetjax.passes.prover.replay import execute

        return execute(self.full, self.proof, self.values)

    def disagreements(self, tolerance=1e-10):
        from hetjax.passes.prover.replay import replay

        return replay(self.full, self.proof, self.values, tolerance)


def trace_step(
    fn, *args, roles, num_microbatches=2, axis=0, labels=False, accept=False, change=None
) -> Step:
    """Traces `fn(*args)` with a role for each argument ("state", "batch", "input"); strict rules.

    `change` is a pass to run on the graphs first.
    """
    import jax
    import numpy as np

    from hetjax.ir.graph import Argument, Result
    from hetjax.ir.importer import import_jaxpr, inline_calls
    from hetjax.passes.label_blocks import label_blocks
    from hetjax.passes.label_regions import label_regions
    from hetjax.passes.prover import prove

    roles = roles.split()

    def graph(values):
        closed = jax.make_jaxpr(fn)(*values)
        arguments = []
        for k, (role, value) in enumerate(zip(roles, values, strict=True)):
            for path, _ in jax.tree_util.tree_leaves_with_path(value):
                name = f"{k}{jax.tree_util.keystr(path, simple=True, separator='/')}"
                arguments.append(Argument(0, name, role, axis if role == "batch" else None))
        out = inline_calls(import_jaxpr(closed, name="step", arguments=arguments, results=results(closed)))
        out = change(out) if change else out
        return label_blocks(label_regions(out)) if labels else out

    def results(closed):
        """Results that look like the first argument update it, leaf by leaf, as a train step's do."""
        state = jax.tree.leaves(args[0])
        avals = closed.out_avals
        same = len(avals) >= len(state) and all(
            np.shape(x) == a.shape and getattr(x, "dtype", None) == a.dtype for x, a in zip(state, avals)
        )
        updates = range(len(state)) if same and roles[0] == "state" else ()
        return [Result(0, str(k), k if k in updates else None) for k in range(len(avals))]

    def part(x):
        at = (slice(None),) * axis + (slice(0, x.shape[axis] // num_microbatches),)
        return x[at]

    full = graph(args)
    micro = graph([jax.tree.map(part, a) if r == "batch" else a for r, a in zip(roles, args)])
    proof = prove(full, micro, num_microbatches, accept=accept, strict=True)
    return Step(full, proof, jax.tree.leaves(args))


@pytest.fixture(scope="session")
def traced():
    """The function `trace_step`."""
    return trace_step
