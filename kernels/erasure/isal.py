"""ISA-L through ctypes, without copies, from the library that the pyeclib wheel carries.

The wheel's own Python interface adds headers and copies and is 10 to 30 times slower than the same
C code called on the arrays themselves, so only its shared library is used. Its file name is private
to the wheel: it is found by pattern and accepted only if every symbol used here is there and its
Cauchy matrix equals ours.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import pathlib
from collections.abc import Sequence

import numpy as np

from hetjax.kernels.erasure import field

_SYMBOLS = ("ec_encode_data", "ec_init_tables", "gf_gen_cauchy1_matrix")
_TABLE_BYTES = 32  # ISA-L's expanded table of one coefficient


def _candidates() -> list[pathlib.Path | str]:
    found: list[pathlib.Path | str] = []
    spec = importlib.util.find_spec("pyeclib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += sorted(pathlib.Path(folder).parent.glob("pyeclib.libs/libisal*.so*"))
    return [*found, "libisal.so.2"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the loaded ISA-L, or None where there is none that can be used."""
    for path in _candidates():
        try:
            lib = ctypes.CDLL(str(path))
        except OSError:
            continue
        if not all(hasattr(lib, name) for name in _SYMBOLS):
            continue
        lib.gf_gen_cauchy1_matrix.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        lib.gf_gen_cauchy1_matrix.restype = None
        lib.ec_init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        lib.ec_init_tables.restype = None
        lib.ec_encode_data.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 3
        lib.ec_encode_data.restype = None
        if np.array_equal(cauchy1(lib, 4, 2), field.generator(4, 2)):
            return lib
    return None


def cauchy1(lib: ctypes.CDLL, k: int, m: int) -> np.ndarray:
    """Returns ISA-L's own Cauchy generator matrix [k + m, k], to compare with ours."""
    matrix = np.zeros((k + m, k), np.uint8)
    lib.gf_gen_cauchy1_matrix(matrix.ctypes.data, k + m, k)
    return matrix


@functools.lru_cache(maxsize=4096)
def _tables(rows: bytes, num_rows: int, k: int) -> np.ndarray:
    lib = library()
    assert lib is not None
    matrix = np.frombuffer(rows, np.uint8).copy()
    tables = np.zeros(_TABLE_BYTES * k * num_rows, np.uint8)
    lib.ec_init_tables(k, num_rows, matrix.ctypes.data, tables.ctypes.data)
    return tables


def combine(rows: np.ndarray, sources: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
    """Writes rows @ sources over GF(2^8) into outs; the GIL is free meanwhile.

    Args:
      rows: coefficients [len(outs), len(sources)], uint8.
      sources: contiguous uint8 arrays of one length below 2 GiB.
      outs: writable contiguous uint8 arrays of the same length.
    """
    lib = library()
    assert lib is not None
    length, k = len(outs[0]), len(sources)
    tables = _tables(rows.tobytes(), len(outs), k)
    inputs = (ctypes.c_void_p * k)(*[s.ctypes.data for s in sources])
    outputs = (ctypes.c_void_p * len(outs))(*[o.ctypes.data for o in outs])
    lib.ec_encode_data(length, k, len(outs), tables.ctypes.data, inputs, outputs)
