"""One table of the forms a bundle can be written in: `--emit hj|dot|html|stablehlo|mpmd|chrome-trace`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle

# form -> (module, function, what it is). A function takes a bundle and returns text.
EMITTERS: dict[str, tuple[str, str, str]] = {
    "chrome-trace": (
        "hetjax.emit.chrome",
        "emit_chrome_trace",
        "the simulated timeline, for Perfetto",
    ),
    "dot": (
        "hetjax.emit.dot",
        "emit_dot",
        "Graphviz: modules and what passes between them, or fragments on meshes",
    ),
    "hj": ("hetjax.ir.text", "print_bundle", "the text form, which parses back"),
    "html": ("hetjax.emit.html", "emit_html", "one page without network: stages, timeline, text"),
    "mpmd": ("hetjax.emit.mpmd", "emit_mpmd", "the program in Shardy's MPMD dialect"),
    "stablehlo": ("hetjax.emit.stablehlo", "emit_stablehlo", "the whole step as JAX lowers it"),
}


def emitter(form: str) -> Callable[[Bundle], str]:
    """Returns the function that writes a form, one of `EMITTERS`."""
    module, function, _ = EMITTERS[form]
    return getattr(importlib.import_module(module), function)


def emit(bundle: Bundle, form: str) -> str:
    """Returns a bundle in a form.

    Raises:
      LoweringError: the bundle lacks what the form shows, or holds what it cannot say.
    """
    return emitter(form)(bundle)
