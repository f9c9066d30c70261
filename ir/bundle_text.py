"""How a bundle prints, which is what a `.hj` file holds; see `hetjax.ir.text` for the language."""

from __future__ import annotations

from itertools import groupby

from hetjax.ir.bundle import Bundle
from hetjax.ir.microbatching import BatchType, Microbatching
from hetjax.ir.program_text import write_program
from hetjax.ir.text import Writer, name_text, quoted

# Written on the first line; a parser refuses a version it does not know.
VERSION = 1


def write_bundle(writer: Writer, bundle: Bundle) -> None:
    """Writes every part that is present."""
    writer.lines.append(f"hetjax {VERSION}")
    if bundle.cluster is not None:
        _write_foreign(writer, "cluster", bundle.cluster.to_toml())
    if bundle.plan is not None:
        _write_foreign(writer, "plan", bundle.plan.to_json())
    if bundle.graph is not None:
        writer.graph(bundle.graph, "")
    if bundle.microbatching is not None:
        _write_microbatching(
            writer, bundle.microbatching, same=bundle.microbatching.graph == bundle.graph
        )
    if bundle.program is not None:
        write_program(writer, bundle.program)
    for topic, sentence in bundle.notes:
        writer.lines.append(f"note {quoted(topic)} {quoted(sentence)}")


def _write_foreign(writer: Writer, word: str, text: str) -> None:
    """Writes TOML or JSON, each line behind a bar."""
    writer.lines.append(f"{word} {{")
    writer.lines.extend(f"  |{line}" for line in text.split("\n"))
    writer.lines.append("}")


def _write_microbatching(writer: Writer, m: Microbatching, same: bool) -> None:
    lines = writer.lines
    lines.append(f"microbatching {m.num_microbatches} {{")
    runs = [(t, len(list(group))) for t, group in groupby(map(batch_type_text, m.types))]
    writer.wrapped("types", [f"{t}*{n}" if n > 1 else t for t, n in runs], "  ")
    writer.wrapped("hoisted", [f"%{r}" for r in sorted(m.hoisted)], "  ")
    writer.wrapped("resliced", [f"%{r}" for r in sorted(m.resliced)], "  ")
    writer.wrapped("positions", [f"%{r}" for r in sorted(m.positions)], "  ")
    writer.wrapped("chained", [f"(%{a},%{b})" for a, b in m.chained], "  ")
    if m.refusal is not None:
        r = m.refusal
        at = "" if r.op is None else f" op {r.op}"
        lines.append(
            f"  refused {quoted(r.reason)}{at} {quoted(r.equation)} {quoted(r.block)} {quoted(r.source)}"
        )
    if m.accepted:
        lines.append("  accepted")
    if same:
        lines.append("  same graph")
    else:
        writer.graph(m.graph, "  ")
    lines.append("}")


def batch_type_text(t: BatchType) -> str:
    """Returns "B(0)^-1": kind, axis, power of the number of microbatches."""
    axis = "" if t.axis is None else f"({t.axis})"
    return f"{name_text(t.kind)}{axis}{f'^{t.power}' if t.power else ''}"
