"""Read-only integer arrays: the only kind a plan is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
WordArray: TypeAlias = NDArray[np.uint64]
Scalar: TypeAlias = Any  # a number inside compiled code, where an element of an array and a Python number are one


def frozen(values: ArrayLike | Iterable[int]) -> IntArray:
    """Read-only int64 copy of ``values``."""
    array = np.array(values, dtype=np.int64, copy=True)
    array.setflags(write=False)
    return array


def offsets(counts: ArrayLike) -> IntArray:
    """Exclusive prefix sums with the total appended: ``[0, c0, c0 + c1, ...]``."""
    counts = np.asarray(counts, dtype=np.int64)
    out = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def ranges(starts: ArrayLike, lengths: ArrayLike) -> IntArray:
    """Concatenation of ``arange(start, start + length)`` over the pairs."""
    starts = np.asarray(starts, dtype=np.int64)
    lengths = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if lengths.size else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
