"""Pieces of the stream given to ranks so that tokens are equal and priced compute nearly so.

Runs of long documents come first, one per rank, neighbours inside a node. Atoms follow, dearest first, each to the rank
whose free slots are meant to hold the densest work; what does not fit whole is halved. Blocks traded between heavy
and light ranks settle the rest.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.runs import Pieces
from megatron_fcp.plan.shape import BlockShapes, blocks_price

TRADES_PER_RANK = 24
CHEAP_SHARE = 0.25
NEIGHBOUR = 0.7  # of the densest need that is enough for a rank that holds the block next to a piece
LIGHTEST = 48  # ranks that a heavy one may trade with
SIZES = 5  # pieces of 1, 2, 4, 8 and 16 blocks are traded
# Blocks that lie deeper in their document than this share of the bearable traffic stay where they are, and the price
# over the mean at which to stop: cheap blocks first, then what remains.
TRADE_PHASES = ((1 / 16, 1.002), (1 / 4, 1.004))


def fill_ranks(
    pieces: Pieces,
    shapes: BlockShapes,
    document_length: IntArray,
    cp_size: int,
    ranks_per_node: int,
    target: float,
    bearable: float,
    q_half: float,
    kv_half: float,
) -> tuple[IntArray, FloatArray]:
    """Owner of every block, shape [num_blocks], and price of every rank, shape [cp_size].

    ``bearable`` is the KV tokens per rank that a node should fetch from outside at most.
    """
    num_blocks = shapes.inner.size
    home = seat_runs(pieces, cp_size, ranks_per_node)
    order = np.argsort(-pieces.price, kind="stable")
    owner = np.full(num_blocks, -1, dtype=np.int64)
    cheap = _cheap_price(pieces)
    far = _far_documents(document_length, bearable / 64)
    _place(
        order, home, pieces, shapes, far, cp_size, ranks_per_node, num_blocks // cp_size, target, cheap, bearable,
        q_half, kv_half, owner,
    )  # fmt: skip
    price = np.zeros(cp_size)
    taken_on = np.zeros(cp_size)
    for share, enough in TRADE_PHASES:
        late = np.append(0, np.cumsum(np.where(shapes.head >= 0, shapes.head_position, 0) > bearable * share))
        _settle(owner, price, shapes, late, num_blocks // cp_size, enough, taken_on, bearable / 2, q_half, kv_half)
    return owner, price


def seat_runs(pieces: Pieces, cp_size: int, ranks_per_node: int) -> IntArray:
    """Rank of every run, -1 for atoms and for runs beyond the last rank.

    Runs of one document sit together, so that few nodes fetch it, but every node gets about as many runs: then there
    is room near them for what is left of their documents.
    """
    home = np.full(pieces.first.size, -1, dtype=np.int64)
    runs = np.flatnonzero(pieces.document >= 0)
    documents, count = np.unique(pieces.document[runs], return_counts=True)
    size = [min(ranks_per_node, cp_size - low) for low in range(0, cp_size, ranks_per_node)]
    quota = min(ranks_per_node, -(-runs.size // len(size)))
    free = [min(quota, s) for s in size]
    taken_of = [0] * len(size)
    for i in np.argsort(-count, kind="stable").tolist():
        mine = runs[pieces.document[runs] == documents[i]]
        mine = mine[np.argsort(pieces.first[mine], kind="stable")][::-1].tolist()  # latest first
        while mine and max(free):
            node = free.index(max(free))
            taken = mine[: free[node]]
            for piece in taken:
                home[piece] = node * ranks_per_node + taken_of[node]
                taken_of[node] += 1
            free[node] -= len(taken)
            mine = mine[len(taken) :]
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
    cp_size: int,
    ranks_per_node: int,
    slots: int,
    target: float,
    cheap: float,
    bearable: float,
    qh: float,
    kh: float,
    owner: IntArray,
) -> None:
    left = np.full(cp_size, target)
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
            if rank < 0 or (k > 1 and spare < -0.005 * target and price > 0.03 * target):
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
    for r in range(left.size):
        if room[r] < count:
            continue
        node = r // ranks_per_node
        extra = position - (have[far[d], node] if known else 0)
        spare = left[r] - price - (room[r] - count) * cheap
        if extra > 0 and fetched[node] + extra > bearable * ranks_per_node:
            spare -= price
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


@njit(cache=True)
def _settle(
    owner: IntArray, price: FloatArray, shapes: BlockShapes, late: IntArray, slots: int, enough: float,
    taken_on: FloatArray, most: float, qh: float, kh: float,
) -> None:  # fmt: skip
    """Trade equally many blocks between the heaviest rank and lighter ones while that lowers the heavier of the two.

    ``late`` counts, before each block, the blocks that lie far inside their document: whoever took one of those would
    need all before it. ``taken_on`` sums up the KV tokens that trades make each rank fetch, ``most`` at the most.
    """
    cp_size = price.size
    held = np.empty((cp_size, slots), dtype=np.int64)
    fill = np.zeros(cp_size, dtype=np.int64)
    for b in range(owner.size):
        held[owner[b], fill[owner[b]]] = b
        fill[owner[b]] += 1
    for r in range(cp_size):
        price[r] = blocks_price(held[r], slots, shapes, qh, kh)
    value = _values(shapes, qh, kh)
    mean = price.mean()
    tried = np.zeros(cp_size, dtype=np.int64)
    lights = np.argsort(price)[:LIGHTEST]
    mine, theirs = np.empty(slots, dtype=np.int64), np.empty(slots, dtype=np.int64)
    give, take = np.empty((3, 2 * slots * SIZES)), np.empty((3, 2 * slots * SIZES))
    stuck = 0.0
    for turn in range(TRADES_PER_RANK * cp_size):
        heavy = -1
        for r in range(cp_size):
            if tried[r] < LIGHTEST // 4 and (heavy < 0 or price[r] > price[heavy]):
                heavy = r
        if heavy < 0 or price[heavy] < max(mean * enough, stuck):
            break
        if turn % 4 == 0 and not tried[heavy]:
            lights = np.argsort(price)[:LIGHTEST]
        num_give = _ends(held[heavy], slots, value, late, give)
        done = False
        for at in range(tried[heavy] * 4, min(tried[heavy] * 4 + 4, lights.size)):
            light = lights[at]
            if price[light] >= mean or light == heavy:
                break
            want = min(price[heavy] - mean, (price[heavy] - price[light]) * 0.5)
            num_take = _ends(held[light], slots, value, late, take)
            i, j = _best_pair(give, num_give, take, num_take, want)
            if i < 0:
                continue
            k, a, b = int(give[0, i]), int(give[1, i]), int(take[1, j])
            before_a = shapes.head_position[a] if shapes.head[a] >= 0 else 0
            before_b = shapes.head_position[b] if shapes.head[b] >= 0 else 0
            if taken_on[light] + before_a > most or taken_on[heavy] + before_b > most:
                continue
            _exchange(held[heavy], a, b, k, slots, mine)
            _exchange(held[light], b, a, k, slots, theirs)
            new_heavy = blocks_price(mine, slots, shapes, qh, kh)
            new_light = blocks_price(theirs, slots, shapes, qh, kh)
            if max(new_heavy, new_light) >= price[heavy] - 0.1 * want:
                give[2, i] = 0.0  # cuts more than it seems: try another piece with the next rank
                continue
            held[heavy, :] = mine
            held[light, :] = theirs
            taken_on[light] += before_a
            taken_on[heavy] += before_b
            owner[a : a + k] = light
            owner[b : b + k] = heavy
            price[heavy], price[light] = new_heavy, new_light
            done = True
            break
        tried[heavy] = 0 if done else tried[heavy] + 1
        if tried[heavy] == LIGHTEST // 4:
            stuck = max(stuck, price[heavy] * 0.9995)  # it sets the pace: no need to bring others far below


@njit(cache=True)
def _values(shapes: BlockShapes, qh: float, kh: float) -> FloatArray:
    """Prefix sums of what a block adds to a rank that holds the one before it; shape [num_blocks + 1]."""
    pair = np.empty(2, dtype=np.int64)
    out = np.zeros(shapes.inner.size + 1)
    for b in range(shapes.inner.size):
        pair[0], pair[1] = b - 1, b
        added = (
            blocks_price(pair, 2, shapes, qh, kh) - blocks_price(pair, 1, shapes, qh, kh)
            if b
            else blocks_price(pair[1:], 1, shapes, qh, kh)
        )
        out[b + 1] = out[b] + added
    return out


@njit(cache=True)
def _ends(blocks: IntArray, slots: int, value: FloatArray, late: IntArray, out: FloatArray) -> int:
    """Pieces at both ends of every contiguous stretch: moving those adds few cuts. Rows: blocks, first block, value."""
    n = 0
    low = 0
    while low < slots:
        high = low + 1
        while high < slots and blocks[high] == blocks[high - 1] + 1:
            high += 1
        k = 1
        for _ in range(SIZES):
            if k > high - low:
                break
            for side in range(2 if k < high - low else 1):
                b = blocks[high - k] if side else blocks[low]
                if late[b + k] == late[b]:
                    out[0, n], out[1, n], out[2, n] = k, b, value[b + k] - value[b]
                    n += 1
            k *= 2
        low = high
    return n


@njit(cache=True)
def _best_pair(give: FloatArray, num_give: int, take: FloatArray, num_take: int, want: float) -> tuple[int, int]:
    """Equally long pieces whose values differ by about ``want``; (-1, -1) if none comes near."""
    best_i, best_j, best = -1, -1, 0.85 * want
    for i in range(num_give):
        if give[2, i] < 0.15 * want:
            continue
        for j in range(num_take):
            if give[0, i] == take[0, j]:
                error = abs(give[2, i] - take[2, j] - want)
                if error < best:
                    best_i, best_j, best = i, j, error
                    if best < 0.1 * want:
                        return best_i, best_j
    return best_i, best_j


@njit(cache=True)
def _exchange(blocks: IntArray, out: int, into: int, k: int, slots: int, result: IntArray) -> None:
    """``blocks`` without ``out .. out + k - 1`` and with ``into .. into + k - 1``, ascending."""
    n = 0
    added = False
    for i in range(slots):
        if out <= blocks[i] < out + k:
            continue
        if not added and blocks[i] > into:
            for j in range(k):
                result[n] = into + j
                n += 1
            added = True
        result[n] = blocks[i]
        n += 1
    if not added:
        for j in range(k):
            result[n] = into + j
            n += 1
