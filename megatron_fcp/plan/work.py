"""What a rank attends to in each stage, as query and KV ranges of its buffers.

Stage 0 attends to what is local: the rank's tokens of one document, in order, are one causal sequence even where they
come from blocks that lie apart, because a later local token comes later in the document too. A later stage attends
suffixes of the local queries to the blocks that arrived, which all lie before them: full mask. A query occurs at most
once per stage, so a stage is one variable-length kernel call. A window takes up to three (see :mod:`plan.window`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen, offsets
from megatron_fcp.plan.blocks import BlockTable, windowed_pairs


@dataclass(frozen=True)
class StageWork:
    """Work list of one kernel call; no entry is empty (https://github.com/Dao-AILab/flash-attention/issues/1537).

    Attributes
    ----------
    q_start, q_stop : IntArray, shape [num_items]
        Ranges of local query tokens, ascending and disjoint.
    kv_start, kv_stop : IntArray, shape [num_items]
        Ranges of KV tokens in the stage's buffer (stage 0: the local tokens).
    causal : bool
        Bottom-right aligned causal mask on every item (then both ranges are equal), or full.
    kv_tokens : int
        Tokens that the stage's buffer holds.
    blocks, block_offset : IntArray, shapes [num_blocks], [num_blocks + 1]
        Blocks in the buffer, ascending, and where the shared part of each begins.
    anticausal : bool
        Query ``i`` of an item sees its keys ``i`` and later; no item has more queries than keys.
    window : int or None
        Causal only: a query sees at most this many keys before its own.
    """

    q_start: IntArray
    q_stop: IntArray
    kv_start: IntArray
    kv_stop: IntArray
    causal: bool
    kv_tokens: int
    blocks: IntArray
    block_offset: IntArray
    anticausal: bool = False
    window: int | None = None

    @property
    def num_items(self) -> int:
        """Kernel entries of the stage."""
        return self.q_start.size

    @property
    def item_pairs(self) -> IntArray:
        """Query-key pairs that each item attends to, shape [num_items]."""
        q, kv = self.q_stop - self.q_start, self.kv_stop - self.kv_start
        if self.causal:
            return windowed_pairs(q, self.window)
        return q * kv - (q * (q - 1) // 2 if self.anticausal else 0)

    @property
    def pairs(self) -> int:
        """Query-key pairs attended to."""
        return int(self.item_pairs.sum())


@dataclass(frozen=True)
class LocalFragments:
    """Fragments of a rank in local token order; every array has shape [num_fragments]."""

    document: IntArray
    block: IntArray
    start: IntArray  # local token index
    stop: IntArray
    stream: IntArray  # first token in the stream


def local_fragments(table: BlockTable, local_blocks: IntArray) -> LocalFragments:
    """Fragments of ``local_blocks`` (ascending) with their place among the rank's tokens."""
    slot = np.full(table.num_blocks, -1, dtype=np.int64)
    slot[local_blocks] = np.arange(local_blocks.size)
    mine = np.flatnonzero(slot[table.fragment_block] >= 0)
    block = table.fragment_block[mine]
    start = slot[block] * table.block_size + table.fragment_start[mine] - block * table.block_size
    stop = start + table.fragment_length[mine]
    return LocalFragments(table.fragment_document[mine], block, start, stop, table.fragment_start[mine])


def stage_works(table: BlockTable, local_blocks: IntArray, arrived: list[IntArray]) -> list[StageWork]:
    """Work of all stages of a rank: the local one, then one for each entry of ``arrived`` (ascending blocks)."""
    fragments = local_fragments(table, local_blocks)
    first, last = table.document_blocks()
    document = fragments.document
    stop = fragments.block if table.mask == "causal" else last[document] + 1
    stages = [_local_stage(table, fragments, local_blocks)]
    return stages + [_remote_stage(table, fragments, first[document], stop, blocks) for blocks in arrived]


def empty_stages(table: BlockTable, local_blocks: IntArray, arrived: list[IntArray]) -> list[StageWork]:
    """What the buffers of all stages hold, without any work on it."""
    none = frozen([])
    whole = np.arange(local_blocks.size + 1) * table.block_size
    held = [(local_blocks, whole)]
    held += [(blocks, offsets(table.shared_stop[blocks] - table.shared_start[blocks])) for blocks in arrived]
    return [StageWork(none, none, none, none, False, int(at[-1]), frozen(blocks), frozen(at)) for blocks, at in held]


def _local_stage(table: BlockTable, f: LocalFragments, local_blocks: IntArray) -> StageWork:
    """Stage 0: each document's local tokens against themselves."""
    first = np.flatnonzero(np.append(True, f.document[1:] != f.document[:-1])) if f.document.size else f.document
    start = f.start[first]
    stop = f.stop[np.append(first[1:], f.document.size) - 1] if first.size else first
    return StageWork(
        frozen(start),
        frozen(stop),
        frozen(start),
        frozen(stop),
        table.mask == "causal",
        local_blocks.size * table.block_size,
        frozen(local_blocks),
        frozen(np.arange(local_blocks.size + 1) * table.block_size),
    )


def _remote_stage(
    table: BlockTable, f: LocalFragments, first_block: IntArray, stop_block: IntArray, arrived: IntArray
) -> StageWork:
    """A later stage: local queries against the shared parts of the ``arrived`` blocks.

    ``first_block`` and ``stop_block`` bound the blocks that each fragment attends to.
    """
    shared = table.shared_stop[arrived] - table.shared_start[arrived]
    offset = offsets(shared)
    low = np.searchsorted(arrived, first_block)
    high = np.searchsorted(arrived, stop_block)
    used = np.flatnonzero(low < high)
    low, high, document = low[used], high[used], f.document[used]
    kv_start, kv_stop = _document_range(table, arrived, offset, document, low, high)
    keep = kv_start < kv_stop
    used, kv_start, kv_stop, document = used[keep], kv_start[keep], kv_stop[keep], document[keep]
    new = np.ones(used.size, dtype=bool)
    # Local tokens of a document lie side by side, so fragments that see the same keys are one range of queries.
    new[1:] = (document[1:] != document[:-1]) | (kv_start[1:] != kv_start[:-1]) | (kv_stop[1:] != kv_stop[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], used.size) - 1 if first.size else first
    return StageWork(
        frozen(f.start[used[first]]),
        frozen(f.stop[used[last]]),
        frozen(kv_start[first]),
        frozen(kv_stop[first]),
        False,
        int(offset[-1]),
        frozen(arrived),
        frozen(offset),
    )


def part_of_stage(table: BlockTable, local_blocks: IntArray, stage: StageWork, low: int, high: int) -> StageWork:
    """Work on blocks ``low:high`` of a remote stage's buffer."""
    fragments = local_fragments(table, local_blocks)
    first, last = table.document_blocks()
    document = fragments.document
    stop = fragments.block if table.mask == "causal" else last[document] + 1
    part = _remote_stage(table, fragments, first[document], stop, stage.blocks[low:high])
    before = int(stage.block_offset[low])
    return replace(
        stage,
        q_start=part.q_start,
        q_stop=part.q_stop,
        kv_start=frozen(part.kv_start + before),
        kv_stop=frozen(part.kv_stop + before),
    )


def part_of_local(local: StageWork, item: IntArray, start: IntArray, stop: IntArray) -> tuple[StageWork, ...]:
    """Queries ``start:stop`` of some items of a causal local stage and their keys: a causal call, and one before it."""
    begin = local.q_start[item]
    square = (frozen(begin + start), frozen(begin + stop))
    calls = [replace(local, q_start=square[0], q_stop=square[1], kv_start=square[0], kv_stop=square[1])]
    cut = np.flatnonzero(start > 0)
    if cut.size:
        before = (frozen(begin[cut]), frozen(begin[cut] + start[cut]))
        calls.append(
            replace(
                local,
                q_start=square[0][cut],
                q_stop=square[1][cut],
                kv_start=before[0],
                kv_stop=before[1],
                causal=False,
            )
        )
    return tuple(calls)


def _document_range(
    table: BlockTable, arrived: IntArray, offset: IntArray, document: IntArray, low: IntArray, high: IntArray
) -> tuple[IntArray, IntArray]:
    """Buffer range that holds ``document``'s tokens of the arrived blocks ``low:high``.

    Only the first and the last block of a document hold other tokens as well; what lies between is all its own.
    """
    first, last = arrived[low], arrived[high - 1]
    begin = np.maximum(table.document_start[document], table.shared_start[first])
    end = np.minimum(table.document_start[document] + table.document_length[document], table.shared_stop[last])
    return offset[low] + begin - table.shared_start[first], offset[high - 1] + end - table.shared_start[last]
