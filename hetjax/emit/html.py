"""One page, without network or script: stages, timeline, memory, what passes between stages, and the text."""

from __future__ import annotations

from hetjax.emit.chrome import timeline_of
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import HetjaxError, LoweringError
from hetjax.ir.text import print_bundle
from hetjax.passes.instruments import PARTS, only
from hetjax.render.gantt import gantt, predicted
from hetjax.render.graph_view import graph_picture, program_picture
from hetjax.render.markup import Markup, fold, table, tag
from hetjax.render.picture import page


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
    parts = [tag("h1", name or bundle.plan.name if bundle.plan else name)]
    if bundle.program is not None:
        parts += [tag("h2", "Timeline"), _timeline(bundle)]
        parts += [tag("h2", "Program"), program_picture(bundle.program).body]
    elif bundle.graph is not None:
        parts += [tag("h2", "Graph"), graph_picture(bundle.graph).body]
    if bundle.notes:
        parts += [tag("h2", "Notes"), table(["topic", ""], [[t, s] for t, s in bundle.notes])]
    parts.append(tag("h2", "Text"))
    parts += [_text(bundle, part) for part in PARTS if getattr(bundle, part)]
    return page(name, *parts)


def _timeline(bundle: Bundle) -> Markup:
    try:
        timeline = timeline_of(bundle)
    except HetjaxError as error:
        return tag("p", f"No timeline: {error}")
    if bundle.program is None:
        return Markup()
    sizes = {r.name: r.nbytes for r in bundle.program.reshards}
    names = [m.name for m in bundle.program.meshes]
    return gantt([predicted(timeline)], names, bundle.program.name, nbytes=sizes).body


def _text(bundle: Bundle, part: str) -> Markup:
    text = print_bundle(only(bundle, (part,)), scopes=False, nones=False)
    lines = text.splitlines()[1:]
    return fold(f"{part}, {len(lines)} lines", tag("pre", "\n".join(lines)))
