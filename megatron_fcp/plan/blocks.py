"""The packed stream cut into blocks, and what each block holds.

::

    documents   |----- d0 -----|-d1-|------------- d2 -------------|  padding |
    blocks      |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |
    fragments   | d0    | d0 |d1| d2  ...

A *fragment* is the piece of one document inside one block. Blocks have equal length, so every rank that owns the same
number of blocks owns the same number of tokens, whatever the documents look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron_fcp.config import Mask, check_at_least
from megatron_fcp.plan.arrays import IntArray, Scalar, frozen, offsets
from megatron_fcp.plan.jit import njit

MAX_TOKENS = 2**31  # of a document: it has up to MAX_TOKENS ** 2 query-key pairs, which must fit into int64
MAX_BLOCKS = 2**20  # more would take minutes to plan; 4096 ranks of 32K tokens in blocks of 128 are no more


@dataclass(frozen=True)
class BlockTable:
    """Blocks of a packed stream with their fragments; build it with :func:`build_block_table`.

    Attributes
    ----------
    block_size, num_blocks : int
        Tokens per block, and blocks in the padded stream.
    mask : {"causal", "full"}
    window : int or None
        A query attends to itself and at most this many tokens before it; None: to all of its document before it.
    document_start, document_length : IntArray, shape [num_documents]
        Place of each document in the stream and its real tokens. Documents are never empty.
    fragment_document, fragment_start, fragment_length, fragment_block : IntArray, shape [num_fragments]
        In stream order; ``fragment_start`` counts from the start of the stream.
    fragment_ptr : IntArray, shape [num_blocks + 1]
        Fragments of block ``b`` are ``fragment_ptr[b]:fragment_ptr[b + 1]``.
    block_cost : IntArray, shape [num_blocks]
        Query-key pairs that the block's queries attend to.
    shared_start, shared_stop : IntArray, shape [num_blocks]
        Token range (stream coordinates) whose KV another block may need; empty where none does. A document that ends
        inside a block is never needed by a later one, so only the last (causal) or the first and last (full) document
        of a block count, and of it the last ``window`` tokens: this is all that ever travels.
    """

    block_size: int
    num_blocks: int
    mask: Mask
    document_start: IntArray
    document_length: IntArray
    fragment_document: IntArray
    fragment_start: IntArray
    fragment_length: IntArray
    fragment_block: IntArray
    fragment_ptr: IntArray
    block_cost: IntArray
    shared_start: IntArray
    shared_stop: IntArray
    window: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the padded stream."""
        return self.block_size * self.num_blocks

    @property
    def real_tokens(self) -> int:
        """Tokens that belong to a document."""
        return int(self.document_length.sum())

    def document_blocks(self) -> tuple[IntArray, IntArray]:
        """First and last block of each document, both shape [num_documents]."""
        first = self.document_start // self.block_size
        last = (self.document_start + self.document_length - 1) // self.block_size
        return first, last

    def attended_blocks(self) -> tuple[IntArray, IntArray]:
        """First block that each fragment attends to, and the one behind the last; causal: its own is left out.

        Both have shape [num_fragments]. A window ends at the start of the document, not of the stream.
        """
        first, last = self.document_blocks()
        first, stop = first[self.fragment_document], last[self.fragment_document] + 1
        if self.mask == "causal":
            stop = self.fragment_block.copy()  # one type for compiled code: never read-only
            if self.window is not None:
                first = np.maximum(first, (self.fragment_start - self.window) // self.block_size)
        return first, stop

    def token_documents(self) -> IntArray:
        """Document of each token of the stream, -1 for padding; shape [num_tokens]."""
        documents = np.full(self.num_tokens, -1, dtype=np.int64)
        for d, (start, length) in enumerate(zip(self.document_start, self.document_length)):
            documents[start : start + length] = d
        return documents


def check_lengths(lengths: Sequence[int] | NDArray[np.generic], what: str = "length") -> IntArray:
    """Document lengths (or another non-negative ``what`` of documents) as int64.

    Raises
    ------
    ValueError
        If one is negative, not an integer, or past ``MAX_TOKENS``; names its position and value.
    """
    if isinstance(lengths, np.ndarray) and lengths.ndim != 1:
        raise ValueError(f"document {what}s must be one flat list of integers, got an array of shape {lengths.shape}")
    if isinstance(lengths, np.ndarray) and lengths.dtype.kind in "iu":  # the usual case, without a look at each item
        values = lengths.astype(np.int64)
        if bool(((values >= 0) & (values <= MAX_TOKENS)).all()):
            return values
    if not hasattr(lengths, "__iter__"):
        raise ValueError(f"document {what}s must be a list of integers, not {lengths!r}")
    items: list[object] = lengths.tolist() if isinstance(lengths, np.ndarray) else list(lengths)
    if not set(map(type, items)) <= {int}:
        for position, item in enumerate(items):
            if isinstance(item, bool) or not isinstance(item, Integral):
                raise ValueError(f"document {what} {item!r} (document {position}) is not an integer")
    integers = [int(cast(int, item)) for item in items]
    if integers and not (min(integers) >= 0 and max(integers) <= MAX_TOKENS):
        position = next(i for i, item in enumerate(integers) if not 0 <= item <= MAX_TOKENS)
        problem = "is negative" if integers[position] < 0 else f"is past the limit of {MAX_TOKENS}"
        raise ValueError(f"document {what} {integers[position]} (document {position}) {problem}")
    return np.array(integers, dtype=np.int64)


def build_block_table(
    lengths: Sequence[int] | NDArray[np.generic],
    *,
    num_tokens: int,
    block_size: int,
    mask: Mask = "causal",
    starts: Sequence[int] | NDArray[np.generic] | None = None,
    window: int | None = None,
) -> BlockTable:
    """Cut a packed stream into blocks.

    Parameters
    ----------
    lengths : sequence of int
        Real tokens of each document, in stream order. Empty documents are dropped: repeated offsets at the end of
        ``cu_seqlens`` change nothing (https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4489).
    num_tokens : int
        Tokens of the padded stream, a multiple of ``block_size``.
    block_size : int
    mask : {"causal", "full"}
    starts : sequence of int, optional
        Start of each document where the stream has padding between documents; default: one after the other.
    window : int, optional
        Tokens before a query that it attends to at most. Causal masks only.

    Raises
    ------
    ValueError
        For lengths that are negative, not integers, overlap, or do not fit the stream, for absurdly many blocks, and
        for a window that is negative or comes with a full mask.
    """
    check_window(window, mask)
    length = check_lengths(lengths)
    if (length > num_tokens).any():  # before any sum could overflow
        position = int((length > num_tokens).argmax())
        raise ValueError(
            f"document {position} holds {length[position]} tokens but the whole stream has only {num_tokens}; "
            "raise the context-parallel size or the tokens per rank"
        )
    start = offsets(length)[:-1] if starts is None else check_lengths(starts, "start")
    if start.size != length.size:
        raise ValueError(f"{length.size} document lengths but {start.size} document starts")
    real = np.flatnonzero(length)
    start, length = start[real], length[real]
    ends = start + length
    late = np.flatnonzero(ends[:-1] > start[1:])
    if late.size:
        d = late[0]
        raise ValueError(f"document {real[d]} ends at token {ends[d]}, after the start of the next document")
    if length.size and ends[-1] > num_tokens:
        raise ValueError(
            f"the documents hold {ends[-1]} tokens but the stream has only {num_tokens}; "
            "raise the context-parallel size or the tokens per rank, or pass fewer documents"
        )
    assert num_tokens % block_size == 0, (num_tokens, block_size)
    if num_tokens // block_size > MAX_BLOCKS:
        raise ValueError(
            f"--fcp-block-size {block_size} cuts the stream of {num_tokens} tokens into {num_tokens // block_size} "
            f"blocks; choose a size that makes at most {MAX_BLOCKS}"
        )
    return _cut(start, length, num_tokens // block_size, block_size, mask, window)


def check_window(window: int | None, mask: Mask = "causal") -> None:
    """Raise a ValueError unless ``window`` is a number of tokens before a causal query, or None."""
    if window is None:
        return
    check_at_least("the window", window, 0)
    if mask != "causal":
        raise ValueError(f"a window of {window} tokens needs a causal mask, not {mask!r}")


def windowed_pairs(tokens: IntArray, window: int | None) -> IntArray:
    """Query-key pairs of the first ``tokens`` queries of a document."""
    if window is None:
        return tokens * (tokens + 1) // 2
    return _pairs_within(tokens, window)


def _pairs_within(tokens: Scalar, window: int) -> Scalar:
    ramp = np.minimum(tokens, window + 1)  # tokens whose window reaches the start of the document
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * (window + 1)


_compiled_pairs = njit(cache=True)(_pairs_within)


def _cut(
    start: IntArray, length: IntArray, num_blocks: int, block_size: int, mask: Mask, window: int | None
) -> BlockTable:
    document, piece_start, piece, block, fragment_ptr = _fragments(start, length, num_blocks, block_size)
    reach = MAX_TOKENS if window is None else window
    cost, shared_start, shared_stop = _shares(
        document, piece_start, piece, block, start, length, num_blocks, block_size, mask == "causal", reach
    )
    for array in (document, piece_start, piece, block, fragment_ptr, cost, shared_start, shared_stop):
        array.setflags(write=False)
    return BlockTable(
        block_size=block_size,
        num_blocks=num_blocks,
        mask=mask,
        document_start=frozen(start),
        document_length=frozen(length),
        fragment_document=document,
        fragment_start=piece_start,
        fragment_length=piece,
        fragment_block=block,
        fragment_ptr=fragment_ptr,
        block_cost=cost,
        shared_start=shared_start,
        shared_stop=shared_stop,
        window=window,
    )


@njit(cache=True)
def _fragments(
    start: IntArray, length: IntArray, num_blocks: int, block_size: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Document, first token, tokens and block of every fragment, and each block's first fragment."""
    size = 0
    for d in range(start.size):
        size += (start[d] + length[d] - 1) // block_size - start[d] // block_size + 1
    document, piece_start, piece, block = np.empty((4, size), dtype=np.int64)
    ptr = np.zeros(num_blocks + 1, dtype=np.int64)
    n = 0
    for d in range(start.size):
        end = start[d] + length[d]
        for b in range(start[d] // block_size, (end - 1) // block_size + 1):
            document[n], block[n], piece_start[n] = d, b, max(start[d], b * block_size)
            piece[n] = min(end, (b + 1) * block_size) - piece_start[n]
            n += 1
            ptr[b + 1] = n
    for b in range(num_blocks):
        ptr[b + 1] = max(ptr[b + 1], ptr[b])
    return document, piece_start, piece, block, ptr


@njit(cache=True)
def _shares(
    document: IntArray, piece_start: IntArray, piece: IntArray, block: IntArray, start: IntArray, length: IntArray,
    num_blocks: int, block_size: int, causal: bool, window: int,
) -> tuple[IntArray, IntArray, IntArray]:  # fmt: skip
    """Pairs of every block, and the range of it that others may need."""
    cost = np.zeros(num_blocks, dtype=np.int64)
    low, high = np.arange(1, num_blocks + 1) * block_size, np.arange(num_blocks) * block_size
    for i in range(document.size):
        d, b, begin, end = document[i], block[i], piece_start[i], piece_start[i] + piece[i]
        if causal:
            cost[b] += _compiled_pairs(end - start[d], window) - _compiled_pairs(begin - start[d], window)
        else:
            cost[b] += piece[i] * length[d]
        goes_on = start[d] + length[d] > (b + 1) * block_size
        if goes_on or (not causal and begin > start[d]):  # then earlier blocks attend to later ones as well
            low[b], high[b] = min(low[b], begin), max(high[b], end)
    for b in range(num_blocks):
        low[b] = min(max(low[b], high[b] - window), high[b])
    return cost, low, high
