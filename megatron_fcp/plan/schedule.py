"""Messages ordered into congestion-free rounds, and rounds cut into compute stages.

::

    round       0     1     2     3     4     5
    rank 0   ->2   ->1   ->3         ->1   ->2       one send and one receive per tier and round
    stages   local |--- stage 1 ---|--- stage 2 ---   attention on what stage k brought, while stage k + 1 travels
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.coloring import color_edges, max_degree
from megatron_fcp.plan.transfers import Messages

PAPER_ROUNDS_PER_STAGE = 16  # arXiv 2605.08524: the coalescer merges 16 sub-stages by default
MIN_STAGES = 3  # fewer leave nothing to overlap the last transfers with


@dataclass(frozen=True)
class Waves:
    """Rounds that ranks go through within a limit of held KV (see :mod:`plan.waves`).

    Attributes
    ----------
    ends : IntArray, shape [num_waves]
        Last round of each wave. Every rank ends a stage there, and nothing is passed on in a later wave.
    held_tokens : int
        KV tokens of others that a rank holds at once at most.
    """

    ends: IntArray
    held_tokens: int


@dataclass(frozen=True)
class CommSchedule:
    """Rounds of messages.

    Attributes
    ----------
    num_rounds : int
    messages : Messages
        Sorted by round, then sender, then receiver.
    message_round : IntArray, shape [num_messages]
    stage_ends : tuple of IntArray, one per rank
        A compute stage starts after each of these rounds; the last one lies at or behind the rank's last receive.
    waves : Waves, optional
        Where not everything that a rank receives may stay.
    """

    num_rounds: int
    messages: Messages
    message_round: IntArray
    stage_ends: tuple[IntArray, ...]
    waves: Waves | None = None

    def stage_of_round(self, rank: int) -> IntArray:
        """Stage (counted from 1) in which ``rank`` attends to what it receives in a round; shape [num_rounds]."""
        return np.searchsorted(self.stage_ends[rank], np.arange(self.num_rounds)) + 1


def tier_of(src: IntArray, dst: IntArray, ranks_per_node: int) -> IntArray:
    """0 for messages inside a node, 1 between nodes."""
    return (src // ranks_per_node != dst // ranks_per_node).astype(np.int64)


def rounds_lower_bound(messages: Messages, ranks_per_node: int) -> int:
    """Fewest rounds that any schedule of ``messages`` needs: the largest degree over both tiers."""
    tier = tier_of(messages.src, messages.dst, ranks_per_node)
    return max(max_degree(messages.src[tier == t], messages.dst[tier == t]) for t in (0, 1))


def schedule_rounds(
    messages: Messages, cp_size: int, *, ranks_per_node: int = 1, rounds_per_stage: int | None = None
) -> CommSchedule:
    """Order messages that owners send into exactly :func:`rounds_lower_bound` rounds.

    Each tier is coloured on its own, since a rank may send once per tier and round.
    """
    tier = tier_of(messages.src, messages.dst, ranks_per_node)
    round_ = np.zeros(len(messages), dtype=np.int64)
    for t in (0, 1):
        chosen = np.flatnonzero(tier == t)
        round_[chosen] = color_edges(messages.src[chosen], messages.dst[chosen], cp_size)
    num_rounds = int(round_.max()) + 1 if round_.size else 0
    ends = frozen(cut_stages(num_rounds, rounds_per_stage))
    return order_by_round(messages, round_, num_rounds, (ends,) * cp_size)


def order_by_round(
    messages: Messages, message_round: IntArray, num_rounds: int, stage_ends: tuple[IntArray, ...]
) -> CommSchedule:
    """Sort messages by round, sender and receiver into a :class:`CommSchedule`."""
    order = np.lexsort((messages.dst, messages.src, message_round))
    return CommSchedule(num_rounds, messages.take(order), frozen(message_round[order]), stage_ends)


def cut_stages(num_rounds: int, rounds_per_stage: int | None) -> list[int]:
    """Last round of each stage.

    Without ``rounds_per_stage``: at least three stages where there are rounds for them, of at most 16 rounds, as even
    as can be.
    """
    if num_rounds == 0:
        return []
    if rounds_per_stage is not None:
        return [*range(rounds_per_stage - 1, num_rounds - 1, rounds_per_stage), num_rounds - 1]
    stages = max(min(MIN_STAGES, num_rounds), -(-num_rounds // PAPER_ROUNDS_PER_STAGE))
    return [(s + 1) * num_rounds // stages - 1 for s in range(stages)]
