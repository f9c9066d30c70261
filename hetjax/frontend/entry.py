"""One plan, compiled: everything that belongs to one batch shape of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetjax.frontend.calls import Returned, Structure
from hetjax.frontend.stacked import Stack
from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Argument, Aval, Graph, Literal
from hetjax.ir.pieces import leaf_aval, leaves_of
from hetjax.ir.program import Program
from hetjax.runtime.compiler import CompiledFragment, compile_program
from hetjax.runtime.executable_store import open_store
from hetjax.runtime.executor import Emulation, Executor
from hetjax.runtime.feeding import Feeder
from hetjax.runtime.meshes import jax_mesh, named_sharding
from hetjax.runtime.start_cache import write_start

# Topics of a bundle's notes that say where its plan comes from.
_PLAN_FROM = (("plan kept", "cache"), ("plan searched", "search"))


class Entry:
    """A lowered call; compiled when it first runs.

    Args:
      bundle: with a complete program.
      structure: of the call.
      returned: the shape of its value.
      start: the file to keep the start in, once compiled; None to keep none.
    """

    def __init__(
        self, bundle: Bundle, structure: Structure, returned: Returned, start: Path | None = None
    ):
        if bundle.program is None or bundle.graph is None or bundle.plan is None:
            raise PlanError("the bundle holds no complete program")
        self.bundle, self.structure, self.returned, self._start = bundle, structure, returned, start
        self.program: Program = bundle.program
        self.graph: Graph = bundle.graph
        self.plan = bundle.plan
        # The user's leaves; some are kept in pieces, on several stages.
        self.leaves = leaves_of(self.graph.inputs)
        self._result_leaves = leaves_of(self.graph.outputs)
        self._stacks: dict[int, Stack] = {}
        self.executor: Executor | None = None
        self._feeder: Feeder | None = None
        self._devices: tuple[Any, ...] = ()
        self._fragments: Mapping[str, CompiledFragment] = {}
        self._meshes: Sequence[Any] = ()

    def compile(
        self, devices: Sequence[Any], progress: Callable[[str, int, int], None] | None = None,
        emulate: Callable[[Program], Emulation] | None = None,
    ) -> None:
        """Compiles the program for devices, once.

        Args:
          devices: one jax device per cluster device.
          progress: told of each fragment compiled.
          emulate: says what work and transfers take on devices that are not there; None lets the
            devices take their own time.

        Raises:
          LoweringError: a fragment cannot be lowered or compiled.
        """
        if self.executor is None:
            fragments, meshes = compile_program(self.program, devices, progress, open_store(devices))
            if self._start is not None and all(f.kept for f in fragments.values()):
                write_start(self._start, self.bundle)
            self._install(fragments, meshes, devices, emulate(self.program) if emulate else None)

    def adopt(self, other: Entry, *, threads: bool = False, emulation: Emulation | None = None) -> None:
        """Runs what another entry has compiled: the same fragments, with this program's task lists."""
        self._install(other._fragments, other._meshes, other._devices, emulation, threads)

    def _install(
        self, fragments: Mapping[str, CompiledFragment], meshes: Sequence[Any], devices: Sequence[Any],
        emulation: Emulation | None = None, threads: bool = False,
    ) -> None:
        self._fragments, self._meshes, self._devices = fragments, meshes, tuple(devices)
        cap = any(d.platform == "cpu" for d in devices)
        self.executor = Executor(self.program, fragments, meshes, cap, threads, emulation)
        self._feeder = Feeder(self.graph, self.program, self.executor)
        self._loose = self._loose_results()
        self._find_stacks()

    def _loose_results(self) -> list[int]:
        """Returns the results to bring to one device: not state, when stages are several."""
        if len(self.program.meshes) == 1:
            return []
        return [
            r.result for r in self.program.returns
            if r.stage is not None and self.graph.outputs[r.result].updates is None
        ]

    def run(self, leaves: Sequence[Any], watched: bool = False) -> list[Any]:
        """Returns one array per output leaf.

        Args:
          leaves: one per input leaf.
          watched: whether to wait for every task and keep its time.

        Raises:
          RuntimeFault: a stage failed.
        """
        import jax

        executor, feeder = self.executor, self._feeder
        if executor is None or feeder is None:
            raise PlanError("the entry was not compiled")
        leaves = self._taken_apart(leaves)
        placed, feeds = feeder.feed(leaves)
        results = executor.run(feeds, watched)
        executor.counters.bytes_between_stages += feeder.bytes_between_stages
        executor.counters.transfers += feeder.transfers
        for ret in self.program.returns:
            if ret.stage is None:
                results[ret.result] = self._handed_back(ret.result, leaves, placed)
        if self._loose:
            device = self._devices[self.program.meshes[0].devices[0]]
            moved = jax.device_put([results[k] for k in self._loose], device)
            for k, array in zip(self._loose, moved):
                results[k] = array
        return self._put_together(results)

    # -- leaves in pieces --------------------------------------------------------------------------

    def _taken_apart(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if not self._stacks:
            return leaves
        out: list[Any] = []
        for k, leaf in enumerate(leaves):
            stack = self._stacks.get(k)
            out += [leaf] if stack is None else stack.pieces(leaf)
        return out

    def _put_together(self, results: list[Any]) -> list[Any]:
        if not self._stacks:
            return results
        by_input = {self.leaves[k].positions[0]: stack for k, stack in self._stacks.items()}
        out = []
        for leaf in self._result_leaves:
            if not leaf.edges:
                out.append(results[leaf.positions[0]])
                continue
            first = self.graph.outputs[leaf.positions[0]].updates
            out.append(by_input[first].whole([results[p] for p in leaf.positions]))  # type: ignore[index]
        return out

    def _find_stacks(self) -> None:
        homes = self.homes()
        for k, leaf in enumerate(self.leaves):
            if leaf.edges:
                where = [homes.get(p, (0, ())) for p in leaf.positions]
                self._stacks[k] = Stack(leaf.edges, [named_sharding(self._meshes[s], spec) for s, spec in where])

    def _handed_back(self, k: int, leaves: Sequence[Any], placed: dict[int, Any]) -> Any:
        """Returns an output that no fragment makes: a literal, an input, a captured array."""
        import jax.numpy as jnp

        atom = self.graph.outputs[k].atom
        if isinstance(atom, Literal):
            value = jnp.asarray(atom.value, self._literal_dtype(atom))
            return _jax.with_weak_type(value, atom.aval.weak_type)
        if atom in self.graph.consts:
            return jnp.asarray(self.graph.consts[atom])
        if atom in placed:
            return placed[atom]
        return jnp.asarray(leaves[atom])

    @staticmethod
    def _literal_dtype(atom: Literal) -> Any:
        from hetjax.ir.exporter import numpy_dtype

        return numpy_dtype(atom.aval.dtype)

    @property
    def plan_from(self) -> str:
        """Returns where the plan comes from: "search", "cache" of an earlier one, or "request": as asked for."""
        topics = {topic for topic, _ in self.bundle.notes}
        return next((word for topic, word in _PLAN_FROM if topic in topics), "request")

    # -- placement of the state --------------------------------------------------------------------

    def homes(self) -> dict[int, tuple[int, Any]]:
        """Returns, per input leaf, (stage, spec) where it lives between steps."""
        out: dict[int, tuple[int, Any]] = {}
        for result, ret in zip(self.program.results, self.program.returns):
            if result.updates is not None and ret.stage is not None and ret.port is not None:
                out[result.updates] = (ret.stage, ret.port.spec)
        for feed in self.program.feeds:
            if feed.form == "step":
                out.setdefault(feed.argument, (feed.stage, feed.spec))
        return out

    def shardings(self, devices: Sequence[Any]) -> list[Any]:
        """Returns the sharding of every input leaf at its home, replicated on stage 0 where it has none."""
        meshes = [jax_mesh(m, devices) for m in self.program.meshes]
        homes = self.homes()
        out = []
        for leaf in self.leaves[: self.structure.num_leaves]:
            where = [homes.get(p, (0, ())) for p in leaf.positions]
            found = [named_sharding(meshes[stage], spec) for stage, spec in where]
            out.append(Stack(leaf.edges, found).sharding if leaf.edges else found[0])
        return out

    def arguments(self) -> list[tuple[Argument, Aval]]:
        """Returns every input leaf of the user's, whole: path and role, type."""
        out = []
        for leaf in self.leaves[: self.structure.num_leaves]:
            argument = dataclasses.replace(self.graph.inputs[leaf.positions[0]], path=leaf.path)
            out.append((argument, leaf_aval(self.graph, leaf)))
        return out
