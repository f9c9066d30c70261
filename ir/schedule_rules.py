"""The rules a program's task lists obey: everything runs as often as it must, in an order that ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hetjax.ir.program import TASK_KINDS, Fragment, Program, Task
from hetjax.ir.program_rules import Context, carried_form, given_form
from hetjax.ir.rules import Found, Rule

_KINDS_OF_PHASE = {
    "prologue": ("prologue",),
    "forward": ("F",),
    "backward": ("B", "I", "W"),
    "weight": ("W",),
    "update": ("update",),
}


def _scheduled(program: Program) -> bool:
    """Returns whether task lists have been made at all."""
    return any(program.tasks)


def _where(task: Task, stage: int, position: int) -> str:
    return f"task {position} of stage {stage} ({task}{f' {task.work}' if task.work else ''})"


def tasks_known(c: Context) -> Iterator[Found]:
    program = c.program
    if not _scheduled(program):
        return
    if len(program.tasks) != len(program.meshes):
        yield Found(f"there are {len(program.tasks)} task lists for {len(program.meshes)} meshes")
    fragments = {f.name: f for f in program.fragments}
    reshards = {r.name: r for r in program.reshards}
    for stage, tasks in enumerate(program.tasks):
        for i, task in enumerate(tasks):
            where = _where(task, stage, i)
            if task.kind not in TASK_KINDS:
                yield Found(f"{where}: kinds are {', '.join(TASK_KINDS)}")
                continue
            if task.stage != stage:
                yield Found(f"{where} says it is of stage {task.stage}")
            if task.kind in ("send", "recv"):
                reshard = reshards.get(task.work)
                if reshard is None:
                    yield Found(f"{where}: there is no reshard of that name")
                elif stage != (reshard.source if task.kind == "send" else reshard.target):
                    end = "starts" if task.kind == "send" else "ends"
                    yield Found(f"{where}: {reshard.name} {end} on another stage")
            elif task.kind != "sync":
                fragment = fragments.get(task.work)
                if fragment is None:
                    yield Found(f"{where}: there is no fragment of that name")
                elif fragment.stage != stage:
                    yield Found(f"{where}: that fragment is on stage {fragment.stage}")
                elif task.kind not in (kinds := _KINDS_OF_PHASE.get(fragment.phase, ())) and kinds:
                    yield Found(
                        f"{where}: a {fragment.phase} fragment is run by {' or '.join(kinds)}"
                    )
            if task.microbatch is not None and not 0 <= task.microbatch < program.num_microbatches:
                yield Found(f"{where}: microbatches are 0 to {program.num_microbatches - 1}")


def _expected(program: Program, per_microbatch: bool) -> set[int | None]:
    return set(range(program.num_microbatches)) if per_microbatch else {None}


def _runs_problem(
    what: str, runs: Counter[int | None], program: Program, per_microbatch: bool
) -> Iterator[Found]:
    # With one microbatch a task may say 0 or nothing.
    if program.num_microbatches == 1:
        runs = Counter({None: sum(runs.values())}) if runs else runs
        per_microbatch = False
    expected = _expected(program, per_microbatch)
    often = sorted((m for m, n in runs.items() if n > 1), key=str)
    absent = sorted(expected - set(runs), key=str)
    extra = sorted(set(runs) - expected, key=str)
    for word, numbers in (
        ("more than once", often),
        ("never", absent),
        ("though it should not", extra),
    ):
        if numbers:
            listed = ", ".join("the step" if m is None else str(m) for m in numbers)
            of = "" if numbers == [None] else f" for microbatch {listed}"
            yield Found(f"{what} {word}{of}")


def runs(c: Context) -> Iterator[Found]:
    program = c.program
    if not _scheduled(program):
        return
    by_work: dict[tuple[str, str], Counter[int | None]] = {}
    for tasks in program.tasks:
        for t in tasks:
            by_work.setdefault((_group(t.kind), t.work), Counter())[t.microbatch] += 1
    apart = {f.stage for f in program.fragments if f.phase == "weight"}
    for f in program.fragments:
        halved = ("I", f.name) in by_work or ("W", f.name) in by_work
        groups = ("I", "W") if halved else ("run",)
        if f.phase == "weight" or (f.stage in apart and halved):  # each half is a fragment of its own
            groups = ("W",) if f.phase == "weight" else ("I",)
        for group in groups:
            found = by_work.get((group, f.name), Counter())
            name = (
                f"fragment {f.name} runs"
                if len(groups) == 1
                else f"the {group} half of fragment {f.name} runs"
            )
            yield from _runs_problem(name, found, program, f.per_microbatch)
    for r in program.reshards:
        # A fragment that runs once may give slices too, as a loss head on the whole batch does.
        per_microbatch = r.form == "micro"
        for kind in ("send", "recv"):
            yield from _runs_problem(
                f"reshard {r.name} has a {kind}",
                by_work.get((kind, r.name), Counter()),
                program,
                per_microbatch,
            )


def _group(kind: str) -> str:
    return kind if kind in ("send", "recv", "I", "W", "sync") else "run"


class _Held:
    """What one stage holds while its list runs."""

    def __init__(self, program: Program, stage: int):
        self.program, self.stage = program, stage
        self.last = program.num_microbatches - 1
        self.once: set[tuple[int, str]] = set()
        self.some: dict[int, set[int]] = {}
        self.sums: dict[int, int] = {}
        self.givers = {
            (p.ref, p.form) for f in program.fragments if f.stage == stage for p in f.outputs
        }
        self.brought = {(r.ref, r.form) for r in program.reshards if r.target == stage}

    def add(self, ref: int, form: str, microbatch: int | None, per_microbatch: bool) -> None:
        if form == "micro" and microbatch is not None and per_microbatch:
            self.some.setdefault(ref, set()).add(microbatch)
        elif form == "sum" and microbatch is not None and per_microbatch:
            self.sums[ref] = self.sums.get(ref, 0) + 1
            if self.sums[ref] > self.last:
                self.once.add((ref, "sum"))
        else:
            self.once.add((ref, form))

    def has(self, ref: int, form: str, microbatch: int | None) -> bool:
        """Returns whether a value can be read in a form, for a microbatch."""
        if (ref, form) in self.once or (form == "last" and (ref, "micro") in self.once):
            return True
        if form == "concat":
            return (ref, "micro") in self.once or len(self.some.get(ref, ())) > self.last
        if form == "last":
            return self.last in self.some.get(ref, ())
        return form == "micro" and microbatch in self.some.get(ref, ())

    def made_here(self, ref: int, form: str) -> bool:
        """Returns whether the stage gets the value from a fragment or reshard, not from a feed."""
        return (ref, given_form(form)) in self.givers or (ref, carried_form(form)) in self.brought


def reads(c: Context) -> Iterator[Found]:
    """What a task reads is there: made on its stage before, received before, or fed."""
    program = c.program
    if not _scheduled(program):
        return
    fragments = {f.name: f for f in program.fragments}
    reshards = {r.name: r for r in program.reshards}
    made = {r for f in program.fragments for op in f.ops for r in op.outputs}
    phases = {(f.stage, f.phase) for f in program.fragments}
    for stage, tasks in enumerate(program.tasks):
        held = _Held(program, stage)
        for i, task in enumerate(tasks):
            where = _where(task, stage, i)
            fragment, reshard = fragments.get(task.work), reshards.get(task.work)
            if task.kind == "recv" and reshard:
                held.add(reshard.ref, reshard.form, task.microbatch, True)
            elif task.kind == "send" and reshard:
                if not held.has(
                    reshard.ref,
                    given_form(reshard.form) if reshard.form != "last" else "last",
                    task.microbatch,
                ):
                    yield Found(f"{where} sends %{reshard.ref} before the stage has it")
            elif fragment:
                for port in fragment.inputs:
                    if held.has(port.ref, port.form, task.microbatch):
                        continue
                    if held.made_here(port.ref, port.form):
                        yield Found(f"{where} reads %{port.ref} before the stage has it")
                    elif port.ref in made:
                        yield Found(
                            f"{where} reads %{port.ref}, which another stage makes and no reshard brings; "
                            "run the pass 'insert-reshards'"
                        )
                if task.kind != "W" or fragment.phase == "weight":
                    halved = task.kind == "I" and (fragment.stage, "weight") not in phases
                    _give(
                        held,
                        fragment,
                        task,
                        tuple(p for p in fragment.outputs if not halved or p.form != "sum"),
                    )
                else:  # W only adds weight gradients; they count when it ends
                    _give(
                        held, fragment, task, tuple(p for p in fragment.outputs if p.form == "sum")
                    )


def _give(held: _Held, fragment: Fragment, task: Task, ports: tuple) -> None:
    for p in ports:
        held.add(p.ref, p.form, task.microbatch, fragment.per_microbatch)


def deadlock(c: Context) -> Iterator[Found]:
    """Runs the lists: a send never waits, a recv waits for its send."""
    program = c.program
    if not _scheduled(program):
        return
    at = [0] * len(program.tasks)
    sent: set[tuple[str, int | None]] = set()
    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(program.tasks):
            while at[stage] < len(tasks):
                task = tasks[at[stage]]
                if task.kind == "recv" and (task.work, task.microbatch) not in sent:
                    break
                if task.kind == "send":
                    sent.add((task.work, task.microbatch))
                at[stage] += 1
                moved = True
    stuck = [
        _where(tasks[at[s]], s, at[s])
        for s, tasks in enumerate(program.tasks)
        if at[s] < len(tasks)
    ]
    if stuck:
        yield Found(
            "the task lists never end; these wait for a send that does not come: "
            + "; ".join(stuck)
        )


SCHEDULE_RULES: tuple[Rule[Context], ...] = (
    Rule(
        "tasks-known",
        "a task names work of its stage, of its kind, for a microbatch there is",
        tasks_known,
    ),
    Rule(
        "runs", "every fragment and reshard runs exactly as often as its phase and form say", runs
    ),
    Rule("reads-before-made", "what a task reads is on its stage by then", reads),
    Rule("deadlock", "the task lists run to their end", deadlock),
)
