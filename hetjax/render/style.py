"""What all pictures share: colours, hatches and the style sheet.

Text takes the colour of the page around it, fills are half transparent and lines grey, so that one
picture reads on a light and on a dark page; where there is no page around it, the system's own
colours are used. Every kind has a hatch beside its colour and a letter in its boxes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from hetjax.render.markup import Markup, tag

# kind -> (what it is, colour, lines of an 8 x 8 tile or dots). The hues differ in lightness too.
KINDS: dict[str, tuple[str, str, str]] = {
    "F": ("forward", "#4a90d9", ""),
    "B": ("backward", "#4fa35f", "M0 8L8 0"),
    "I": ("input gradient", "#27a5a0", "M0 0L8 8"),
    "W": ("weight gradient", "#d9a520", "M2 2h2M6 6h2"),
    "prologue": ("prologue", "#8d939c", "M4 0V8"),
    "update": ("update", "#d4674a", "M0 0L8 8M0 8L8 0"),
    "sync": ("gradient sync", "#a56cc1", "M0 4H8"),
    "transfer": ("transfer", "#8d939c", "M0 2H5M3 6H8"),
    "idle": ("idle", "", "M3.5 4h1"),
}

STYLE = """
.hj{font:13px/1.45 system-ui,sans-serif;max-width:82em;overflow-x:auto}
.hj h1,.hj h2,.hj h3{font-weight:600;margin:1em 0 .3em;line-height:1.25}.hj h3{font-size:1.05em}
.hj h2{font-size:1.25em}.hj p{margin:.3em 0}.hj table{border-collapse:collapse;margin:.4em 0;font-size:12px}
.hj td,.hj th{border:1px solid rgba(128,128,128,.4);padding:.15em .5em;text-align:left;vertical-align:top}
.hj td.s,.hj td.n,.hj th{white-space:nowrap}.hj td.n{text-align:right;font-variant-numeric:tabular-nums}.hj th{background:rgba(128,128,128,.14)}
.hj summary{cursor:pointer}.hj details{margin:.1em 0 .1em .2em}.hj details>:not(summary){margin-left:1.1em}
.hj pre{font:11.5px/1.4 ui-monospace,monospace;white-space:pre;overflow-x:auto;margin:.2em 0;
background:rgba(128,128,128,.1);padding:.4em}.hj .faint{opacity:.7}.hj svg{max-width:100%;height:auto;display:block}
.hj .bad{font-weight:700;text-decoration:underline}.hj .del{background:rgba(212,103,74,.25)}
.hj .ins{background:rgba(79,163,95,.25)}
.hj-step{display:grid;grid-template-columns:minmax(14em,23em) minmax(0,1fr);gap:0 .8em}
.hj-step>input{position:absolute;opacity:0}.hj-step>label{grid-column:1;padding:.1em .6em;cursor:pointer;
border-left:3px solid rgba(128,128,128,.3)}.hj-step>div{display:none;grid-column:2;grid-row:1/-1;min-width:0}
.hj-step>div>pre{max-height:44em;overflow:auto}
.hj-step>input:checked+label{border-left-color:#4a90d9;font-weight:600;background:rgba(128,128,128,.14)}
.hj-tree{max-width:76em}.hj-node{display:grid;grid-template-columns:repeat(5,5.4em);float:right;text-align:right;
font-variant-numeric:tabular-nums;font-size:12px}.hj-tree summary,.hj-leaf{border-bottom:1px solid rgba(128,128,128,.2)}
.hj-tree .hj-leaf{margin-left:1.3em}.hj-leaf:after,.hj-tree summary:after{content:"";display:block;clear:both}
.hj-step>input:focus-visible+label{outline:2px solid #4a90d9}.hj-step>input:checked+label+div{display:block}
"""
# The classes of lines in one picture, in order; each has dashes of its own beside its colour.
LINES = ("line", "line2", "line3", "line4", "line5", "line6")
SVG_STYLE = """
svg.hj-svg{font:11px system-ui,sans-serif}.hj-svg text{fill:currentColor}.hj-svg .h{font-size:13px;font-weight:600}
.hj-svg .faint{opacity:.7}.hj-svg .axis{stroke:#888;stroke-width:.6;fill:none}.hj-svg .grid{stroke:#888;
stroke-opacity:.3;stroke-width:.6}.hj-svg .box{fill:#888;fill-opacity:.08;stroke:#888;stroke-width:.8}
.hj-svg .hatch{stroke:currentColor;stroke-opacity:.3;fill:none}.hj-svg .task{stroke:#888;stroke-width:.5}
.hj-svg .modelled{stroke:currentColor;stroke-width:.9;stroke-dasharray:3 2}.hj-svg .m{text-anchor:middle}
.hj-svg .e{text-anchor:end}.hj-svg .line{fill:none;stroke:#4a90d9;stroke-width:1.6}
.hj-svg .line2{fill:none;stroke:#d4674a;stroke-width:1.6;stroke-dasharray:6 3}
.hj-svg .line3{fill:none;stroke:#4fa35f;stroke-width:1.6;stroke-dasharray:2 3}
.hj-svg .line4{fill:none;stroke:#a56cc1;stroke-width:1.6;stroke-dasharray:10 3 2 3}
.hj-svg .line5{fill:none;stroke:#b8860b;stroke-width:2.2;stroke-dasharray:1 4}
.hj-svg .line6{fill:none;stroke:#27a5a0;stroke-width:1.6;stroke-dasharray:14 4}
.hj-svg .over{fill:none;stroke:#d4674a;stroke-width:1.2;stroke-dasharray:7 4}.hj-svg a,.hj-svg .dot{cursor:default}
"""
# Only where there is no page around the picture.
PAGE_STYLE = ":root{color-scheme:light dark}body{background:Canvas;color:CanvasText;margin:1.5em}"
SVG_PAGE_STYLE = "svg.hj-svg{color-scheme:light dark;background:Canvas;color:CanvasText}"


def prefix_of(*parts: object) -> str:
    """Returns a short name that only equal content shares, for ids: a page may hold many pictures."""
    return "hj" + hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def hatches(prefix: str, kinds: Iterable[str]) -> Markup:
    """Returns the patterns of kinds; `fill_of` refers to them."""
    return tag("defs", *(_pattern(f"{prefix}-{k}", *KINDS[k][1:]) for k in dict.fromkeys(kinds)))


def _pattern(name: str, colour: str, lines: str) -> Markup:
    return tag(
        "pattern",
        tag("rect", width="8", height="8", fill=colour, fill_opacity=".55") if colour else None,
        tag("path", d=lines, class_="hatch") if lines else None,
        id=name,
        width="8",
        height="8",
        patternUnits="userSpaceOnUse",
    )


def fill_of(prefix: str, kind: str) -> str:
    """Returns the fill of a kind."""
    return f"url(#{prefix}-{kind})"
