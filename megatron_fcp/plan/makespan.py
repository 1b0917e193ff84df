"""Placement and schedule that keep the makespan under a hardware model small.

::

    fold          a ring's placement, where documents fit whole ranks evenly   (folded)
    cut_pieces    otherwise: long documents into runs, the rest at cheap cuts  (runs)
    fill_ranks    runs and atoms onto ranks: equal tokens, equal priced compute (fill)
    share_out     what each rank needs of which document, in units             (units)
    spread        rounds of messages; whoever holds a unit may pass it on      (swarm)
    cut_by_arrival  stages, cut by simulated arrival                           (stages)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, frozen, offsets, ranges
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.coloring import color_edges
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.fill import fill_ranks
from megatron_fcp.plan.folded import fold
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.runs import Pieces, cut_pieces, filler_prices
from megatron_fcp.plan.schedule import CommSchedule
from megatron_fcp.plan.shape import BlockShapes, block_shapes, local_prices
from megatron_fcp.plan.stages import cut_by_arrival, message_ends
from megatron_fcp.plan.swarm import Transfers, spread
from megatron_fcp.plan.transfers import Messages
from megatron_fcp.plan.units import Sharing, share_out

REFINEMENTS = 3  # cuts of the stream after the first, each with the filler prices of the one before
WIDEST_RUN = 0.35  # share of a rank's tokens; earlier parts of a long document are cut like the rest of the stream
BEARABLE = 0.4  # share of the mean compute time in which a rank of a node may fetch from outside
ROUNDS_PER_STEP = 96  # the mean compute time over the time of one round, where latencies allow it
LEAST_ROUND, MOST_ROUND = 512, 32768  # tokens between nodes in one round
RUN_BLOCKS = 3  # blocks that the deepest run should have at least
LATENCIES_PER_ROUND = 6  # a round lasts at least as long as so many of what a transfer costs by itself
SMALLEST, LARGEST = 128, 512  # tokens per block, where tokens per rank allow it
SHORT = 500  # latencies of compute per rank, below which larger blocks are tried as well: fewer rounds, less balance
TRIED = (1, 2, 4, 8)  # times the block size that balance asks for


@dataclass(frozen=True)
class Estimate:
    """What the planner expects, in seconds: the end of every rank, shape [cp_size], and the sum of priced work."""

    finish: FloatArray
    compute: float


def choose_block_size(length: IntArray, cp_size: int, tokens_per_rank: int, cost: CostModel) -> int:
    """Tokens per block: small enough that the last blocks of the longest document can be balanced, no smaller."""
    divisors = [d for d in range(1, tokens_per_rank + 1) if tokens_per_rank % d == 0] if tokens_per_rank < 4096 else [
        tokens_per_rank // k for k in range(1, tokens_per_rank // SMALLEST + 1) if tokens_per_rank % k == 0
    ]  # fmt: skip
    allowed = [d for d in divisors if SMALLEST <= d <= LARGEST] or [max(d for d in divisors if d <= LARGEST)]
    if not length.size:
        return max(allowed)
    n = length.astype(np.float64)
    mean = float(((n + cost.q_half) * (n + cost.kv_half)).sum()) / 2 / cp_size
    deepest = mean / (float(n.max()) + cost.kv_half)
    return max((d for d in allowed if d * RUN_BLOCKS <= deepest), default=min(allowed))


def block_sizes_to_try(length: IntArray, cp_size: int, tokens_per_rank: int, cost: CostModel) -> list[int]:
    """Block sizes among which only their plans can tell; one where latencies hardly matter."""
    least = choose_block_size(length, cp_size, tokens_per_rank, cost)
    n = length[length > 0].astype(np.float64)
    compute = float(((n + cost.q_half) * (n + cost.kv_half)).sum()) / 2 / cp_size * cost.pair_s
    if compute >= SHORT * cost.latency_s:
        return [least]
    larger = [least * k for k in TRIED[1:]]
    return [least, *(size for size in larger if tokens_per_rank % size == 0 and 2 * size <= tokens_per_rank)]


def place_and_schedule(table: BlockTable, cp_size: int, cost: CostModel) -> tuple[Placement, CommSchedule, Estimate]:
    """Owners, rounds and stages for a causal table.

    Parameters
    ----------
    table : BlockTable
        ``cp_size`` divides its blocks.
    cp_size : int
    cost : CostModel
    """
    assert table.mask == "causal", table.mask
    assert table.num_blocks % cp_size == 0, (table.num_blocks, cp_size)
    shapes = block_shapes(table, cost.q_half, cost.kv_half)
    speed = cost.speed_of_ranks(cp_size)
    owner, price = _place(table, shapes, speed, cost)
    round_s = max(float(price.mean()) * cost.pair_s / ROUNDS_PER_STEP, LATENCIES_PER_ROUND * cost.latency_s)
    per_round = round_s / cost.token_s(1)
    blocks_per_round = max(round(min(max(per_round, LEAST_ROUND), MOST_ROUND) / table.block_size), 1)
    sharing = share_out(table, shapes, owner, cp_size, max(blocks_per_round // 2, 1))
    fast = cost.intra_bytes_per_s / cost.inter_bytes_per_s
    transfers = spread(sharing, cp_size, cost.ranks_per_node, fast, blocks_per_round)
    if not (transfers.parent >= 0).any():
        transfers = _fewest_rounds(transfers, cp_size)
    blocks = offsets(sharing.unit_count[transfers.unit])[transfers.message_ptr]
    duration = cost.latency_s + np.diff(blocks) * table.block_size * np.where(
        transfers.tier == 1, cost.token_s(1), cost.token_s(0)
    )
    ends, ends_ptr, finish = cut_by_arrival(
        sharing, shapes, owner, transfers, message_ends(transfers, duration, cp_size, False),
        local_prices(table, shapes, owner, cp_size, cost.q_half, cost.kv_half) * cost.pair_s / speed,
        cost.pair_s / speed, cost.q_half, cost.kv_half, _unit_tokens(table, sharing),
    )  # fmt: skip
    stage_ends = tuple(frozen(ends[ends_ptr[r] : ends_ptr[r + 1]]) for r in range(cp_size))
    schedule = _schedule(sharing, transfers, stage_ends)
    return Placement(cp_size, frozen(owner)), schedule, Estimate(finish, float(price.sum()) * cost.pair_s)


def _place(table: BlockTable, shapes: BlockShapes, speed: FloatArray, cost: CostModel) -> tuple[IntArray, FloatArray]:
    """Owner of every block and price of every rank."""
    even = fold(table, shapes, speed.size, cost.q_half, cost.kv_half) if np.ptp(speed) == 0 else None
    if even is not None:
        return even
    pieces, target = _pieces(table, shapes, speed.size, cost)
    bearable = BEARABLE * target * cost.pair_s / cost.token_s(1)
    return fill_ranks(
        pieces, shapes, table.document_length, speed, cost.ranks_per_node, target, bearable, cost.q_half, cost.kv_half
    )


def _pieces(table: BlockTable, shapes: BlockShapes, cp_size: int, cost: CostModel) -> tuple[Pieces, float]:
    """The stream cut so that runs and what fills up their ranks fit together, and the mean price per rank."""
    slots = table.num_blocks // cp_size
    n = table.document_length.astype(np.float64)
    target = float(((n + cost.q_half) * (n + cost.kv_half)).sum()) / 2 / cp_size
    depth, filler = np.zeros(1), np.full(1, 0.2 * target / slots)
    pieces = cut_pieces(table, shapes, slots, target * 1.03, depth, filler, WIDEST_RUN, cost.q_half, cost.kv_half)
    target = float(pieces.price.sum()) / cp_size
    for _ in range(REFINEMENTS):
        if not (pieces.document >= 0).any():
            break
        depth, filler = filler_prices(pieces, slots, target, _run_depth(table, pieces))
        pieces = cut_pieces(table, shapes, slots, target, depth, filler, WIDEST_RUN, cost.q_half, cost.kv_half)
        target = float(pieces.price.sum()) / cp_size
    return pieces, target


def _run_depth(table: BlockTable, pieces: Pieces) -> IntArray:
    """Tokens of its document up to the end of each run; meaningless for atoms."""
    stop = (pieces.first + pieces.blocks) * table.block_size - table.document_start[pieces.document]
    return np.minimum(stop, table.document_length[pieces.document])


def _unit_tokens(table: BlockTable, sharing: Sharing) -> IntArray:
    """KV tokens of each unit that anyone attends to."""
    before = offsets(table.shared_stop - table.shared_start)
    return before[sharing.unit_first + sharing.unit_count] - before[sharing.unit_first]


def _fewest_rounds(transfers: Transfers, cp_size: int) -> Transfers:
    """The same messages in exactly as many rounds as the busiest rank has; only for messages from owners."""
    color = np.zeros(transfers.src.size, dtype=np.int64)
    for tier in (0, 1):
        chosen = np.flatnonzero(transfers.tier == tier)
        if not chosen.size:
            continue
        found = color_edges(transfers.src[chosen], transfers.dst[chosen], cp_size)
        early = np.bincount(found, transfers.round[chosen]) / np.maximum(np.bincount(found), 1)
        rank = np.empty(early.size, dtype=np.int64)
        rank[np.argsort(early, kind="stable")] = np.arange(early.size)
        color[chosen] = rank[found]
    order = np.argsort(color, kind="stable")
    count = np.diff(transfers.message_ptr)[order]
    moved = ranges(transfers.message_ptr[order], count)
    return Transfers(
        offsets(count), transfers.src[order], transfers.dst[order], transfers.tier[order], color[order],
        transfers.unit[moved], transfers.share[moved], transfers.parent[moved],
    )  # fmt: skip


def _schedule(sharing: Sharing, transfers: Transfers, stage_ends: tuple[IntArray, ...]) -> CommSchedule:
    """Messages sorted by round and sender, of which a round has one per tier."""
    cp_size = sharing.rank_ptr.size - 1
    order = np.argsort((transfers.round * cp_size + transfers.src) * cp_size + transfers.dst)
    ptr, block = _blocks_of(order, transfers.message_ptr, transfers.unit, sharing.unit_first, sharing.unit_count)
    for array in (ptr, block):
        array.setflags(write=False)
    messages = Messages(frozen(transfers.src[order]), frozen(transfers.dst[order]), ptr, block)
    num_rounds = int(transfers.round[order[-1]]) + 1 if order.size else 0
    return CommSchedule(num_rounds, messages, frozen(transfers.round[order]), stage_ends)


@njit(cache=True)
def _blocks_of(
    order: IntArray, message_ptr: IntArray, unit: IntArray, first: IntArray, count: IntArray
) -> tuple[IntArray, IntArray]:
    """Offsets and blocks of the messages in ``order``."""
    ptr = np.zeros(order.size + 1, dtype=np.int64)
    for i in range(order.size):
        ptr[i + 1] = ptr[i]
        for u in unit[message_ptr[order[i]] : message_ptr[order[i] + 1]]:
            ptr[i + 1] += count[u]
    block = np.empty(ptr[-1], dtype=np.int64)
    n = 0
    for i in range(order.size):
        for u in unit[message_ptr[order[i]] : message_ptr[order[i] + 1]]:
            for k in range(count[u]):
                block[n] = first[u] + k
                n += 1
    return ptr, block
