"""What the documents name exists: files, links, make targets, commands."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = [p for p in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]) if p.is_file()]
# An installed wheel is tested outside the source tree, where there are no documents.
pytestmark = pytest.mark.skipif(not DOCUMENTS, reason="no documents beside these tests")

# Fragments are called s0/forward, which looks like a file.
FILE = re.compile(r"`(?!s\d/)((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|toml|py)|Makefile|\.ci/run)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
COMMAND = re.compile(r"(?<![\w./@-])hetjax ([a-z]+)\b")


def code(text: str) -> str:
    """Returns the code of a document: its fenced blocks and its `spans`."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.S))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(document):
    text = document.read_text()
    named = {*FILE.findall(text), *LINK.findall(text)}
    missing = sorted(n for n in named if not any((base / n).exists() for base in (ROOT, document.parent)))
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(MAKE.findall(code(document.read_text()))) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_commands_exist(document):
    from hetjax.cli.main import COMMANDS

    assert set(COMMAND.findall(code(document.read_text()))) <= set(COMMANDS)
