"""Profile tables: JSON both ways, what is missing, and repair of noise."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ir.errors import ParseError, PlanError
from hetjax.ir.plan import SOURCES
from hetjax.passes.cost.profiles import LayerKey, LayerTime, Profiles

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
seconds = st.floats(0, 1e3)
keys = st.builds(LayerKey, words, words, st.integers(1, 8), st.integers(1, 64), words)
tables = st.dictionaries(
    keys, st.builds(LayerTime, seconds, seconds, seconds, st.sampled_from(SOURCES)), max_size=8
).map(lambda d: Profiles(d.items()))


def key(microbatch: int = 2, layer: str = "block_0", kind: str = "t4", tensor: int = 1) -> LayerKey:
    return LayerKey("gpt", kind, tensor, microbatch, layer)


@given(tables)
@settings(max_examples=80, deadline=None)
def test_json_reads_back_equal(table):
    assert Profiles.from_json(table.to_json()) == table


@given(tables, tables)
@settings(max_examples=40, deadline=None)
def test_merging_keeps_every_key_and_prefers_the_other(a, b):
    merged = a.merged(b)
    assert dict(merged) == {**dict(a), **dict(b)}


@given(tables)
@settings(max_examples=80, deadline=None)
def test_repaired_times_never_fall_as_the_microbatch_grows(table):
    repaired = table.repaired()
    assert [k for k, _ in repaired] == [k for k, _ in table]
    for k, time in repaired:
        assert time.forward_s <= table.time(k).forward_s
        for other, longer in repaired:
            same = (k.model, k.kind, k.tensor, k.layer) == (other.model, other.kind, other.tensor, other.layer)
            if same and k.microbatch <= other.microbatch:
                assert time.forward_s <= longer.forward_s
                assert time.backward_s <= longer.backward_s


@pytest.mark.quick
def test_what_is_missing_is_told_with_what_there_is():
    table = Profiles([(key(), LayerTime(1, 2, 3)), (key(4), LayerTime(1, 2, 3))])
    assert table.time(key()).backward_s == 2
    for wanted, said in (
        (key(8), r"no microbatch 8; there is: 2, 4"),
        (key(kind="t44"), "did you mean 't4'"),
        (key(layer="blok_0"), "did you mean 'block_0'"),
        (key(tensor=2), "no tensor 2; there is: 1"),
    ):
        with pytest.raises(PlanError, match=said):
            table.time(wanted)


def test_wrong_json_is_told_by_key(tmp_path):
    row = {"model": "m", "kind": "k", "tensor": 0, "microbatch": 1, "layer": 3, "forward_s": -1, "bakward_s": 1, "update_s": 0, "source": "guess"}
    with pytest.raises(PlanError) as caught:
        Profiles.from_json(json.dumps({"hetjax_profiles": 1, "layers": [row, 4]}), "p.json")
    said = "\n".join(caught.value.problems)
    for part in (
        "layers[0].tensor: must be a whole number of at least 1", "layers[0].layer: must be a string",
        "layers[0].bakward_s: unknown field; did you mean 'backward_s'?", "layers[0].forward_s: must be a number",
        "layers[0].backward_s: must be", "layers[0].source: unknown source", "layers[1]: must be an object",
    ):  # fmt: skip
        assert part in said
    with pytest.raises(PlanError, match="hetjax_profiles"):
        Profiles.from_json("[]")
    with pytest.raises(PlanError, match="layers: must be a list"):
        Profiles.from_json('{"hetjax_profiles": 1}')
    with pytest.raises(ParseError):
        Profiles.from_json("{")
    with pytest.raises(PlanError, match="cannot read"):
        Profiles.load(tmp_path / "no.json")
