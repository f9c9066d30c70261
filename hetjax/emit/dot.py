"""Graphviz: a graph as modules with the bytes that pass between them, a program as fragments on meshes."""

from __future__ import annotations

import json
from collections import defaultdict

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import LoweringError
from hetjax.ir.graph import Graph, definitions
from hetjax.ir.program import Program, Reshard
from hetjax.ir.program_rules import given_form
from hetjax.passes.search.result import SearchTree
from hetjax.render.units import human_bytes, human_seconds

_FILL = {
    "prologue": "#e0e0e0",
    "forward": "#cfe0f3",
    "backward": "#d6ebcc",
    "update": "#f3d6cc",
    "": "#ffffff",
}


def emit_dot(bundle: Bundle) -> str:
    """Returns the program as a Graphviz digraph, or the graph when there is no program.

    Raises:
      LoweringError: the bundle has neither.
    """
    if bundle.program is not None:
        return program_dot(bundle.program)
    if bundle.graph is None:
        raise LoweringError("there is neither a graph nor a program to draw")
    return graph_dot(bundle.graph)


def graph_dot(graph: Graph) -> str:
    """Returns one node per region and module, and an edge where values pass, each value counted once."""
    place = lambda i: (graph.ops[i].region, graph.ops[i].block)  # noqa: E731
    ops: dict[tuple[str, str], int] = defaultdict(int)
    passed: dict[tuple[tuple[str, str], tuple[str, str]], set[int]] = defaultdict(set)
    made = definitions(graph)
    for i, op in enumerate(graph.ops):
        ops[place(i)] += 1
        for r in op.refs:
            if r in made and place(made[r]) != place(i):
                passed[place(made[r]), place(i)].add(r)
    name = {p: f"n{k}" for k, p in enumerate(ops)}
    lines = [
        f"digraph {json.dumps(graph.name)} {{",
        '  node [shape=box, style=filled, fontname="sans-serif"];',
    ]
    for (region, block), n in ops.items():
        label = f"{block or '(no module)'}\n{region or 'not labelled'}, {n} ops"
        lines.append(
            f"  {name[region, block]} [label={json.dumps(label)}, fillcolor={json.dumps(_FILL.get(region, '#ffffff'))}];"
        )
    for (a, b), refs in passed.items():
        nbytes = sum(graph.avals[r].nbytes for r in refs)
        lines.append(f"  {name[a]} -> {name[b]} [label={json.dumps(human_bytes(nbytes))}];")
    return "\n".join([*lines, "}", ""])


def program_dot(program: Program) -> str:
    """Returns one cluster per mesh, one node per fragment, one edge per pair of fragments and way."""
    name = {f.name: f"n{k}" for k, f in enumerate(program.fragments)}
    lines = [
        f"digraph {json.dumps(program.name)} {{",
        "  rankdir=LR;",
        '  node [shape=box, style=filled, fontname="sans-serif"];',
    ]
    for s, mesh in enumerate(program.meshes):
        axes = " x ".join(f"{a} {n}" for a, n in mesh.axes)
        lines += [
            f"  subgraph cluster_{s} {{",
            f"    label={json.dumps(f'{mesh.name}: {mesh.kind} at {mesh.site} ({axes})')};",
        ]
        for f in program.fragments:
            if f.stage == s:
                label = f"{f.name}\n{len(f.ops)} ops"
                lines.append(
                    f"    {name[f.name]} [label={json.dumps(label)}, fillcolor={json.dumps(_FILL.get(f.phase, '#ffffff'))}];"
                )
        lines.append("  }")
    for (a, b, between), nbytes in sorted(_passed(program).items()):
        style = ", style=bold, color=red" if between else ""
        lines.append(f"  {name[a]} -> {name[b]} [label={json.dumps(human_bytes(nbytes))}{style}];")
    return "\n".join([*lines, "}", ""])


def _passed(program: Program) -> dict[tuple[str, str, bool], int]:
    """Returns the bytes of one pass from fragment to fragment; True marks those between stages.

    What is carried to a stage is drawn once, to the first fragment that reads it there.
    """
    out: dict[tuple[str, str, bool], int] = defaultdict(int)
    arrived: set[tuple[int, int, str]] = set()
    reshards: dict[tuple[int, int], list[Reshard]] = defaultdict(list)
    for r in program.reshards:
        reshards[r.target, r.ref].append(r)
    for reader in program.fragments:
        for port in reader.inputs:
            for maker in program.fragments:
                given = any(
                    p.ref == port.ref and p.form == given_form(port.form) for p in maker.outputs
                )
                carried = any(r.source == maker.stage for r in reshards[reader.stage, port.ref])
                between = maker.stage != reader.stage
                if not given or (
                    between and (not carried or (reader.stage, port.ref, port.form) in arrived)
                ):
                    continue
                if between:
                    arrived.add((reader.stage, port.ref, port.form))
                table = program.avals if port.form == "step" else program.micro_avals
                out[maker.name, reader.name, between] += table[port.ref].nbytes
    return dict(out)


def search_dot(tree: SearchTree, most: int = 120) -> str:
    """Returns a search's most visited decisions as a Graphviz digraph; the way to the best plan is bold.

    Args:
      tree: of the search.
      most: nodes.
    """
    kept = range(min(most, len(tree)))
    best = min((n.best for n in tree if n.best is not None), default=None)
    lines = ["digraph search {", '  node [shape=box, style=filled, fillcolor="#ffffff", fontname="sans-serif"];']
    for i in kept:
        n = tree[i]
        said = [n.label, f"{n.visits} visits, prior {n.prior:.3f}"]
        if n.best is not None:
            value = "" if n.value is None else f", value {n.value:.3f}"
            said.append(f"best {human_seconds(n.best) if tree.unit == 's' else f'{n.best:.6g}'}{value}")
        if n.pruned:
            said.append(n.pruned)
        bold = ", penwidth=2.5" if n.best is not None and n.best == best else ""
        grey = ', fillcolor="#e0e0e0"' if n.pruned else ""
        lines.append(f"  n{i} [label={json.dumps(chr(10).join(said), ensure_ascii=False)}{grey}{bold}];")
    lines += [f"  n{tree[i].parent} -> n{i};" for i in kept if tree[i].parent >= 0]
    return "\n".join([*lines, "}"]) + "\n"
