"""The exceptions hetjax raises: one root, one leaf per kind of fault.

A message has four parts: what broke; which value, by the user's own path and source line; the
numbers; what to do next. All problems of one kind are reported together.
"""

from __future__ import annotations

from collections.abc import Sequence


class HetjaxError(Exception):
    """The root of every error hetjax raises on purpose."""


class ParseError(HetjaxError):
    """Text (IR, pipeline, TOML) does not follow its grammar; carries line and column.

    Args:
      message: what is wrong and what was expected.
      source: the whole text, used to print the line with a caret.
      line: 1-based line number, 0 when unknown.
      column: 1-based column number, 0 when unknown.
      filename: where the text came from.
    """

    def __init__(
        self, message: str, *, source: str = "", line: int = 0, column: int = 0,
        filename: str = "<text>",
    ):
        self.message, self.line, self.column, self.filename = message, line, column, filename
        parts = [f"{filename}:{line}:{column}: {message}" if line else f"{filename}: {message}"]
        lines = source.splitlines()
        if 0 < line <= len(lines):
            parts.append("  " + lines[line - 1])
            if column:
                parts.append("  " + " " * (column - 1) + "^")
        super().__init__("\n".join(parts))


class _ListedError(HetjaxError):
    """An error that may have found several problems; `problems` holds one sentence each."""

    def __init__(self, problems: Sequence[str] | str):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class VerifyError(_ListedError):
    """A graph, program or plan breaks an invariant; lists every violation found."""


class PassError(HetjaxError):
    """A pass failed; carries the pass's name."""

    def __init__(self, pass_name: str, message: str):
        self.pass_name = pass_name
        super().__init__(f"pass '{pass_name}': {message}")


class ClusterError(_ListedError):
    """A cluster description is wrong, or it is not the devices at hand; lists every problem."""


class PlanError(_ListedError):
    """No plan fits the request, or a plan given does not fit; lists every problem."""


class MicrobatchError(HetjaxError):
    """Splitting the batch would change the numbers, or cannot be shown not to.

    Attributes:
      reason: why, in words.
      equation: the primitive that cannot be split, or "".
      module_path: the Flax module it belongs to, or "".
      source: file:line of the user's code, or "".
    """

    def __init__(
        self, message: str, *, reason: str = "", equation: str = "", module_path: str = "",
        source: str = "",
    ):
        self.reason, self.equation = reason or message, equation
        self.module_path, self.source = module_path, source
        super().__init__(message)


class LoweringError(HetjaxError):
    """A graph or program cannot be turned into something JAX can run."""


class RuntimeFault(HetjaxError):
    """A stage failed while it ran; names stage, microbatch and module path."""


class NanFault(RuntimeFault, FloatingPointError):
    """A result is not finite while jax_debug_nans or jax_debug_infs is on; JAX's own kind of error, too."""


class CheckpointError(HetjaxError):
    """A checkpoint cannot be written, found or trusted."""
