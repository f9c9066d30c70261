"""Reads what `hetjax opt --dump DIR` and `HETJAX_DUMP=DIR` write."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import ParseError
from hetjax.ir.parser import parse_bundle
from hetjax.passes.diffing import diff
from hetjax.passes.dumping import TRACE
from hetjax.render.stepper import PassStep


@dataclasses.dataclass(frozen=True)
class Dump:
    """One dumped run of passes.

    Attributes:
      folder: where it lies.
      pipeline: what was run.
      entries: the lines of its log, the input first.
    """

    folder: Path
    pipeline: str
    entries: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @functools.cached_property
    def steps(self) -> tuple[PassStep, ...]:
        """Returns every pass with the difference it made."""
        out, before = [], self._text(self.entries[0]["file"])
        for e in self.entries[1:]:
            failed = str(e.get("error", ""))
            changed = tuple(e.get("changed", ()))
            after = self._text(e["file"]) if changed else before
            lines = tuple(diff(before, after)) if changed else ()
            out.append(
                PassStep(e["pass"], e.get("seconds"), e.get("ops", 0), changed, lines, failed)
            )
            before = after
        return tuple(out)

    @functools.cached_property
    def bundle(self) -> Bundle:
        """Returns the last bundle written.

        Raises:
          ParseError: the file cannot be read.
        """
        name = self.entries[-1]["file"]
        return parse_bundle(self._text(name), filename=str(self.folder / name))

    def _text(self, name: str) -> str:
        try:
            text = (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParseError(f"the dump in {self.folder} lacks {name}: {error}") from None
        # The head says how to make the file again; it is no part of the program.
        return "\n".join(line for line in text.splitlines() if not line.startswith("//"))


def read_dump(folder: str | Path) -> Dump:
    """Returns the dump in a folder; where the folder holds several, the newest.

    Raises:
      ParseError: there is none.
    """
    return read_dumps(folder)[-1]


def read_dumps(folder: str | Path) -> list[Dump]:
    """Returns every dump in a folder, by name: itself, or those in folders of its own.

    Raises:
      ParseError: there is none, or its log is damaged.
    """
    folder = Path(folder)
    found = (
        [folder]
        if (folder / TRACE).is_file()
        else sorted(p.parent for p in folder.glob(f"*/{TRACE}"))
    )
    if not found:
        raise ParseError(
            f"{folder} holds no dump (no {TRACE}); write one with hetjax opt --dump DIR, or run with HETJAX_DUMP=DIR"
        )
    return [_read(f) for f in found]


def _read(folder: Path) -> Dump:
    """Returns one dump; of a log with several runs, as planning makes them, all passes one after the other."""
    try:
        lines = (folder / TRACE).read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ParseError(f"{folder / TRACE} cannot be read: {error}") from None
    if not all(isinstance(e, dict) and isinstance(e.get("file"), str) for e in entries) or not all(
        isinstance(e.get("pipeline"), str) for e in entries if e.get("pass") == ""
    ):
        raise ParseError(f"{folder / TRACE} is no log of passes: a line of it names no file or pipeline")
    starts = [e for e in entries if e.get("pass") == ""]
    if not starts or entries[0] is not starts[0]:
        raise ParseError(f"{folder / TRACE} does not begin with the input of a run")
    kept = [entries[0], *(e for e in entries[1:] if e.get("pass"))]
    return Dump(folder, ",".join(e["pipeline"] for e in starts), tuple(kept))
