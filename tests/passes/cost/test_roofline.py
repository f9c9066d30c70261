"""Prices of ops against values computed by hand, and curves fitted back from what they produced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ir import presets
from hetjax.ir.errors import PlanError
from hetjax.passes.cost.roofline import ASSUMED, FREE, Efficiency, fit_efficiency, op_price

A100 = presets.KINDS["a100-80g"]
V100 = presets.KINDS["v100-16g"]
IDEAL = Efficiency(top=1.0, ramp_s=0.0, memory_top=1.0, launch_s=0.0)


@pytest.mark.quick
def test_a_large_product_is_bound_by_arithmetic_and_a_copy_by_memory():
    product = op_price(A100, 312e12, 1e6, "bf16", efficiency=IDEAL)
    assert product.seconds == pytest.approx(1.0)
    copy = op_price(A100, 1e6, 2039e9, "bf16", efficiency=IDEAL)
    assert copy.seconds == pytest.approx(1.0)
    assert copy.memory_s > copy.arithmetic_s


def test_half_of_the_top_is_reached_where_work_equals_the_ramp():
    curve = Efficiency(top=0.8, ramp_s=1e-5, memory_top=1.0, launch_s=0.0)
    flops = 1e-5 * 0.8 * 312e12
    price = op_price(A100, flops, 0, "bf16", efficiency=curve)
    assert flops / price.seconds == pytest.approx(0.4 * 312e12)


def test_launch_is_paid_once_by_every_op_and_prices_add_up():
    curve = Efficiency(1.0, 0.0, 1.0, launch_s=5e-6)
    price = op_price(A100, 0, 0, "f32", efficiency=curve)
    assert (price + price + FREE).seconds == pytest.approx(1e-5)


def test_default_precision_products_use_tf32_where_there_is_one():
    fast = op_price(A100, 156e12, 0, "tf32", efficiency=IDEAL)
    slow = op_price(V100, 15.7e12, 0, "tf32", efficiency=IDEAL)
    assert fast.seconds == pytest.approx(1.0)
    assert slow.seconds == pytest.approx(1.0)


def test_an_emulated_dtype_is_priced_and_said_and_a_lacking_one_refused():
    price = op_price(V100, 15.7e12, 0, "bf16", efficiency=IDEAL)
    assert price.seconds == pytest.approx(1.0)
    assert price.emulated == ("bf16",)
    with pytest.raises(PlanError, match=r"'v100-16g' has no f8e5m2 and does not emulate it; it computes in f64, f32, f16"):
        op_price(V100, 1, 1, "f8e5m2")


def test_other_arithmetic_is_priced_by_bytes_whatever_its_dtype():
    # An integer op on V100's memory; the tensor cores do not help.
    price = op_price(V100, 1e6, 900e9, "i32", product=False, efficiency=IDEAL)
    assert price.seconds == pytest.approx(1.0)


@given(
    share=st.floats(0.05, 1.0), ramp=st.floats(0, 1e-3), launch=st.floats(1e-7, 1e-4),
    memory=st.floats(0.05, 1.0),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_curve_is_fitted_back_from_what_it_produced(share, ramp, launch, memory):
    curve = Efficiency(0.5, ramp, memory, launch, (("bf16", share),))
    flops = [1e8, 1e9, 1e10, 1e11, 1e12]
    products = [(f, op_price(A100, f, 0, "bf16", efficiency=curve).seconds) for f in flops]
    sizes = [1e4, 1e6, 1e8, 1e9]
    copies = [(n, op_price(A100, 0, n, "f32", product=False, efficiency=curve).seconds) for n in sizes]
    fitted = fit_efficiency(A100, "bf16", products, copies)
    for f, seconds in products:
        assert op_price(A100, f, 0, "bf16", efficiency=fitted).seconds == pytest.approx(seconds, rel=1e-3)
    for n, seconds in copies:
        price = op_price(A100, 0, n, "f32", product=False, efficiency=fitted)
        assert price.seconds == pytest.approx(seconds, rel=1e-3)
    assert fitted.source == "measured"


def test_every_platform_has_an_assumed_curve_that_says_so():
    assert set(ASSUMED) == {"cpu", "cuda", "rocm", "tpu"}
    assert all(curve.source == "assumed" for curve in ASSUMED.values())
