"""One page, without network or script: stages, timeline, what passes between stages, and the text."""

from __future__ import annotations

from html import escape

from hetjax.emit.chrome import timeline_of
from hetjax.emit.dot import human_bytes
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import HetjaxError, LoweringError
from hetjax.ir.program import Program
from hetjax.ir.text import print_bundle
from hetjax.passes.instruments import PARTS, only

_STYLE = """
body { font: 14px sans-serif; margin: 2em; max-width: 90em; } table { border-collapse: collapse; }
td, th { border: 1px solid #ccc; padding: .2em .6em; text-align: left; } td.n { text-align: right; }
pre { background: #f6f6f6; padding: .6em; overflow-x: auto; font-size: 12px; } summary { cursor: pointer; }
svg { max-width: 100%; }
"""


def emit_html(bundle: Bundle) -> str:
    """Returns the page.

    Raises:
      LoweringError: the bundle is empty.
    """
    name = bundle.program.name if bundle.program else bundle.graph.name if bundle.graph else ""
    if not name and bundle.plan is None:
        raise LoweringError(
            "there is nothing to show: the bundle has neither graph nor program nor plan"
        )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(name)}</h1>",
    ]
    if bundle.program is not None:
        parts += [
            "<h2>Stages</h2>",
            _stages(bundle.program),
            "<h2>Timeline</h2>",
            _timeline(bundle),
        ]
        parts += ["<h2>Between stages</h2>", _reshards(bundle.program)]
    if bundle.notes:
        rows = [[escape(t), escape(s)] for t, s in bundle.notes]
        parts += ["<h2>Notes</h2>", _table(["topic", ""], rows)]
    parts.append("<h2>Text</h2>")
    parts += [_text(bundle, part) for part in PARTS if getattr(bundle, part)]
    return "\n".join([*parts, "</body></html>", ""])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["<table>", "<tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>"]
    for row in rows:
        cells = "".join(
            f'<td class="n">{c}</td>' if c[:1].isdigit() else f"<td>{c}</td>" for c in row
        )
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _stages(program: Program) -> str:
    rows = []
    for s, mesh in enumerate(program.meshes):
        mine = [f for f in program.fragments if f.stage == s]
        blocks = list(
            dict.fromkeys(
                op.block for f in mine for op in f.ops if op.block and op.region == "forward"
            )
        )
        span = " … ".join(dict.fromkeys((blocks[0], blocks[-1]))) if blocks else ""
        axes = " x ".join(f"{a} {n}" for a, n in mesh.axes)
        flops = sum(op.cost.flops for f in mine for op in f.ops if op.cost)
        rows.append(
            [
                escape(mesh.name),
                escape(f"{len(mesh.devices)} x {mesh.kind} at {mesh.site}"),
                escape(axes),
                escape(span),
                str(sum(len(f.ops) for f in mine)),
                f"{flops:.3g}",
            ]
        )
    return _table(["stage", "devices", "mesh", "modules", "ops", "FLOPs"], rows)


def _timeline(bundle: Bundle) -> str:
    from hetjax.emit.gantt import svg_chart

    try:
        timeline = timeline_of(bundle)
    except HetjaxError as error:
        return f"<p>No timeline: {escape(str(error))}</p>"
    return (
        svg_chart(timeline, [m.name for m in bundle.program.meshes], bundle.program.name)
        if bundle.program
        else ""
    )


def _reshards(program: Program) -> str:
    rows = []
    for r in sorted(program.reshards, key=lambda r: -r.nbytes):
        times = program.num_microbatches if r.form == "micro" else 1
        rows.append(
            [
                escape(r.name),
                escape(str(program.avals[r.ref])),
                f"s{r.source} &rarr; s{r.target}",
                human_bytes(r.nbytes),
                f"{times} per step",
            ]
        )
    return _table(["reshard", "value", "way", "size", "times"], rows) if rows else "<p>Nothing.</p>"


def _text(bundle: Bundle, part: str) -> str:
    text = print_bundle(only(bundle, (part,)), scopes=False, nones=False)
    lines = text.splitlines()[1:]
    return f"<details><summary>{part}, {len(lines)} lines</summary><pre>{escape(chr(10).join(lines))}</pre></details>"
