"""How a program prints; see `hetjax.ir.text` for the language."""

from __future__ import annotations

import re
from typing import Any

from hetjax.ir.graph import Aval
from hetjax.ir.program import Feed, Fragment, Port, Program, Reshard, Return, Spec, StageMesh, Task
from hetjax.ir.text import Writer, atom_text, name_text, number_text, quoted, type_text

_AXIS = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TASK = re.compile(r"[A-Za-z_]+", re.ASCII)


def write_program(writer: Writer, program: Program) -> None:
    """Writes a program: meshes, values, fragments, reshards, task lists, feeds, returns."""
    lines = writer.lines
    lines.append(f"program {name_text(program.name)} {{")
    lines.append(f"  microbatches {program.num_microbatches}")
    lines.append(f"  schedule {name_text(program.schedule)}")
    for mesh in program.meshes:
        lines.append("  " + _mesh_text(mesh))
    types = ValueTypes(program)
    writer.wrapped("values", types.table(program), "  ")
    for fragment in program.fragments:
        _write_fragment(writer, fragment, types)
    for reshard in program.reshards:
        _write_reshard(lines, reshard, types)
    for stage, tasks in enumerate(program.tasks):
        lines.append(f"  tasks {stage} {{")
        lines.extend(f"    {_task_text(task, stage)}" for task in tasks)
        lines.append("  }")
    lines.extend(f"  {_feed_text(feed)}" for feed in program.feeds)
    lines.extend(f"  {_return_text(r)}" for r in program.returns)
    for r in program.results:
        updates = "" if r.updates is None else f" updates {r.updates}"
        lines.append(f"  result {atom_text(r.atom)} {quoted(r.path)}{updates}")
    lines.append("}")


class ValueTypes:
    """The type of each value, at full batch and in one microbatch, as one text."""

    def __init__(self, program: Program):
        self.full, self.micro = program.avals, program.micro_avals
        self.memo: dict[tuple[Aval, Aval], str] = {}

    def pair(self, ref: int) -> tuple[Aval, Aval]:
        """Returns both types; a ref out of range has type "?", so that a broken program prints too."""
        full = self.full[ref] if ref < len(self.full) else Aval("?", ())
        return full, self.micro[ref] if ref < len(self.micro) else full

    def fits(self, ref: int) -> bool:
        """Returns whether one text holds both types."""
        full, micro = self.pair(ref)
        return (full.dtype, full.weak_type, full.ndim) == (micro.dtype, micro.weak_type, micro.ndim)

    def text(self, ref: int) -> str:
        """Returns "f32[64|16,8]"."""
        key = self.pair(ref)
        if (found := self.memo.get(key)) is None:
            found = self.memo[key] = self.with_spec(ref, None)
        return found

    def with_spec(self, ref: int, spec: Spec | None) -> str:
        """Returns "f32[64|16@data,8]"."""
        full, micro = self.pair(ref)
        if not self.fits(ref):
            micro = full
        dims = []
        for i, (n, m) in enumerate(zip(full.shape, micro.shape)):
            at = f"@{_axes_text(spec[i])}" if spec and spec[i] else ""
            dims.append(f"{n}{'' if n == m else f'|{m}'}{at}")
        return f"{'~' if full.weak_type else ''}{full.dtype}[{','.join(dims)}]"

    def placed(self, ref: int, spec: Spec) -> str:
        """Returns "%3:f32[64|16@data,8]", with the spec apart where it does not fit the type."""
        plain = len(spec) == self.pair(ref)[0].ndim and all(
            _AXIS.fullmatch(a) for axes in spec for a in axes
        )
        if plain:
            return f"%{ref}:{self.with_spec(ref, spec)}"
        return f"%{ref}:{self.text(ref)} {spec_text(spec)}"

    def table(self, program: Program) -> list[str]:
        """Returns the values the rest of the text does not type, or not fully."""
        typed = {r.ref for r in program.reshards}
        for f in program.fragments:
            typed.update(p.ref for p in (*f.inputs, *f.outputs))
            typed.update(ref for op in f.ops for ref in op.outputs)
        out = []
        for ref in range(len(self.full)):
            if not self.fits(ref):
                out.append(
                    f"%{ref}:{type_text(self.full[ref])} micro {type_text(self.pair(ref)[1])}"
                )
            elif ref not in typed:
                out.append(f"%{ref}:{self.text(ref)}")
        return out


def _axes_text(axes: tuple[str, ...]) -> str:
    names = [a if _AXIS.fullmatch(a) else quoted(a) for a in axes]
    return names[0] if len(names) == 1 else f"({','.join(names)})"


def spec_text(spec: Spec) -> str:
    """Returns "spec(data,-,(x,y))"."""
    return f"spec({','.join(_axes_text(axes) if axes else '-' for axes in spec)})"


def _mesh_text(mesh: StageMesh) -> str:
    axes = ",".join(f"{name_text(a)}={n}" for a, n in mesh.axes)
    devices = ",".join(map(str, mesh.devices))
    return (
        f"mesh {name_text(mesh.name)} of {name_text(mesh.kind)} at {name_text(mesh.site)} "
        f"({axes}) devices ({devices})"
    )


def _port_tail(port: Port) -> str:
    scale = "" if repr(port.scale) == "1.0" else f" scale {number_text(port.scale)}"
    axis = "" if port.axis is None else f" axis {port.axis}"
    return f"{name_text(port.form)}{scale}{axis}"


def _write_fragment(writer: Writer, f: Fragment, types: ValueTypes) -> None:
    lines = writer.lines
    lines.append(
        f"  fragment {name_text(f.name)} on {f.stage} {name_text(f.phase)} level {f.level} {{"
    )
    inputs = range(len(f.inputs))
    apart = f.donated if tuple(i for i in inputs if i in f.donated) != f.donated else None
    for i, port in enumerate(f.inputs):
        donated = " donated" if apart is None and i in f.donated else ""
        lines.append(f"    in {types.placed(port.ref, port.spec)} {_port_tail(port)}{donated}")
    if apart is not None:
        lines.append(f"    donates {' '.join(map(str, apart))}")
    writer.ops(f.ops, types.text, "    ")
    for port in f.outputs:
        lines.append(f"    out {types.placed(port.ref, port.spec)} {_port_tail(port)}")
    lines.append("  }")


def _write_reshard(lines: list[str], r: Reshard, types: ValueTypes) -> None:
    lines.append(
        f"  reshard {name_text(r.name)} {name_text(r.form)} from {r.source} "
        f"{types.placed(r.ref, r.source_spec)} to {r.target} {types.placed(r.ref, r.target_spec)} "
        f"bytes {r.nbytes}{' {' if r.pieces else ''}"
    )
    for p in r.pieces:
        start, stop = (f"({','.join(map(str, x))})" for x in (p.start, p.stop))
        lines.append(f"    piece {p.source} to {p.target} {start} {stop}")
    if r.pieces:
        lines.append("  }")


def _task_text(task: Task, stage: int) -> str:
    number = "" if task.microbatch is None else str(task.microbatch)
    if _TASK.fullmatch(task.kind) and not number.startswith("-"):
        head = task.kind + number
    else:
        head = f"{quoted(task.kind)} {number}".rstrip()
    on = "" if task.stage == stage else f" on {task.stage}"
    return f"{head} {name_text(task.work)}{on}"


def _optional(word: str, value: Any) -> str:
    return "" if value is None else f" {word} {value}"


def _feed_text(feed: Feed) -> str:
    return (
        f"feed {feed.argument} to {feed.stage} {name_text(feed.form)} {spec_text(feed.spec)}"
        f"{_optional('axis', feed.axis)}"
    )


def _return_text(r: Return) -> str:
    port = "" if r.port is None else f" %{r.port.ref} {spec_text(r.port.spec)} {_port_tail(r.port)}"
    return f"return {r.result}{_optional('from', r.stage)}{port}"
