"""The shared cases, each distilled from a public bug report of a system that splits batches."""

import importlib.util
import sys

import pytest

ROLES = {
    "alpa372_dropout_mask": "input batch", "alpa268_sum_loss": "state batch",
    "token_weighted_mean": "state batch", "alpa880_clip_by_global_norm": "state batch",
    "tied_embedding": "state batch", "xla42481_embedding_grad_rows": "state batch",
    "flax5372_optax_partition": "state batch", "adafactor_state_shapes": "state batch",
}  # fmt: skip
# A square of the batch's size as a constant, and a matrix where the batch would be: neither has a half.
NOT_AT_HALF = {"alpa400_while_loop": "state batch", "alpa807_consts": "state batch"}


@pytest.fixture(scope="module")
def cases(shared_dir):
    spec = importlib.util.spec_from_file_location("small_cases", shared_dir / "cases" / "small_cases.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module.CASES
    del sys.modules[spec.name]


def test_every_case_is_here(cases):
    assert {*ROLES, *NOT_AT_HALF} == set(cases)


@pytest.mark.parametrize("name", ROLES)
def test_proved_and_equal_in_numbers(traced, cases, name):
    fn, args, _ = cases[name]()
    run = traced(fn, *args, roles=ROLES[name], labels=True)
    assert run.refusal is None
    assert run.disagreements(3e-5) == []
    hoists = {"alpa372_dropout_mask", "token_weighted_mean"}
    assert bool(run.proof.hoisted) == (name in hoists)


@pytest.mark.parametrize("name", NOT_AT_HALF)
def test_cannot_be_traced_at_half_a_batch(traced, cases, name):
    fn, args, _ = cases[name]()
    with pytest.raises(TypeError, match=r"dot_general|shape"):
        traced(fn, *args, roles=NOT_AT_HALF[name])
    one = traced(fn, *args, roles=NOT_AT_HALF[name], num_microbatches=1)
    assert one.refusal is None
