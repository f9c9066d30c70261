"""A program in Shardy's MPMD dialect: a topology, fragments as functions, calls and transfers in order.

The task lists are written out: one call per task, in the order the one-process runtime runs them. A
batch leaf that is fed per microbatch enters as one argument per microbatch. Functions hold StableHLO;
shardings stand in the types of what passes between them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hetjax.emit.stablehlo import struct_of
from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import LoweringError
from hetjax.ir.program import Program, Spec, StageMesh, Task
from hetjax.ir.rebuild import rebuild_program
from hetjax.runtime.executor import merge_tasks
from hetjax.runtime.fragment_function import FragmentFunction, Slot, fragment_function

_Key = tuple[int, int, str | int | None]  # stage, ref, form or microbatch


def emit_mpmd(bundle: Bundle) -> str:
    """Returns the program as an MPMD module, parsed and verified by jaxlib.

    Raises:
      LoweringError: the bundle has no program with task lists, or jaxlib refuses the module.
    """
    if bundle.program is None or not any(bundle.program.tasks):
        raise LoweringError("there is no program with task lists to write as MPMD; run -p default")
    text = _Writer(rebuild_program(bundle.program)).module()
    try:
        return str(_jax.parse_module(text))
    except ValueError as error:
        raise LoweringError(f"jaxlib refuses the MPMD module: {error}") from error


def symbol(name: str) -> str:
    """Returns a name as an MLIR symbol."""
    return f"@{name}" if re.fullmatch(r"[A-Za-z_][\w.$]*", name) else f"@{json.dumps(name)}"


class _Writer:
    def __init__(self, program: Program):
        self.program = program
        self.functions: dict[str, FragmentFunction] = {
            f.name: fragment_function(program, f) for f in program.fragments
        }
        self.bodies: list[str] = []
        self.signatures: dict[str, tuple[list[str], list[str]]] = {}
        self.values: dict[_Key, tuple[str, str]] = {}  # SSA name and type
        self.lines: list[str] = []
        self.arguments: list[tuple[str, str]] = []
        self.count = 0

    # -- parts

    def module(self) -> str:
        for f in self.program.fragments:
            self.lower(
                f.name,
                self.functions[f.name].call,
                [a for _, a, _ in self.functions[f.name].inputs],
                f.stage,
            )
        self.feed()
        started: set[str] = set()
        for task in merge_tasks(self.program):
            if task.kind == "send":
                self.transfer(task)
            elif task.kind not in ("recv", "sync"):
                if task.work not in started:
                    started.add(task.work)
                    self.zeros(task)
                self.call(task)
        results = [
            self.values[r.stage, r.port.ref, "step"]
            for r in self.program.returns
            if r.stage is not None and r.port is not None
        ]
        topology = ", ".join(
            f"<{json.dumps(m.name)}: {_mesh_text(m)}>" for m in self.program.meshes
        )
        arguments = ", ".join(f"{name}: {kind}" for name, kind in self.arguments)
        kinds = ", ".join(kind for _, kind in results)
        ending = f"return {', '.join(n for n, _ in results)} : {kinds}" if results else "return"
        return "\n".join(
            [
                "module {",
                f"func.func public {symbol(self.program.name)}({arguments}) -> ({kinds})",
                f"    attributes {{topology = #mpmd.topology<{topology}>}} {{",
                *(f"  {line}" for line in self.lines),
                f"  {ending}",
                "}",
                *self.bodies,
                "}",
            ]
        )

    def lower(self, name: str, call: Any, avals: list[Any], stage: int) -> None:
        """Adds a function; its entry is called like the fragment."""
        module = _jax.lower_to_module(call, [struct_of(a) for a in avals])
        attributes = {"mesh_shape": f"#sdy.mesh<{_axes_text(self.program.meshes[stage])}>"}
        body, inputs, outputs = _jax.rename_functions(module, name, attributes)
        self.bodies.append(body)
        self.signatures[name] = (inputs, outputs)

    def mesh_type(self, stage: int, tensor: str, spec: Spec) -> str:
        mesh = self.program.meshes[stage]
        rank = tensor[len("tensor<") :].rstrip(">").count("x")
        sharding = ""
        if any(spec) and len(spec) == rank:
            dims = ", ".join("{" + ", ".join(json.dumps(a) for a in axes) + "}" for axes in spec)
            sharding = f", sharding=<{symbol(mesh.name)}, [{dims}]>"
        return f"!mpmd.mesh_tensor<{json.dumps(mesh.name)}, {tensor}{sharding}>"

    def new_name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    # -- what happens

    def feed(self) -> None:
        """Makes the arguments: one per feed, or per feed and microbatch."""
        wanted: dict[_Key, str] = {}
        for f in self.program.fragments:
            for ((ref, form), _, _), tensor in zip(
                self.functions[f.name].inputs, self.signatures[f.name][0]
            ):
                wanted.setdefault((f.stage, ref, form), tensor)
        for k, feed in enumerate(self.program.feeds):
            micro = feed.form == "micro"
            tensor = wanted.get((feed.stage, feed.argument, "each" if micro else "step"))
            if tensor is None:
                continue
            kind = self.mesh_type(feed.stage, tensor, feed.spec)
            forms: list[str | int] = (
                list(range(self.program.num_microbatches)) if micro else ["step"]
            )
            for form in forms:
                name = f"%arg{k}" if form == "step" else f"%arg{k}_{form}"
                self.arguments.append((name, kind))
                self.values[feed.stage, feed.argument, form] = (name, kind)

    def zeros(self, task: Task) -> None:
        """Makes a fragment's accumulators before its first microbatch."""
        function = self.functions[task.work]
        if not function.accumulators:
            return
        import jax.numpy as jnp

        structs = [struct_of(aval) for _, aval, _ in function.accumulators]
        name = f"{task.work}.zeros"
        self.lower(name, lambda: [jnp.zeros(s.shape, s.dtype) for s in structs], [], task.stage)
        self.emit_call(name, task, [], [(slot, spec) for slot, _, spec in function.accumulators])

    def call(self, task: Task) -> None:
        function = self.functions[task.work]
        inputs = [slot for slot, _, _ in function.inputs]
        self.emit_call(
            task.work, task, inputs, [(slot, spec) for slot, _, spec in function.outputs]
        )

    def emit_call(
        self, name: str, task: Task, inputs: list[Slot], outputs: list[tuple[Slot, Spec]]
    ) -> None:
        key = lambda slot: (task.stage, slot[0], task.microbatch if slot[1] == "each" else slot[1])  # noqa: E731
        operands = [self.values[key(slot)] for slot in inputs]
        kinds = [
            self.mesh_type(task.stage, tensor, spec)
            for tensor, (_, spec) in zip(self.signatures[name][1], outputs)
        ]
        result = self.new_name()
        mesh = json.dumps(self.program.meshes[task.stage].name)
        counter = "" if task.microbatch is None else f" {{call_counter = {task.microbatch} : ui32}}"
        left = f"{result}{f':{len(kinds)}' if len(kinds) > 1 else ''} = " if kinds else ""
        self.lines.append(
            f"{left}mpmd.fragment_call<mesh={mesh}, origin=[{json.dumps(task.work)}]> {symbol(name)}"
            f"({', '.join(n for n, _ in operands)}){counter} : "
            f"({', '.join(k for _, k in operands)}) -> {kinds[0] if len(kinds) == 1 else f'({chr(44).join(kinds)})'}"
        )
        for i, ((slot, _), kind) in enumerate(zip(outputs, kinds)):
            self.values[key(slot)] = (f"{result}#{i}" if len(kinds) > 1 else result, kind)

    def transfer(self, task: Task) -> None:
        reshard = next(r for r in self.program.reshards if r.name == task.work)
        form: str | int = "step"
        if reshard.form == "sum":
            form = "sum"
        elif reshard.form == "last" and self.program.num_microbatches > 1:
            form = self.program.num_microbatches - 1
        elif task.microbatch is not None:
            form = task.microbatch
        name, kind = self.values[reshard.source, reshard.ref, form]
        tensor = re.search(r"tensor<[^>]*>", kind[len("!mpmd.mesh_tensor") :])
        if tensor is None:
            raise LoweringError(f"the type {kind} holds no tensor")
        target = self.mesh_type(reshard.target, tensor[0], reshard.target_spec)
        result = self.new_name()
        self.lines.append(f"{result} = mpmd.transfer {name} : ({kind}) -> {target}")
        self.values[reshard.target, reshard.ref, form] = (result, target)


def _axes_text(mesh: StageMesh) -> str:
    return "[" + ", ".join(f"{json.dumps(a)}={n}" for a, n in mesh.axes) + "]"


def _mesh_text(mesh: StageMesh) -> str:
    return f"<{_axes_text(mesh)}>"
