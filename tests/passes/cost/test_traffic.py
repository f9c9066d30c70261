"""Bytes through memory of fused ops, against sums by hand."""

from hetjax.ir.graph import Aval, Op
from hetjax.passes.cost.traffic import memory_traffic

F32 = Aval("f32", (100,))
SCALAR = Aval("f32", ())


def op(primitive, inputs, *outputs):
    return Op(primitive, inputs, outputs)


def test_a_chain_of_elementwise_ops_reads_once_and_writes_once():
    ops = [op("exp", (0,), 1), op("mul", (1, 1), 2), op("neg", (2,), 3)]
    traffic = memory_traffic(ops, [F32] * 4, leaving=[3])
    assert traffic == [(400, 0), (0, 0), (0, 400)]


def test_a_product_reads_and_writes_what_is_around_it():
    ops = [op("exp", (0,), 2), op("dot_general", (2, 1), 3), op("neg", (3,), 4)]
    traffic = memory_traffic(ops, [F32] * 5, leaving=[4])
    assert traffic == [(400, 400), (800, 400), (400, 400)]


def test_a_reduction_takes_its_producer_in_and_writes_its_result():
    ops = [op("mul", (0, 0), 1), op("reduce_sum", (1,), 2), op("neg", (2,), 3)]
    traffic = memory_traffic(ops, [F32, F32, SCALAR, SCALAR], leaving=[3])
    assert traffic == [(400, 0), (0, 4), (4, 4)]


def test_what_leaves_is_written_even_in_the_middle():
    ops = [op("exp", (0,), 1), op("neg", (1,), 2)]
    assert memory_traffic(ops, [F32] * 3, leaving=[1, 2]) == [(400, 400), (400, 400)]
