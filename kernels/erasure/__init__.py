"""Erasure codes: a systematic Cauchy Reed-Solomon code over GF(2^8), and block checksums."""

from hetjax.kernels.erasure.checksum import block_sums, find_bad_blocks
from hetjax.kernels.erasure.code import BACKENDS, Code, combine

__all__ = ["BACKENDS", "Code", "block_sums", "combine", "find_bad_blocks"]
