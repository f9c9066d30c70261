"""Reads programs; see `hetjax.ir.parser`."""

from __future__ import annotations

import re
from typing import Any

from hetjax.ir.graph import Aval, Op, Result
from hetjax.ir.parser import GraphReader
from hetjax.ir.program import (
    Feed,
    Fragment,
    Piece,
    Port,
    Program,
    Reshard,
    Return,
    Spec,
    StageMesh,
    Task,
)

_TYPE = re.compile(r"(~?)(\w+(?:<\w+>)?)\[(.*)\]", re.ASCII)
_DIM = re.compile(r"\s*(\d+)(?:\|(\d+))?(?:@(?:(\w+)|\((\w+(?:,\w+)*)\)))?\s*", re.ASCII)
_TASK = re.compile(r"([A-Za-z_]+)(\d*)", re.ASCII)
_Typed = tuple[Aval, Aval, Spec]


class ProgramReader(GraphReader):
    """Reads a program after the word `program`."""

    def __init__(self, source: str, filename: str = "<text>"):
        super().__init__(source, filename)
        self.placed_types: dict[str, _Typed] = {}
        # By ref: types at full batch and in one microbatch; those of `values … micro` are fixed.
        self.pairs: dict[int, tuple[Aval, Aval]] = {}
        self.fixed: set[int] = set()

    def program(self) -> Program:
        """Reads the program, its name first."""
        self.pairs, self.fixed = {}, set()
        name = self.name("the program's name")
        self.expect("{", "to open the program")
        self.expect("microbatches")
        count = self.integer("how many microbatches")
        self.expect("schedule")
        schedule = self.name("the schedule's name")
        parts: dict[str, list[Any]] = {
            w: []
            for w in ("mesh", "values", "fragment", "reshard", "tasks", "feed", "return", "result")
        }
        while not self.take("}"):
            word = self.peek()
            if word not in parts:
                self.expected(f"one of {', '.join(parts)} or '}}'")
            self.at += 1
            parts[word].append(getattr(self, f"read_{word}")(len(parts[word])))
        pairs = self.table(self.pairs)
        return Program(
            name,
            count,
            schedule,
            tuple(parts["mesh"]),
            tuple(full for full, _ in pairs),
            tuple(micro for _, micro in pairs),
            tuple(parts["fragment"]),
            tuple(parts["reshard"]),
            tuple(parts["tasks"]),
            tuple(parts["feed"]),
            tuple(parts["return"]),
            tuple(parts["result"]),
        )

    # -- types

    def placed_type(self, text: str, inside: int) -> _Typed:
        """Reads "f32[64|16@data,8]", the token just passed from `inside` on."""
        found = self.placed_types.get(text)
        if found is None:
            match = _TYPE.fullmatch(text)
            if match is None:
                self.fail(f"'{text}' is not a type such as f32[64|16@data,8]", self.at - 1, inside)
            full, micro, spec = [], [], []
            at, body = 0, match[3]
            while body.strip():
                dim = _DIM.match(body, at)
                if dim is None or (dim.end() < len(body) and body[dim.end()] != ","):
                    self.fail(
                        f"'{body[at:]}' in {text} is not a dimension such as 64, 64|16, 16@model or 16@(x,y)",
                        self.at - 1,
                        inside + match.start(3) + at,
                    )
                full.append(self.to_int(dim[1]))
                micro.append(self.to_int(dim[2] or dim[1]))
                spec.append(
                    (dim[3],) if dim[3] else tuple((dim[4] or "").split(",")) if dim[4] else ()
                )
                at = dim.end() + 1
                if dim.end() == len(body):
                    break
            weak = bool(match[1])
            found = self.placed_types[text] = (
                Aval(match[2], tuple(full), weak),
                Aval(match[2], tuple(micro), weak),
                tuple(spec),
            )
        return found

    def placed_value(self) -> tuple[int, Spec]:
        """Steps over "%3:f32[64|16@data,8]" and perhaps a spec apart; notes the types."""
        token = self.peek()
        head, colon, text = token.partition(":")
        if not colon or not head.startswith("%"):
            self.expected("a value with its type, such as %3:f32[64|16@data,8]")
        self.at += 1
        ref = self.to_int(head[1:])
        full, micro, spec = self.placed_type(text, len(head) + 1)
        known = self.pairs.setdefault(ref, (full, micro))
        if known != (full, micro) and not (ref in self.fixed and known[0] == full == micro):
            self.fail(
                f"%{ref} is {text} here but {known[0]} (in one microbatch {known[1]}) above",
                self.at - 1,
            )
        return ref, self.spec() if self.peek() == "spec" else spec

    def spec(self) -> Spec:
        """Steps over "spec(data,-,(x,y))"."""
        self.expect("spec")
        self.expect("(")
        out: list[tuple[str, ...]] = []
        while not self.take(")"):
            out.append(self.axes())
            if not self.take(",") and self.peek() != ")":
                self.expected("',' or ')' in a spec")
        return tuple(out)

    def axes(self) -> tuple[str, ...]:
        if self.take("-"):
            return ()
        if not self.take("("):
            return (self.name("a mesh axis or '-'"),)
        names: list[str] = []
        while not self.take(")"):
            names.append(self.name("a mesh axis"))
            if not self.take(",") and self.peek() != ")":
                self.expected("',' or ')' after a mesh axis")
        return tuple(names)

    def optional(self, word: str, what: str) -> int | None:
        return self.integer(what) if self.take(word) else None

    # -- parts

    def read_mesh(self, _: int) -> StageMesh:
        name = self.name("the mesh's name")
        self.expect("of")
        kind = self.name("the device kind")
        self.expect("at")
        site = self.name("the site")
        self.expect("(", "before the mesh's axes")
        axes: list[tuple[str, int]] = []
        while not self.take(")"):
            axis = self.name("an axis")
            self.expect("=", "after the axis")
            axes.append((axis, self.integer("the axis's size")))
            if not self.take(",") and self.peek() != ")":
                self.expected("',' or ')' after an axis")
        self.expect("devices")
        return StageMesh(name, kind, site, tuple(axes), self.integers("a device's position"))

    def read_values(self, _: int) -> None:
        while self.peek().startswith("%"):
            ref, _spec = self.placed_value()
            if self.take("micro"):
                token = self.peek()
                self.at += 1
                if not token.endswith("]"):
                    self.at -= 1
                    self.expected("the type in one microbatch")
                self.pairs[ref] = (self.pairs[ref][0], self.placed_type(token, 0)[0])
                self.fixed.add(ref)

    def port_tail(self) -> tuple[str, float, int | None]:
        """Reads form, scale and axis."""
        form = self.name("the value's form (step, micro, sum, concat or last)")
        scale = 1.0
        if self.take("scale"):
            scale = self.real("a number after 'scale'")
        return form, scale, self.optional("axis", "an axis")

    def port(self) -> Port:
        ref, spec = self.placed_value()
        form, scale, axis = self.port_tail()
        return Port(ref, form, spec, scale, axis)

    def read_fragment(self, _: int) -> Fragment:
        name = self.name("the fragment's name")
        self.expect("on")
        stage = self.integer("the stage")
        phase = self.name("the phase")
        self.expect("level")
        level = self.integer("the level")
        self.expect("{", "to open the fragment")
        inputs: list[Port] = []
        donated: list[int] = []
        ops: list[Op] = []
        outputs: list[Port] = []
        while not self.take("}"):
            token = self.peek()
            if self.take("in"):
                inputs.append(self.port())
                if self.take("donated"):
                    donated.append(len(inputs) - 1)
            elif self.take("donates"):
                while self.peek()[:1].isdigit() or self.peek()[:1] == "-":
                    donated.append(self.integer("the position of an input"))
            elif self.take("out"):
                outputs.append(self.port())
            elif token and token[0] in "%[(":
                self.ops(ops, self.op_output)
            else:
                self.expected("'in', 'out', 'donates', an op, a '[region]' or '}'")
        return Fragment(
            name, stage, phase, level, tuple(ops), tuple(inputs), tuple(outputs), tuple(donated)
        )

    def op_output(self) -> int:
        position = self.at
        ref, spec = self.placed_value()
        if any(spec):
            self.fail("an op's result has no sharding of its own; ports have", position)
        return ref

    def read_reshard(self, _: int) -> Reshard:
        name = self.name("the reshard's name")
        form = self.name("the value's form (micro, step or sum)")
        self.expect("from")
        source = self.integer("the source stage")
        ref, source_spec = self.placed_value()
        self.expect("to")
        target = self.integer("the target stage")
        position = self.at
        other, target_spec = self.placed_value()
        if other != ref:
            self.fail(
                f"a reshard moves one value, but %{ref} leaves and %{other} arrives", position
            )
        self.expect("bytes")
        nbytes = self.integer("how many bytes")
        pieces: list[Piece] = []
        if self.take("{"):
            while not self.take("}"):
                self.expect("piece")
                start_device = self.integer("the source device")
                self.expect("to")
                stop_device = self.integer("the target device")
                start = self.integers("a bound")
                pieces.append(Piece(start_device, stop_device, start, self.integers("a bound")))
        return Reshard(
            name, ref, form, source, target, source_spec, target_spec, nbytes, tuple(pieces)
        )

    def read_tasks(self, position: int) -> tuple[Task, ...]:
        stage = self.integer("the stage")
        if stage != position:
            self.fail(
                f"task lists stand in order of stages; this is number {position}", self.at - 1
            )
        self.expect("{", "to open the task list")
        tasks: list[Task] = []
        while not self.take("}"):
            tasks.append(self.task(stage))
        return tuple(tasks)

    def task(self, stage: int) -> Task:
        number = None
        if self.peek().startswith('"'):
            kind = self.string("the task's kind")
            if self.peek()[:1].isdigit() or self.peek()[:1] == "-":
                number = self.integer("the microbatch")
        else:
            match = _TASK.fullmatch(self.peek())
            if match is None:
                self.expected("a task such as F0, send3 or update, or '}'")
            self.at += 1
            kind = match[1]
            number = self.to_int(match[2]) if match[2] else None
        work = self.name("the fragment or reshard the task runs")
        on = self.optional("on", "a stage")
        return Task(kind, stage if on is None else on, number, work)

    def read_feed(self, _: int) -> Feed:
        argument = self.integer("the position of an input")
        self.expect("to")
        stage = self.integer("the stage")
        form = self.name("the form (step or micro)")
        spec = self.spec()
        return Feed(argument, stage, form, spec, self.optional("axis", "an axis"))

    def read_return(self, _: int) -> Return:
        result = self.integer("the position of an output")
        stage = self.optional("from", "the stage")
        port = None
        if self.peek().startswith("%"):
            ref = self.ref("a value")
            spec = self.spec()
            form, scale, axis = self.port_tail()
            port = Port(ref, form, spec, scale, axis)
        return Return(result, stage, port)

    def read_result(self, _: int) -> Result:
        return self.result()
