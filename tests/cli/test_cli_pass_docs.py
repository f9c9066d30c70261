"""The documents of passes are made from the passes, and the example pass in them works from an entry point."""

import importlib
import pathlib
import re

import pytest
from click.testing import CliRunner

from hetjax.cli.main import cli
from hetjax.cli.pass_docs import page, pass_facts
from hetjax.ir.parser import parse_bundle
from hetjax.passes import registry

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_page_of_passes_is_current():
    assert (ROOT / "docs" / "passes.md").read_text() == page(), (
        "run: make docs"
    )


@pytest.mark.parametrize("name", registry.PASSES)
def test_every_option_of_every_pass_is_explained(name):
    facts = pass_facts(name)
    assert len(facts["text"].splitlines()) >= 1
    assert [o["name"] for o in facts["options"] if not o["help"]] == []


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs the example of docs/debugging.md as a package with an entry point."""
    text = (ROOT / "docs" / "debugging.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    entry = re.search(r'drop-sources = "(.*?)"', text)[1]
    module, _, _ = entry.partition(":")
    folder = tmp_path.joinpath(*module.split(".")[:-1])
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / f"{module.rpartition('.')[2]}.py").write_text(code)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[hetjax.passes]\ndrop-sources = {entry}\nverify = {entry}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    registry.third_party_passes.cache_clear()
    yield
    registry.third_party_passes.cache_clear()


def test_a_third_party_pass_runs_by_its_entry_point(installed):
    text = 'graph g { in %0:f32[] input "x"\n %1:f32[] = neg %0 from "here.py:3"\n out %1 "y" }'
    result = CliRunner().invoke(
        cli, ["opt", "-", "-p", "drop-sources"], input=text, standalone_mode=False
    )
    assert parse_bundle(result.stdout).graph.ops[0].source == ""
    listing = CliRunner().invoke(cli, ["opt", "--list"], standalone_mode=False).stdout
    assert re.search(r"^drop-sources +empty the source lines", listing, re.M)


def test_a_third_party_pass_cannot_take_the_place_of_ours(installed):
    assert "verify" not in registry.third_party_passes()
    assert registry.pass_class("verify").__module__ == "hetjax.passes.verify"
