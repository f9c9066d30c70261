"""Pipeline strings: `label-regions,cut-stages{stages=4},insert-reshards`, to passes and back.

    pipeline := [pass ("," pass)*]
    pass     := ALIAS | NAME ["{" [option ([","] option)*] "}"]
    option   := NAME "=" value | NAME               (a bare name sets a bool to true)
    value    := WORD | STRING | "(" [value ("," value)*] [","] ")"

Option names may be written with `-` or `_`. A word is a number, true, false, none or plain text,
read as the type of the option's field asks. `default` stands for the passes the decorator runs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from hetjax.ir.errors import ParseError, PassError
from hetjax.ir.suggest import nearest
from hetjax.passes.registry import ALIASES, Pass, pass_class, pass_names

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>[^\s,{}()="]+)|(?P<mark>[,{}()=]))"""
)
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}
MAX_NESTING = 8


def parse_pipeline(text: str) -> tuple[Pass, ...]:
    """Returns the passes a pipeline string names, in order.

    Raises:
      ParseError: the string does not follow the grammar, or names an unknown pass or option, or
        gives an option a value of the wrong type; the message has the column, the nearest name
        and what is known.
    """
    return _Parser(text).pipeline()


def pipeline_text(passes: Sequence[Pass]) -> str:
    """Returns the string that parses back to `passes`; options at their default are left out."""
    return ",".join(map(pass_text, passes))


def pass_text(p: Pass) -> str:
    """Returns one pass as `parse_pipeline` reads it."""
    options = [
        f"{f.name}={_value_text(getattr(p, f.name))}"
        for f in option_fields(type(p))
        if getattr(p, f.name) != default_of(f)
    ]
    return p.name + (f"{{{','.join(options)}}}" if options else "")


def option_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Returns the fields of a pass that are options."""
    return tuple(f for f in dataclasses.fields(cls) if f.init)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns a field's default; `dataclasses.MISSING` when it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def option_type_text(cls: type, field: dataclasses.Field[Any]) -> str:
    """Returns an option's type as documentation shows it."""
    return _hint_text(typing.get_type_hints(cls)[field.name])


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        items = [_value_text(v) for v in value]
        return f"({','.join(items)}{',' if len(items) == 1 else ''})"
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z_][\w./:+-]*", text) and text not in ("none", "true", "false")
    return text if plain else json.dumps(text)


def _hint_text(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_hint_text, args))
    if origin is tuple:
        inner = ", ".join("..." if a is Ellipsis else _hint_text(a) for a in args)
        return f"({inner})"
    return "none" if hint is type(None) else getattr(hint, "__name__", str(hint))


@dataclasses.dataclass(frozen=True)
class _Word:
    """An unquoted word, whose meaning depends on the option's type."""

    text: str


class _Parser:
    """Recursive descent over one pipeline string."""

    def __init__(self, text: str):
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.error(
                    "a string that is not closed", at + len(text[at:]) - len(text[at:].lstrip())
                )
            kind = str(match.lastgroup)
            self.tokens.append((kind, match[kind], match.start(kind)))
            at = match.end()
        self.tokens.append(("end", "", len(text)))
        self.next = 0

    def error(self, message: str, at: int) -> ParseError:
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        return ParseError(
            message, source=self.text, line=line, column=column, filename="<pipeline>"
        )

    def peek(self, mark: str) -> bool:
        kind, text, _ = self.tokens[self.next]
        return kind == "mark" and text == mark

    def take(self, mark: str) -> bool:
        if self.peek(mark):
            self.next += 1
            return True
        return False

    def word(self, what: str) -> tuple[str, int]:
        kind, text, at = self.tokens[self.next]
        if kind != "word":
            raise self.error(f"expected {what}, found {f'{text!r}' if text else 'the end'}", at)
        self.next += 1
        return text, at

    def pipeline(self) -> tuple[Pass, ...]:
        passes: list[Pass] = []
        if self.tokens[0][0] == "end":
            return ()
        while True:
            kind, text, _ = self.tokens[self.next]
            if kind == "word" and text in ALIASES:
                self.next += 1
                passes.extend(parse_pipeline(ALIASES[text]))
            else:
                passes.append(self.one_pass())
            if self.tokens[self.next][0] == "end":
                return tuple(passes)
            if not self.take(","):
                _, text, at = self.tokens[self.next]
                raise self.error(f"expected ',' before the next pass, found {text!r}", at)

    def one_pass(self) -> Pass:
        name, at = self.word("a pass's name")
        if name not in pass_names():
            raise self.error(
                f"there is no pass '{name}'{nearest(name, [*pass_names(), *ALIASES])}", at
            )
        cls = pass_class(name)
        options: dict[str, Any] = {}
        if self.take("{"):
            while not self.take("}"):
                key, value = self.option(cls)
                if key in options:
                    raise self.error(
                        f"option '{key}' of pass '{name}' is given twice",
                        self.tokens[self.next - 1][2],
                    )
                options[key] = value
                self.take(",")
        absent = [
            f.name
            for f in option_fields(cls)
            if default_of(f) is dataclasses.MISSING and f.name not in options
        ]
        if absent:
            raise self.error(
                f"pass '{name}' needs the option '{absent[0]}': {name}{{{absent[0]}=…}}", at
            )
        try:
            return cls(**options)
        except (ValueError, TypeError) as error:
            raise self.error(f"pass '{name}': {error}", at) from error

    def option(self, cls: Any) -> tuple[str, Any]:
        name, at = self.word("an option's name or '}'")
        key = name.replace("-", "_")
        fields = {f.name: f for f in option_fields(cls)}
        if key not in fields:
            raise self.error(f"pass '{cls.name}' has no option '{name}'{nearest(key, fields)}", at)
        hint = typing.get_type_hints(cls)[key]
        start = at
        if self.take("="):
            start = self.tokens[self.next][2]
            raw = self.value(0)
        else:
            raw = _Word("true")
        try:
            return key, _convert(raw, hint)
        except ValueError:
            given = self.text[
                start : self.tokens[self.next - 1][2] + len(self.tokens[self.next - 1][1])
            ]
            raise self.error(
                f"option '{key}' of pass '{cls.name}' takes {_wanted(hint)}, not {given!r}", start
            ) from None

    def value(self, depth: int) -> Any:
        kind, text, at = self.tokens[self.next]
        if depth > MAX_NESTING:
            raise self.error(f"values nest more than {MAX_NESTING} deep", at)
        if self.take("("):
            items: list[Any] = []
            while not self.take(")"):
                items.append(self.value(depth + 1))
                if not self.take(",") and not self.peek(")"):
                    _, text, at = self.tokens[self.next]
                    raise self.error(
                        f"expected ',' or ')', found {text!r}" if text else "expected ')'", at
                    )
            return tuple(items)
        if kind not in ("word", "string"):
            raise self.error(f"expected a value, found {f'{text!r}' if text else 'the end'}", at)
        self.next += 1
        if kind == "word":
            return _Word(text)
        try:
            return json.loads(text, strict=False)
        except ValueError:
            raise self.error(f"not a string: {text}", at) from None


def _convert(raw: Any, hint: Any) -> Any:
    """Reads a raw value as `hint` asks; ValueError when it cannot be."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for arg in sorted(args, key=lambda a: a is str):  # text takes anything, so it comes last
            try:
                return _convert(raw, arg)
            except ValueError:
                continue
        raise ValueError(raw)
    if origin is tuple:
        if not isinstance(raw, tuple):
            raise ValueError(raw)
        kinds = [args[0]] * len(raw) if len(args) == 2 and args[1] is Ellipsis else args
        if len(kinds) != len(raw):
            raise ValueError(raw)
        return tuple(_convert(r, k) for r, k in zip(raw, kinds))
    if isinstance(raw, tuple):
        raise ValueError(raw)
    text = raw.text if isinstance(raw, _Word) else raw
    if origin is typing.Literal:
        for choice in args:
            if text == str(choice):
                return choice
        raise ValueError(text)
    if hint is str:
        return text
    if not isinstance(raw, _Word):
        raise ValueError(raw)
    if hint is type(None) or hint is bool:
        named: dict[str, Any] = (
            {"none": None} if hint is type(None) else {"true": True, "false": False}
        )
        if text.lower() not in named:
            raise ValueError(text)
        return named[text.lower()]
    if hint in (int, float):
        return hint(text)
    raise ValueError(f"an option of type {hint} cannot be written in a pipeline")


def _wanted(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_wanted, args))
    if origin is tuple:
        return f"a list {_hint_text(hint)}"
    return _KINDS.get(hint, f"no text (its type is {_hint_text(hint)})")


def resolve(passes: str | Sequence[Pass]) -> tuple[Pass, ...]:
    """Returns passes given as a pipeline string or as objects."""
    if isinstance(passes, str):
        return parse_pipeline(passes)
    for p in passes:
        if not isinstance(p, Pass):
            raise PassError(
                str(p), f"{p!r} is not a pass: it needs name, summary and apply(bundle)"
            )
    return tuple(passes)
