"""Pieces of the stream given to ranks so that tokens are equal and priced compute nearly so.

Runs of long documents come first, one per rank, neighbours inside a node. Atoms follow, dearest first, each to the rank
whose free slots are meant to hold the densest work; what does not fit whole is halved. Trades between heavy and light
ranks (:mod:`plan.trade`) settle the rest.
"""

from __future__ import annotations

import heapq

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.needs import all_needs, give, neediest
from megatron_fcp.plan.runs import Pieces
from megatron_fcp.plan.shape import BlockShapes, blocks_price
from megatron_fcp.plan.trade import settle

FAST = 0.98  # of the mean speed that a rank needs to be given a run
CHEAP_SHARE = 0.25


def fill_ranks(
    pieces: Pieces,
    shapes: BlockShapes,
    document_length: IntArray,
    speed: FloatArray,
    ranks_per_node: int,
    target: float,
    bearable: float,
    q_half: float,
    kv_half: float,
) -> tuple[IntArray, FloatArray]:
    """Owner of every block, shape [num_blocks], and price of every rank, shape [cp_size].

    ``target`` is the price of a rank of mean speed, ``bearable`` the KV tokens per rank that a node should fetch from
    outside at most.
    """
    cp_size = speed.size
    num_blocks = shapes.inner.size
    home = seat_runs(pieces, speed, ranks_per_node)
    order = np.argsort(-pieces.price, kind="stable")
    owner = np.full(num_blocks, -1, dtype=np.int64)
    cheap = _cheap_price(pieces)
    far = _far_documents(document_length, bearable / 64)
    _place(
        order, home, pieces, shapes, far, ranks_per_node, num_blocks // cp_size, target * (speed / speed.mean()),
        cheap, bearable, q_half, kv_half, owner,
    )  # fmt: skip
    return owner, settle(owner, shapes, speed, bearable, q_half, kv_half)


def seat_runs(pieces: Pieces, speed: FloatArray, ranks_per_node: int) -> IntArray:
    """Rank of every run, -1 for atoms and for runs beyond the last rank that is as fast as a run expects.

    Runs of one document sit together, so that few nodes fetch it, but every node gets about as many runs: then there
    is room near them for what is left of their documents.
    """
    home = np.full(pieces.first.size, -1, dtype=np.int64)
    runs = np.flatnonzero(pieces.document >= 0)
    runs = runs[np.lexsort((-pieces.first[runs], pieces.document[runs]))]  # latest first
    _, begin, count = np.unique(pieces.document[runs], return_index=True, return_counts=True)
    seats: list[list[int]] = [[] for _ in range(-(-speed.size // ranks_per_node))]
    for rank in np.flatnonzero(speed >= FAST * speed.mean()).tolist():
        seats[rank // ranks_per_node].append(rank)
    size = [len(seat) for seat in seats]
    quota = min(ranks_per_node, -(-runs.size // len(size)))
    taken_of = [0] * len(size)
    emptiest = [(-min(quota, ranks), node) for node, ranks in enumerate(size) if ranks]
    heapq.heapify(emptiest)
    for i in np.argsort(-count, kind="stable").tolist():
        mine: list[int] = runs[begin[i] : begin[i] + count[i]].tolist()
        while mine and emptiest:
            free, node = heapq.heappop(emptiest)
            taken, mine = mine[:-free], mine[-free:]
            for piece in taken:
                home[piece] = seats[node][taken_of[node]]
                taken_of[node] += 1
            if -free > len(taken):
                heapq.heappush(emptiest, (free + len(taken), node))
    return home


def _far_documents(document_length: IntArray, least: float) -> IntArray:
    """Dense index of the documents whose traffic matters, -1 for the others."""
    far = document_length > least
    return np.where(far, np.cumsum(far) - 1, -1)


def _cheap_price(pieces: Pieces) -> float:
    """Price per block of the cheapest quarter of the stream: what any free slot costs at least."""
    density = pieces.price / pieces.blocks
    order = np.argsort(density, kind="stable")
    blocks = pieces.blocks[order].cumsum()
    chosen = order[: int((blocks < int(blocks[-1]) * CHEAP_SHARE).sum()) + 1]
    return float(pieces.price[chosen].sum()) / float(pieces.blocks[chosen].sum())


@njit(cache=True)
def _place(
    order: IntArray,
    home: IntArray,
    pieces: Pieces,
    shapes: BlockShapes,
    far: IntArray,
    ranks_per_node: int,
    slots: int,
    target: FloatArray,
    cheap: float,
    bearable: float,
    qh: float,
    kh: float,
    owner: IntArray,
) -> None:
    least = target.min()
    needs = all_needs(target, slots, cheap, far, ranks_per_node)
    for i in range(order.size):
        if home[i] >= 0:
            b, k = pieces.first[i], pieces.blocks[i]
            owner[b : b + k] = home[i]
            give(home[i], b, k, pieces.price[i], needs, cheap, shapes, far, ranks_per_node)
    first = np.empty(64, dtype=np.int64)
    count = np.empty(64, dtype=np.int64)
    scratch = np.empty(slots, dtype=np.int64)
    for i in order:
        if home[i] >= 0:
            continue
        depth = 1
        first[0], count[0] = pieces.first[i], pieces.blocks[i]
        price = pieces.price[i]
        while depth:
            depth -= 1
            b, k = first[depth], count[depth]
            if k != pieces.blocks[i]:
                for j in range(k):
                    scratch[j] = b + j
                price = blocks_price(scratch, k, shapes, qh, kh)
            rank, spare = neediest(b, k, price, needs, cheap, owner, shapes, far, bearable, ranks_per_node)
            if rank < 0 or (k > 1 and spare < -0.005 * least and price > 0.03 * least):
                half = k // 2
                first[depth], count[depth] = b + half, k - half
                first[depth + 1], count[depth + 1] = b, half
                depth += 2
                continue
            owner[b : b + k] = rank
            give(rank, b, k, price, needs, cheap, shapes, far, ranks_per_node)
