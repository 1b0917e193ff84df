"""Which KV blocks must move where, and the messages that carry them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen, offsets, ranges
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.placement import Placement


@dataclass(frozen=True)
class Messages:
    """Point-to-point messages, each with the blocks it carries.

    Attributes
    ----------
    src, dst : IntArray, shape [num_messages]
    ptr : IntArray, shape [num_messages + 1]
        Blocks of message ``m`` are ``block[ptr[m]:ptr[m + 1]]``, ascending.
    block : IntArray, shape [num_transfers]
    """

    src: IntArray
    dst: IntArray
    ptr: IntArray
    block: IntArray

    def __len__(self) -> int:
        return self.src.size

    def take(self, chosen: IntArray) -> Messages:
        """The ``chosen`` messages, in that order."""
        counts = np.diff(self.ptr)[chosen]
        block = self.block[ranges(self.ptr[chosen], counts)]
        return Messages(frozen(self.src[chosen]), frozen(self.dst[chosen]), frozen(offsets(counts)), frozen(block))


def needed_blocks(table: BlockTable, placement: Placement) -> tuple[IntArray, IntArray]:
    """Remote KV blocks that each rank needs, each listed once.

    Returns
    -------
    (rank, block) : two IntArrays of shape [num_transfers]
        Sorted by rank, then block. Rank ``rank`` attends to ``block``, which another rank owns.

    Notes
    -----
    Causal: a rank needs the document's prefix up to the block before its own latest one; with a window, only the blocks
    that hold a token within the window of one of its queries. Full: every block of any document it holds a piece of.
    """
    if table.window is not None:
        return _within_window(table, placement)
    first, last = table.document_blocks()
    doc, block = table.fragment_document, table.fragment_block
    owner = placement.block_rank[block]
    spans = first[doc] < last[doc]  # one-block documents never travel
    key, latest = _latest_block(owner[spans], doc[spans], block[spans], table.document_length.size)
    rank, document = key // max(table.document_length.size, 1), key % max(table.document_length.size, 1)
    stop = latest if table.mask == "causal" else last[document] + 1
    count = stop - first[document]
    needed = np.arange(int(count.sum()), dtype=np.int64) + np.repeat(first[document] - offsets(count)[:-1], count)
    needing = np.repeat(rank, count)
    remote = placement.block_rank[needed] != needing
    pair = np.sort(needing[remote] * table.num_blocks + needed[remote])
    if table.mask == "full":  # two documents may need the same block, where one ends and the other begins
        pair = pair[np.append(True, pair[1:] != pair[:-1])[: pair.size]]
    return frozen(pair // table.num_blocks), frozen(pair % table.num_blocks)


def _within_window(table: BlockTable, placement: Placement) -> tuple[IntArray, IntArray]:
    """:func:`needed_blocks` where each fragment attends to a few blocks before its own."""
    block = table.fragment_block
    first, stop = table.attended_blocks()
    rank = placement.block_rank[block]
    chosen = np.flatnonzero(first < stop)  # in stream order
    order = chosen[np.argsort(rank[chosen], kind="stable")]
    rank, block, first, stop = rank[order], block[order], first[order], stop[order]
    # What a fragment shares with the one before it on the same rank lies before that one's own block. That holds across
    # documents, too: the earlier fragment's document ends in or before the block in which the later one's begins.
    again = np.append(False, rank[1:] == rank[:-1])[: rank.size]
    first = np.where(again, np.maximum(first, np.append(0, block[:-1])[: block.size]), first)
    count = np.maximum(stop - first, 0)
    needed, needing = ranges(first, count), np.repeat(rank, count)
    remote = placement.block_rank[needed] != needing
    return frozen(needing[remote]), frozen(needed[remote])


def _latest_block(rank: IntArray, doc: IntArray, block: IntArray, num_documents: int) -> tuple[IntArray, IntArray]:
    """For each (rank, document) pair that occurs: its key and the latest block of the document on the rank."""
    key = rank * max(num_documents, 1) + doc
    order = np.lexsort((block, key))
    key, block = key[order], block[order]
    ends = np.flatnonzero(np.append(key[1:] != key[:-1], True)) if key.size else np.zeros(0, dtype=np.int64)
    return key[ends], block[ends]


def coalesce(rank: IntArray, block: IntArray, placement: Placement, blocks_per_message: int) -> Messages:
    """Merge single-block transfers from owners into messages of at most ``blocks_per_message`` blocks.

    A launch costs about 10 us however small the message (https://github.com/uccl-project/uccl/issues/931), so the
    number of messages bounds the rounds while bytes bound their length.
    """
    src = placement.block_rank[block]
    order = np.lexsort((block, rank, src))
    src, dst, block = src[order], rank[order], block[order]
    pair = src * placement.cp_size + dst
    new_pair = np.append(True, pair[1:] != pair[:-1]) if pair.size else np.zeros(0, dtype=bool)
    start_of_pair = np.maximum.accumulate(np.where(new_pair, np.arange(pair.size), 0))
    start = np.flatnonzero((np.arange(pair.size) - start_of_pair) % blocks_per_message == 0)
    return Messages(frozen(src[start]), frozen(dst[start]), frozen(np.append(start, pair.size)), frozen(block))


def message_tokens(table: BlockTable, messages: Messages) -> IntArray:
    """KV tokens that each message carries, shape [num_messages]: what others may need of its blocks."""
    if not len(messages):
        return np.zeros(0, dtype=np.int64)
    return np.add.reduceat((table.shared_stop - table.shared_start)[messages.block], messages.ptr[:-1])
