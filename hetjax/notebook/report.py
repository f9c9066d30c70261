"""The report of a dumped run: one page from the pictures notebooks show, or plain text that diffs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hetjax.ir.errors import HetjaxError
from hetjax.notebook import views
from hetjax.notebook.dumps import Dump, read_dumps
from hetjax.notebook.subject import Subject, on_lines_of
from hetjax.passes.simulator import Timeline
from hetjax.render.cluster_map import cluster_picture
from hetjax.render.graph_view import graph_picture, program_picture
from hetjax.render.markup import Markup, join, table, tag
from hetjax.render.picture import Picture, page
from hetjax.render.stepper import stepper_picture
from hetjax.render.units import human_seconds, plural


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of a report.

    Attributes:
      name: its heading.
      picture: what it shows.
      plain: whether its text is the same each time the same run is dumped.
    """

    name: str
    picture: Picture
    plain: bool = True


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known of one dumped run.

    Attributes:
      name: of the dump.
      facts: for JSON: ops, passes, stages, microbatches, schedule, predicted seconds.
      sections: in order.
    """

    name: str
    facts: dict[str, Any]
    sections: tuple[Section, ...]

    def html(self) -> str:
        """Returns one page that needs nothing else."""
        links = [tag("a", s.name, href=f"#{_anchor(s.name)}") for s in self.sections]
        parts: list[Markup] = [tag("h1", self.name), tag("p", join(links, " · "))]
        for s in self.sections:
            parts += [tag("h2", s.name, id=_anchor(s.name)), tag("div", s.picture.body)]
        return page(f"hetjax report: {self.name}", *parts)

    def text(self) -> str:
        """Returns the report for terminals and for comparing two runs: nothing in it is a clock's."""
        out = [f"report {self.name}"]
        for s in self.sections:
            out += [
                "",
                f"== {s.name}",
                s.picture.text if s.plain else _without_clock(s.picture.text),
            ]
        return "\n".join(out) + "\n"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _without_clock(text: str) -> str:
    """Returns the passes without the seconds they took."""
    return "\n".join(
        line.rpartition(", ")[0] if line.startswith("  ") else line for line in text.splitlines()
    )


def build_report(dump: Dump, measured: Timeline | None = None) -> Report:
    """Returns the report of a dump, as far as its run came.

    Args:
      dump: of a run of passes.
      measured: when the same step's tasks ran, to stand below what is predicted.

    Raises:
      ParseError: a file of the dump cannot be read.
    """
    bundle = dump.bundle
    facts: dict[str, Any] = {
        "name": dump.name, "passes": len(dump.steps), "ops": len(bundle.graph.ops) if bundle.graph else 0,
        "failed": next((s.error for s in dump.steps if s.error), None),
    }  # fmt: skip
    sections: list[Section] = []
    complete = (
        bundle.program is not None and any(bundle.program.tasks) and bundle.cluster and bundle.graph
    )
    if bundle.plan is not None:
        plan = bundle.plan
        facts |= {
            "stages": plan.num_stages,
            "microbatches": plan.num_microbatches,
            "schedule": plan.schedule,
        }
    if complete:
        subject = Subject(bundle)
        try:
            if measured is not None:
                subject = dataclasses.replace(
                    subject, measured=on_lines_of(measured, subject.estimate.timeline)
                )
            sections += _of_program(subject)
            facts |= {
                "step_s": subject.estimate.iteration_s, "lower_bound_s": subject.estimate.lower_bound_s,
                "bubble": subject.estimate.bubble, "over": list(subject.estimate.over),
            }  # fmt: skip
        except HetjaxError as error:
            words = f"It cannot be priced: {error}"
            sections.append(Section("Price", Picture("price", tag("p", words), words)))
    if bundle.cluster is not None:
        sections.append(Section("Cluster", cluster_picture(bundle.cluster, bundle.plan)))
    if bundle.program is not None:
        sections.append(Section("Program", program_picture(bundle.program)))
    if bundle.graph is not None:
        sections.append(Section("Graph", graph_picture(bundle.graph)))
    sections.append(Section("Passes", stepper_picture(dump.name, dump.steps), plain=False))
    if bundle.notes:
        rows = [[a, b] for a, b in bundle.notes]
        text = "\n".join(f"  {a}: {b}" for a, b in bundle.notes)
        sections.append(Section("Notes", Picture("notes", table(["topic", ""], rows), text)))
    return Report(dump.name, facts, tuple(sections))


def _of_program(s: Subject) -> list[Section]:
    out = [
        Section("Stages", views.stages(s)),
        Section("Timeline", views.gantt(s)),
        Section("Memory", views.memory(s)),
    ]
    if s.measured is not None:
        out.append(Section("Predicted and measured", views.compare(s)))
    return [*out, Section("Roofline", views.roofline(s)), Section("Shardings", views.shardings(s))]


def write_report(
    folder: str | Path, out: str | Path, *, plain: bool = False, measured: Timeline | None = None
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Writes the reports of all dumps in a folder; returns the files, the first to open first, and the facts.

    One dump gives index.html (report.txt where `plain`). Several, as a run with `HETJAX_DUMP` leaves one
    per step planned, give a page each, and index.html lists them.

    Args:
      folder: a dump, or a folder of dumps.
      out: where to; made if need be.
      plain: text and not HTML.
      measured: of the last step dumped.

    Raises:
      ParseError: there is no dump, or one is damaged.
    """
    dumps = read_dumps(folder)
    reports = [build_report(d, measured if d is dumps[-1] else None) for d in dumps]
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    ending = ".txt" if plain else ".html"
    said = [r.text() if plain else r.html() for r in reports]
    if len(reports) == 1:
        files = {out / ("report.txt" if plain else "index.html"): said[0]}
    else:
        # A dump of the name of the first page stands beside it.
        stem = [f"{r.name}-dump" if r.name in ("index", "report") else r.name for r in reports]
        pages = {out / f"{name}{ending}": text for name, text in zip(stem, said)}
        first = out / ("report.txt" if plain else "index.html")
        files = {first: _landing_text(reports) if plain else _landing(reports, stem), **pages}
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files), [r.facts for r in reports]


def _landing(reports: list[Report], stem: list[str]) -> str:
    rows = []
    for r, name in zip(reports, stem):
        link = tag("a", r.name, href=quote(f"./{name}.html"))
        rows.append([link, *_cells(r)])
    title = f"hetjax report: {plural(len(reports), 'step')} planned"
    return page(title, tag("h1", title), table(_HEAD, rows))


_HEAD = ["step", "ops", "passes", "stages", "microbatches", "schedule", "predicted", "bubble", ""]


def _cells(r: Report) -> list[str]:
    f = r.facts
    return [
        str(f["ops"]), str(f["passes"]), str(f.get("stages", "")), str(f.get("microbatches", "")), str(f.get("schedule", "")),
        human_seconds(f["step_s"]) if "step_s" in f else "", f"{f['bubble']:.1%}" if "bubble" in f else "",
        f"failed: {f['failed']}" if f["failed"] else "does not fit" if f.get("over") else "",
    ]  # fmt: skip


def _landing_text(reports: list[Report]) -> str:
    return "\n".join("  ".join([r.name, *_cells(r)]).rstrip() for r in reports) + "\n"
