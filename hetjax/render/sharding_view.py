"""How an array lies on a mesh, from its type and spec alone: no array is needed, so none is too large."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from hetjax.ir.graph import Aval
from hetjax.ir.program import Spec, StageMesh
from hetjax.render.markup import Markup, at, join, tag
from hetjax.render.picture import Picture, svg
from hetjax.render.units import human_bytes

MAX_TILES = 64
_SHADES = (
    "",
    "M0 8L8 0",
    "M0 0L8 8",
    "M0 4H8",
    "M4 0V8",
    "M0 8L8 0M0 0L8 8",
    "M0 4H8M4 0V8",
    "M2 2h1M6 6h1",
)
_COLOURS = ("#4a90d9", "#d9a520", "#4fa35f", "#d4674a", "#a56cc1", "#27a5a0", "#8d939c", "#b5651d")


@dataclasses.dataclass(frozen=True)
class Tile:
    """One part of an array and who holds it.

    Attributes:
      index: of the part, per dimension.
      start, stop: its bounds, per dimension.
      devices: positions in the cluster, all holding the same values.
    """

    index: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    devices: tuple[int, ...]


def tiles(shape: Sequence[int], mesh: StageMesh, spec: Spec) -> list[Tile]:
    """Returns the parts a spec cuts an array into, in row-major order.

    Args:
      shape: of the whole array; split dimensions divide by the axes that split them, as a program's do.
      mesh: the devices.
      spec: mesh axes per dimension, () for replicated.
    """
    spec = spec or ((),) * len(shape)
    parts = mesh.parts(spec)
    sizes = [n for _, n in mesh.axes]
    names = [a for a, _ in mesh.axes]
    held: dict[tuple[int, ...], list[int]] = {}
    for k, device in enumerate(mesh.devices):
        coordinates = dict(zip(names, _unravel(k, sizes)))
        index = []
        for axes in spec:
            i = 0
            for a in axes:
                i = i * mesh.axis_size(a) + coordinates[a]
            index.append(i)
        held.setdefault(tuple(index), []).append(device)
    out = []
    for index in itertools.product(*map(range, parts)):
        start = tuple(i * n // p for i, n, p in zip(index, shape, parts))
        stop = tuple((i + 1) * n // p for i, n, p in zip(index, shape, parts))
        out.append(Tile(index, start, stop, tuple(held[index])))
    return out


def _unravel(k: int, sizes: Sequence[int]) -> list[int]:
    out = []
    for n in reversed(sizes):
        k, i = divmod(k, n)
        out.append(i)
    return out[::-1]


def spec_words(spec: Spec) -> str:
    """Returns "replicated" or "dimension 1 over model"."""
    if not any(spec):
        return "replicated"
    return ", ".join(f"dimension {d} over {'*'.join(axes)}" for d, axes in enumerate(spec) if axes)


def array_tiles(
    aval: Aval, mesh: StageMesh, spec: Spec, *, width: float = 210, height: float = 120
) -> Markup:
    """Returns an SVG group: the array as a rectangle, a hatch per part, its devices written in.

    An array of more than two dimensions is drawn as rows of its last one.
    """
    found = tiles(aval.shape, mesh, spec)
    columns = max((t.index[-1] for t in found if t.index), default=0) + 1
    rows = len(found) // columns
    across, down = width / columns, height / rows
    parts = []
    for k, t in enumerate(found[:MAX_TILES]):
        x, y = (k % columns) * across, (k // columns) * down
        bounds = ", ".join(f"{a}:{b}" for a, b in zip(t.start, t.stop)) or "whole"
        size = math.prod(b - a for a, b in zip(t.start, t.stop)) * aval.nbytes // max(1, aval.size)
        who = _devices(t.devices)
        title = f"[{bounds}] on {'device' if len(t.devices) == 1 else 'devices'} {who}, {human_bytes(size)}"
        shade = k % len(_COLOURS)
        parts += [
            tag("rect", x=at(x), y=at(y), width=at(across), height=at(down), fill=_COLOURS[shade], fill_opacity=".35"),
            tag("path", d=_hatch(shade, x, y, across, down), class_="hatch"),
            tag(
                "rect", tag("title", title), x=at(x), y=at(y), width=at(across), height=at(down), class_="task",
                fill="transparent", data_devices=" ".join(map(str, t.devices)),
                data_start=" ".join(map(str, t.start)), data_stop=" ".join(map(str, t.stop)),
            ),
        ]  # fmt: skip
        if down > 12 and across > 4 + 5.6 * len(who):
            parts.append(tag("text", who, x=at(x + across / 2), y=at(y + down / 2 + 4), class_="m"))
    if len(found) > MAX_TILES:
        parts.append(
            tag("text", f"… and {len(found) - MAX_TILES} more parts", x="4", y=at(height - 5))
        )
    return tag("g", *parts)


def _hatch(shade: int, x: float, y: float, width: float, height: float) -> str:
    """Returns lines inside a rectangle, another way for each shade; few enough that numbers stay readable."""
    step = 11.0
    lines = []
    kind = shade % 4
    if kind == 1:
        lines = [f"M{at(x + i)} {at(y)}v{at(height)}" for i in _steps(width, step)]
    elif kind == 2:
        lines = [f"M{at(x)} {at(y + i)}h{at(width)}" for i in _steps(height, step)]
    elif kind == 3:
        for i in _steps(width, step):
            n = min(i, height)
            lines.append(f"M{at(x + i)} {at(y)}l-{at(n)} {at(n)}")
    return "".join(lines) or f"M{at(x)} {at(y)}"


def _steps(length: float, step: float) -> list[float]:
    return [step * k for k in range(1, int(length / step) + 1)]


def _devices(devices: Sequence[int]) -> str:
    """Returns "0-3" or "0, 2, 4 … (12)"."""
    if len(devices) > 1 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    text = ", ".join(map(str, devices[:4]))
    return f"{text} … ({len(devices)})" if len(devices) > 4 else text


def mesh_grid(mesh: StageMesh) -> Markup:
    """Returns the devices of a mesh as a grid: rows along the first axis, columns along the last."""
    columns = mesh.axes[-1][1] if mesh.axes else 1
    rows = len(mesh.devices) // columns
    cell, top = 34, 40
    shown = min(rows, 16)
    parts = [
        tag(
            "text",
            f"{mesh.name}: {len(mesh.devices)} x {mesh.kind} at {mesh.site}",
            x="8",
            y="16",
            class_="h",
        )
    ]
    axes = " x ".join(f"{a} {n}" for a, n in mesh.axes)
    parts.append(tag("text", axes, x="8", y="32", class_="faint"))
    across = min(columns, 24)
    for k, device in enumerate(mesh.devices):
        row, column = divmod(k, columns)
        if row >= shown or column >= across:
            continue
        x, y = 8 + column * cell, top + row * cell
        parts.append(
            tag("rect", x=at(x), y=at(y), width="30", height="30", class_="box", data_device=device)
        )
        parts.append(tag("text", str(device), x=at(x + 15), y=at(y + 19), class_="m"))
    height = top + shown * cell + 6
    if shown < rows or across < columns:
        parts.append(tag("text", f"… {len(mesh.devices)} devices in all", x="8", y=at(height + 8)))
        height += 16
    return svg(
        max(260, 16 + across * cell), height, *parts, label=f"mesh {mesh.name}", data_picture="mesh"
    )


@dataclasses.dataclass(frozen=True)
class Placed:
    """One place of a value.

    Attributes:
      mesh: of the stage.
      where: the fragment, or "fed".
      how: "fed", "read", "given" or "inside".
      aval: its type there.
      spec: how it is split.
      chosen_by: who decided so.
    """

    mesh: StageMesh
    where: str
    how: str
    aval: Aval
    spec: Spec
    chosen_by: str


@dataclasses.dataclass(frozen=True)
class Arrow:
    """A value that goes from one stage to another.

    Attributes:
      name: of the reshard.
      source, target: stages, by the names of their meshes.
      nbytes: once.
      times: a step.
    """

    name: str
    source: str
    target: str
    nbytes: int
    times: int


def sharding_picture(name: str, places: Sequence[Placed], arrows: Sequence[Arrow]) -> Picture:
    """Returns a value at each place it is in, with an arrow where it crosses.

    Args:
      name: of the value.
      places: in the order the step reaches them; equal ones of one stage are drawn once.
      arrows: reshards of the value.
    """
    kept: dict[tuple, list[Placed]] = {}
    for p in places:
        kept.setdefault((p.mesh.name, p.aval, p.spec), []).append(p)
    stages = list(dict.fromkeys(key[0] for key in kept))
    width, parts, text = 235, [], [name]
    x, bottom = 10.0, 0.0
    at_stage: dict[str, tuple[float, float]] = {}
    for stage in stages:
        mine = [v for k, v in kept.items() if k[0] == stage]
        y = 44.0
        parts.append(tag("text", _stage_head(mine[0][0].mesh), x=at(x), y="36", class_="h"))
        for same in mine:
            p = same[0]
            where = ", ".join(dict.fromkeys(f"{q.how} {q.where}".strip() for q in same))
            local = p.aval.nbytes // math.prod(p.mesh.parts(p.spec) or (1,))
            lines = [
                f"{p.aval} · {spec_words(p.spec)}",
                f"{where if len(where) < 38 else where[:37] + '…'}; {human_bytes(local)} a device",
            ]
            text += [
                f"  {stage}: {lines[0]} ({where}), {human_bytes(local)} on each device",
                f"    chosen by {p.chosen_by}",
            ]
            for k, line in enumerate(lines):
                parts.append(
                    tag(
                        "text",
                        tag("title", f"{where}; chosen by {p.chosen_by}"),
                        line,
                        x=at(x),
                        y=at(y + 12 + 14 * k),
                    )
                )
            array = array_tiles(p.aval, p.mesh, p.spec, height=96)
            parts.append(
                tag("g", array, transform=f"translate({at(x)} {at(y + 34)})", data_stage=stage)
            )
            y += 144
        at_stage[stage] = (x, y)
        bottom = max(bottom, y)
        x += width + 90
    for k, a in enumerate(arrows):
        if a.source not in at_stage or a.target not in at_stage:
            continue
        x0, x1 = at_stage[a.source][0], at_stage[a.target][0]
        forward = x1 > x0
        start, end = (x0 + 212, x1 - 8) if forward else (x0 - 8, x1 + 212)
        y = bottom + 22 + 26 * k
        words = f"{a.name}: {human_bytes(a.nbytes)} x {a.times}"
        tip = 6 if forward else -6
        parts.append(
            tag(
                "path", d=f"M{at(start)} {at(y)}H{at(end)}m{-tip} -4l{tip} 4l{-tip} 4", class_="line",
                data_arrow=a.name, data_bytes=a.nbytes, data_times=a.times,
            )
        )  # fmt: skip
        parts.append(tag("text", words, x=at((start + end) / 2), y=at(y - 5), class_="m"))
        text.append(f"  {a.source} → {a.target}: {words} a step")
    height = bottom + (30 + 26 * len(arrows) if arrows else 8)
    heading = tag("text", name, x="10", y="16", class_="h")
    body = svg(
        max(300, x - 40),
        height,
        heading,
        *parts,
        label=f"sharding of {name}",
        data_picture="sharding",
    )
    return Picture(f"sharding of {name}", body, "\n".join(text), is_svg=True)


def _stage_head(mesh: StageMesh) -> str:
    axes = " x ".join(f"{a} {n}" for a, n in mesh.axes)
    return f"{mesh.name}: {len(mesh.devices)} x {mesh.kind} ({axes})"


def shardings_table(rows: Sequence[tuple[str, Aval, StageMesh, Spec, int]], title: str) -> Picture:
    """Returns leaves with a small drawing of each: (path, type, mesh, spec, bytes on one device)."""
    from hetjax.render.markup import table

    cells = []
    for path, aval, mesh, spec, local in rows:
        cells.append(
            [
                path,
                str(aval),
                mesh.name,
                spec_words(spec),
                human_bytes(local),
                _small(aval, mesh, spec),
            ]
        )
    text = [
        title,
        *(
            f"  {p}: {a}, {m.name}, {spec_words(s)}, {human_bytes(n)} a device"
            for p, a, m, s, n in rows
        ),
    ]
    body = join(
        [
            tag("p", tag("b", title)),
            table(["leaf", "type", "stage", "split", "a device", ""], cells),
        ]
    )
    return Picture(title, body, "\n".join(text))


def _small(aval: Aval, mesh: StageMesh, spec: Spec) -> Markup:
    label = f"{aval} {spec_words(spec)}"
    return svg(
        90,
        34,
        array_tiles(aval, mesh, spec, width=90, height=34),
        label=label,
        data_picture="tiles",
    )
