"""The whole plan of one packed stream, and how it is made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_fcp.config import FcpConfig, Mask, check_stream
from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.backward import PushSchedule, reverse_schedule
from megatron_fcp.plan.blocks import BlockTable, build_block_table, check_lengths, check_window
from megatron_fcp.plan.bounded import DEFAULT_MULTIPLE, check_limit, least_limit, received_tokens, within_limit
from megatron_fcp.plan.calls import Calls, split_calls
from megatron_fcp.plan.cost import CostModel, PushPrices
from megatron_fcp.plan.held import attended_before
from megatron_fcp.plan.layout import PlanLayout, build_layout
from megatron_fcp.plan.makespan import block_sizes_to_try, choose_block_size, place_and_schedule
from megatron_fcp.plan.placement import Placement, place_blocks
from megatron_fcp.plan.push_tree import push_by_tree
from megatron_fcp.plan.push_waves import push_in_waves
from megatron_fcp.plan.rank_plan import RankPlan, derive_rank_plan
from megatron_fcp.plan.schedule import CommSchedule, schedule_rounds
from megatron_fcp.plan.strips import place_strips
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.plan.validate import check_plan
from megatron_fcp.plan.waves import schedule_in_waves


@dataclass(frozen=True)
class Plan:
    """Blocks, their owners and the rounds that move KV, for every rank. Checked once when built.

    Raises
    ------
    ValueError
        If the parts contradict each other; says which block, rank or round.
    """

    table: BlockTable
    placement: Placement
    schedule: CommSchedule
    ranks_per_node: int = 1
    push_prices: PushPrices = PushPrices()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_plan(self.table, self.placement, self.schedule, self.ranks_per_node)

    @property
    def cp_size(self) -> int:
        """Ranks of the context-parallel group."""
        return self.placement.cp_size

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that every rank owns, padding included."""
        return self.table.num_tokens // self.cp_size

    @cached_property
    def fine_backward(self) -> bool:
        """Whether backward cuts stages finer than forward and pushes along trees of its own.

        Not where owners send all that they have in many stages: pushes between the pulls keep memory at two stages.
        """
        if self.schedule.waves is not None:
            return True
        m = self.schedule.messages
        relays = (self.placement.block_rank[m.block] != np.repeat(m.src, np.diff(m.ptr))).any()
        few = max(ends.size for ends in self.schedule.stage_ends) <= 2
        return self.table.mask == "causal" and len(m) > 0 and bool(relays or few)

    @cached_property
    def calls(self) -> Calls:
        """The kernel calls of backward."""
        return split_calls(self.table, self.placement, self.schedule, finely=self.fine_backward)

    @cached_property
    def push(self) -> PushSchedule:
        """Rounds that bring partial dKV home in backward."""
        if self.schedule.waves is not None:
            return push_in_waves(
                self.table, self.placement, self.schedule, self.schedule.waves, self.calls, self.ranks_per_node,
                self.push_prices,
            )  # fmt: skip
        if self.fine_backward:
            return push_by_tree(
                self.table, self.placement, self.schedule, self.calls, self.ranks_per_node, self.push_prices
            )
        return reverse_schedule(self.schedule, self.placement, self.ranks_per_node)

    @cached_property
    def attended(self) -> tuple[IntArray, ...]:
        """Stage up to which each rank has attended when it begins to pull each of its stages."""
        return attended_before(self.table, self.schedule, all_at_once=self.fine_backward)

    @cached_property
    def layout(self) -> PlanLayout:
        """Where the tokens of every message lie on both ends."""
        return build_layout(self.table, self.placement, self.schedule, self.push)

    @cached_property
    def digest(self) -> str:
        """sha256 over every decision in canonical little-endian bytes; equal plans have equal digests."""
        table, schedule = self.table, self.schedule
        scalars = [self.cp_size, table.block_size, table.num_blocks, self.ranks_per_node, schedule.num_rounds]
        messages = schedule.messages
        parts: list[IntArray] = [frozen(scalars), table.document_start, table.document_length]
        parts += [self.placement.block_rank, messages.src, messages.dst, messages.ptr, messages.block]
        parts += [schedule.message_round, *schedule.stage_ends]
        if schedule.waves is not None:
            parts += [schedule.waves.ends, frozen([schedule.waves.held_tokens])]
        kind = f"fcp-plan/1 {table.mask} "
        if table.window is not None:
            kind = f"fcp-plan/2 {table.mask} window {table.window} "
        if self.push_prices != PushPrices():
            kind += f"push {' '.join(map(str, astuple(self.push_prices)))} "
        sha = hashlib.sha256(kind.encode())
        for part in parts:
            sha.update(np.int64(part.size).astype("<i8").tobytes())
            sha.update(part.astype("<i8").tobytes())
        return sha.hexdigest()

    def rank_plan(self, rank: int) -> RankPlan:
        """What ``rank`` executes."""
        assert 0 <= rank < self.cp_size, (rank, self.cp_size)
        return derive_rank_plan(
            self.table, self.placement, self.schedule, self.calls, self.push, self.layout, self.attended, rank,
            self.digest,
        )  # fmt: skip


def make_plan(
    lengths: Sequence[int] | NDArray[np.generic],
    *,
    cp_size: int,
    tokens_per_rank: int,
    config: FcpConfig | None = None,
    starts: Sequence[int] | NDArray[np.generic] | None = None,
    hardware: CostModel | None = None,
    window: int | None = None,
) -> Plan:
    """Plan one packed stream of ``cp_size * tokens_per_rank`` tokens.

    Parameters
    ----------
    lengths : sequence of int
        Real tokens of each document in stream order; zeros are ignored.
    cp_size, tokens_per_rank : int
    config : FcpConfig, optional
    starts : sequence of int, optional
        Document starts, where the stream holds padding between documents.
    hardware : CostModel, optional
        Plan for the smallest makespan on this hardware: chooses the block size unless ``config`` names one, stages and
        messages, and uses the hardware's ranks per node. Causal masks only; others are planned without it. With a
        window it gives the block size and weighs traffic against compute; rounds are the ordinary ones.
    window : int, optional
        Tokens before a query that it attends to at most. Where other layers of the model see whole documents, plan for
        those and derive the windowed plan with :func:`with_window`, so that both share one placement.

    Raises
    ------
    ValueError
        For bad lengths, a stream too short for them or longer than 2**28 tokens, a block size that does not divide
        ``tokens_per_rank``, a limit of held KV below two rounds, or a window that is negative or comes with a full
        mask.
    """
    config = config or FcpConfig()
    cp_size, tokens_per_rank = check_stream(cp_size, tokens_per_rank)
    window = _checked_window(window, config.mask)
    if hardware is not None and config.mask == "causal" and window is None:
        return _plan_for(hardware, lengths, cp_size, tokens_per_rank, config, starts)
    table = build_block_table(
        lengths,
        num_tokens=cp_size * tokens_per_rank,
        block_size=_block_size(hardware, lengths, cp_size, tokens_per_rank, config),
        mask=config.mask,
        starts=starts,
        window=window,
    )
    if window is None:
        placement = place_blocks(table, cp_size)
    elif hardware is None:
        placement = place_strips(table, cp_size)
    else:
        placement = place_strips(table, cp_size, hardware.token_s(1) / hardware.pair_s)
    planned_for = None if config.mask != "causal" else hardware
    if planned_for is None:
        return _with_ordinary_rounds(table, placement, config, config.ranks_per_node)
    return _with_ordinary_rounds(table, placement, config, planned_for.ranks_per_node, planned_for.push_prices())


def with_window(plan: Plan, window: int | None, config: FcpConfig | None = None) -> Plan:
    """A plan for the same blocks on the same ranks, for layers of another window (None: whole documents).

    A token keeps its place whatever the layer; transfers, rounds and stages are those that the window needs.

    Parameters
    ----------
    plan : Plan
    window : int or None
    config : FcpConfig, optional
        Blocks per message and rounds per stage.
    """
    table = plan.table
    window = _checked_window(window, table.mask)
    if window == table.window:
        return plan
    other = build_block_table(
        table.document_length,
        num_tokens=table.num_tokens,
        block_size=table.block_size,
        mask=table.mask,
        starts=table.document_start,
        window=window,
    )
    return _with_ordinary_rounds(other, plan.placement, config or FcpConfig(), plan.ranks_per_node, plan.push_prices)


def _checked_window(window: int | None, mask: Mask) -> int | None:
    check_window(window, mask)
    return None if window is None else int(window)


def _with_ordinary_rounds(
    table: BlockTable,
    placement: Placement,
    config: FcpConfig,
    ranks_per_node: int,
    push_prices: PushPrices = PushPrices(),  # noqa: B008
) -> Plan:
    """Rounds that move what the placement needs from owners, as few as there can be."""
    rank, block = needed_blocks(table, placement)
    schedule = schedule_rounds(
        coalesce(rank, block, placement, config.blocks_per_message),
        placement.cp_size,
        ranks_per_node=ranks_per_node,
        rounds_per_stage=config.rounds_per_stage,
    )
    if config.kv_buffer_tokens is not None:
        schedule = _limited(table, placement, schedule, ranks_per_node, config.kv_buffer_tokens, config)
    return Plan(table, placement, schedule, ranks_per_node, push_prices)


def _limited(
    table: BlockTable,
    placement: Placement,
    schedule: CommSchedule,
    ranks_per_node: int,
    limit: int,
    config: FcpConfig,
) -> CommSchedule:
    """``schedule`` if no rank receives more than it may hold at once, else one that keeps the limit in stages."""
    check_limit(limit, table.block_size)
    if (received_tokens(table, schedule, placement.cp_size) <= limit).all():
        return schedule
    return within_limit(table, placement, ranks_per_node, limit, config.blocks_per_message)


def _block_size(
    cost: CostModel | None,
    lengths: Sequence[int] | NDArray[np.generic],
    cp_size: int,
    tokens_per_rank: int,
    config: FcpConfig,
) -> int:
    if cost is None or config.mask != "causal" or config.block_size is not None:
        return config.resolve_block_size(tokens_per_rank)
    return choose_block_size(check_lengths(lengths), cp_size, tokens_per_rank, cost)


def _plan_for(
    cost: CostModel,
    lengths: Sequence[int] | NDArray[np.generic],
    cp_size: int,
    tokens_per_rank: int,
    config: FcpConfig,
    starts: Sequence[int] | NDArray[np.generic] | None,
) -> Plan:
    if config.block_size is None:
        sizes = block_sizes_to_try(check_lengths(lengths), cp_size, tokens_per_rank, cost)
    else:
        sizes = [config.resolve_block_size(tokens_per_rank)]
    limit = DEFAULT_MULTIPLE * tokens_per_rank if config.kv_buffer_tokens is None else config.kv_buffer_tokens
    sizes = [size for size in sizes if least_limit(size) <= limit] or sizes[:1]
    total = cp_size * tokens_per_rank
    tables = [
        build_block_table(lengths, num_tokens=total, block_size=size, mask=config.mask, starts=starts) for size in sizes
    ]
    found = [place_and_schedule(table, cp_size, cost) for table in tables]
    best = min(range(len(found)), key=lambda i: float(found[i][2].finish.max()))
    table, (placement, schedule, estimate) = tables[best], found[best]
    received = received_tokens(table, schedule, cp_size)
    check_limit(limit, table.block_size)
    if received.max(initial=0) > limit:
        waves = schedule_in_waves(table, placement, cost, estimate.compute, received, limit)
        schedule = waves or within_limit(table, placement, cost.ranks_per_node, limit, config.blocks_per_message)
    return Plan(table, placement, schedule, cost.ranks_per_node, cost.push_prices())
