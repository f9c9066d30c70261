"""The erasure code: one matrix, three paths, every subset of k chunks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.kernels import erasure
from hetjax.kernels.erasure import Code, checksum, field, isal
from hetjax.kernels.erasure.code import combine, default_threads

CODES = [(1, 1), (2, 1), (2, 2), (4, 2), (8, 2), (8, 4)]
HAS_ISAL = isal.library() is not None
PATHS = [*(["isal"] if HAS_ISAL else []), "swar"]


def _slow_product(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def _oracle(rows: np.ndarray, sources: list[np.ndarray]) -> list[np.ndarray]:
    """A table walk that shares no code with the three paths."""
    table = np.array([[_slow_product(a, b) for b in range(256)] for a in range(256)], np.uint8)
    return [
        np.bitwise_xor.reduce([table[c][s] for c, s in zip(row, sources)]) for row in rows
    ]


def _chunks(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length, np.uint8) for _ in range(count)]


@pytest.mark.quick
def test_field_is_the_one_of_polynomial_0x11d():
    a, b = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    want = np.array([[_slow_product(x, y) for y in range(256)] for x in range(256)], np.uint8)
    assert np.array_equal(field.multiply(a, b), want)
    assert all(_slow_product(x, field.inverse(x)) == 1 for x in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        field.inverse(0)


@pytest.mark.quick
@pytest.mark.skipif(not HAS_ISAL, reason="needs the library of the pyeclib wheel")
@pytest.mark.parametrize("k,m", [c for c in CODES if c[1] > 1] + [(100, 30)])
def test_generator_is_isal_cauchy1(k, m):
    library = isal.library()
    assert library is not None
    assert np.array_equal(isal.cauchy1(library, k, m), field.generator(k, m))


def test_single_parity_is_xor_and_a_scaled_cauchy_row():
    matrix = field.generator(5, 1)
    assert (matrix[5] == 1).all()
    data, parity = _chunks(5, 1000), np.empty(1000, np.uint8)
    Code(5, 1).encode(data, [parity])
    assert np.array_equal(parity, np.bitwise_xor.reduce(data))


@pytest.mark.parametrize("k,m", [(2, 1), (2, 2), (4, 2), (3, 3)])
def test_any_k_rows_are_invertible(k, m):
    matrix = field.generator(k, m)
    for rows in itertools.combinations(range(k + m), k):
        sub = matrix[list(rows)]
        assert np.array_equal(field.matmul(sub, field.invert(sub)), np.eye(k, dtype=np.uint8))


@pytest.mark.quick
@pytest.mark.parametrize("k,m", CODES)
def test_paths_give_identical_parity(k, m):
    data = _chunks(k, 4099)
    want = _oracle(field.generator(k, m)[k:], data)
    paths = [*PATHS, *(["xor"] if m == 1 else [])]
    for path in paths:
        parity = [np.full(4099, 0xA5, np.uint8) for _ in range(m)]
        Code(k, m).encode(data, parity, backend=path)
        for got, expected in zip(parity, want):
            assert np.array_equal(got, expected), path


@pytest.mark.parametrize("k,m", CODES)
@pytest.mark.parametrize("encoder,decoder", [*itertools.permutations([*PATHS, "auto"], 2)])
def test_each_path_decodes_the_other(k, m, encoder, decoder):
    code, data = Code(k, m), _chunks(k, 515, seed=k)
    parity = [np.empty(515, np.uint8) for _ in range(m)]
    code.encode(data, parity, backend=encoder)
    chunks = [*data, *parity]
    lost = [0, k, *range(1, m - 1)][:m] if m > 1 else [0]
    have = {i: c for i, c in enumerate(chunks) if i not in lost}
    want = {i: np.empty(515, np.uint8) for i in lost}
    code.reconstruct(have, want, backend=decoder)
    for i in lost:
        assert np.array_equal(want[i], chunks[i])


def test_xor_path_decodes_what_isal_made():
    data, parity = _chunks(3, 777), np.empty(777, np.uint8)
    code = Code(3, 1)
    code.encode(data, [parity])
    out = np.empty(777, np.uint8)
    code.reconstruct({0: data[0], 2: data[2], 3: parity}, {1: out}, backend="xor")
    assert np.array_equal(out, data[1])


@pytest.mark.parametrize("k,m", [(2, 1), (2, 2), (4, 2)])
def test_every_loss_of_at_most_m_is_rebuilt(k, m):
    code, data = Code(k, m), _chunks(k, 300)
    parity = [np.empty(300, np.uint8) for _ in range(m)]
    code.encode(data, parity)
    chunks = [*data, *parity]
    for count in range(1, m + 1):
        for lost in itertools.combinations(range(k + m), count):
            out = {i: np.empty(300, np.uint8) for i in lost}
            code.reconstruct({i: c for i, c in enumerate(chunks) if i not in lost}, out)
            assert all(np.array_equal(out[i], chunks[i]) for i in lost)


@given(
    k=st.integers(1, 10), m=st.integers(1, 5), length=st.integers(1, 700),
    seed=st.integers(0, 1 << 30), threads=st.integers(1, 3), data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_random_code_random_loss(k, m, length, seed, threads, data):
    code, chunks = Code(k, m), _chunks(k, length, seed)
    parity = [np.empty(length, np.uint8) for _ in range(m)]
    code.encode(chunks, parity, threads=threads)
    every = [*chunks, *parity]
    lost = data.draw(st.sets(st.integers(0, k + m - 1), max_size=m))
    out = {i: np.empty(length, np.uint8) for i in lost}
    code.reconstruct({i: c for i, c in enumerate(every) if i not in lost}, out)
    assert all(np.array_equal(out[i], every[i]) for i in lost)


@pytest.mark.skipif(not HAS_ISAL, reason="needs the library of the pyeclib wheel")
def test_threads_and_odd_lengths_change_nothing():
    data = _chunks(4, (5 << 20) + 13)
    one, many = ([np.empty_like(data[0]) for _ in range(2)] for _ in range(2))
    Code(4, 2).encode(data, one)
    Code(4, 2).encode(data, many, threads=3)
    assert all(np.array_equal(a, b) for a, b in zip(one, many))
    assert default_threads() >= 1


def test_swar_runs_on_device_arrays_under_jit():
    import jax.numpy as jnp

    from hetjax.kernels.erasure import swar

    data = _chunks(4, 4096)
    words = [jnp.asarray(d.view(np.uint32)) for d in data]
    got = swar.combine_words(field.generator(4, 2)[4:], words)
    want = _oracle(field.generator(4, 2)[4:], data)
    for g, w in zip(got, want):
        assert np.array_equal(np.asarray(g).view(np.uint8), w)


@pytest.mark.quick
def test_misuse_names_the_numbers():
    with pytest.raises(ValueError, match="k \\+ m <= 255"):
        Code(200, 100)
    with pytest.raises(ValueError, match="2 of 4 chunks are needed and 1 are here"):
        Code(2, 2).reconstruct({0: np.zeros(4, np.uint8)}, {1: np.zeros(4, np.uint8)})
    with pytest.raises(ValueError, match="coefficients of 0 and 1"):
        Code(2, 2).encode(_chunks(2, 8), [np.empty(8, np.uint8)] * 2, backend="xor")
    with pytest.raises(ValueError, match="lengths \\[8, 9\\]"):
        Code(2, 1).encode(_chunks(2, 8), [np.empty(9, np.uint8)])
    with pytest.raises(ValueError, match="no erasure backend 'zfec'"):
        combine(np.ones((1, 2), np.uint8), _chunks(2, 8), _chunks(1, 8), backend="zfec")
    with pytest.raises(ValueError, match="distinct chunks"):
        field.recovery_rows(2, 1, [0, 0], [1])
    with pytest.raises(ValueError, match="singular"):
        field.invert(np.ones((2, 2), np.uint8))


@given(length=st.integers(0, 5000), block=st.integers(1, 900), seed=st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_one_flipped_bit_is_found_in_its_block(length, block, seed):
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, length, np.uint8)
    sums = erasure.block_sums(data, block)
    assert checksum.find_bad_blocks(data, sums, block) == []
    if length:
        at = int(random.integers(length))
        data[at] ^= np.uint8(1 << int(random.integers(8)))
        assert checksum.find_bad_blocks(data, sums, block) == [at // block]
