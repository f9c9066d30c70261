"""A graph and a program, folded: stages, then modules, then ops."""

from __future__ import annotations

from collections import Counter, defaultdict

from hetjax.ir.graph import Graph
from hetjax.ir.program import Fragment, Program, StageMesh
from hetjax.render.folding import cut, groups_of, outline_ops, outline_text
from hetjax.render.markup import fold, join, table, tag
from hetjax.render.picture import Picture
from hetjax.render.units import human_bytes, human_count, plural

MAX_OPS = 400
MAX_ROWS = 30


def graph_picture(graph: Graph) -> Picture:
    """Returns a graph folded by region and module."""
    blocks = {g.blocks for g in groups_of(graph.ops, graph.avals)}
    modules = sum(map(len, blocks))
    flops = sum(op.cost.flops for op in graph.ops if op.cost is not None)
    title = f"graph {graph.name}: {plural(len(graph.ops), 'op')} in {plural(modules, 'module')}"
    if flops:
        title += f", {human_count(flops)} FLOP"
    roles: dict[str, list[int]] = defaultdict(list)
    for a in graph.inputs:
        roles[a.role].append(graph.avals[a.ref].nbytes)
    takes = "; ".join(
        f"{plural(len(n), role + ' leaf', role + ' leaves')}, {human_bytes(sum(n))}"
        for role, n in roles.items()
    )
    leaves = [
        [cut(a.path), a.role, str(graph.avals[a.ref]), human_bytes(graph.avals[a.ref].nbytes)]
        for a in sorted(graph.inputs, key=lambda a: -graph.avals[a.ref].nbytes)[:MAX_ROWS]
    ]
    if len(graph.inputs) > MAX_ROWS:
        leaves.append([f"… and {len(graph.inputs) - MAX_ROWS:,} more", "", "", ""])
    body = join(
        [
            tag("p", tag("b", title)),
            fold(f"takes {takes}", table(["leaf", "role", "type", "size"], leaves)),
            outline_ops(graph.ops, graph.avals, MAX_OPS),
            tag(
                "p",
                f"gives {plural(len(graph.outputs), 'leaf', 'leaves')}; str(graph) is the whole text",
                class_="faint",
            ),
        ]
    )
    text = [title, f"  takes {takes}", *outline_text(graph.ops, graph.avals)]
    return Picture(title, body, "\n".join(text))


def program_picture(program: Program) -> Picture:
    """Returns a program: its stages with their fragments, and what crosses between them."""
    ops = sum(len(f.ops) for f in program.fragments)
    title = (
        f"program {program.name}: {plural(len(program.meshes), 'stage')}, {plural(len(program.fragments), 'fragment')}, "
        f"{plural(ops, 'op')}, {plural(program.num_microbatches, 'microbatch', 'microbatches')}, {program.schedule}"
    )
    each = max(20, MAX_OPS // max(1, len(program.fragments)))
    stages, lines = [], [title]
    for s, mesh in enumerate(program.meshes):
        mine = [f for f in program.fragments if f.stage == s]
        head = f"{mesh_words(mesh)}: {plural(sum(len(f.ops) for f in mine), 'op')} in {plural(len(mine), 'fragment')}"
        lines.append(f"  {head}")
        stages.append(
            fold(
                head,
                *(fragment_fold(program, f, each) for f in mine),
                open_=len(program.meshes) <= 4,
            )
        )
    body = join(
        [tag("p", tag("b", title)), *stages, tag("h3", "Between stages"), _reshards(program)]
    )
    total = sum(r.nbytes * _times(program, r.form) for r in program.reshards)
    lines.append(f"  {plural(len(program.reshards), 'value')} cross, {human_bytes(total)} a step")
    return Picture(title, body, "\n".join(lines))


def mesh_words(mesh: StageMesh) -> str:
    """Returns "s0: 2 x a100-80g at lyon (data 2 x model 1)"."""
    axes = " x ".join(f"{a} {n}" for a, n in mesh.axes)
    return f"{mesh.name}: {len(mesh.devices)} x {mesh.kind} at {mesh.site} ({axes})"


def fragment_fold(program: Program, f: Fragment, budget: int):
    """Returns one fragment, closed."""
    avals = program.micro_avals if f.per_microbatch else program.avals
    forms = Counter(p.form for p in f.outputs)
    gives = ", ".join(f"{n} {form}" for form, n in forms.items())
    head = (
        f"{f.name}: {plural(len(f.ops), 'op')}, reads {len(f.inputs)}, gives {gives or 'nothing'}"
    )
    return fold(head, outline_ops(f.ops, avals, budget))


def fragment_picture(fragment: Fragment) -> Picture:
    """Returns a fragment alone; without its program the types of its values are not known."""
    primitives = Counter(op.primitive for op in fragment.ops)
    blocks = list(dict.fromkeys(op.block for op in fragment.ops if op.block))
    title = f"fragment {fragment.name}: {plural(len(fragment.ops), 'op')}"
    rows = [[name, str(n)] for name, n in primitives.most_common(MAX_ROWS)]
    modules = " … ".join(dict.fromkeys((*blocks[:1], *blocks[-1:]))) or "no module"
    body = join([tag("p", tag("b", title), f", {modules}"), table(["primitive", "ops"], rows)])
    return Picture(title, body, f"{title}, {modules}")


def mesh_picture(mesh: StageMesh) -> Picture:
    """Returns the devices of a stage as a grid over its axes."""
    from hetjax.render.sharding_view import mesh_grid

    title = mesh_words(mesh)
    return Picture(title, mesh_grid(mesh), title, is_svg=True)


def _times(program: Program, form: str) -> int:
    return program.num_microbatches if form == "micro" else 1


def _reshards(program: Program):
    ordered = sorted(program.reshards, key=lambda r: -r.nbytes * _times(program, r.form))
    tables = {"micro": program.micro_avals}
    rows = [
        [
            r.name, str(tables.get(r.form, program.avals)[r.ref]), f"s{r.source} → s{r.target}",
            human_bytes(r.nbytes), str(_times(program, r.form)),
        ]
        for r in ordered[:MAX_ROWS]
    ]  # fmt: skip
    if len(ordered) > MAX_ROWS:
        rows.append([f"… and {len(ordered) - MAX_ROWS} more", "", "", "", ""])
    return (
        table(["reshard", "value", "way", "size", "times a step"], rows)
        if rows
        else tag("p", "Nothing.")
    )
