"""Dumps of a run of passes: numbered files, a log of what each did, and a reproducer when one fails.

A dump holds `000_input.hj`, then one file per pass that changed something, `003_cut-stages.hj`. Each
names in its first lines the command that makes it from the file before. `trace.jsonl` has one line
per pass. `HETJAX_DUMP=DIR` writes the same from an unmodified training run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.text import print_bundle
from hetjax.passes.instruments import changed_parts, count_ops
from hetjax.passes.manager import Instrument, Step
from hetjax.passes.pipeline_text import pipeline_text
from hetjax.passes.registry import Pass

TRACE = "trace.jsonl"
ENVIRONMENT = "HETJAX_DUMP"
_PIPELINE_LINE = "// pipeline: "


class Dump(Instrument):
    """Writes the bundle after every pass that changed it.

    Args:
      folder: made if need be. What an earlier dump left there is replaced.

    Raises:
      PassError: the folder cannot be made or written, or holds files that no dump wrote.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.number = 0
        self.last = ""
        self._start = 0.0
        _make_empty(self.folder)

    def begin(self, bundle: Bundle, passes: tuple[Pass, ...]) -> None:
        self._write("input", bundle, [f"// the input of {pipeline_text(passes)}"])
        self._log(
            {
                "pass": "",
                "pipeline": pipeline_text(passes),
                "file": self.last,
                "ops": count_ops(bundle),
            }
        )

    def before(self, step: Step, bundle: Bundle) -> None:
        self._start = time.perf_counter()

    def after(self, step: Step, before: Bundle, after: Bundle) -> None:
        seconds = time.perf_counter() - self._start
        parts = changed_parts(before, after)
        if parts:
            name = f"{self.number:03d}_{step.name}.hj"
            self._write(
                step.name,
                after,
                [
                    f"// after pass {step.number} of {len(step.passes)}: {step.text}",
                    f"// hetjax opt {self.last} -p {_shell(step.text)} -o {name}",
                ],
            )
        else:
            self.number += 1
        self._log(
            {
                "pass": step.text,
                "number": step.number,
                "of": len(step.passes),
                "seconds": round(seconds, 6),
                "changed": list(parts),
                "ops": count_ops(after),
                "file": self.last,
            }
        )

    def failed(self, step: Step, bundle: Bundle, error: BaseException) -> None:
        self._log(
            {
                "pass": step.text,
                "number": step.number,
                "of": len(step.passes),
                "error": f"{type(error).__name__}: {error}",
                "file": self.last,
            }
        )

    def _write(self, name: str, bundle: Bundle, header: list[str]) -> None:
        self.last = f"{self.number:03d}_{name}.hj"
        self.number += 1
        (self.folder / self.last).write_text(
            "\n".join(header) + "\n" + print_bundle(bundle), encoding="utf-8"
        )

    def _log(self, entry: dict[str, object]) -> None:
        with (self.folder / TRACE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _shell(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _make_empty(folder: Path) -> None:
    """Makes the folder, or clears it of an earlier dump and of nothing else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PassError(
            "dump", f"cannot write to {folder}: {error.strerror}; set {ENVIRONMENT}, or the option, to another folder"
        ) from None
    ours = re.compile(r"\d{3,}_[\w.-]+\.hj|trace\.jsonl")
    others = sorted(p.name for p in folder.iterdir() if not ours.fullmatch(p.name))
    if others and not (folder / TRACE).exists():
        raise PassError(
            "dump",
            f"{folder} holds {', '.join(others[:3])}, which no dump wrote; give an empty or new folder",
        )
    for path in folder.iterdir():
        if ours.fullmatch(path.name):
            path.unlink()


class Reproducer(Instrument):
    """Writes, when a pass fails, a file that fails the same way.

    Args:
      path: where; None for a new name in the working folder.
      written: called with the path.
      command: how the run was started, for the reader.
    """

    def __init__(self, path: str | Path | None, written: Callable[[Path], None], command: str = ""):
        self.path, self.written, self.command = path, written, command

    def failed(self, step: Step, bundle: Bundle, error: BaseException) -> None:
        path = Path(self.path) if self.path else _free_name(Path.cwd(), step.name)
        path.write_text(reproducer_text(step, bundle, error, self.command), encoding="utf-8")
        self.written(path)


def reproducer_text(step: Step, bundle: Bundle, error: BaseException, command: str = "") -> str:
    """Returns the failing pass's input with the pipeline still to run and the versions used."""
    first = (str(error).splitlines() or [""])[0]
    lines = [
        f"// reproducer: {type(error).__name__} in pass '{step.name}': {first}",
        "// run it: hetjax opt --run-repro FILE",
        _PIPELINE_LINE + pipeline_text(step.passes[step.number - 1 :]),
        *(f"// {name} {version}" for name, version in versions().items()),
        *([f"// found by: {command}"] if command else []),
    ]
    return "\n".join(lines) + "\n" + print_bundle(bundle)


def reproducer_pipeline(text: str) -> str | None:
    """Returns the pipeline string a reproducer carries, None when the text is none."""
    for line in text.splitlines():
        if line.startswith(_PIPELINE_LINE):
            return line.removeprefix(_PIPELINE_LINE)
        if not line.startswith("//"):
            return None
    return None


def versions() -> dict[str, str]:
    """Returns the versions a fault may depend on."""
    from importlib.metadata import PackageNotFoundError, version

    # Run from a checkout, hetjax is no installed package.
    out = {
        "python": platform.python_version(),
        "hetjax": getattr(sys.modules["hetjax"], "__version__", "unknown"),
    }
    for package in ("jax", "jaxlib", "flax", "optax", "numpy"):
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out


def _free_name(folder: Path, name: str) -> Path:
    for i in range(1, 1000):
        path = folder / f"hetjax-repro-{name}{'' if i == 1 else f'-{i}'}.hj"
        if not path.exists():
            return path
    raise PassError("reproducer", f"{folder} is full of reproducers; remove some")


_SERIES = {"next": 0}


def environment_instruments(name: str) -> list[Instrument]:
    """Returns the instruments the environment asks for: a dump into a folder of its own per step planned.

    Args:
      name: the step's name.
    """
    root = os.environ.get(ENVIRONMENT)
    if not root:
        return []
    number = _SERIES["next"]
    _SERIES["next"] += 1
    plain = re.sub(r"[^\w.-]", "_", name)
    return [Dump(Path(root) / f"{number:03d}_{plain}")]
