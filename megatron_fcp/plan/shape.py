"""Priced compute of any set of blocks: area and rim of what a rank attends to, in pair times (:mod:`plan.cost`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit

STAGE_KEYS = 16384.0  # keys of one document that a stage attends to, as a guess while there is no schedule yet


class BlockShapes(NamedTuple):
    """What a block adds to a rank's compute, by block; a causal document only matters at the two ends of a block.

    Attributes
    ----------
    inner : FloatArray
        Price of the documents that lie wholly inside the block.
    head, head_length, head_position : IntArray
        Document that began in an earlier block (-1: none), its tokens here and how many lie before them.
    tail, tail_length : IntArray
        Document that begins here and goes on (-1: none), and its tokens here.
    """

    inner: FloatArray
    head: IntArray
    head_length: IntArray
    head_position: IntArray
    tail: IntArray
    tail_length: IntArray


def block_shapes(table: BlockTable, q_half: float, kv_half: float) -> BlockShapes:
    """Shapes of a causal table's blocks."""
    first, last = table.document_blocks()
    return BlockShapes(
        *_shapes(
            table.fragment_document, table.fragment_start, table.fragment_length, table.fragment_block,
            table.document_start, first, last, table.num_blocks, q_half, kv_half,
        )
    )  # fmt: skip


@njit(cache=True)
def _shapes(
    document: IntArray, start: IntArray, length: IntArray, block: IntArray, document_start: IntArray, first: IntArray,
    last: IntArray, num_blocks: int, q_half: float, kv_half: float,
) -> tuple[FloatArray, IntArray, IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    inner = np.zeros(num_blocks)
    head, head_length = np.full(num_blocks, -1), np.zeros(num_blocks, dtype=np.int64)
    head_position = np.zeros(num_blocks, dtype=np.int64)
    tail, tail_length = np.full(num_blocks, -1), np.zeros(num_blocks, dtype=np.int64)
    for i in range(document.size):
        d, b = document[i], block[i]
        if first[d] == last[d]:
            inner[b] += triangle(float(length[i]), q_half, kv_half)
        elif b == first[d]:
            tail[b], tail_length[b] = d, length[i]
        else:
            head[b], head_length[b], head_position[b] = d, length[i], start[i] - document_start[d]
    return inner, head, head_length, head_position, tail, tail_length


@njit(cache=True)
def triangle(n: Scalar, q_half: float, kv_half: float) -> Scalar:
    """Price of ``n`` tokens of a document against themselves."""
    return (n * n + n) / 2 * (1 + q_half / n) * (1 + kv_half / n) if n > 0 else 0.0


@njit(cache=True)
def rectangle(pairs: Scalar, queries: Scalar, keys: Scalar, q_half: float, kv_half: float) -> Scalar:
    """Price of remote keys, in stages of about ``STAGE_KEYS``; a key costs the same rim however few queries see it."""
    if pairs <= 0:
        return 0.0
    return pairs + q_half * keys + kv_half * (queries + q_half) * (1 + keys / STAGE_KEYS)


@njit(cache=True)
def blocks_price(blocks: IntArray, count: int, shapes: BlockShapes, q_half: float, kv_half: float) -> Scalar:
    """Price of the first ``count`` of ``blocks`` (ascending) on one rank."""
    inner, head, head_length, head_position, tail, tail_length = shapes
    total = 0.0
    document = -1
    local = pairs = queries = keys = 0.0
    for i in range(count):
        b = blocks[i]
        total += inner[b]
        d = head[b]
        if d >= 0:
            if d != document:
                total += triangle(local, q_half, kv_half) + rectangle(pairs, queries, keys, q_half, kv_half)
                document = d
                local = pairs = queries = keys = 0.0
            n = float(head_length[b])
            gap = head_position[b] - local
            if gap > 0:
                pairs += n * gap
                queries += n
                keys = gap
            local += n
        if tail[b] >= 0:
            total += triangle(local, q_half, kv_half) + rectangle(pairs, queries, keys, q_half, kv_half)
            document = tail[b]
            pairs = queries = keys = 0.0
            local = float(tail_length[b])
    return total + triangle(local, q_half, kv_half) + rectangle(pairs, queries, keys, q_half, kv_half)


def local_prices(
    table: BlockTable, shapes: BlockShapes, owner: IntArray, cp_size: int, q_half: float, kv_half: float
) -> FloatArray:
    """Price of every rank's local stage, shape [cp_size]: each document's local tokens are one causal range."""
    out = np.bincount(owner, shapes.inner, cp_size).astype(np.float64)
    first, last = table.document_blocks()
    _add_spanning(first, last, shapes, owner, np.zeros(cp_size), q_half, kv_half, out)
    return out


@njit(cache=True)
def _add_spanning(
    first: IntArray,
    last: IntArray,
    shapes: BlockShapes,
    owner: IntArray,
    tokens: FloatArray,
    q_half: float,
    kv_half: float,
    out: FloatArray,
) -> None:
    for d in range(first.size):
        if first[d] == last[d]:
            continue
        for b in range(first[d], last[d] + 1):
            tokens[owner[b]] += shapes.head_length[b] if shapes.head[b] == d else shapes.tail_length[b]
        for b in range(first[d], last[d] + 1):
            r = owner[b]
            if tokens[r] > 0:
                out[r] += triangle(tokens[r], q_half, kv_half)
                tokens[r] = 0.0
