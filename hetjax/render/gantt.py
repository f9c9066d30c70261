"""A pipeline step on the clock: tasks per device, transfers per line, predicted over measured.

Every box carries its numbers as they are (`data-t` is "start end" in the timeline's own unit,
`data-m` the microbatch, `data-s` the stage, `data-b` the bytes), so that a reader gets back exactly
what was drawn: `read_gantt` does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree

from hetjax.passes.simulator import Span, Timeline
from hetjax.render.axes import round_ticks
from hetjax.render.markup import Markup, at, tag
from hetjax.render.picture import Picture, svg
from hetjax.render.style import KINDS, fill_of, hatches, prefix_of
from hetjax.render.text_chart import text_chart
from hetjax.render.units import human_bytes, human_seconds

ROW, GAP, LEGEND_HEIGHT = 20, 7, 22
# Beyond so many boxes none can be told from the next: columns of a few pixels are drawn instead.
MAX_BOXES = 1500
COLUMN = 2
MAX_LINES = 10
MAX_DEVICES = 40


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a step.

    Attributes:
      label: "predicted" or "measured".
      timeline: when everything ran.
      modelled: what of a measured run took a model's time and not its own.
    """

    label: str
    timeline: Timeline
    modelled: frozenset[Span] = frozenset()


def predicted(timeline: Timeline) -> Run:
    """Returns a run that took place in the simulator alone."""
    return Run("predicted", timeline)


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """One thing drawn, as it reads back.

    Attributes:
      run, row: "predicted", and the device or line.
      kind: a key of `KINDS`.
      start, end: in the timeline's unit.
      stage, microbatch: of the task, None where it has none.
      nbytes: of a transfer, None where nobody knows.
    """

    run: str
    row: str
    kind: str
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    nbytes: int | None = None


def gantt(
    runs: Sequence[Run],
    names: Sequence[str],
    title: str,
    *,
    nbytes: Mapping[str, int] | None = None,
    seconds: bool = True,
    width: int = 980,
) -> Picture:
    """Returns the chart: devices above, lines below, one band a run, on one clock.

    Args:
      runs: at least one; all of the same devices.
      names: of the devices.
      title: what ran; each run's length and bubble are put behind it.
      nbytes: bytes of a transfer by the `work` of its task.
      seconds: whether times are seconds; False for any unit.
      width: of the drawing.
    """
    said = human_seconds if seconds else lambda x: f"{x:.6g}"
    whole = "; ".join(
        f"{r.label} {said(r.timeline.makespan_s)}, bubble {r.timeline.bubble:.1%}" for r in runs
    )
    heading = f"{title}: {whole}"
    chart = _Chart(runs, names, nbytes or {}, said, width)
    text = "\n".join([heading, *(_text(r, names) for r in runs)])
    return Picture(title, chart.draw(heading), text, is_svg=True)


def _text(run: Run, names: Sequence[str]) -> str:
    return text_chart(run.timeline, names, 100)


class _Chart:
    def __init__(
        self, runs: Sequence[Run], names: Sequence[str], nbytes: Mapping[str, int], said, width: int
    ):
        self.runs, self.names, self.nbytes, self.said = runs, list(names), nbytes, said
        places = dict.fromkeys(t.place for r in runs for t in r.timeline.transfers)
        busy = {
            p: sum(t.end_s - t.start_s for r in runs for t in r.timeline.transfers if t.place == p)
            for p in places
        }
        kept = set(sorted(busy, key=lambda p: -busy[p])[:MAX_LINES])
        self.lines = [p for p in places if p in kept]
        self.lines_left = len(places) - len(self.lines)
        self.devices = list(range(min(len(self.names), MAX_DEVICES)))
        self.total = max((r.timeline.makespan_s for r in runs), default=0.0) or 1.0
        longest = max(map(len, [*self.names, *map(_line_name, self.lines)]), default=4)
        self.left = min(190, 14 + 6.2 * longest)
        self.scale = (width - self.left - 14) / self.total
        self.width = width
        boxes = sum(len(r.timeline.spans[d]) for r in runs for d in self.devices)
        self.named = boxes + sum(len(r.timeline.transfers) for r in runs) <= MAX_BOXES
        self.prefix = prefix_of(
            "gantt",
            self.names,
            [(r.label, r.timeline.makespan_s, r.timeline.busy_s, boxes) for r in runs],
        )

    def draw(self, heading: str) -> Markup:
        y = 26.0
        parts: list[Markup | None] = [tag("text", heading, x="8", y="17", class_="h")]
        band = ROW if len(self.runs) == 1 else 15
        for d in self.devices:
            parts.append(tag("text", self.names[d], x="8", y=at(y + band * len(self.runs) / 2 + 4)))
            for run in self.runs:
                parts.append(
                    self._row(run, self.names[d], run.timeline.spans[d], y, band, idle=True)
                )
                y += band
            y += GAP
        for place in self.lines:
            parts.append(
                tag(
                    "text",
                    _line_name(place),
                    x="8",
                    y=at(y + 6 * len(self.runs) + 4),
                    class_="faint",
                )
            )
            for run in self.runs:
                spans = [t for t in run.timeline.transfers if t.place == place]
                parts.append(self._row(run, place, spans, y, 12, idle=False))
                y += 12
            y += GAP - 2
        for count, what in (
            (len(self.names) - len(self.devices), "devices"),
            (self.lines_left, "lines"),
        ):
            if count:
                parts.append(
                    tag("text", f"… and {count} more {what}", x="8", y=at(y + 11), class_="faint")
                )
                y += 16
        parts.append(self._axis(y))
        y += 26
        kinds = self._kinds()
        height = y + LEGEND_HEIGHT
        return svg(
            self.width, height, hatches(self.prefix, kinds), *parts, self._legend(kinds, y),
            label=heading, data_picture="gantt", data_total=float(self.total),
        )  # fmt: skip

    def _kinds(self) -> list[str]:
        seen = {_kind(s) for r in self.runs for row in r.timeline.spans for s in row}
        seen |= {"idle"} | {_kind(t) for r in self.runs for t in r.timeline.transfers}
        return [k for k in KINDS if k in seen]

    def _row(
        self, run: Run, row: str, spans: Sequence[Span], y: float, height: float, *, idle: bool
    ) -> Markup:
        """Returns one run's band of one device or line."""
        if not self.named:
            return self._columns(run, row, spans, y, height, idle)
        by_kind: dict[tuple[str, bool], list[Span]] = {}
        for s in spans:
            by_kind.setdefault((_kind(s), s in run.modelled), []).append(s)
        groups = [self._idle(run, spans, y, height)] if idle else []
        for (kind, modelled), members in by_kind.items():
            style = "task modelled" if modelled else "task"
            drawn = [self._box(kind, s, y, height) for s in members]
            groups.append(
                tag("g", *drawn, class_=style, fill=fill_of(self.prefix, kind), data_kind=kind)
            )
        labels = [
            tag(
                "text", str(s.task), x=at(self._x((s.start_s + s.end_s) / 2)), y=at(y + height / 2 + 4),
                class_="m",
            )
            for s in spans
            if idle and self._w(s) > 6 + 6.5 * len(str(s.task))
        ]  # fmt: skip
        return tag("g", *groups, *labels, data_run=run.label, data_row=row)

    def _columns(
        self, run: Run, row: str, spans: Sequence[Span], y: float, height: float, idle: bool
    ) -> Markup:
        """Returns a band in columns of `COLUMN`: each shows the kind that took most of it."""
        step = COLUMN / self.scale
        took: list[dict[str, float]] = [{} for _ in range(int(self.total / step) + 1)]
        for s in spans:
            for c in range(int(s.start_s / step), min(len(took) - 1, int(s.end_s / step)) + 1):
                share = min(s.end_s, (c + 1) * step) - max(s.start_s, c * step)
                took[c][_kind(s)] = took[c].get(_kind(s), 0.0) + share
        # A column of a device belongs to nobody where more than half of it is idle; a line is mostly idle.
        least = step / 2 if idle else 0.0
        most = [max(t, key=lambda k: t[k]) if sum(t.values()) > least else "idle" for t in took]
        paths: dict[str, list[str]] = {}
        for kind, run_of in itertools.groupby(enumerate(most), key=lambda x: x[1]):
            columns = [c for c, _ in run_of]
            if kind != "idle" or idle:
                w = COLUMN * len(columns)
                x = at(self.left + COLUMN * columns[0])
                paths.setdefault(kind, []).append(f"M{x} {at(y)}h{w}v{at(height)}h-{w}z")
        drawn = [
            tag("path", d="".join(d), fill=fill_of(self.prefix, kind), data_kind=kind)
            for kind, d in paths.items()
        ]
        return tag("g", *drawn, data_run=run.label, data_row=row)

    def _box(self, kind: str, s: Span, y: float, height: float) -> Markup:
        size = self.nbytes.get(s.task.work) if kind == "transfer" else None
        words = [
            f"transfer of {s.task.work or s.task}"
            if kind == "transfer"
            else f"{s.task} on s{s.task.stage} ({KINDS[kind][0]})"
        ]
        if s.task.microbatch is not None:
            words.append(f"microbatch {s.task.microbatch}")
        words.append(
            f"{self.said(s.end_s - s.start_s)}, {self.said(s.start_s)} to {self.said(s.end_s)}"
        )
        if size is not None:
            words.append(human_bytes(size))
        return tag(
            "rect", tag("title", "; ".join(words)), x=at(self._x(s.start_s)), y=at(y), width=at(self._w(s)),
            height=at(height), data_s=s.task.stage, data_m=s.task.microbatch,
            data_t=f"{s.start_s!r} {s.end_s!r}", data_b=size,
        )  # fmt: skip

    def _idle(self, run: Run, spans: Sequence[Span], y: float, height: float) -> Markup:
        edges = [
            0.0,
            *itertools.chain(*((s.start_s, s.end_s) for s in spans)),
            run.timeline.makespan_s,
        ]
        gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]
        drawn = [
            tag(
                "rect", tag("title", f"idle {self.said(b - a)}"), x=at(self._x(a)),
                y=at(y), width=at((b - a) * self.scale), height=at(height), data_t=f"{a!r} {b!r}",
            )
            for a, b in gaps
        ]  # fmt: skip
        return tag("g", *drawn, fill=fill_of(self.prefix, "idle"), data_kind="idle")

    def _axis(self, y: float) -> Markup:
        parts = []
        for t in round_ticks(0.0, self.total, self.said, 8):
            x = self._x(t)
            parts.append(tag("path", d=f"M{at(x)} 24V{at(y)}", class_="grid"))
            anchor = "e" if x > self.width - 34 else "m"
            parts.append(tag("text", self.said(t), x=at(x), y=at(y + 14), class_=anchor))
        return tag("g", *parts)

    def _legend(self, kinds: Iterable[str], y: float) -> Markup:
        parts, x = [], self.left
        for kind in kinds:
            letter = f"{kind}: " if len(kind) == 1 else ""
            words = letter + KINDS[kind][0]
            parts.append(
                tag(
                    "rect", x=at(x), y=at(y + 3), width="16", height="12",
                    fill=fill_of(self.prefix, kind), class_="task",
                )
            )  # fmt: skip
            parts.append(tag("text", words, x=at(x + 20), y=at(y + 13)))
            x += 34 + 6.4 * len(words)
        if any(r.modelled for r in self.runs):
            parts.append(
                tag(
                    "rect",
                    x=at(x),
                    y=at(y + 3),
                    width="16",
                    height="12",
                    fill="none",
                    class_="modelled",
                )
            )
            parts.append(tag("text", "modelled time", x=at(x + 20), y=at(y + 13)))
        if not self.named:
            words = "tasks are narrower than can be drawn: each column shows what took most of it"
            parts.append(tag("text", words, x=at(x), y=at(y + 13), class_="faint"))
        return tag("g", *parts, class_="legend")

    def _x(self, t: float) -> float:
        return self.left + t * self.scale

    def _w(self, s: Span) -> float:
        return max(0.3, (s.end_s - s.start_s) * self.scale)


def _kind(s: Span) -> str:
    """Returns how a span is drawn: what crosses a line is a transfer, whatever task made it."""
    if not s.place.startswith("line"):
        return s.task.kind
    return "sync" if s.task.kind == "sync" else "transfer"


def _line_name(place: str) -> str:
    name = place.removeprefix("line ")
    return name if len(name) <= 28 else name[:27] + "…"


def read_gantt(text: str) -> list[Box]:
    """Returns every box of a chart as it was drawn, idle times included.

    Args:
      text: the SVG.
    """
    out = []
    for row in ElementTree.fromstring(text).iter():
        if "data-row" not in row.attrib:
            continue
        for group in row:
            for box in group:
                if "data-t" not in box.attrib:
                    continue
                start, end = map(float, box.attrib["data-t"].split())
                whole = {
                    k: int(box.attrib[k]) if k in box.attrib else None
                    for k in ("data-s", "data-m", "data-b")
                }
                out.append(
                    Box(
                        row.attrib["data-run"], row.attrib["data-row"], group.attrib["data-kind"], start, end,
                        whole["data-s"], whole["data-m"], whole["data-b"],
                    )
                )  # fmt: skip
    return out
