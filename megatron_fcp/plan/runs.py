"""Long documents cut into runs of neighbouring blocks, one run per rank; the rest of the stream cut where it is cheap.

For the same compute a contiguous run of late blocks has more queries than an early and a late piece together, hence
less rim, and it leaves room for many cheap short documents. Runs are cut from the end of a document::

    long document   | head: atoms |  run  |  run | run | run |     one rank each, equal time with their filler
    stream between  | atom | atom |    atom     | atom |           boundaries fall into the shortest documents
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.shape import BlockShapes, blocks_price, rectangle, triangle

SPARE = 1.0  # by which filler is priced higher than the cheapest: not every rank gets just that


class Pieces(NamedTuple):
    """Consecutive blocks that go to a rank together; all arrays of shape [num_pieces].

    Attributes
    ----------
    first, blocks : IntArray
        Blocks ``first .. first + blocks - 1``.
    document : IntArray
        Long document that a run belongs to, in which case it wants a rank of its own; -1 for atoms.
    price : FloatArray
    """

    first: IntArray
    blocks: IntArray
    document: IntArray
    price: FloatArray


def cut_pieces(
    table: BlockTable,
    shapes: BlockShapes,
    slots: int,
    target: float,
    depth: FloatArray,
    filler: FloatArray,
    widest: float,
    q_half: float,
    kv_half: float,
) -> Pieces:
    """Cut the stream.

    Parameters
    ----------
    table, shapes : BlockTable, BlockShapes
    slots : int
        Blocks per rank.
    target : float
        Price that every rank should reach.
    depth, filler : FloatArray, shape [num_knots]
        Price per block, ``filler[i]``, of what fills up a rank whose run ends ``depth[i]`` tokens into its document or
        deeper; depths ascend.
    widest : float
        Largest share of a rank's blocks that a run may take; earlier parts of a document become atoms.
    """
    first, last = table.document_blocks()
    size = 2 * table.num_blocks + 2
    first_block, blocks, document = np.empty((3, size), dtype=np.int64)
    out = Pieces(first_block, blocks, document, np.empty(size))
    n = _cut(
        table.document_start, table.document_length, first, last, table.block_size, table.num_blocks,
        shapes, slots, target, depth, filler, widest, q_half, kv_half, out,
    )  # fmt: skip
    return Pieces(out.first[:n], out.blocks[:n], out.document[:n], out.price[:n])


@njit(cache=True)
def _cut(
    start: IntArray,
    length: IntArray,
    first: IntArray,
    last: IntArray,
    block_size: int,
    num_blocks: int,
    shapes: BlockShapes,
    slots: int,
    target: float,
    depth: FloatArray,
    filler: FloatArray,
    widest: float,
    qh: float,
    kh: float,
    out: Pieces,
) -> int:
    n = 0
    done = 0  # blocks before this one are in a piece
    for d in range(start.size):
        low, high = max(first[d], done), last[d] + 1
        fill = _at(depth, filler, length[d])
        if high - low < 2 or not _too_long(float(length[d]), high - low, slots, target, fill, qh, kh):
            continue
        stop = high
        runs = n
        while stop > low:
            reach = min(stop * block_size - start[d], length[d])
            fill = _at(depth, filler, reach)
            k = _run(start[d], length[d], low, stop, block_size, slots, target, fill, qh, kh)
            if stop - k <= low or k > widest * slots:
                break
            position = float((stop - k) * block_size - start[d])
            tokens = float(min(stop * block_size, start[d] + length[d]) - (stop - k) * block_size)
            out.first[n], out.blocks[n], out.document[n] = stop - k, k, d
            out.price[n] = triangle(tokens, qh, kh) + rectangle(tokens * position, tokens, position, qh, kh)
            n += 1
            stop -= k
        if n > runs:
            n = _atoms(done, stop, shapes, length, slots, target, qh, kh, out, n)
            done = high
    return _atoms(done, num_blocks, shapes, length, slots, target, qh, kh, out, n)


@njit(cache=True)
def _at(depth: FloatArray, filler: FloatArray, reach: int) -> float:
    return filler[max(np.searchsorted(depth, reach, side="right") - 1, 0)]


@njit(cache=True)
def _too_long(n: float, blocks: int, slots: int, target: float, filler: float, qh: float, kh: float) -> bool:
    return blocks > slots or triangle(n, qh, kh) > target - (slots - blocks) * filler


@njit(cache=True)
def _run(
    start: int, length: int, low: int, stop: int, block_size: int, slots: int, target: float, filler: float,
    qh: float, kh: float,
) -> int:  # fmt: skip
    """Most blocks that end at ``stop`` and, filled up, stay within the target; at least one."""
    end = float(min(stop * block_size, start + length) - start)
    k = 0
    while k < slots and stop - k - 1 >= low:
        tokens = end - max((stop - k - 1) * block_size - start, 0)
        position = end - tokens
        price = triangle(tokens, qh, kh) + rectangle(tokens * position, tokens, position, qh, kh)
        if k > 0 and price > target * 1.003 - (slots - k - 1) * filler:
            break
        k += 1
    return k


@njit(cache=True)
def _atoms(
    low: int, high: int, shapes: BlockShapes, length: IntArray, slots: int, target: float, qh: float, kh: float,
    out: Pieces, n: int,
) -> int:  # fmt: skip
    """Cut ``low:high`` at the cheapest boundaries into pieces of about an eighth of a rank."""
    least, most, limit = max(slots // 12, 1), max(slots // 5, 1), max(slots // 2, 1)
    cheap = 0.004 * target / qh
    head = shapes.head  # in a loop every access to a tuple's array would count a reference
    scratch = np.empty(limit + 1, dtype=np.int64)
    while low < high:
        best = min(low + least, high)
        shortest = _cut_length(best, head, length)
        for e in range(low + least, min(low + limit, high) + 1):
            if e > low + most and shortest <= cheap:
                break
            this = _cut_length(e, head, length)
            if this < shortest or e == high:
                best, shortest = e, this
        count = best - low
        for i in range(count):
            scratch[i] = low + i
        price = blocks_price(scratch, count, shapes, qh, kh)
        while price > target / 2 and count > 1:
            count = (count + 1) // 2
            price = blocks_price(scratch, count, shapes, qh, kh)
        out.first[n], out.blocks[n], out.document[n], out.price[n] = low, count, -1, price
        n += 1
        low += count
    return n


@njit(cache=True)
def _cut_length(boundary: int, head: IntArray, length: IntArray) -> Scalar:
    """Length of the document that a boundary between blocks cuts."""
    return length[head[boundary]] if boundary < head.size and head[boundary] >= 0 else 0


def filler_prices(pieces: Pieces, slots: int, target: float, depth_of: IntArray) -> tuple[FloatArray, FloatArray]:
    """Knots of :func:`cut_pieces`: the deepest runs are filled up with the cheapest atoms, the next ones with the next.

    Parameters
    ----------
    pieces : Pieces
        A previous cut.
    slots, target : int, float
    depth_of : IntArray, shape [num_pieces]
        Tokens of its document up to the end of each run.
    """
    runs, atoms = np.flatnonzero(pieces.document >= 0), np.flatnonzero(pieces.document < 0)
    if not runs.size or not atoms.size:
        return np.zeros(1), np.full(1, pieces.price.sum() / max(pieces.blocks.sum(), 1))
    runs = runs[np.argsort(-depth_of[runs], kind="stable")]
    atoms = atoms[np.argsort(pieces.price[atoms] / pieces.blocks[atoms], kind="stable")]
    room = np.append(0, np.cumsum(slots - pieces.blocks[runs])).astype(np.float64)
    blocks = np.append(0, np.cumsum(pieces.blocks[atoms])).astype(np.float64)
    price = np.append(0.0, np.cumsum(pieces.price[atoms]))
    edges = np.linspace(0, runs.size, min(16, runs.size) + 1).astype(np.int64)
    spent = np.interp(room[edges], blocks, price)
    taken = np.maximum(np.minimum(room[edges[1:]], blocks[-1]) - np.minimum(room[edges[:-1]], blocks[-1]), 1e-9)
    filler = np.minimum(np.maximum.accumulate(SPARE * np.diff(spent) / taken), target / slots / 2)
    return depth_of[runs][edges[1:] - 1][::-1].astype(np.float64), filler[::-1].copy()
