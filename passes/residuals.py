"""What a stage's forward keeps for its backward: the residuals, and their bytes."""

from __future__ import annotations

from hetjax.ir.graph import Ref
from hetjax.ir.program import Program


def residual_refs(program: Program) -> dict[int, tuple[Ref, ...]]:
    """Returns, by stage, the values that its forward makes and its own backward reads."""
    made: dict[int, set[Ref]] = {}
    read: dict[int, set[Ref]] = {}
    for f in program.fragments:
        if f.phase == "forward":
            made.setdefault(f.stage, set()).update(p.ref for p in f.outputs)
        elif f.phase in ("backward", "weight"):
            read.setdefault(f.stage, set()).update(p.ref for p in f.inputs)
    return {m: tuple(sorted(made.get(m, set()) & read.get(m, set()))) for m in range(len(program.meshes))}


def residual_bytes(program: Program) -> dict[int, int]:
    """Returns, by stage, the bytes of its residuals for one microbatch, over all devices of the stage."""
    return {
        stage: sum(program.micro_avals[r].nbytes for r in refs)
        for stage, refs in residual_refs(program).items()
    }
