"""Kernel seconds of the shapes that plans and peers run.

The rule is :mod:`megatron_fcp.plan.cost`'s: work on ``nq`` queries and ``nk`` keys of one document in one call costs
its area and a rim. numpy, and written apart from :mod:`simulate.price`, so that the two check each other.

A window changes both: only visible pairs count, and a causal square is as long in keys as its window, since that is how
far a kernel goes through the keys of a query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from megatron_fcp.plan.arrays import FloatArray, IntArray, offsets
from megatron_fcp.plan.blocks import BlockTable, windowed_pairs
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.window import windowed_stages
from megatron_fcp.plan.work import StageWork, local_fragments
from megatron_fcp.simulate.hardware import HardwareModel

BACKWARD_FLOPS = 2.5  # five matrix products against forward's two


def backward_cost(cost: CostModel, hardware: HardwareModel) -> CostModel:
    """``cost`` with the pair time of a backward kernel."""
    return dataclasses.replace(cost, pair_s=cost.pair_s * BACKWARD_FLOPS / hardware.backward_rate)


def causal_s(tokens: ArrayLike, cost: CostModel, window: int | None = None) -> FloatArray:
    """Seconds of ``tokens`` of a document against themselves, causal, one call; elementwise, 0 for 0."""
    n = np.asarray(tokens, dtype=np.float64)
    if window is None:
        return _priced((n * n + n) / 2, n, n, cost)
    pairs = windowed_pairs(np.asarray(tokens, dtype=np.int64), window).astype(np.float64)
    return _priced(pairs, n, np.minimum(n, window + 1), cost)


def full_s(queries: ArrayLike, keys: ArrayLike, cost: CostModel) -> FloatArray:
    """Seconds of every query against every key, one call; elementwise."""
    q, k = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    return _priced(q * k, q, k, cost)


def suffix_s(queries: ArrayLike, before: ArrayLike, cost: CostModel) -> FloatArray:
    """Seconds of ``queries`` causal tokens that also see the ``before`` tokens in front of them, one call."""
    q, p = np.asarray(queries, dtype=np.float64), np.asarray(before, dtype=np.float64)
    return _priced(q * p + (q * q + q) / 2, q, p + q, cost)


def _priced(pairs: FloatArray, q: FloatArray, k: FloatArray, cost: CostModel) -> FloatArray:
    area = np.maximum(q * k, 1.0)
    return np.where(pairs > 0, pairs * (q + cost.q_half) * (k + cost.kv_half) / area * cost.pair_s, 0.0)


def work_shapes(work: StageWork) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Visible pairs, and the lengths in queries and keys that the price depends on, of every item of a kernel call."""
    q, k = work.q_stop - work.q_start, work.kv_stop - work.kv_start
    if work.causal and work.window is not None:
        k = np.minimum(k, work.window + 1)
    return work.item_pairs.astype(np.float64), q.astype(np.float64), k.astype(np.float64)


def works_s(
    works: Sequence[tuple[int, StageWork, IntArray]], num_entries: int, cost: CostModel, window: int | None = None
) -> FloatArray:
    """Seconds of kernel calls, added up by entry; shape [num_entries].

    Parameters
    ----------
    works : sequence of (int, StageWork, IntArray)
        Entry, call, and the document of each of its items. Items of a document are one piece of work, as long in keys
        as they reach together, but no longer than the window.
    num_entries : int
    cost : CostModel
    window : int, optional
    """
    filled = [(entry, call, document) for entry, call, document in works if call.num_items]
    if not filled:
        return np.zeros(num_entries)
    number = np.repeat(np.arange(len(filled)), [call.num_items for _, call, _ in filled])
    document = np.concatenate([d for _, _, d in filled])
    width = int(document.max()) + 1
    name, piece = np.unique(number * width + document, return_inverse=True)
    shapes = [work_shapes(call) for _, call, _ in filled]
    pairs, queries = (np.bincount(piece, np.concatenate([s[i] for s in shapes])) for i in (0, 1))
    start, stop = np.full(name.size, np.iinfo(np.int64).max), np.zeros(name.size, dtype=np.int64)
    np.minimum.at(start, piece, np.concatenate([call.kv_start for _, call, _ in filled]))
    np.maximum.at(stop, piece, np.concatenate([call.kv_stop for _, call, _ in filled]))
    keys = stop - start if window is None else np.minimum(stop - start, window + 1)
    seconds = _priced(pairs, queries, keys.astype(np.float64), cost)
    entry = np.array([e for e, _, _ in filled])[name // width]
    return np.bincount(entry, seconds, minlength=num_entries).astype(np.float64)


def windowed_s(plan: Plan, cost: CostModel, *, backward: bool) -> FloatArray:
    """Seconds of every stage (backward: every part of one) of a plan for a window, rank by rank.

    Priced are the very calls that the runtime makes, up to three for a stage.
    """
    works: list[tuple[int, StageWork, IntArray]] = []
    entry = 0
    for rank in range(plan.cp_size):
        blocks = plan.placement.blocks_of(rank)
        fragments = local_fragments(plan.table, blocks)
        if backward:
            parts, mine = plan.rank_plan(rank).parts, slice(plan.calls.ptr[rank], plan.calls.ptr[rank + 1])
            stages = [parts[s][p] for s, p in zip(plan.calls.stage[mine].tolist(), plan.calls.part[mine].tolist())]
        else:
            arrived = plan.layout.stage_blocks(rank, plan.schedule.stage_ends[rank].size)
            stages = list(windowed_stages(plan.table, blocks, arrived))
        for calls in stages:
            for call in calls:
                at = np.searchsorted(fragments.start, call.q_start, side="right") - 1
                works.append((entry, call, fragments.document[at]))
            entry += 1
    return works_s(works, entry, cost, plan.table.window)


def ideal_s(lengths: IntArray, num_ranks: int, cost: CostModel, window: int | None = None) -> float:
    """Seconds per rank if every document were one kernel call, perfectly spread."""
    return float(causal_s(lengths, cost, window).sum()) / num_ranks


def local_s(table: BlockTable, block_rank: IntArray, num_ranks: int, cost: CostModel) -> FloatArray:
    """Seconds of each rank's local stage: a document's local tokens are one causal call; shape [num_ranks]."""
    documents = max(table.document_length.size, 1)
    key = block_rank[table.fragment_block] * documents + table.fragment_document
    held = np.bincount(key, table.fragment_length, minlength=num_ranks * documents)
    return causal_s(held, cost).reshape(num_ranks, documents).sum(axis=1)


def pieces_s(start: IntArray, stop: IntArray, cost: CostModel) -> FloatArray:
    """Seconds of tokens ``start:stop`` of a document that see all up to themselves, as backward's local calls run them.

    One causal call, and one on all that comes before.
    """
    q, k = (stop - start).astype(np.float64), start.astype(np.float64)
    return causal_s(q, cost) + _priced(q * k, q, k, cost)


def remote_s(
    table: BlockTable, block_rank: IntArray, rank: IntArray, group: IntArray, block: IntArray, num_groups: int,
    cost: CostModel,
) -> FloatArray:  # fmt: skip
    """Seconds of remote kernel calls, shape [num_groups].

    Parameters
    ----------
    rank, group, block : IntArray, shape [num_arrivals]
        ``rank`` attends to ``block`` in call ``group`` (a rank's stage, or finer). In a call, each document's keys are
        one range and its queries the rank's tokens behind the first of them.
    """
    nb = table.num_blocks
    tail = np.maximum(table.fragment_ptr[1:] - 1, 0)
    document = table.fragment_document[tail] if table.fragment_document.size else np.zeros(nb, np.int64)
    keys = (table.shared_stop - table.shared_start)[block].astype(np.float64)
    place = (block_rank[table.fragment_block] * max(table.document_length.size, 1) + table.fragment_document) * nb
    order = np.argsort(place + table.fragment_block, kind="stable")
    place = (place + table.fragment_block)[order]
    prefix = offsets(table.fragment_length[order])
    wanted = (rank * max(table.document_length.size, 1) + document[block]) * nb
    after = prefix[np.searchsorted(place, wanted + block, side="right")]
    queries = (prefix[np.searchsorted(place, wanted + nb)] - after).astype(np.float64)
    used = (queries > 0) & (keys > 0)
    call = group[used] * max(table.document_length.size, 1) + document[block[used]]
    name, index = np.unique(call, return_inverse=True)
    total_keys = np.bincount(index, keys[used])
    pairs = np.bincount(index, keys[used] * queries[used])
    most = np.zeros(name.size)
    np.maximum.at(most, index, queries[used])
    seconds = _priced(pairs, most, total_keys, cost)
    out = np.bincount(name // max(table.document_length.size, 1), seconds, minlength=num_groups)
    return out.astype(np.float64)  # numpy counts in integers where there is nothing
