"""The planner's benchmark: rows are kept between sittings, and the published simulator itself agrees with our equations."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    # An installed wheel is tested outside the source tree, where there are no benchmarks.
    if not BENCHMARKS.is_dir():
        pytest.skip("no benchmarks beside these tests")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_rows_are_kept_and_gone_on_from(load, tmp_path, monkeypatch):
    settings = load("_planner_settings")
    path, measured = str(tmp_path / "rows"), []

    def row(kept, key):
        return kept.row(key, lambda: measured.append(key) or {"seconds": float("inf"), "key": key})

    assert row(settings.Kept(path), "a") == {"seconds": float("inf"), "key": "a"}
    with open(path, "a") as file:
        file.write('\n{"code": "half a li')
    again = settings.Kept(path)
    assert [row(again, key)["key"] for key in "aba"] == list("aba")
    assert measured == ["a", "b"]
    over = settings.Kept(path, seconds=-1.0)
    assert row(over, "b")["key"] == "b"
    with pytest.raises(settings.Over):
        row(over, "c")
    monkeypatch.setattr(settings, "code_version", lambda: "another")
    row(settings.Kept(path), "a")
    assert measured == ["a", "b", "a"]


def test_the_simulator_is_found_or_missed_in_words(load, tmp_path, monkeypatch):
    module = load("_planner_rescore")
    monkeypatch.delenv("HETJAX_SAILOR", raising=False)
    assert module.checkout(None) is None
    monkeypatch.setenv("HETJAX_SAILOR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"runtime_simulator.py is not there; give a checkout"):
        module.checkout(None)
    file = tmp_path / "sailor" / "sailor" / "Planner" / "simulations" / "runtime_simulator.py"
    file.parent.mkdir(parents=True)
    file.touch()
    for given in (tmp_path, tmp_path / "sailor", tmp_path / "sailor" / "sailor"):
        assert module.checkout(str(given)) == tmp_path / "sailor"


@pytest.mark.skipif("HETJAX_SAILOR" not in os.environ, reason="HETJAX_SAILOR names no checkout of the published simulator")
def test_the_published_simulator_agrees(load, shared_dir):
    module, root = load("_planner_published"), load("_planner_rescore").checkout(None)
    folder = shared_dir / "data" / "sailor"
    for _, file, row, _, _ in module.INSTANCES:
        problem = module.instance(folder, file, row)
        drawn = module.drawn_plans(problem, folder, 60, seed=1)
        found = module.compared(problem, root, [], drawn)
        assert found["compared"] == 60
        assert found["apart"] < 1e-12
        assert found["unlike"] == 0
