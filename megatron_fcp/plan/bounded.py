"""The limit of others' KV that a rank may hold, and rounds that keep it where only owners send.

Where hardware is known, blocks are passed on, and a limit is kept in waves (:mod:`plan.waves`). Elsewhere, and where
that took too many waves, owners send everything themselves, in as few rounds as there can be, cut into stages of half
the limit: the runtime holds two stages of KV, and of partial dKV, whatever the documents.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.schedule import CommSchedule, schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks

BUFFERS = 2  # stages of KV that are alive at once
TIERS = 2  # a rank receives at most one message per tier in a round
DEFAULT_MULTIPLE = 32  # of the tokens per rank


def least_limit(block_size: int) -> int:
    """Least tokens that a rank must be allowed to hold: two stages of one round each."""
    return BUFFERS * TIERS * block_size


def check_limit(limit: int, block_size: int) -> None:
    """Raise unless two stages of one round each fit.

    Raises
    ------
    ValueError
        Naming the flag, the value, and what to change.
    """
    least = least_limit(block_size)
    if limit < least:
        raise ValueError(
            f"--fcp-kv-buffer-tokens {limit} is too little for two stages of one round, a block of {block_size} tokens "
            f"from inside and one from outside the node; raise it to at least {least} or lower --fcp-block-size"
        )


def received_tokens(table: BlockTable, schedule: CommSchedule, cp_size: int) -> IntArray:
    """KV tokens of other ranks that each rank receives in a pass, shape [cp_size]."""
    m = schedule.messages
    return _received(m.dst, m.ptr, m.block, table.shared_stop - table.shared_start, cp_size)


@njit(cache=True)
def _received(dst: IntArray, ptr: IntArray, block: IntArray, tokens: IntArray, cp_size: int) -> IntArray:
    out = np.zeros(cp_size, dtype=np.int64)
    for m in range(dst.size):
        for b in block[ptr[m] : ptr[m + 1]]:
            out[dst[m]] += tokens[b]
    return out


def within_limit(
    table: BlockTable, placement: Placement, ranks_per_node: int, limit: int, blocks_per_message: int
) -> CommSchedule:
    """Rounds and stages for a placement whose ranks hold at most ``limit`` KV tokens of others at once.

    Parameters
    ----------
    table, placement
    ranks_per_node : int
    limit : int
        At least what :func:`check_limit` asks for.
    blocks_per_message : int
        As many blocks as a message may carry at most; fewer where the limit asks for it.
    """
    stage = limit // BUFFERS
    most = max(min(blocks_per_message, stage // TIERS // table.block_size), 1)
    rank, block = needed_blocks(table, placement)
    schedule = schedule_rounds(coalesce(rank, block, placement, most), placement.cp_size, ranks_per_node=ranks_per_node)
    ends = frozen(_stage_ends(table, schedule, placement.cp_size, stage))
    return CommSchedule(schedule.num_rounds, schedule.messages, schedule.message_round, (ends,) * placement.cp_size)


def _stage_ends(table: BlockTable, schedule: CommSchedule, cp_size: int, most: int) -> list[int]:
    """Rounds after which all ranks start a stage, as late as no rank receives more than ``most`` tokens in one."""
    m = schedule.messages
    counts = np.diff(m.ptr)
    tokens = (table.shared_stop - table.shared_start)[m.block]
    received = np.zeros((schedule.num_rounds, cp_size), dtype=np.int64)
    np.add.at(received, (np.repeat(schedule.message_round, counts), np.repeat(m.dst, counts)), tokens)
    ends: list[int] = []
    held = np.zeros(cp_size, dtype=np.int64)
    for round_ in range(schedule.num_rounds):
        if (held + received[round_]).max() > most:
            ends.append(round_ - 1)
            held[:] = 0
        held += received[round_]
    return [*ends, schedule.num_rounds - 1] if schedule.num_rounds else []
