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
from megatron_fcp.plan.arrays import IntArray, frozen, offsets

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
    start, length = start[length > 0], length[length > 0]
    ends = start + length
    if (ends[:-1] > start[1:]).any():
        position = int(np.flatnonzero(ends[:-1] > start[1:])[0])
        raise ValueError(f"document {position} ends at token {ends[position]}, after the start of the next document")
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
    if window > MAX_TOKENS:
        raise ValueError(f"the window {window} is past the limit of {MAX_TOKENS}; leave it out for no limit")
    if mask != "causal":
        raise ValueError(f"a window of {window} tokens needs a causal mask, not {mask!r}")


def windowed_pairs(tokens: IntArray, window: int | None) -> IntArray:
    """Query-key pairs of the first ``tokens`` queries of a document."""
    if window is None:
        return tokens * (tokens + 1) // 2
    ramp = np.minimum(tokens, window + 1)  # tokens whose window reaches the start of the document
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * (window + 1)


def _cut(
    start: IntArray, length: IntArray, num_blocks: int, block_size: int, mask: Mask, window: int | None
) -> BlockTable:
    first = start // block_size
    last = (start + length - 1) // block_size
    pieces = last - first + 1
    document = np.repeat(np.arange(start.size, dtype=np.int64), pieces)
    block = np.arange(document.size, dtype=np.int64) - np.repeat(offsets(pieces)[:-1] - first, pieces)
    piece_start = np.maximum(start[document], block * block_size)
    piece_stop = np.minimum(start[document] + length[document], (block + 1) * block_size)
    piece = piece_stop - piece_start
    position = piece_start - start[document]
    if mask == "causal":
        pairs = windowed_pairs(position + piece, window) - windowed_pairs(position, window)
    else:
        pairs = piece * length[document]
    fragment_ptr = np.searchsorted(block, np.arange(num_blocks + 1))
    before = offsets(pairs)
    cost = before[fragment_ptr[1:]] - before[fragment_ptr[:-1]]

    continues = block < last[document]  # the document goes on in a later block
    began = block > first[document]
    edge = np.arange(num_blocks, dtype=np.int64) * block_size
    shared_start, shared_stop = edge + block_size, edge.copy()
    shared_start[block[continues]] = piece_start[continues]
    shared_stop[block[continues]] = piece_stop[continues]
    if mask == "full":  # earlier blocks attend to later ones as well
        np.minimum.at(shared_start, block[began], piece_start[began])
        np.maximum.at(shared_stop, block[began], piece_stop[began])
    if window is not None:
        shared_start = np.maximum(shared_start, shared_stop - window)
    shared_start = np.minimum(shared_start, shared_stop)
    return BlockTable(
        block_size=block_size,
        num_blocks=num_blocks,
        mask=mask,
        document_start=frozen(start),
        document_length=frozen(length),
        fragment_document=frozen(document),
        fragment_start=frozen(piece_start),
        fragment_length=frozen(piece),
        fragment_block=frozen(block),
        fragment_ptr=frozen(fragment_ptr),
        block_cost=frozen(cost),
        shared_start=frozen(shared_start),
        shared_stop=frozen(shared_stop),
        window=window,
    )
