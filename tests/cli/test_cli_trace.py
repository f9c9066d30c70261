"""`hetjax trace` writes a step that passes run on; FILE.py:build works wherever PROGRAM stands."""

import json

import pytest
from click.testing import CliRunner

from hetjax.cli.main import cli
from hetjax.ir.errors import MicrobatchError
from hetjax.ir.parser import parse_bundle
from hetjax.ir.verify import verify_bundle

CASE = '''
import jax
import jax.numpy as jnp
import optax
from tests.support import make_linen


def build():
    step, state, batch = make_linen(loss="masked")
    return step, state, [batch], {}


def whole_batch():
    """A loss that no split of the batch gives: a product over examples."""
    _, state, batch = make_linen()

    def step(state, batch):
        def loss(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            return jnp.prod(logits.mean((1, 2)) + 1)

        grads = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=grads)

    return step, state, [batch], {}


def empty():
    step, state, _ = make_linen()
    return step, state, [], {}
'''


@pytest.fixture
def case(tmp_path, monkeypatch):
    path = tmp_path / "case_to_trace.py"
    path.write_text(CASE)
    monkeypatch.chdir(tmp_path)
    return path


def run(*args):
    return CliRunner().invoke(cli, [*map(str, args)], standalone_mode=False)


def test_a_traced_step_is_valid_text_that_the_default_pipeline_takes(case, tmp_path):
    report = json.loads(run("trace", f"{case}:build", "-o", "step.hj", "--json").output)
    bundle = parse_bundle((tmp_path / "step.hj").read_text())
    verify_bundle(bundle)
    assert (report["ok"], report["ops"]) == (True, len(bundle.graph.ops))
    assert {a.role for a in bundle.graph.inputs} >= {"state", "batch"}
    assert any(op.source.startswith("case_to_trace.py") or "support.py" in op.source for op in bundle.graph.ops)
    (tmp_path / "cluster.toml").write_text(run("cluster", "from-jax").output)
    result = run("opt", "step.hj", "--cluster", "cluster.toml", "-p", "default", "-o", "out.hj")
    assert result.return_value == 0, result.output
    assert parse_bundle((tmp_path / "out.hj").read_text()).program is not None


def test_microbatches_come_with_their_proof(case):
    bundle = parse_bundle(run("trace", f"{case}:build", "--microbatches", "2").stdout)
    micro = bundle.microbatching
    assert (micro.num_microbatches, micro.refusal) == (2, None)
    assert {t.kind for t in micro.types} >= {"R", "B", "S"}
    refused = run("trace", f"{case}:whole_batch", "--microbatches", "2")
    assert isinstance(refused.exception, MicrobatchError)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("trace", "case_to_trace.py:empty"), "batches is empty"),
        (("trace", "case_to_trace.py:nothing"), "defines no function 'nothing'"),
        (("trace", "case_to_trace.py:build", "--json"), "name a file for the text with -o"),
        (("trace", "case_to_trace.py:build", "-o", "no/where.hj"), "cannot be written"),
        (("explain", "case_to_trace.py:build", "--mesh", "x"), "is not understood"),
    ],
)
def test_wrong_requests_say_what_is_wrong(case, args, words):
    error = run(*args).exception
    assert words in getattr(error, "format_message", lambda: str(error))()


def test_opt_and_explain_take_python_code(case):
    result = run("opt", "case_to_trace.py:build", "-p", "inline-calls,label-regions")
    assert {op.region for op in parse_bundle(result.stdout).graph.ops} >= {"forward", "backward", "update"}
    found = json.loads(
        run("explain", "case_to_trace.py:build", "--stages", "2", "--microbatches", "2", "--json").output
    )
    assert found["ok"] and len(found["stages"]) == 2 and found["microbatches"] == 2
    gate = run("explain", "case_to_trace.py:build", "--stages", "2", "--reshards", "--fail-over", "1B")
    assert gate.return_value == 1 and "over 1B: " in gate.output
