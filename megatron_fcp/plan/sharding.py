"""Which tokens of the stream a rank holds outside attention: Megatron's own context-parallel shardings.

Every function gives one index array per rank: the stream index of each token in the order in which the rank holds them.

::

    zigzag, cp 2, 8 tokens    chunks 0 1 | 2 3 | 4 5 | 6 7
                              rank 0 holds the first and the last chunk: 0 1 6 7, rank 1 the two between: 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_fcp.plan.arrays import IntArray, frozen

Layout = tuple[IntArray, ...]


def contiguous(num_tokens: int, cp_size: int) -> Layout:
    """Rank r holds the r-th of ``cp_size`` equal pieces.

    Raises
    ------
    ValueError
        If ``cp_size`` does not divide ``num_tokens``.
    """
    _check_divides(num_tokens, cp_size, "the stream")
    return tuple(frozen(piece) for piece in np.arange(num_tokens, dtype=np.int64).reshape(cp_size, -1))


def zigzag(num_tokens: int, cp_size: int) -> Layout:
    """Rank r holds chunks r and ``2 * cp_size - 1 - r`` of ``2 * cp_size`` equal chunks of the whole stream.

    This is ``get_batch_on_this_cp_rank`` of Megatron's ``megatron/core/utils.py`` for an unpacked sequence.

    Raises
    ------
    ValueError
        If ``2 * cp_size`` does not divide ``num_tokens``.
    """
    return zigzag_per_document([0, num_tokens], cp_size)


def zigzag_per_document(cu_seqlens_padded: Sequence[int] | NDArray[np.generic], cp_size: int) -> Layout:
    """Zigzag inside every document, the documents one after the other.

    This is how Transformer Engine shards packed sequences (``thd_get_partitioned_indices``).

    Parameters
    ----------
    cu_seqlens_padded : sequence of int, shape [num_documents + 1]
        Starts in the padded stream, and its end. Repeated offsets are empty documents.
    cp_size : int

    Raises
    ------
    ValueError
        If ``2 * cp_size`` (1 at ``cp_size`` 1) does not divide a document's padded length.
    """
    cu = np.asarray(cu_seqlens_padded, dtype=np.int64)
    if cu.size == 0 or cu[0] != 0 or (np.diff(cu) < 0).any():
        raise ValueError(f"cu_seqlens must begin with 0 and never fall, got {cu.tolist()}")
    pieces: list[list[IntArray]] = [[] for _ in range(cp_size)]
    chunks = 2 * cp_size if cp_size > 1 else 1
    for document, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist())):
        _check_divides(stop - start, chunks, f"document {document}")
        parts = np.arange(start, stop, dtype=np.int64).reshape(chunks, -1)
        for rank in range(cp_size):
            pieces[rank].append(parts[rank])
            if cp_size > 1:
                pieces[rank].append(parts[chunks - 1 - rank])
    return tuple(frozen(np.concatenate(p) if p else []) for p in pieces)


def batched(layout: Layout, batch_size: int, order: Literal["bs", "sb"]) -> Layout:
    """Layout of ``batch_size`` sequences laid one after the other in the stream, each sharded by ``layout``.

    Parameters
    ----------
    layout : Layout
        Of one sequence.
    batch_size : int
    order : {"bs", "sb"}
        How a rank's tokens are flattened: sequence by sequence, or (Megatron's [s, b, h]) position by position.
    """
    length = sum(index.size for index in layout)
    starts = np.arange(batch_size, dtype=np.int64) * length
    by_sequence = [index[None, :] + starts[:, None] for index in layout]
    return tuple(frozen((tokens if order == "bs" else tokens.T).reshape(-1)) for tokens in by_sequence)


def _check_divides(length: int, pieces: int, what: str) -> None:
    if length % pieces:
        below, above = length // pieces * pieces, -(-length // pieces) * pieces
        raise ValueError(
            f"{what} holds {length} tokens, which cannot be cut into {pieces} equal pieces; "
            f"pad it to {above}" + (f" or shorten it to {below}" if below else "")
        )
