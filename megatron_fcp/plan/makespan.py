"""Placement and schedule that keep the makespan under a hardware model small.

::

    fold          a ring's placement, where documents fit whole ranks          (folded)
    cut_pieces    otherwise: long documents into runs, the rest at cheap cuts  (runs)
    fill_ranks    runs and atoms onto ranks: equal tokens, equal priced compute (fill)
    settle        few ranks: traded once more, whatever they fetch for it      (trade)
    share_necklace  few ranks, short documents: as few cuts as can be          (necklace)
    share_out     what each rank needs of which document, in units             (units)
    spread        rounds of messages; whoever holds a unit may pass it on      (swarm)
    cut_by_arrival  stages, cut by simulated arrival                           (stages)

Of several placements the one whose schedule ends first is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_fcp.config import divisors_of, largest_block
from megatron_fcp.plan.arrays import FloatArray, IntArray, frozen, offsets, ranges
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.coloring import color_edges
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.fill import fill_ranks
from megatron_fcp.plan.folded import EVEN, fold
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.necklace import share_necklace
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.runs import Pieces, cut_pieces, filler_prices
from megatron_fcp.plan.schedule import CommSchedule, Waves
from megatron_fcp.plan.shape import BlockShapes, block_shapes, local_prices
from megatron_fcp.plan.stages import cut_by_arrival, message_ends
from megatron_fcp.plan.swarm import Transfers, spread
from megatron_fcp.plan.trade import settle
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
TRIED = (2, 4, 8)  # times the block size that balance asks for
VERY_SHORT = 20  # latencies of compute per rank, below which whole ranks are tried as blocks
FEW_RANKS = 64  # up to which there is time for more than one placement; for a second block size up to half of that
MORE_TRADES, TRADED = 5, 1e-3  # times that all is traded again, and the share of the price that each has to gain


@dataclass(frozen=True)
class Estimate:
    """What the planner expects, in seconds: the end of every rank, shape [cp_size], and the sum of priced work."""

    finish: FloatArray
    compute: float


def choose_block_size(length: IntArray, cp_size: int, tokens_per_rank: int, cost: CostModel) -> int:
    """Tokens per block: small enough that the last blocks of the longest document can be balanced, no smaller."""
    allowed = [d for d in divisors_of(tokens_per_rank) if SMALLEST <= d <= LARGEST]
    allowed = allowed or [largest_block(tokens_per_rank, LARGEST)]
    if not length.size:
        return max(allowed)
    n = length.astype(np.float64)
    mean = float(((n + cost.q_half) * (n + cost.kv_half)).sum()) / 2 / cp_size
    deepest = mean / (float(n.max()) + cost.kv_half)
    return max((d for d in allowed if d * RUN_BLOCKS <= deepest), default=min(allowed))


def block_sizes_to_try(length: IntArray, cp_size: int, tokens_per_rank: int, cost: CostModel) -> list[int]:
    """Block sizes among which only their plans can tell; one where latencies hardly matter and documents are long."""
    least = choose_block_size(length, cp_size, tokens_per_rank, cost)
    n = length[length > 0].astype(np.float64)
    compute = float(((n + cost.q_half) * (n + cost.kv_half)).sum()) / 2 / cp_size * cost.pair_s
    sizes = [least]
    if compute < SHORT * cost.latency_s:
        sizes += [least * k for k in TRIED if tokens_per_rank % (least * k) == 0]
    if compute < VERY_SHORT * cost.latency_s and tokens_per_rank not in sizes:
        sizes.append(tokens_per_rank)
    if _for_necklace(length, 2 * cp_size, tokens_per_rank) and least % 2 == 0 and least // 2 >= SMALLEST:
        sizes.append(least // 2)
    return sizes


def _for_necklace(length: IntArray, cp_size: int, tokens_per_rank: int) -> bool:
    """Whether there are few ranks and each could hold the longest document."""
    return cp_size <= FEW_RANKS and int(length.max(initial=0)) <= tokens_per_rank


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
    found = [_schedule_for(table, shapes, speed, *placed, cost) for placed in _placements(table, shapes, speed, cost)]
    return min(found, key=lambda plan: float(plan[2].finish.max()))


def _placements(
    table: BlockTable, shapes: BlockShapes, speed: FloatArray, cost: CostModel
) -> Iterator[tuple[IntArray, FloatArray]]:
    """Owner of every block and price of every rank, in every way that may be the best."""
    cp_size, half = speed.size, (cost.q_half, cost.kv_half)
    even = fold(table, shapes, cp_size, *half) if np.ptp(speed) == 0 else None
    if even is not None and even[1].max() <= EVEN * even[1].mean():
        yield even
        return
    pieces, target = _pieces(table, shapes, cp_size, cost)
    bearable = BEARABLE * target * cost.pair_s / cost.token_s(1)
    owner, price = fill_ranks(
        pieces, shapes, table.document_length, speed, cost.ranks_per_node, target, bearable, *half
    )
    if cp_size > FEW_RANKS:
        yield even if even is not None and even[1].max() <= price.max() else (owner, price)
        return
    if even is not None:
        yield even
    yield owner, price
    owner, load, gained = owner.copy(), price / speed, False
    for _ in range(MORE_TRADES):
        price = settle(owner, shapes, speed, bearable, *half)
        before, load = load, price / speed
        if load.max() >= before.max() * (1 - TRADED):
            break
        gained = True
    if gained:
        yield owner, price
    tokens_per_rank = table.num_tokens // cp_size
    if table.block_size <= LARGEST and cp_size > 1 and _for_necklace(table.document_length, cp_size, tokens_per_rank):
        yield share_necklace(table, shapes, speed, *half)


def _schedule_for(
    table: BlockTable, shapes: BlockShapes, speed: FloatArray, owner: IntArray, price: FloatArray, cost: CostModel
) -> tuple[Placement, CommSchedule, Estimate]:
    """Rounds and stages for a placement."""
    cp_size = speed.size
    blocks_per_round = max(round(round_tokens(float(price.mean()) * cost.pair_s, cost) / table.block_size), 1)
    sharing = share_out(table, shapes, owner, cp_size, max(blocks_per_round // 2, 1))
    fast = cost.intra_bytes_per_s / cost.inter_bytes_per_s
    transfers = spread(sharing, cp_size, cost.ranks_per_node, fast, blocks_per_round)
    if not (transfers.parent >= 0).any():
        transfers = _fewest_rounds(transfers, cp_size)
    schedule, finish = cut_stages(table, shapes, owner, sharing, transfers, cost)
    return Placement(cp_size, frozen(owner)), schedule, Estimate(finish, float(price.sum()) * cost.pair_s)


def round_tokens(mean_s: float, cost: CostModel) -> float:
    """Tokens that a message between nodes should carry, where ranks compute for ``mean_s`` seconds."""
    round_s = max(mean_s / ROUNDS_PER_STEP, LATENCIES_PER_ROUND * cost.latency_s)
    return min(max(round_s / cost.token_s(1), LEAST_ROUND), MOST_ROUND)


def cut_stages(
    table: BlockTable,
    shapes: BlockShapes,
    owner: IntArray,
    sharing: Sharing,
    transfers: Transfers,
    cost: CostModel,
    waves: Waves | None = None,
) -> tuple[CommSchedule, FloatArray]:
    """Transfers as rounds with stages, none of which receives in two waves, and when every rank ends."""
    cp_size = sharing.rank_ptr.size - 1
    speed = cost.speed_of_ranks(cp_size)
    blocks = offsets(sharing.unit_count[transfers.unit])[transfers.message_ptr]
    duration = cost.latency_s + np.diff(blocks) * table.block_size * np.where(
        transfers.tier == 1, cost.token_s(1), cost.token_s(0)
    )
    ends, ends_ptr, finish = cut_by_arrival(
        sharing, shapes, owner, transfers, message_ends(transfers, duration, cp_size, False),
        local_prices(table, shapes, owner, cp_size, cost.q_half, cost.kv_half) * cost.pair_s / speed,
        cost.pair_s / speed, cost.q_half, cost.kv_half, unit_tokens(table, sharing),
        frozen([]) if waves is None else waves.ends,
    )  # fmt: skip
    stage_ends = tuple(frozen(ends[ends_ptr[r] : ends_ptr[r + 1]]) for r in range(cp_size))
    return _schedule(sharing, transfers, stage_ends, waves), finish


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


def unit_tokens(table: BlockTable, sharing: Sharing) -> IntArray:
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


def _schedule(
    sharing: Sharing, transfers: Transfers, stage_ends: tuple[IntArray, ...], waves: Waves | None
) -> CommSchedule:
    """Messages sorted by round and sender, of which a round has one per tier."""
    cp_size = sharing.rank_ptr.size - 1
    order = np.argsort((transfers.round * cp_size + transfers.src) * cp_size + transfers.dst)
    ptr, block = _blocks_of(order, transfers.message_ptr, transfers.unit, sharing.unit_first, sharing.unit_count)
    for array in (ptr, block):
        array.setflags(write=False)
    messages = Messages(frozen(transfers.src[order]), frozen(transfers.dst[order]), ptr, block)
    num_rounds = int(transfers.round[order[-1]]) + 1 if order.size else 0
    return CommSchedule(num_rounds, messages, frozen(transfers.round[order]), stage_ends, waves)


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
