"""`hetjax bugreport` makes an archive that still reproduces and tells nothing of machine or user."""

import dataclasses
import getpass
import json
import pathlib
import socket
import tarfile

import pytest
from click.testing import CliRunner

from hetjax.cli.bugreport import Redactor
from hetjax.cli.main import cli
from hetjax.ir.parser import parse_bundle
from hetjax.ir.text import print_bundle
from hetjax.ir.verify import verify_bundle
from hetjax.passes.dumping import reproducer_pipeline
from hetjax.passes.manager import run_pipeline

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "lowering.hj"
CLUSTER = """name = "secret-lab"
[[sites]]
name = "lyon-basement"
[[sites.nodes]]
name = "gpu07.lab.example"
kind = "a100-80g"
devices = 2
[[sites]]
name = "oslo-attic"
[[sites.nodes]]
name = "gpu08.lab.example"
kind = "a100-80g"
devices = 2
[links.lyon-to-oslo]
between = ["lyon-basement", "oslo-attic"]
bandwidth_gbit_s = 10
latency_ms = 12
source = "iperf3 by alice"
"""


def report(*args):
    return CliRunner().invoke(cli, ["bugreport", *map(str, args)], standalone_mode=False)


def members(path):
    with tarfile.open(path) as archive:
        return {
            m.name.removeprefix("hetjax-bugreport/"): archive.extractfile(m).read().decode()
            for m in archive
        }


@pytest.fixture
def repro(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundle = run_pipeline(parse_bundle(GOLDEN.read_text()), "default")
    ops = bundle.graph.ops
    source = str(pathlib.Path.home() / "secret" / "train.py") + ":41"
    graph = bundle.graph.replace(ops=(dataclasses.replace(ops[0], source=source), *ops[1:]))
    head = f"// reproducer: ValueError in pass 'verify': on {socket.gethostname()}\n// pipeline: verify\n"
    path = tmp_path / "repro.hj"
    path.write_text(head + print_bundle(bundle.replace(graph=graph)))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return path


def test_the_archive_reproduces_and_tells_nothing(repro, tmp_path):
    result = report(
        repro,
        "--cluster",
        tmp_path / "cluster.toml",
        "-o",
        tmp_path / "out.tar.gz",
        "--hide",
        "Dense_0",
        "--json",
    )
    assert json.loads(result.output)["members"] == ["00_repro.hj", "cluster.toml", "versions.json"]
    found = members(tmp_path / "out.tar.gz")
    everything = "\n".join(found.values())
    secrets = [
        str(pathlib.Path.home()) + "/",
        str(tmp_path),
        "lyon-basement",
        "gpu07",
        "oslo-attic",
        "lyon-to-oslo",
        "alice",
        "secret-lab",
        "Dense_0",
        "/secret/",
    ]
    host = socket.gethostname()
    secrets += [host] if len(host) > 2 else []
    assert [s for s in secrets if s in everything] == []
    text = found["00_repro.hj"]
    bundle = parse_bundle(text)
    verify_bundle(bundle)
    assert reproducer_pipeline(text) == "verify"
    assert bundle.graph.ops[0].source == "train.py:41"
    assert [s.name for s in bundle.cluster.sites] == ["site0", "site1"]
    assert (
        [s.site for s in bundle.plan.stages]
        == [m.site for m in bundle.program.meshes]
        == ["site0", "site1"]
    )
    assert bundle.plan.cluster_hash == bundle.cluster.hash
    assert "site0" in found["cluster.toml"] and "bandwidth" in found["cluster.toml"]
    assert set(json.loads(found["versions.json"])["versions"]) >= {
        "python",
        "hetjax",
        "jax",
        "jaxlib",
    }


def test_text_that_is_no_ir_goes_along_redacted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "log.txt"
    path.write_text(
        'Traceback\n  File "/data/users/bob/project/train.py", line 3\nssh bob@10.1.2.3 mail bob@lab.example\n'
    )
    assert report(path, "-o", "out.tar.gz", "--hide", "bob").exception is None
    text = members("out.tar.gz")["00_log.txt"]
    assert text == 'Traceback\n  File "train.py", line 3\nssh ADDRESS mail ADDRESS\n'


def test_words_of_every_program_are_not_removed(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "model")
    monkeypatch.setattr(socket, "getfqdn", lambda: "model")
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert Redactor()("the model at root") == "the model at root"
    monkeypatch.setattr(getpass, "getuser", lambda: "carol")
    assert (
        Redactor()("carol and carolina, module MLP/Dense_0, a/b, 3 / 4")
        == "USER and carolina, module MLP/Dense_0, a/b, 3 / 4"
    )


def test_a_missing_file_and_an_unwritable_archive_are_usage_errors(tmp_path, repro):
    assert "there is no file" in report("nowhere.hj").exception.format_message()
    bad = report(repro, "-o", tmp_path / "no" / "out.tar.gz")
    assert "cannot be written" in bad.exception.format_message()
