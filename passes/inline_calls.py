"""inline-calls: replaces every op that only calls a jaxpr by that jaxpr's ops."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.graph import Op
from hetjax.ir.importer import inline_calls
from hetjax.passes.rewrites import rewrite


@dataclasses.dataclass(frozen=True)
class InlineCalls:
    """Inlines jit, closed_call, custom_jvp_call and custom_vjp_call.

    Before: `%9:f32[8] = jit %1 {jaxpr=…}`. After: the ops of the jaxpr, their name stacks prefixed by
    the call's. Scans, loops, branches and rematerialised regions stay regions.
    """

    name: ClassVar[str] = "inline-calls"
    summary: ClassVar[str] = "inline jitted and custom-derivative calls"

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            return bundle
        graph = inline_calls(bundle.graph, lambda op: rewrite(f"inline-{op.primitive}", _where(op)))
        return bundle if graph is bundle.graph else bundle.replace(graph=graph)


def _where(op: Op) -> str:
    result = f"%{op.outputs[0]}" if op.outputs else op.primitive
    return f"{result} ({op.param('name') or op.primitive})"
