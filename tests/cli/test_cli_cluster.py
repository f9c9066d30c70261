"""`hetjax cluster` as a user runs it: what it prints and the codes it exits with."""

import json
import subprocess
import sys

import pytest

from hetjax.cli.main import main
from hetjax.ir import presets
from hetjax.ir.cluster import Cluster

GOOD = """\
name = "pair"
[[sites]]
name = "s"
nodes = [{ kind = "v100-16g", devices = 2 }]
"""


def run(*args: str, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace("v100-16g", "v100").replace("name = \"s\"", "nam = \"s\""))
    return str(path)


def test_show_tells_sites_groups_and_what_a_kind_needs(good, capsys):
    code, out, _ = run("cluster", "show", good, capsys=capsys)
    assert code == 0
    assert "s-0: 2 x v100-16g" in out
    assert "emulates bf16" in out and "jax[cuda12]" in out
    code, out, _ = run("cluster", "show", good, "--json", capsys=capsys)
    facts = json.loads(out)
    assert (code, facts["num_devices"], facts["groups"][0]["devices"]) == (0, 2, [0, 1])
    assert facts["hash"] == Cluster.parse(GOOD).hash


def test_show_wants_a_file_or_presets(good, capsys):
    assert run("cluster", "show", capsys=capsys)[0] == 1
    assert run("cluster", "show", good, "--presets", capsys=capsys)[0] == 1
    code, out, _ = run("cluster", "show", "--presets", capsys=capsys)
    assert code == 0 and all(k.source in out for k in presets.KINDS.values())
    code, out, _ = run("cluster", "show", "--presets", "--json", capsys=capsys)
    assert code == 0 and set(json.loads(out)["kinds"]) == set(presets.KINDS)


def test_validate_tells_every_problem_and_exits_1(good, bad, capsys):
    assert run("cluster", "validate", good, capsys=capsys) == (0, f"{good}: good\n", "")
    code, _, err = run("cluster", "validate", bad, capsys=capsys)
    assert code == 1
    assert f"{bad}:4: sites.nodes.kind: unknown kind 'v100'; did you mean 'v100-16g' or 'v100-32g'?" in err
    assert f"{bad}:3: sites.nam: unknown field; did you mean 'name'?" in err
    code, out, _ = run("cluster", "validate", bad, "--json", capsys=capsys)
    verdict = json.loads(out)
    assert (code, verdict["ok"], len(verdict["problems"])) == (1, False, 3)


def test_validate_compares_with_the_devices_at_hand(good, capsys):
    code, _, err = run("cluster", "validate", good, "--at-hand", capsys=capsys)
    assert code == 1 and "described: 2 x v100-16g (cuda)" in err and "JAX sees:  8 x cpu" in err
    code, out, _ = run("cluster", "validate", good, "--at-hand", "--rehearse", "--json", capsys=capsys)
    assert (code, json.loads(out)["ok"]) == (0, True)


def test_a_file_that_is_absent_or_not_toml_is_an_input_fault(tmp_path, capsys):
    code, _, err = run("cluster", "show", str(tmp_path / "no.toml"), capsys=capsys)
    assert code == 1 and "cannot read" in err and "Traceback" not in err
    (tmp_path / "x.toml").write_text("name = ")
    code, _, err = run("cluster", "validate", str(tmp_path / "x.toml"), capsys=capsys)
    assert code == 1 and "x.toml:1" in err


def test_from_jax_writes_what_reads_back(tmp_path, capsys):
    code, out, _ = run("cluster", "from-jax", capsys=capsys)
    assert code == 0 and Cluster.parse(out) == Cluster.local()
    path = tmp_path / "local.toml"
    code, out, _ = run("cluster", "from-jax", "-o", str(path), capsys=capsys)
    assert code == 0 and "8 devices" in out and Cluster.from_toml(path) == Cluster.local()
    code, out, _ = run("cluster", "from-jax", "--json", capsys=capsys)
    assert json.loads(out)["num_devices"] == 8
    code, _, err = run("cluster", "from-jax", "-o", str(tmp_path / "no" / "x"), capsys=capsys)
    assert code == 1 and "cannot write" in err


def test_showing_a_file_needs_no_jax(good):
    program = (
        "import sys; from hetjax.cli.main import main\n"
        "try: main(['cluster', 'show', sys.argv[1]])\n"
        "finally: print('jax' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, good], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.strip() == "False"


@pytest.mark.quick
@pytest.mark.parametrize("words", [("show", "--jsn"), ("show", "nowhere.toml"), ("no-such-command",)])
def test_whoever_asks_for_json_gets_an_object_for_usage_errors_too(words, capsys):
    code, out, err = run("cluster", *words, "--json", capsys=capsys)
    answer = json.loads(out)
    assert code == 1 and answer["ok"] is False and answer["error"].splitlines()[0] in err
