"""Every invariant of a plan, checked once when it is built or read."""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.delivery import delivers, in_step
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule, Waves, tier_of
from megatron_fcp.plan.transfers import needed_blocks

LEAST_WAVES = 2


def check_plan(table: BlockTable, placement: Placement, schedule: CommSchedule, ranks_per_node: int) -> None:
    """Check that a schedule delivers what the placement needs, once, in congestion-free rounds.

    Raises
    ------
    ValueError
        Naming the first block, rank or round that breaks a rule.
    """
    _check_placement(table, placement)
    _check_limits(table, placement, schedule)
    if not delivers(table, placement, schedule):
        _name_fault(table, placement, schedule, ranks_per_node)
    if not in_step(schedule, placement.cp_size, ranks_per_node):
        _check_rounds(schedule, ranks_per_node)
    _check_stages(placement, schedule)
    if schedule.waves is not None:
        _check_waves(table, placement, schedule, schedule.waves)


def _name_fault(table: BlockTable, placement: Placement, schedule: CommSchedule, ranks_per_node: int) -> None:
    """Raise the error that says what :func:`plan.delivery.delivers` found."""
    _check_messages(table, schedule)
    counts = np.diff(schedule.messages.ptr)
    round_ = np.repeat(schedule.message_round, counts)
    src, dst = np.repeat(schedule.messages.src, counts), np.repeat(schedule.messages.dst, counts)
    _check_rounds(schedule, ranks_per_node)
    _check_holders(table, placement, round_, src, dst, schedule.messages.block)
    _check_complete(table, placement, dst, schedule.messages.block)
    raise AssertionError("the plan does not deliver what it should, and no check says why")


def _check_placement(table: BlockTable, placement: Placement) -> None:
    owner = placement.block_rank
    if owner.size != table.num_blocks:
        raise ValueError(f"the plan places {owner.size} blocks but the stream has {table.num_blocks}")
    if owner.size and (owner.min() < 0 or owner.max() >= placement.cp_size):
        block = int(np.flatnonzero((owner < 0) | (owner >= placement.cp_size))[0])
        raise ValueError(f"block {block} is placed on rank {owner[block]}, outside 0..{placement.cp_size - 1}")
    held = np.bincount(owner, minlength=placement.cp_size)
    if (held * placement.cp_size != table.num_blocks).any():
        rank = int(np.flatnonzero(held * placement.cp_size != table.num_blocks)[0])
        raise ValueError(
            f"rank {rank} owns {held[rank]} blocks; every rank must own {table.num_blocks / placement.cp_size:g}"
        )


def _check_limits(table: BlockTable, placement: Placement, schedule: CommSchedule) -> None:
    m = schedule.messages
    for name, values, limit in (
        ("sender", m.src, placement.cp_size),
        ("receiver", m.dst, placement.cp_size),
        ("block", m.block, table.num_blocks),
        ("round", schedule.message_round, schedule.num_rounds),
    ):
        if values.size and (values.min() < 0 or values.max() >= limit):
            raise ValueError(
                f"a message names {name} {values[(values < 0) | (values >= limit)][0]}, outside 0..{limit - 1}"
            )
    counts = np.diff(m.ptr)
    if (counts <= 0).any():
        at = int((counts <= 0).argmax())
        raise ValueError(f"the message from rank {m.src[at]} to rank {m.dst[at]} carries no block")
    if (m.src == m.dst).any():
        raise ValueError(f"rank {m.src[m.src == m.dst][0]} sends a message to itself")


def _check_messages(table: BlockTable, schedule: CommSchedule) -> None:
    m = schedule.messages
    unsorted = np.flatnonzero(np.diff(m.block) <= 0) + 1
    unsorted = unsorted[~np.isin(unsorted, m.ptr)]  # a new message may start anywhere
    if unsorted.size:
        at = int(unsorted[0])
        raise ValueError(f"a message lists block {m.block[at]} after block {m.block[at - 1]}; blocks must ascend")
    idle = table.shared_start[m.block] >= table.shared_stop[m.block]
    if idle.any():
        raise ValueError(f"block {m.block[idle.argmax()]} is sent, but holds nothing that another block attends to")


def _check_rounds(schedule: CommSchedule, ranks_per_node: int) -> None:
    tier = tier_of(schedule.messages.src, schedule.messages.dst, ranks_per_node)
    for verb, rank in (("sends", schedule.messages.src), ("receives", schedule.messages.dst)):
        order = np.lexsort((rank, tier, schedule.message_round))
        r, t, k = schedule.message_round[order], tier[order], rank[order]
        twice = np.flatnonzero((r[1:] == r[:-1]) & (t[1:] == t[:-1]) & (k[1:] == k[:-1]))
        if twice.size:
            at = twice[0]
            where = "between nodes" if t[at] else "inside its node"
            raise ValueError(f"in round {r[at]} rank {k[at]} {verb} more than once {where}")


def _check_holders(
    table: BlockTable, placement: Placement, round_: IntArray, src: IntArray, dst: IntArray, block: IntArray
) -> None:
    key = dst * table.num_blocks + block
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        at = order[twice[0]]
        raise ValueError(f"rank {dst[at]} receives block {block[at]} more than once")
    owned = np.flatnonzero(placement.block_rank[block] == dst)
    if owned.size:
        raise ValueError(f"rank {dst[owned[0]]} receives block {block[owned[0]]}, which it owns")
    forwarded = np.flatnonzero(placement.block_rank[block] != src)
    if not forwarded.size:
        return
    wanted = src[forwarded] * table.num_blocks + block[forwarded]
    found = np.minimum(np.searchsorted(ordered, wanted), ordered.size - 1)
    held = (ordered[found] == wanted) & (round_[order[found]] < round_[forwarded])
    if not held.all():
        at = forwarded[np.flatnonzero(~held)[0]]
        raise ValueError(f"in round {round_[at]} rank {src[at]} sends block {block[at]}, which it does not hold yet")


def _check_complete(table: BlockTable, placement: Placement, dst: IntArray, block: IntArray) -> None:
    rank, needed = needed_blocks(table, placement)
    missing = np.setdiff1d(rank * table.num_blocks + needed, dst * table.num_blocks + block, assume_unique=True)
    if missing.size:
        raise ValueError(
            f"rank {missing[0] // table.num_blocks} needs block {missing[0] % table.num_blocks} and never receives it"
        )


def _check_stages(placement: Placement, schedule: CommSchedule) -> None:
    if len(schedule.stage_ends) != placement.cp_size:
        raise ValueError(f"the plan has stages for {len(schedule.stage_ends)} ranks, not {placement.cp_size}")
    last = np.full(placement.cp_size, -1, dtype=np.int64)
    np.maximum.at(last, schedule.messages.dst, schedule.message_round)
    stops = np.concatenate(schedule.stage_ends)
    size = np.array([ends.size for ends in schedule.stage_ends])
    stop = np.cumsum(size)
    falls = np.diff(stops) <= 0
    falls[(stop - size)[(size > 0) & (stop > size)] - 1] = False  # between two ranks
    wrong = np.zeros(placement.cp_size, dtype=bool)
    rank = np.repeat(np.arange(placement.cp_size), size)
    wrong[rank[1:][falls]] = True
    wrong[rank[(stops < 0) | (stops >= schedule.num_rounds)]] = True
    if wrong.any():
        raise ValueError(
            f"the stages of rank {int(wrong.argmax())} do not end at ascending rounds of 0..{schedule.num_rounds - 1}"
        )
    end = np.full(placement.cp_size, -1, dtype=np.int64)
    end[size > 0] = stops[stop[size > 0] - 1]
    if (end < last).any():
        at = int((end < last).argmax())
        raise ValueError(f"rank {at} receives in round {last[at]}, after its last stage")


def _check_waves(table: BlockTable, placement: Placement, schedule: CommSchedule, waves: Waves) -> None:
    ends, m = waves.ends, schedule.messages
    if ends.size < LEAST_WAVES or (np.diff(ends) <= 0).any() or ends[0] < 0 or ends[-1] != schedule.num_rounds - 1:
        raise ValueError(
            f"there must be at least {LEAST_WAVES} waves, that end at ascending rounds up to {schedule.num_rounds - 1}"
        )
    wave = np.searchsorted(ends, schedule.message_round)
    for rank, stops in enumerate(schedule.stage_ends):
        mine = np.flatnonzero(m.dst == rank)
        stage = np.searchsorted(stops, schedule.message_round[mine])
        if ((stage[1:] == stage[:-1]) & (wave[mine][1:] != wave[mine][:-1])).any():
            raise ValueError(f"a stage of rank {rank} receives in more than one wave")
    counts = np.diff(m.ptr)
    src, dst, at = (np.repeat(a, counts) for a in (m.src, m.dst, wave))
    came = np.full((placement.cp_size, table.num_blocks), -1, dtype=np.int64)
    came[dst, m.block] = at
    late = (placement.block_rank[m.block] != src) & (came[src, m.block] != at)
    if late.any():
        i = int(late.argmax())
        raise ValueError(f"rank {src[i]} passes block {m.block[i]} on in wave {at[i]}, in which it did not receive it")
    received = np.zeros((placement.cp_size, ends.size), dtype=np.int64)
    np.add.at(received, (dst, at), (table.shared_stop - table.shared_start)[m.block])
    over = (received.sum(axis=1) > waves.held_tokens) & (2 * received.max(axis=1) > waves.held_tokens)
    if over.any():
        rank = int(over.argmax())
        raise ValueError(
            f"rank {rank} receives {received[rank].max()} tokens in a wave, more than half of the "
            f"{waves.held_tokens} that it may hold"
        )
