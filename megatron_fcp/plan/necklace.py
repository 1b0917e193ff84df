"""A stream of short documents divided in few cuts: equal tokens for every rank, nearly equal priced compute.

Tokens and price are two kinds of beads on a necklace. On the stream bent into a circle some window holds exactly half
of the tokens and nearly half of the price: the price changes little from one window to the next, and is half on
average. Hence n ranks need no more than 2 (n - 1) cuts (N. Alon, Splitting necklaces, Advances in Mathematics 63,
1987)::

    stream on a circle   | rest |    window     | rest |        four ranks: two and two
    each part again      | a | b | a | b |                      two ranks: one window, or two where cuts are cheap

A cut costs the same wherever in its document it lies, and in proportion to the document's length. Two windows leave a
choice, so that short documents are cut. In the end groups of a heavy rank and light ones are divided anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.shape import BlockShapes, blocks_price, rectangle, triangle

PLACES = 64  # cheapest places at which two windows may begin and end
GROUPS = (2, 3, 4)  # ranks that are divided anew, among them the heaviest
PARTNERS = 8  # groups of each size, the one with the lightest ranks first
LEAST_GAIN = 2e-4  # of the heaviest price
TRIES = 192  # groups in all, for the sake of planning time


class Beads(NamedTuple):
    """What every block adds to a rank, by block; all of shape [num_blocks].

    Attributes
    ----------
    price : FloatArray
        Of a block whose document's earlier blocks are on the rank as well.
    before, rest : FloatArray
        Tokens of the document that began in an earlier block: those before this block, and those from here to its end;
        both 0 where there is none, and a cut before the block costs nothing.
    """

    price: FloatArray
    before: FloatArray
    rest: FloatArray


def share_necklace(
    table: BlockTable, shapes: BlockShapes, speed: FloatArray, q_half: float, kv_half: float
) -> tuple[IntArray, FloatArray]:
    """Owner of every block and price of every rank, shapes [num_blocks] and [cp_size].

    Parameters
    ----------
    table : BlockTable
        Causal, with documents of which none fills many ranks: nothing here looks at traffic.
    shapes : BlockShapes
    speed : FloatArray, shape [cp_size]
        Its size divides the blocks of the table.
    q_half, kv_half : float
        See :class:`megatron_fcp.plan.cost.CostModel`.
    """
    length = np.append(table.document_length, 0)
    began = shapes.head >= 0
    before = np.where(began, shapes.head_position, 0).astype(np.float64)
    rest = np.where(began, length[shapes.head] - shapes.head_position, 0).astype(np.float64)
    beads = Beads(_prices(shapes, q_half, kv_half), before, rest)
    order = np.arange(table.num_blocks)
    _divide(order, np.arange(speed.size), beads, speed, table.block_size, q_half, kv_half)
    owner = np.empty(table.num_blocks, dtype=np.int64)
    owner[order] = np.repeat(np.arange(speed.size), table.num_blocks // speed.size)
    return owner, _even_out(owner, beads, shapes, speed, table.block_size, q_half, kv_half)


@njit(cache=True)
def _prices(shapes: BlockShapes, qh: float, kh: float) -> FloatArray:
    out = shapes.inner.copy()
    for b in range(out.size):
        if shapes.head[b] >= 0:
            before = float(shapes.head_position[b])
            out[b] += triangle(before + shapes.head_length[b], qh, kh) - triangle(before, qh, kh)
        if shapes.tail[b] >= 0:
            out[b] += triangle(float(shapes.tail_length[b]), qh, kh)
    return out


@njit(cache=True)
def _cut_price(b: Scalar, tokens: Scalar, beads: Beads, qh: float, kh: float) -> Scalar:
    """What it costs to cut before block ``b``, on the rank of the later piece, which holds ``tokens`` at most."""
    p, q = beads.before[b], min(beads.rest[b], tokens)
    if p == 0:
        return 0.0
    whole = triangle(p + q, qh, kh) - triangle(p, qh, kh)
    return triangle(q, qh, kh) + rectangle(q * p, q, p, qh, kh) - whole


@njit(cache=True)
def _divide(
    order: IntArray, ranks: IntArray, beads: Beads, speed: FloatArray, block_size: int, qh: float, kh: float
) -> None:
    """Halve ``ranks`` and the blocks ``order`` until each is alone, and sort the blocks of each, in place."""
    slots = order.size // ranks.size
    first, count = np.zeros(ranks.size, dtype=np.int64), np.zeros(ranks.size, dtype=np.int64)  # stack
    count[0] = ranks.size
    depth = 1
    while depth:
        depth -= 1
        low, number = first[depth], count[depth]
        part = order[low * slots : (low + number) * slots]
        if number == 1:
            part.sort()
            continue
        half = number // 2
        share = speed[ranks[low : low + half]].sum() / speed[ranks[low : low + number]].sum()
        windows = _halve(part, half * slots, share, beads, block_size, qh, kh)
        _apart(part.copy(), half * slots, windows, part)
        first[depth], count[depth] = low, half
        first[depth + 1], count[depth + 1] = low + half, number - half
        depth += 2


@njit(cache=True)
def _halve(part: IntArray, blocks: int, share: float, beads: Beads, block_size: int, qh: float, kh: float) -> IntArray:
    """Begin and end of one or two windows on the circle ``part``, ``blocks`` long in all: the fairest ones.

    ``share`` is what the windows should have of the price.
    """
    n = part.size
    until, mine, theirs = np.zeros(2 * n + 1), np.zeros(2 * n), np.zeros(2 * n)
    for i in range(n):
        b = part[i]
        until[i + 1] = beads.price[b]
        if b == part[i - 1] + 1:  # of the last one, too: a circle
            mine[i] = mine[n + i] = _cut_price(b, float(blocks * block_size), beads, qh, kh)
            theirs[i] = theirs[n + i] = _cut_price(b, float((n - blocks) * block_size), beads, qh, kh)
        else:
            until[i + 1] += _cut_price(b, float(n * block_size), beads, qh, kh)
        until[n + i + 1] = until[i + 1]
    until = np.cumsum(until)
    total = until[n]
    best = np.inf
    windows = np.zeros(4, dtype=np.int64)
    for i in range(n):
        price = until[i + blocks] - until[i]
        worst = max((price + mine[i]) / share, (total - price + theirs[i + blocks]) / (1 - share))
        if worst < best:
            best = worst
            windows[:] = i, i + blocks, i + blocks, i + blocks
    cheap = np.sort(np.argsort(mine[:n], kind="mergesort")[:PLACES])
    usable = np.zeros(2 * n, dtype=np.bool_)
    usable[cheap] = usable[cheap + n] = True
    even = n == 2 * blocks and share == 0.5  # then windows over the circle's seam are others' gaps
    for x in range(cheap.size):
        a = cheap[x]
        stop = n if even else a + n
        for y in range(x + 1, cheap.size):
            b = cheap[y]
            left = blocks - (b - a)
            if left <= 0:
                break
            price, cuts = until[b] - until[a], theirs[b]
            least = price + mine[a]
            for z in range(y + 1, cheap.size):
                c = cheap[z]
                if c + left > stop:
                    break
                if not usable[c + left]:
                    continue
                second = until[c + left] - until[c]
                ours = least + second + mine[c]
                if ours >= best * share:
                    continue
                worst = max(ours / share, (total - price - second + cuts + theirs[c + left]) / (1 - share))
                if worst < best:
                    best = worst
                    windows[:] = a, b, c, c + left
    return windows


@njit(cache=True)
def _apart(part: IntArray, blocks: int, windows: IntArray, out: IntArray) -> None:
    """The blocks inside the windows, then those outside, each in the order of the circle."""
    n = part.size
    inside, outside = 0, blocks
    for i in range(windows[0], windows[0] + n):
        if i < windows[1] or windows[2] <= i < windows[3]:
            out[inside] = part[i % n]
            inside += 1
        else:
            out[outside] = part[i % n]
            outside += 1


@njit(cache=True)
def _even_out(
    owner: IntArray, beads: Beads, shapes: BlockShapes, speed: FloatArray, block_size: int, qh: float, kh: float
) -> FloatArray:
    """Divide the blocks of the heaviest rank and light ones anew while that lowers it; returns the ranks' prices."""
    cp_size = speed.size
    slots = owner.size // cp_size
    price = np.empty(cp_size)
    for r in range(cp_size):
        price[r] = blocks_price(np.flatnonzero(owner == r), slots, shapes, qh, kh)
    among = np.zeros(cp_size, dtype=np.bool_)
    tries = 0
    while tries < TRIES:
        load = price / speed
        order = np.argsort(load, kind="mergesort")
        best = load[order[-1]] * (1 - LEAST_GAIN)
        kept_ranks, kept_blocks, kept_price = order[:0], order[:0], price[:0]
        for size in GROUPS:
            for low in range(min(PARTNERS, cp_size - size + 1)):
                tries += 1
                ranks = np.append(order[-1:], order[low : low + size - 1])
                among[:] = False
                among[ranks] = True
                blocks = np.flatnonzero(among[owner])
                _divide(blocks, ranks, beads, speed, block_size, qh, kh)
                new = np.empty(size)
                for i in range(size):
                    new[i] = blocks_price(blocks[i * slots : (i + 1) * slots], slots, shapes, qh, kh)
                worst = (new / speed[ranks]).max()
                if worst < best:
                    best = worst
                    kept_ranks, kept_blocks, kept_price = ranks, blocks, new
            if kept_ranks.size:
                break
        if not kept_ranks.size:
            break
        owner[kept_blocks] = np.repeat(kept_ranks, slots)
        price[kept_ranks] = kept_price
    return price
