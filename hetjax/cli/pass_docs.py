"""What is written about passes, from the passes themselves: `--list`, `--help-pass`, docs/passes.md.

python -m hetjax.cli.pass_docs > docs/passes.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import click

from hetjax.passes.facts import FACTS
from hetjax.passes.pipeline_text import default_of, option_fields, option_type_text
from hetjax.passes.registry import ALIASES, PASSES, pass_class, pass_names


def pass_list() -> list[dict[str, str]]:
    """Returns name and summary of every pass, installed ones included."""
    return [{"name": n, "summary": pass_class(n).summary} for n in pass_names()]  # type: ignore[attr-defined]


def list_text() -> str:
    """Returns the table `hetjax opt --list` prints."""
    rows = pass_list()
    width = max(len(r["name"]) for r in rows)
    lines = [f"{r['name']:{width}}  {r['summary']}" for r in rows]
    lines += [f"{name:{width}}  = {text}" for name, text in ALIASES.items()]
    return "\n".join(lines)


def pass_facts(name: str) -> dict[str, Any]:
    """Returns everything a pass says of itself.

    Raises:
      PassError: there is no such pass.
    """
    cls: Any = pass_class(name)
    text, help_of = _split_docstring(inspect.getdoc(cls) or "")
    options = []
    for field in option_fields(cls):
        default = default_of(field)
        options.append(
            {
                "name": field.name,
                "type": option_type_text(cls, field),
                "default": None if default is dataclasses.MISSING else default,
                "required": default is dataclasses.MISSING,
                "help": help_of.get(field.name, ""),
            }
        )
    return {
        "name": name,
        "summary": cls.summary,
        "text": text,
        "options": options,
        "requires": list(getattr(cls, "requires", ())),
    }


def _split_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Returns the docstring without its Attributes section, and that section by name."""
    text, _, section = doc.partition("\nAttributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := re.fullmatch(r"  (\w+(?:, \w+)*): (.*)", line):
            for name in match[1].split(", "):
                found[name] = match[2]
        elif line.strip() and name:
            found[name] += " " + line.strip()
    return text.strip(), found


def help_text(name: str) -> str:
    """Returns what `hetjax opt --help-pass NAME` prints."""
    facts = pass_facts(name)
    lines = [f"{name}: {facts['summary']}", "", facts["text"]]
    if facts["requires"]:
        lines += ["", "Requires:", *(f"  {f}: {FACTS[f][1]}" for f in facts["requires"])]
    if facts["options"]:
        lines += ["", "Options:"]
        for o in facts["options"]:
            default = "required" if o["required"] else f"default {_default_text(o['default'])}"
            lines.append(f"  {o['name']} ({o['type']}, {default}): {o['help']}")
    return "\n".join(lines)


def _default_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def page() -> str:
    """Returns docs/passes.md: every pass of ours, from its class."""
    lines = [
        "# Passes",
        "",
        "Made from the passes by `make docs`; a test checks that it is current.",
        "How a pipeline string is written: [debugging.md](debugging.md).",
        "",
        f"`default` stands for `{ALIASES['default']}`.",
        "",
    ]
    for name in PASSES:
        facts = pass_facts(name)
        lines += [
            f"## {name}",
            "",
            facts["summary"][0].upper() + facts["summary"][1:] + ".",
            "",
            facts["text"],
            "",
        ]
        if facts["requires"]:
            lines += [
                "Requires " + ", ".join(f"`{f}` ({FACTS[f][1]})" for f in facts["requires"]) + ".",
                "",
            ]
        if facts["options"]:
            lines += ["| option | type | default | |", "|---|---|---|---|"]
            for o in facts["options"]:
                default = "required" if o["required"] else f"`{_default_text(o['default'])}`"
                kind = o["type"].replace("|", "\\|")
                lines.append(f"| `{o['name']}` | {kind} | {default} | {o['help']} |")
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    click.echo(page(), nl=False)
