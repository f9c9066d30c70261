"""The tokens of the text form, and a cursor over them that knows lines and columns.

A token is a plain string; its first character tells its kind. Positions are worked out again only
when an error is raised, which keeps parsing fast.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from hetjax.ir.errors import ParseError

# Possessive, or a long run of digits would be tried in every split.
_NUMBER = r"-?(?:\d++(?:\.\d*+)?(?:[eE][+-]?\d++)?|inf\b|nan\b)"
_TYPE = r"~?[A-Za-z_]\w*(?:<\w+>)?"
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    rf"""(?:\s|//[^\n]*+)*+(
      %\d+(?::{_TYPE}\[[^\]\n]*\])?                                 # a value, with its type
    | {_STRING}
    | \#(?:[A-Za-z_][\w.]*|{_STRING})                               # a handle
    | (?:{_NUMBER}|True|False|complex\({_NUMBER},{_NUMBER}\)):{_TYPE}(?:\[[^\]\n]*\])?  # a literal
    | {_TYPE}\[[^\]\n]*\]                                           # a type
    | [A-Za-z_][\w./:<>-]*
    | {_NUMBER}
    | \|[^\n]*                                                      # a line in another language
    | \S
    | \Z                                                             # or a comment at the end would be searched for tokens
    )""",
    re.ASCII | re.VERBOSE,
)
_WORD = re.compile(r"[A-Za-z_][\w./:<>-]*", re.ASCII)
_INTEGER = re.compile(r"-?\d+", re.ASCII)
# Deeper nesting than any real program's, and far from Python's own recursion limit.
MAX_NESTING = 40


class Cursor:
    """Steps through the tokens of one text.

    Args:
      source: the text.
      filename: where it came from, for messages.
    """

    def __init__(self, source: str, filename: str = "<text>"):
        self.source, self.filename = source, filename
        self.tokens: list[str] = _TOKEN.findall(source)
        self.tokens.append("")
        self.at = 0
        self.depth = 0

    def offset(self, position: int) -> int:
        """Returns where in the source a token starts."""
        for i, match in enumerate(_TOKEN.finditer(self.source)):
            if i == position:
                return match.start(1)
        return len(self.source.rstrip())

    def line(self, position: int | None = None) -> int:
        """Returns the 1-based line a token (the next one) stands on."""
        offset = self.offset(self.at if position is None else position)
        return self.source.count("\n", 0, offset) + 1

    def fail(self, message: str, position: int | None = None, inside: int = 0) -> NoReturn:
        """Raises a ParseError at a token: the next one, or `position`; `inside` moves right."""
        offset = self.offset(self.at if position is None else position) + inside
        line = self.source.count("\n", 0, offset) + 1
        column = offset - (self.source.rfind("\n", 0, offset) + 1) + 1
        raise ParseError(
            message, source=self.source, line=line, column=column, filename=self.filename
        )

    def expected(self, what: str) -> NoReturn:
        """Raises a ParseError that says what should stand here and what does."""
        self.fail(f"expected {what}, found {self.found()}")

    def found(self) -> str:
        token = self.tokens[self.at]
        shown = token if len(token) <= 40 else token[:37] + "..."
        return f"'{shown}'" if token else "the end of the text"

    def peek(self) -> str:
        """Returns the next token, "" at the end."""
        return self.tokens[self.at]

    def take(self, token: str) -> bool:
        """Steps over `token` if it comes next, and returns whether it did."""
        if self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def expect(self, token: str, where: str = "") -> None:
        """Steps over `token`, or raises."""
        if self.tokens[self.at] != token:
            self.expected(f"'{token}'{' ' + where if where else ''}")
        self.at += 1

    def name(self, what: str) -> str:
        """Steps over a word or a string and returns its text."""
        token = self.tokens[self.at]
        if token.startswith('"'):
            return self.string(what)
        if not _WORD.fullmatch(token):
            self.expected(what)
        self.at += 1
        return token

    def at_name(self) -> bool:
        """Returns whether a word or a string comes next."""
        token = self.tokens[self.at]
        return token.startswith('"') or _WORD.fullmatch(token) is not None

    def string(self, what: str) -> str:
        """Steps over a string in quotes and returns what it says."""
        token = self.tokens[self.at]
        if not token.startswith('"'):
            self.expected(f"{what} in quotes")
        if token == '"':
            self.fail("this string is not closed on its line")
        self.at += 1
        return self.unquote(token)

    def unquote(self, token: str) -> str:
        """Returns what a string token says; it is the token just passed."""
        try:
            return json.loads(token, strict=False)
        except ValueError as error:
            self.fail(f"not a string: {error}", self.at - 1)

    def integer(self, what: str) -> int:
        """Steps over a whole number."""
        token = self.tokens[self.at]
        if not _INTEGER.fullmatch(token):
            self.expected(what)
        self.at += 1
        return self.to_int(token)

    def to_int(self, text: str) -> int:
        """Reads digits of the token just passed; Python refuses integers of several thousand."""
        try:
            return int(text)
        except ValueError:
            self.fail("this number is too long", self.at - 1)

    def integers(self, what: str) -> tuple[int, ...]:
        """Steps over "(1,2)"."""
        self.expect("(")
        out: list[int] = []
        while not self.take(")"):
            out.append(self.integer(what))
            if not self.take(",") and self.peek() != ")":
                self.expected("',' or ')'")
        return tuple(out)

    def ref(self, what: str) -> int:
        """Steps over "%3"."""
        token = self.tokens[self.at]
        if not token.startswith("%") or ":" in token or token == "%":
            self.expected(f"{what}, such as %3")
        self.at += 1
        return self.to_int(token[1:])

    def foreign(self) -> tuple[str, int]:
        """Steps over lines behind bars; returns their text and the line before the first."""
        before = self.line() - 1
        lines = []
        while self.peek().startswith("|"):
            lines.append(self.peek()[1:])
            self.at += 1
        return "\n".join(lines), before

    def enter(self) -> None:
        """Counts one level of nesting, or raises when there are too many."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"nested more than {MAX_NESTING} deep")

    def leave(self) -> None:
        self.depth -= 1

    def finish(self) -> None:
        """Raises unless the text is used up."""
        if self.peek():
            self.expected("the end of the text")
