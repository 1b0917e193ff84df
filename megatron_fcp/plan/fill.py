"""Pieces of the stream given to ranks so that tokens are equal and priced compute nearly so.

Runs of long documents come first, one per rank, neighbours inside a node. Atoms follow, dearest first, each to the rank
whose free slots are meant to hold the densest work; what does not fit whole is halved. Trades between heavy and light
ranks (:mod:`plan.trade`) settle the rest.
"""

from __future__ import annotations

import heapq

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.runs import Pieces
from megatron_fcp.plan.shape import BlockShapes, blocks_price
from megatron_fcp.plan.trade import settle

FAST = 0.98  # of the mean speed that a rank needs to be given a run
CHEAP_SHARE = 0.25
NEIGHBOUR = 0.7  # of the densest need that is enough for a rank that holds the block next to a piece


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
    seats = [np.flatnonzero(speed[low : low + ranks_per_node] >= FAST * speed.mean()) + low
             for low in range(0, speed.size, ranks_per_node)]  # fmt: skip
    size = [seat.size for seat in seats]
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
    cp_size, least = target.size, target.min()
    left = target.copy()
    room = np.full(cp_size, slots)
    num_nodes = (cp_size + ranks_per_node - 1) // ranks_per_node
    have = np.zeros((max(far.max() + 1 if far.size else 0, 1), num_nodes), dtype=np.int64)  # prefix a node fetches
    fetched = np.zeros(num_nodes)
    for i in range(order.size):
        if home[i] >= 0:
            owner[pieces.first[i] : pieces.first[i] + pieces.blocks[i]] = home[i]
            left[home[i]] -= pieces.price[i]
            room[home[i]] -= pieces.blocks[i]
            _fetch(pieces.first[i], home[i] // ranks_per_node, shapes, far, have, fetched)
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
            rank, spare = _densest(
                b, left, room, k, price, cheap, owner, shapes, far, have, fetched, bearable, ranks_per_node
            )
            if rank < 0 or (k > 1 and spare < -0.005 * least and price > 0.03 * least):
                half = k // 2
                first[depth], count[depth] = b + half, k - half
                first[depth + 1], count[depth + 1] = b, half
                depth += 2
                continue
            owner[b : b + k] = rank
            left[rank] -= price
            room[rank] -= k
            _fetch(b, rank // ranks_per_node, shapes, far, have, fetched)


@njit(cache=True)
def _fetch(block: int, node: int, shapes: BlockShapes, far: IntArray, have: IntArray, fetched: FloatArray) -> None:
    """Note that ``node`` needs what lies before ``block`` in its document."""
    d = shapes.head[block]
    if d < 0:
        return
    position = shapes.head_position[block]
    if far[d] < 0:
        fetched[node] += position
    elif position > have[far[d], node]:
        fetched[node] += position - have[far[d], node]
        have[far[d], node] = position


@njit(cache=True)
def _densest(
    block: int, left: FloatArray, room: IntArray, count: int, price: Scalar, cheap: float, owner: IntArray,
    shapes: BlockShapes, far: IntArray, have: IntArray, fetched: FloatArray, bearable: float, ranks_per_node: int,
) -> tuple[int, float]:  # fmt: skip
    """Rank with room that needs the most price per free slot and can bear these blocks; else the one it hurts least.

    Ranks whose node fetches what lies before the blocks anyway come first, those whose node fetches enough come last.
    Also returns what the rank has left then, negative if too little.
    """
    d = shapes.head[block]
    position = shapes.head_position[block] if d >= 0 else 0
    known = d >= 0 and far[d] >= 0
    near, best, fallback = -1, -1, -1
    most = 0.0
    for node in range(fetched.size):
        extra = position - (have[far[d], node] if known else 0)
        needed = price * 2 if extra > 0 and fetched[node] + extra > bearable * ranks_per_node else price
        for r in range(node * ranks_per_node, min((node + 1) * ranks_per_node, left.size)):
            if room[r] < count:
                continue
            spare = left[r] - needed - (room[r] - count) * cheap
            if fallback < 0 or spare > most:
                fallback, most = r, spare
            if spare < 0:
                continue
            if extra <= 0 and known and (near < 0 or left[r] * room[near] > left[near] * room[r]):
                near = r
            if best < 0 or left[r] * room[best] > left[best] * room[r]:
                best = r
    for b in (block - 1, block + count):  # a rank that holds a neighbour saves a cut
        if best >= 0 and 0 <= b < owner.size and owner[b] >= 0:
            r = owner[b]
            spare = left[r] - price - (room[r] - count) * cheap
            if room[r] >= count and spare >= 0 and left[r] * room[best] >= NEIGHBOUR * left[best] * room[r]:
                return r, 0.0
    if near >= 0:
        return near, 0.0
    return (best, 0.0) if best >= 0 else (fallback, most)
