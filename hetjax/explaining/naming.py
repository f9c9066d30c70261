"""Values by the user's names: paths of inputs and outputs, else op, module and source line."""

from __future__ import annotations

import dataclasses

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Graph, Op, Ref
from hetjax.ir.suggest import nearest


@dataclasses.dataclass(frozen=True)
class Names:
    """What a step's values are called.

    Attributes:
      graph: the step.
    """

    graph: Graph

    def maker(self, ref: Ref) -> Op | None:
        """Returns the op that makes a value, None for an input."""
        return next((op for op in self.graph.ops if ref in op.outputs), None)

    def of(self, ref: Ref) -> str:
        """Returns an input's or output's path, else "%12 (dot_general in MLP/Dense_1)"."""
        for a in self.graph.inputs:
            if a.ref == ref:
                return a.path
        for r in self.graph.outputs:
            if r.atom == ref:
                return r.path
        op = self.maker(ref)
        if op is None:
            return f"%{ref}"
        return f"%{ref} ({op.primitive}{f' in {op.block}' if op.block else ''})"

    def source(self, ref: Ref) -> str:
        """Returns the user's line that makes a value, "" for inputs and where JAX does not say."""
        op = self.maker(ref)
        return op.source if op is not None else ""

    def find(self, name: str) -> Ref:
        """Returns the value a user names: "%12", or the path of an input or output.

        Raises:
          PlanError: there is no such value; says the nearest.
        """
        if name.startswith("%") and name[1:].isdecimal():
            if int(name[1:]) < len(self.graph.avals):
                return int(name[1:])
            raise PlanError(
                f"there is no value {name}; values go up to %{len(self.graph.avals) - 1}"
            )
        paths: dict[str, Ref] = {
            r.path: r.atom for r in self.graph.outputs if isinstance(r.atom, int)
        }
        paths |= {a.path: a.ref for a in self.graph.inputs}
        if name in paths:
            return paths[name]
        ending = [p for p in paths if p.endswith("/" + name)]
        if len(ending) == 1:
            return paths[ending[0]]
        if ending:
            raise PlanError(f"{name!r} is the end of {len(ending)} paths: {', '.join(ending[:6])}")
        raise PlanError(
            f"there is no value {name!r}{nearest(name, paths)}; %NUMBER names any value, s0 a stage"
        )


def names_of(bundle: Bundle) -> Names:
    """Returns the names of a bundle's graph.

    Raises:
      PlanError: the bundle has no graph.
    """
    if bundle.graph is None:
        raise PlanError("a plan alone names no values; give FILE.py:build or step.hj")
    return Names(bundle.graph)
