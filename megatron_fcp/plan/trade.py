"""Blocks traded between heavy and light ranks, until priced compute is nearly equal."""

from __future__ import annotations

import heapq

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.shape import BlockShapes, blocks_price, rectangle, triangle

TRADES_PER_RANK = 24
LIGHTEST = 24  # ranks that a heavy one may trade with
SIZES = 5  # pieces of 1, 2, 4, 8 and 16 blocks are traded
# Blocks that lie deeper in their document than this share of the bearable traffic stay where they are, and the price
# over the mean at which to stop: cheap blocks first, then what remains.
TRADE_PHASES = ((1 / 16, 1.002), (1 / 4, 1.003))


def settle(
    owner: IntArray, shapes: BlockShapes, speed: FloatArray, bearable: float, q_half: float, kv_half: float
) -> FloatArray:
    """Trade blocks in place, cheap ones first; returns the price of every rank, shape [cp_size].

    Parameters
    ----------
    owner : IntArray, shape [num_blocks]
        Equally many blocks for each rank, before and after.
    shapes : BlockShapes
    speed : FloatArray, shape [cp_size]
    bearable : float
        KV tokens per rank that a node should fetch from outside at most.
    q_half, kv_half : float
        See :class:`megatron_fcp.plan.cost.CostModel`.
    """
    num_blocks = owner.size
    position = np.where(shapes.head >= 0, shapes.head_position, 0)
    late = np.zeros((len(TRADE_PHASES), num_blocks + 1), dtype=np.int64)
    for phase, (share, _) in enumerate(TRADE_PHASES):
        np.cumsum(position > bearable * share, out=late[phase, 1:])
    enough = np.array([level for _, level in TRADE_PHASES])
    return _settle(owner, shapes, late, speed, enough, bearable / 2, q_half, kv_half)


@njit(cache=True)
def _settle(
    owner: IntArray, shapes: BlockShapes, late: IntArray, speed: FloatArray, enough: FloatArray, most: float, qh: float,
    kh: float,
) -> FloatArray:  # fmt: skip
    """Trade blocks in phases, each with its ``late`` and ``enough``; returns the price of every rank.

    ``late`` counts, before each block, the blocks that lie far inside their document: whoever took one of those would
    need all before it. Trades make no rank fetch more than ``most`` KV tokens.
    """
    cp_size = speed.size
    slots = owner.size // cp_size
    held = np.empty((cp_size, slots), dtype=np.int64)
    fill = np.zeros(cp_size, dtype=np.int64)
    for b in range(owner.size):
        held[owner[b], fill[owner[b]]] = b
        fill[owner[b]] += 1
    price, taken_on = np.empty(cp_size), np.zeros(cp_size)
    for r in range(cp_size):
        price[r] = blocks_price(held[r], slots, shapes, qh, kh)
    value = _values(shapes, qh, kh)
    for phase in range(enough.size):
        _trade(owner, held, price, speed, shapes, late[phase], value, enough[phase], taken_on, most, qh, kh)
    return price


@njit(cache=True)
def _trade(
    owner: IntArray, held: IntArray, price: FloatArray, speed: FloatArray, shapes: BlockShapes, late: IntArray,
    value: FloatArray, enough: float, taken_on: FloatArray, most: float, qh: float, kh: float,
) -> None:  # fmt: skip
    """Trade equally many blocks between the heaviest rank and lighter ones while that lowers the heavier of the two."""
    cp_size, slots = held.shape
    load = price / speed  # in which ranks are compared
    mean = price.sum() / speed.sum()
    tried = np.zeros(cp_size, dtype=np.int64)
    lights = np.argsort(load)[:LIGHTEST]
    mine, theirs = np.empty(slots, dtype=np.int64), np.empty(slots, dtype=np.int64)
    give_block, take_block = np.empty((2, SIZES, 2 * slots), dtype=np.int64)
    give_value, take_value = np.empty((2, SIZES, 2 * slots))
    gives, takes = np.zeros((2, SIZES), dtype=np.int64)
    stuck, trades = 0.0, 0
    heap = [(-load[r], r) for r in range(cp_size)]  # of the heaviest; entries with an old load are passed over
    heapq.heapify(heap)
    for _ in range(TRADES_PER_RANK * cp_size):
        heavy = _heaviest(heap, load)
        if heavy < 0 or load[heavy] < max(mean * enough, stuck):
            break
        if trades >= 4 and not tried[heavy]:
            lights = np.argsort(load)[:LIGHTEST]
            trades = 0
        _ends(held[heavy], value, late, give_block, give_value, gives)
        done = False
        for at in range(tried[heavy] * 4, min(tried[heavy] * 4 + 4, lights.size)):
            light = lights[at]
            if load[light] >= mean or light == heavy:
                break
            level = speed[heavy] * speed[light] / (speed[heavy] + speed[light])  # what evens the two out, per load
            want = min(price[heavy] - mean * speed[heavy], (load[heavy] - load[light]) * level)
            _ends(held[light], value, late, take_block, take_value, takes)
            size, i, j = _best_pair(give_value, gives, take_value, takes, want)
            if i < 0:
                continue
            k, a, b = 1 << size, give_block[size, i], take_block[size, j]
            before_a, before_b = _before(a, shapes), _before(b, shapes)
            if taken_on[light] + before_a > most or taken_on[heavy] + before_b > most:
                continue
            new_heavy = _exchange(held[heavy], a, b, k, mine, shapes, qh, kh)
            new_light = _exchange(held[light], b, a, k, theirs, shapes, qh, kh)
            if max(new_heavy / speed[heavy], new_light / speed[light]) >= load[heavy] - 0.1 * want / speed[heavy]:
                give_value[size, i] = 0.0  # cuts more than it seems: try another piece with the next rank
                continue
            held[heavy, :], owner[b : b + k] = mine, heavy
            held[light, :], owner[a : a + k] = theirs, light
            taken_on[light] += before_a
            taken_on[heavy] += before_b
            price[heavy], price[light] = new_heavy, new_light
            for r in (heavy, light):
                load[r] = price[r] / speed[r]
                heapq.heappush(heap, (-load[r], r))
            trades += 1
            done = True
            break
        tried[heavy] = 0 if done else tried[heavy] + 1
        if tried[heavy] == LIGHTEST // 4:
            heapq.heappop(heap)
            stuck = max(stuck, load[heavy] * 0.9995)  # it sets the pace: no need to bring others far below


@njit(cache=True)
def _heaviest(heap: list[tuple[float, int]], load: FloatArray) -> int:
    """Rank of the largest load, -1 if none is left; drops entries with an old load from the heap."""
    while len(heap) > 0 and -heap[0][0] != load[heap[0][1]]:
        heapq.heappop(heap)
    return heap[0][1] if len(heap) > 0 else -1


@njit(cache=True)
def _before(block: int, shapes: BlockShapes) -> Scalar:
    """KV tokens that the block's first document has before it."""
    return shapes.head_position[block] if shapes.head[block] >= 0 else 0


@njit(cache=True)
def _values(shapes: BlockShapes, qh: float, kh: float) -> FloatArray:
    """Prefix sums of what a block adds to a rank that holds the one before it; shape [num_blocks + 1]."""
    inner, head, head_length, head_position, tail, tail_length = shapes
    out = np.zeros(inner.size + 1)
    for b in range(inner.size):
        added = inner[b]
        if head[b] >= 0:
            n = float(head_length[b])
            m = float(head_length[b - 1] if head[b - 1] == head[b] else tail_length[b - 1])
            before = head_position[b] - m
            added += triangle(m + n, qh, kh) - triangle(m, qh, kh)
            added += rectangle((m + n) * before, m + n, before, qh, kh) - rectangle(m * before, m, before, qh, kh)
        if tail[b] >= 0:
            added += triangle(float(tail_length[b]), qh, kh)
        out[b + 1] = out[b] + added
    return out


@njit(cache=True)
def _ends(
    blocks: IntArray, value: FloatArray, late: IntArray, out_block: IntArray, out_value: FloatArray, number: IntArray
) -> None:
    """Pieces of 1, 2, 4, ... blocks at both ends of every contiguous stretch: moving those adds few cuts.

    First block and value of each, and how many, by size.
    """
    number[:] = 0
    low = 0
    while low < blocks.size:
        high = low + 1
        while high < blocks.size and blocks[high] == blocks[high - 1] + 1:
            high += 1
        for size in range(SIZES):
            k = 1 << size
            if k > high - low:
                break
            for side in range(2 if k < high - low else 1):
                b = blocks[high - k] if side else blocks[low]
                if late[b + k] == late[b]:
                    out_block[size, number[size]] = b
                    out_value[size, number[size]] = value[b + k] - value[b]
                    number[size] += 1
        low = high


@njit(cache=True)
def _best_pair(
    give: FloatArray, gives: IntArray, take: FloatArray, takes: IntArray, want: float
) -> tuple[int, int, int]:
    """Size and indices of two pieces whose values differ by about ``want``; (-1, -1, -1) if none comes near."""
    best_size, best_i, best_j, best = -1, -1, -1, 0.85 * want
    for size in range(SIZES):
        for i in range(gives[size]):
            if give[size, i] < 0.15 * want:
                continue
            wish = give[size, i] - want
            for j in range(takes[size]):
                error = abs(wish - take[size, j])
                if error < best:
                    best_size, best_i, best_j, best = size, i, j, error
            if best < 0.02 * want:
                return best_size, best_i, best_j
    return best_size, best_i, best_j


@njit(cache=True)
def _exchange(
    blocks: IntArray, out: int, into: int, k: int, result: IntArray, shapes: BlockShapes, qh: float, kh: float
) -> Scalar:
    """``blocks`` without ``out .. out + k - 1`` and with ``into .. into + k - 1``, ascending; returns their price."""
    n = 0
    added = False
    for i in range(blocks.size):
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
    return blocks_price(result, n, shapes, qh, kh)
