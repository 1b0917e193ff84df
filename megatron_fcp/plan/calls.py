"""The kernel calls of a backward pass: the forward pass's stages, cut finer.

Two cuts give what travels something to hide behind::

    forward   local | stage 1 ............................ | stage 2 ...
    backward  local, half | stage 1, part 0 | part 1 | ... | stage 2, parts | local, the rest

The local stage covers the pulls with its first half and the pushes with its second. A stage's buffer holds blocks in
stream order, so that parts of it are ranges, and all ranks go through a document from the front: its first blocks,
which most ranks attend to, are on their way home while the later ones are attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen, offsets, ranges
from megatron_fcp.plan.backward import transfer_arrays
from megatron_fcp.plan.blocks import MAX_TOKENS, BlockTable, windowed_pairs
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule

MOST_PARTS = 16  # of a stage
LEAST_PART = 4096  # KV tokens, below which kernels lose shape
GRAIN = 32  # share of the local pairs that is not worth a cut inside a document
HALVES = frozen([8, 16])  # sixteenths of the local pairs at which parts of the local stage end
STEPS = frozen([6, 9, 11, 13, 15, 16])  # the same where much goes home behind the last stage


@dataclass(frozen=True)
class LocalCuts:
    """The local stage in pieces; a piece of a document covers queries ``start:stop`` of it and all keys before them.

    Attributes
    ----------
    ptr : IntArray, shape [cp_size + 1]
        Pieces of each rank.
    part, item : IntArray, shape [num_pieces]
        Part of the rank's local stage, ascending, and which of the rank's documents.
    start, stop : IntArray, shape [num_pieces]
        Tokens among those that the rank holds of the document.
    """

    ptr: IntArray
    part: IntArray
    item: IntArray
    start: IntArray
    stop: IntArray


@dataclass(frozen=True)
class Calls:
    """Backward's calls of all ranks, each rank's in the order in which it makes them.

    Attributes
    ----------
    ptr : IntArray, shape [cp_size + 1]
        Calls of each rank.
    stage, part : IntArray, shape [num_calls]
        What is attended to: a part of a stage's buffer.
    pairs : IntArray, shape [num_calls]
        Query-key pairs.
    of_transfer : IntArray, shape [num_transfers]
        Call in which the receiver of each transfer attends to it.
    local : LocalCuts
    """

    ptr: IntArray
    stage: IntArray
    part: IntArray
    pairs: IntArray
    of_transfer: IntArray
    local: LocalCuts


def message_stages(schedule: CommSchedule) -> IntArray:
    """Stage (from 1) in which the receiver of each message attends to it, shape [num_messages]."""
    m = schedule.messages
    stage = np.zeros(len(m), dtype=np.int64)
    by_receiver = np.argsort(m.dst, kind="stable")
    edge = np.searchsorted(m.dst[by_receiver], np.arange(len(schedule.stage_ends) + 1))
    for rank, ends in enumerate(schedule.stage_ends):
        mine = by_receiver[edge[rank] : edge[rank + 1]]
        stage[mine] = np.searchsorted(ends, schedule.message_round[mine]) + 1
    return stage


def split_calls(table: BlockTable, placement: Placement, schedule: CommSchedule, *, finely: bool) -> Calls:
    """Backward's calls.

    Parameters
    ----------
    table, placement, schedule
    finely : bool
        Cut remote stages and the second half of the local one.
    """
    n = placement.cp_size
    _, _, dst, block = transfer_arrays(schedule)
    stage = np.repeat(message_stages(schedule), np.diff(schedule.messages.ptr))
    order = np.lexsort((block, stage, dst))
    length = (table.shared_stop - table.shared_start)[block[order]]
    most, least = (MOST_PARTS, LEAST_PART) if finely else (1, 0)
    part = _cut_stages(dst[order], stage[order], length, most, least)
    stages = np.array([ends.size for ends in schedule.stage_ends])
    held_ptr, held = _local_lengths(table, placement)
    sixteenths = STEPS if finely else HALVES
    if table.mask != "causal":
        sixteenths = sixteenths[-1:]
    cuts = [sixteenths if s else sixteenths[-1:] for s in stages.tolist()]
    window = MAX_TOKENS if table.window is None else table.window
    local = LocalCuts(*_cut_local(held_ptr, held, offsets([c.size for c in cuts]), np.concatenate(cuts), window))

    first = offsets(stages)  # remote calls: at least one per stage, whether or not anything arrives in it
    parts = np.ones(int(first[-1]), dtype=np.int64)
    np.maximum.at(parts, first[dst[order]] + stage[order] - 1, part + 1)
    rank = np.repeat(np.arange(n), stages)
    remote_rank = np.repeat(rank, parts)
    remote_stage = np.repeat(np.arange(rank.size) - first[rank] + 1, parts)
    remote_part = ranges(np.zeros_like(parts), parts)
    piece_rank = np.repeat(np.arange(n), np.diff(local.ptr))
    local_key = np.unique(piece_rank * 64 + local.part)
    without = np.setdiff1d(np.arange(n), piece_rank)  # ranks of padding have a local call, too
    local_key = np.sort(np.append(local_key, without * 64))
    local_rank, local_part = local_key // 64, local_key % 64
    all_rank = np.concatenate((local_rank, remote_rank))
    all_stage = np.concatenate((np.zeros_like(local_rank), remote_stage))
    all_part = np.concatenate((local_part, remote_part))
    late = np.where(all_stage > 0, all_stage, np.where(all_part == 0, 0, 1 << 30))
    by = np.lexsort((all_part, late, all_rank))
    place = np.empty(by.size, dtype=np.int64)
    place[by] = np.arange(by.size)
    of_transfer = np.empty(order.size, dtype=np.int64)
    of_transfer[order] = place[local_rank.size + offsets(parts)[first[dst[order]] + stage[order] - 1] + part]

    pairs = np.zeros(by.size, dtype=np.int64)
    np.add.at(pairs, of_transfer, _transfer_pairs(table, placement, dst, block))
    at = place[np.searchsorted(local_key, piece_rank * 64 + local.part)]
    np.add.at(pairs, at, windowed_pairs(local.stop, table.window) - windowed_pairs(local.start, table.window))
    return Calls(offsets(np.bincount(all_rank, minlength=n)), all_stage[by], all_part[by], pairs, of_transfer, local)


def _local_lengths(table: BlockTable, placement: Placement) -> tuple[IntArray, IntArray]:
    """Tokens that each rank holds of each of its documents, flat, and their offsets (shape [cp_size + 1])."""
    documents = max(table.document_length.size, 1)
    key = placement.block_rank[table.fragment_block] * documents + table.fragment_document
    name, index = np.unique(key, return_inverse=True)
    held = np.zeros(name.size, dtype=np.int64)
    np.add.at(held, index, table.fragment_length)
    return np.searchsorted(name // documents, np.arange(placement.cp_size + 1)), held


def _transfer_pairs(table: BlockTable, placement: Placement, receiver: IntArray, block: IntArray) -> IntArray:
    """Query-key pairs that each transfer is for; only a scale where the mask is not causal or has a window."""
    if not block.size:
        return block
    nb, documents = table.num_blocks, max(table.document_length.size, 1)
    place = placement.block_rank[table.fragment_block] * documents + table.fragment_document
    place = place * nb + table.fragment_block
    order = np.argsort(place)
    place = place[order]
    prefix = offsets(table.fragment_length[order])
    travelling = table.fragment_document[table.fragment_ptr[1:] - 1][block]  # a block's last document goes on
    wanted = (receiver * documents + travelling) * nb
    seen = np.full(block.size, nb - 1)
    if table.window is not None:  # the last block that the window of a query reaches out of
        seen = np.minimum((table.shared_stop[block] - 1 + table.window) // table.block_size, seen)
    behind = prefix[np.searchsorted(place, wanted + seen, side="right")]
    behind -= prefix[np.searchsorted(place, wanted + block, side="right")]
    return behind * (table.shared_stop - table.shared_start)[block]


@njit(cache=True)
def _cut_stages(dst: IntArray, stage: IntArray, length: IntArray, most: int, least: int) -> IntArray:
    """Part of its stage that each arrival is in; sorted by receiver, stage and block."""
    part = np.zeros(dst.size, dtype=np.int64)
    i = 0
    while i < dst.size:
        j, total = i, 0
        while j < dst.size and dst[j] == dst[i] and stage[j] == stage[i]:
            total += length[j]
            j += 1
        parts = max(1, min(most, total // max(least, 1)))
        before = 0
        for k in range(i, j):
            part[k] = min((before + length[k] // 2) * parts // max(total, 1), parts - 1)
            before += length[k]
        last, number = part[i], 0
        for k in range(i, j):  # without gaps
            if part[k] != last:
                last = part[k]
                number += 1
            part[k] = number
        i = j
    return part


@njit(cache=True)
def _cut_local(
    ptr: IntArray, length: IntArray, cut_ptr: IntArray, sixteenths: IntArray, window: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    size = length.size + sixteenths.size
    part, item = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    start, stop = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    out_ptr = np.zeros(ptr.size, dtype=np.int64)
    k = 0
    for r in range(ptr.size - 1):
        total = 0
        for i in range(ptr[r], ptr[r + 1]):
            total += _pairs(length[i], window)
        done, p, number, current = 0, 0, -1, -1
        last = cut_ptr[r + 1] - cut_ptr[r] - 1
        for i in range(ptr[r], ptr[r + 1]):
            a = 0
            while a < length[i]:
                room = total * sixteenths[cut_ptr[r] + p] // 16 - done
                rest = _pairs(length[i], window) - _pairs(a, window)
                b = length[i]
                if p < last and rest > room + total // GRAIN:
                    if room > total // GRAIN:
                        b = _tokens(int(room + _pairs(a, window)), window)
                    else:
                        p += 1
                        continue
                if b > a:
                    if p != current:  # numbered without gaps
                        current = p
                        number += 1
                    part[k], item[k], start[k], stop[k] = number, i - ptr[r], a, b
                    k += 1
                    done += _pairs(b, window) - _pairs(a, window)
                if b < length[i]:
                    p += 1
                a = b
        out_ptr[r + 1] = k
    return out_ptr, part[:k], item[:k], start[:k], stop[:k]


@njit(cache=True)
def _pairs(tokens: int, window: int) -> int:
    """Query-key pairs of the first ``tokens`` queries."""
    ramp = min(tokens, window + 1)
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * (window + 1)


@njit(cache=True)
def _tokens(pairs: int, window: int) -> int:
    """Most queries with at most ``pairs`` pairs."""
    ramp = _pairs(window + 1, window)
    if pairs >= ramp:
        return window + 1 + (pairs - ramp) // (window + 1)
    n = int(np.sqrt(2.0 * pairs))
    while n * (n + 1) // 2 > pairs:
        n -= 1
    while (n + 1) * (n + 2) // 2 <= pairs:
        n += 1
    return n
