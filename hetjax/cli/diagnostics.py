"""`// expected-error {{…}}` lines in golden files: errors a file is there to provoke.

// expected-error {{reads %9}}          any line
// expected-error@+1 {{expected ','}}   reported one line below this one (parse errors have lines)
"""

from __future__ import annotations

import re

from hetjax.ir.errors import ParseError, VerifyError

_EXPECTED = re.compile(r"//\s*expected-error(?:@([+-]\d+))?\s*\{\{(.*?)\}\}")


class Expectations:
    """What a piece of a file expects.

    Args:
      text: the piece.
      first_line: its first line's number in the whole file.
    """

    def __init__(self, text: str, first_line: int):
        self.wanted: list[tuple[int, int | None, str]] = []
        for i, line in enumerate(text.splitlines(), first_line):
            for offset, message in _EXPECTED.findall(line):
                self.wanted.append((i, i + int(offset) if offset else None, message))

    def unmet(self, error: BaseException | None) -> list[str]:
        """Returns one sentence per expectation not met and per error not expected."""
        if error is None:
            given: list[tuple[int | None, str]] = []
        elif isinstance(error, VerifyError):
            given = [(None, p) for p in error.problems]
        elif isinstance(error, ParseError):
            given = [(error.line, error.message)]
        else:
            given = [(None, str(error))]
        out = []
        for line, at, message in self.wanted:
            match = next((g for g in given if message in g[1] and (at is None or at == g[0])), None)
            if match is None:
                where = f" at line {at}" if at is not None else ""
                out.append(f"line {line}: expected an error{where} that says: {message}")
            else:
                given.remove(match)
        out += [
            f"unexpected error{f' at line {line}' if line else ''}: {text}" for line, text in given
        ]
        return out
