"""Kernel seconds of the shapes that plans and peers run.

The rule is :mod:`megatron_fcp.plan.cost`'s: work on ``nq`` queries and ``nk`` keys of one document in one call costs
its area and a rim. numpy, and written apart from :mod:`simulate.price`, so that the two check each other.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from megatron_fcp.plan.arrays import FloatArray, IntArray, offsets
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.simulate.hardware import HardwareModel

BACKWARD_FLOPS = 2.5  # five matrix products against forward's two


def backward_cost(cost: CostModel, hardware: HardwareModel) -> CostModel:
    """``cost`` with the pair time of a backward kernel."""
    return dataclasses.replace(cost, pair_s=cost.pair_s * BACKWARD_FLOPS / hardware.backward_rate)


def causal_s(tokens: ArrayLike, cost: CostModel) -> FloatArray:
    """Seconds of ``tokens`` of a document against themselves, causal, one call; elementwise, 0 for 0."""
    n = np.asarray(tokens, dtype=np.float64)
    return _priced((n * n + n) / 2, n, n, cost)


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


def ideal_s(lengths: IntArray, num_ranks: int, cost: CostModel) -> float:
    """Seconds per rank if every document were one kernel call, perfectly spread."""
    return float(causal_s(lengths, cost).sum()) / num_ranks


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
