"""The rules every program obeys, apart from those of its task lists."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from hetjax.ir.blocks import common, elements, remainder
from hetjax.ir.graph import Aval, Ref
from hetjax.ir.program import (
    FORMS,
    PHASES,
    Block,
    Fragment,
    Port,
    Program,
    Reshard,
    Spec,
    StageMesh,
)
from hetjax.ir.rules import Found, Rule
from hetjax.ir.suggest import nearest

# In which forms a fragment may give a value, and in which a reshard may carry one.
GIVEN_FORMS = ("step", "micro", "sum")
CARRIED_FORMS = ("step", "micro", "sum", "last")


def given_form(form: str) -> str:
    """Returns the form in which a value is given that is read in `form`."""
    return "micro" if form in ("concat", "last") else form


def carried_form(form: str) -> str:
    """Returns the form in which a reshard carries a value that is read in `form`."""
    return "micro" if form == "concat" else form


@dataclasses.dataclass(frozen=True)
class Context:
    """A program with what many rules look up."""

    program: Program

    def aval(self, ref: Ref, form: str) -> Aval | None:
        """Returns the type of a value in a form, None when it has none."""
        table = self.program.avals if form == "step" else self.program.micro_avals
        return table[ref] if 0 <= ref < len(table) else None

    def mesh(self, stage: int) -> StageMesh | None:
        meshes = self.program.meshes
        return meshes[stage] if 0 <= stage < len(meshes) else None

    def path(self, ref: Ref) -> str:
        """Returns "%3", with the user's path where the value is a result."""
        for r in self.program.results:
            if r.atom == ref:
                return f'%{ref} (output "{r.path}")'
        return f"%{ref}"


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, n in Counter(names).items() if n > 1]


def meshes(c: Context) -> Iterator[Found]:
    for name in _twice(m.name for m in c.program.meshes):
        yield Found(f"two meshes are called {name}")
    for m in c.program.meshes:
        size = math.prod(n for _, n in m.axes)
        if any(n < 1 for _, n in m.axes):
            yield Found(f"mesh {m.name} has an axis of size less than 1: {dict(m.axes)}")
        elif size != len(m.devices):
            yield Found(
                f"mesh {m.name} has axes of {size} devices in all, and names {len(m.devices)}"
            )
        if len(set(m.devices)) != len(m.devices):
            yield Found(f"mesh {m.name} names a device twice: {list(m.devices)}")
        for name in _twice(a for a, _ in m.axes):
            yield Found(f"mesh {m.name} has two axes {name}")


def names(c: Context) -> Iterator[Found]:
    p = c.program
    for name in _twice([*(f.name for f in p.fragments), *(r.name for r in p.reshards)]):
        yield Found(f"two fragments or reshards are called {name}")
    if p.num_microbatches < 1:
        yield Found(f"microbatches is {p.num_microbatches}; it must be at least 1")
    for f in p.fragments:
        if f.phase not in PHASES:
            yield Found(f"fragment {f.name} has phase '{f.phase}'; phases are {', '.join(PHASES)}")
        if c.mesh(f.stage) is None:
            yield Found(
                f"fragment {f.name} is on stage {f.stage}, but there are {len(p.meshes)} meshes"
            )
        for what, ports, forms in (("reads", f.inputs, FORMS), ("gives", f.outputs, GIVEN_FORMS)):
            for port in ports:
                if port.form not in forms:
                    yield Found(
                        f"fragment {f.name} {what} %{port.ref} as '{port.form}'; it may be {', '.join(forms)}"
                    )
    for r in p.reshards:
        if r.form not in CARRIED_FORMS:
            yield Found(
                f"reshard {r.name} carries its value as '{r.form}'; it may be {', '.join(CARRIED_FORMS)}"
            )
        for end, stage in (("starts", r.source), ("ends", r.target)):
            if c.mesh(stage) is None:
                yield Found(
                    f"reshard {r.name} {end} on stage {stage}, but there are {len(p.meshes)} meshes"
                )


def types(c: Context) -> Iterator[Found]:
    p = c.program
    if len(p.avals) != len(p.micro_avals):
        yield Found(
            f"{len(p.avals)} values have types at full batch, {len(p.micro_avals)} in one microbatch"
        )
    for ref, (full, micro) in enumerate(zip(p.avals, p.micro_avals)):
        if full.dtype != micro.dtype or full.ndim != micro.ndim:
            yield Found(f"%{ref} is {full} at full batch but {micro} in one microbatch")
    for f in p.fragments:
        for port in (*f.inputs, *f.outputs):
            if not 0 <= port.ref < len(p.avals):
                yield Found(
                    f"fragment {f.name} has a port for %{port.ref}, but values go up to %{len(p.avals) - 1}"
                )
    for r in p.reshards:
        if not 0 <= r.ref < len(p.avals):
            yield Found(
                f"reshard {r.name} carries %{r.ref}, but values go up to %{len(p.avals) - 1}"
            )


def _spec_problems(
    c: Context, spec: Spec, mesh: StageMesh | None, aval: Aval | None, what: str
) -> Iterator[Found]:
    # An empty spec is one that no pass has decided yet.
    if mesh is None or aval is None or spec == ():
        return
    if len(spec) != aval.ndim:
        yield Found(f"{what}: its spec has {len(spec)} entries for {aval.ndim} dimensions ({aval})")
        return
    axes = [a for dim in spec for a in dim]
    sizes = dict(mesh.axes)
    unknown = [a for a in axes if a not in sizes]
    for a in unknown:
        yield Found(f"{what}: mesh {mesh.name} has no axis '{a}'{nearest(a, sizes)}")
    for a in _twice(axes):
        yield Found(f"{what}: axis '{a}' splits it twice")
    if unknown:
        return
    for d, (n, parts) in enumerate(zip(aval.shape, mesh.parts(spec))):
        if parts > 1 and n % parts:
            yield Found(
                f"{what}: dimension {d} of size {n} does not divide over {'*'.join(spec[d])} of size {parts} "
                f"on mesh {mesh.name}; replicate it, or pad it to {-(-n // parts) * parts}"
            )


def specs(c: Context) -> Iterator[Found]:
    for f in c.program.fragments:
        for what, ports in (("reads", f.inputs), ("gives", f.outputs)):
            for port in ports:
                aval = c.aval(port.ref, port.form)
                yield from _spec_problems(
                    c, port.spec, c.mesh(f.stage), aval, f"{f.name} {what} {c.path(port.ref)}"
                )
    for r in c.program.reshards:
        for what, spec, stage in (
            ("takes", r.source_spec, r.source),
            ("brings", r.target_spec, r.target),
        ):
            yield from _spec_problems(
                c, spec, c.mesh(stage), c.aval(r.ref, r.form), f"{r.name} {what} %{r.ref}"
            )
    for feed in c.program.feeds:
        mesh = c.mesh(feed.stage)
        if mesh is not None:
            unknown = {a for dim in feed.spec for a in dim} - {a for a, _ in mesh.axes}
            for a in sorted(unknown):
                yield Found(
                    f"input {feed.argument} is fed to {mesh.name} split over axis '{a}', which it does not have"
                )


def ports(c: Context) -> Iterator[Found]:
    for f in c.program.fragments:
        for what, side in (("reads", f.inputs), ("gives", f.outputs)):
            for (ref, form), n in Counter((p.ref, p.form) for p in side).items():
                if n > 1:
                    yield Found(f"fragment {f.name} {what} %{ref} as '{form}' {n} times")
        made = {r for op in f.ops for r in op.outputs} | {p.ref for p in f.inputs}
        for port in f.outputs:
            if port.ref not in made:
                yield Found(
                    f"fragment {f.name} gives %{port.ref}, which none of its ops or inputs has"
                )
            if (
                port.form != "step"
                and not f.per_microbatch
                and port.axis is None
                and c.program.num_microbatches > 1
            ):
                yield Found(f"fragment {f.name} runs once and gives %{port.ref} as '{port.form}'")
        for port in f.inputs:
            aval = c.aval(port.ref, port.form)
            if port.form == "concat" and port.axis is None:
                yield Found(f"fragment {f.name} reads %{port.ref} concatenated, without an axis")
            if port.axis is not None and aval is not None and not 0 <= port.axis < aval.ndim:
                yield Found(
                    f"fragment {f.name} reads %{port.ref} along axis {port.axis}; it has {aval.ndim} dimensions"
                )
            if f.per_microbatch and port.form not in ("step", "micro"):
                yield Found(
                    f"fragment {f.name} runs per microbatch and reads %{port.ref} as '{port.form}', which exists after the last"
                )
        for i in f.donated:
            if not 0 <= i < len(f.inputs):
                yield Found(
                    f"fragment {f.name} donates input {i}, but inputs go up to {len(f.inputs) - 1}"
                )
        for i, n in Counter(f.donated).items():
            if n > 1:
                yield Found(f"fragment {f.name} donates input {i} twice")


def accumulators(c: Context) -> Iterator[Found]:
    given: dict[tuple[int, Ref], list[tuple[Fragment, Port]]] = {}
    for f in c.program.fragments:
        for port in f.outputs:
            if port.form == "sum":
                given.setdefault((f.stage, port.ref), []).append((f, port))
    for (stage, ref), makers in given.items():
        if len(makers) > 1:
            whose = ", ".join(f.name for f, _ in makers)
            yield Found(f"%{ref} is accumulated on stage {stage} by {whose}; one fragment may")
    scales: dict[Ref, tuple[str, float]] = {}
    for f in c.program.fragments:
        for port in f.inputs:
            if port.form != "sum":
                continue
            whose, scale = scales.setdefault(port.ref, (f.name, port.scale))
            if repr(scale) != repr(port.scale):
                yield Found(
                    f"the sum %{port.ref} is scaled by {scale!r} in {whose} and by {port.scale!r} in {f.name}"
                )
            for other, out in given.get((f.stage, port.ref), ()):
                if out.spec and port.spec and out.spec != port.spec:
                    yield Found(
                        f"the sum %{port.ref} is given by {other.name} and read by {f.name} with another spec"
                    )


def _ends(r: Reshard, program: Program) -> tuple[list[Port], list[Port]]:
    sources = [
        p
        for f in program.fragments
        if f.stage == r.source
        for p in f.outputs
        if p.ref == r.ref and p.form == given_form(r.form)
    ]
    targets = [
        p
        for f in program.fragments
        if f.stage == r.target
        for p in f.inputs
        if p.ref == r.ref and carried_form(p.form) == r.form
    ]
    return sources, targets


def reshards(c: Context) -> Iterator[Found]:
    program = c.program
    for r in program.reshards:
        if r.source == r.target:
            yield Found(f"reshard {r.name} goes from stage {r.source} to itself")
        sources, targets = _ends(r, program)
        if not sources:
            yield Found(
                f"reshard {r.name}: no fragment of stage {r.source} gives %{r.ref} as '{given_form(r.form)}'"
            )
        elif all(p.spec != r.source_spec for p in sources):
            yield Found(
                f"reshard {r.name} takes %{r.ref} with another spec than stage {r.source} gives it"
            )
        if not targets:
            yield Found(
                f"reshard {r.name}: no fragment of stage {r.target} reads %{r.ref} as '{r.form}'"
            )
        elif all(p.spec != r.target_spec for p in targets):
            yield Found(
                f"reshard {r.name} brings %{r.ref} with another spec than stage {r.target} reads it"
            )
        aval = c.aval(r.ref, r.form)
        if aval is not None and r.nbytes != aval.nbytes:
            yield Found(f"reshard {r.name} says {r.nbytes} bytes, but {aval} has {aval.nbytes}")
        yield from _pieces(c, r, aval)


def _pieces(c: Context, r: Reshard, aval: Aval | None) -> Iterator[Found]:
    source, target = c.mesh(r.source), c.mesh(r.target)
    if not r.pieces or aval is None or source is None or target is None:
        return
    if not (_splits(source, r.source_spec, aval) and _splits(target, r.target_spec, aval)):
        return  # the rules of specs and meshes say so
    own, due = source.blocks(r.source_spec, aval.shape), target.blocks(r.target_spec, aval.shape)
    arrived: dict[int, list[Block]] = {}
    brought: Counter[int] = Counter()
    for p in r.pieces:
        block = (p.start, p.stop)
        if not {p.source, p.target} <= {*own, *due}:
            yield Found(
                f"reshard {r.name} has a piece from device {p.source} to {p.target}, "
                "which are not on its meshes"
            )
            return
        bounds = len(p.start) == len(p.stop) == aval.ndim
        if not bounds or any(not 0 <= a < b <= n for a, b, n in zip(p.start, p.stop, aval.shape)):
            yield Found(
                f"reshard {r.name} has a piece {p.start} to {p.stop}, which is no block of {aval}"
            )
            return
        held = [own[p.source]] if p.source in own else []
        if remainder(block, held + arrived.get(p.source, [])):
            yield Found(
                f"reshard {r.name} has a piece {p.start} to {p.stop} from device {p.source}, "
                "which neither holds all of it nor got it from pieces before"
            )
            return
        arrived.setdefault(p.target, []).append(block)
        shared = common(block, due[p.target]) if p.target in due else None
        brought[p.target] += 0 if shared is None else elements(shared)
    for device, block in due.items():
        if brought[device] != elements(block):
            yield Found(
                f"reshard {r.name} brings device {device} {brought[device]} elements of {aval}; "
                f"its share is {elements(block)}"
            )
        elif left := remainder(block, arrived.get(device, [])):
            yield Found(
                f"reshard {r.name} never brings device {device} the block {left[0][0]} to {left[0][1]}"
            )


def _splits(mesh: StageMesh, spec: Spec, aval: Aval) -> bool:
    """Returns whether a spec says how a value is split over a mesh."""
    used = [a for axes in spec for a in axes]
    return (
        len(spec) in (0, aval.ndim)
        and {*used} <= {a for a, _ in mesh.axes}
        and len({*used}) == len(used)
        and math.prod(n for _, n in mesh.axes) == len(mesh.devices)
    )


def returned(c: Context) -> Iterator[Found]:
    program = c.program
    seen = Counter(r.result for r in program.returns)
    for k, n in seen.items():
        if not 0 <= k < len(program.results):
            yield Found(f"output {k} is returned, but outputs go up to {len(program.results) - 1}")
        elif n > 1:
            yield Found(f'output "{program.results[k].path}" is returned {n} times')
    for k, result in enumerate(program.results):
        if k not in seen:
            yield Found(f'output "{result.path}" is not returned: it is lost')
    for r in program.returns:
        if r.stage is None or r.port is None or not 0 <= r.result < len(program.results):
            continue
        result = program.results[r.result]
        if result.atom != r.port.ref:
            yield Found(
                f'output "{result.path}" is {result.atom} but %{r.port.ref} is returned for it'
            )
        if not any(
            p.ref == r.port.ref and p.form == given_form(r.port.form)
            for f in program.fragments
            if f.stage == r.stage
            for p in f.outputs
        ):
            yield Found(
                f"output \"{result.path}\": no fragment of stage {r.stage} gives %{r.port.ref} as '{r.port.form}'"
            )
    for k, n in Counter(r.updates for r in program.results if r.updates is not None).items():
        if n > 1:
            yield Found(f"input {k} is updated by {n} outputs")


def fed(c: Context) -> Iterator[Found]:
    for (argument, stage, form), n in Counter(
        (f.argument, f.stage, f.form) for f in c.program.feeds
    ).items():
        if n > 1:
            yield Found(f"input {argument} is fed to stage {stage} as '{form}' {n} times")
    for f in c.program.feeds:
        if c.mesh(f.stage) is None:
            yield Found(
                f"input {f.argument} is fed to stage {f.stage}, but there are {len(c.program.meshes)} meshes"
            )
        if f.form not in ("step", "micro"):
            yield Found(f"input {f.argument} is fed as '{f.form}'; it may be step or micro")
        if f.form == "micro" and f.axis is None and c.program.num_microbatches > 1:
            yield Found(f"input {f.argument} is fed per microbatch, without an axis")


PROGRAM_RULES: tuple[Rule[Context], ...] = (
    Rule("names", "fragments and reshards have names, phases, forms and stages that exist", names),
    Rule("meshes", "a mesh's axes multiply to its devices, each named once", meshes),
    Rule("value-types", "every value has a type, alike at full batch and in one microbatch", types),
    Rule("specs", "a spec's axes are on the mesh, used once, and divide their dimension", specs),
    Rule("ports", "a fragment gives what it has, in a form that suits how often it runs", ports),
    Rule("accumulators", "a sum has one fragment that accumulates it and one scale", accumulators),
    Rule(
        "reshard-ends",
        "a reshard's ends agree with the fragments there, its pieces with its value",
        reshards,
    ),
    Rule("returns", "every output is returned exactly once, by a stage that has it", returned),
    Rule("feeds", "an input is fed once per stage and form", fed),
)
