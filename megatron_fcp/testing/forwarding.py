"""Valid plans that the planner does not make yet: blocks forwarded by receivers, stages cut differently on every rank.

The runtime executes any valid plan, so it is tested on more than what today's planner produces::

    planner      owner -> a      owner -> b      owner -> c           every block comes from its owner
    rerouted     owner -> a      a -> b          a -> x, b -> c       from anyone who received it in an earlier round,
                                                                      also through ``x``, which has no use for it
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_fcp.plan import CommSchedule, Plan
from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.backward import transfer_arrays
from megatron_fcp.plan.schedule import order_by_round
from megatron_fcp.plan.transfers import Messages


def reroute(
    plan: Plan,
    rng: np.random.Generator,
    *,
    share: float = 0.5,
    bystanders: float = 0.1,
    gaps: float = 0.05,
    blocks_per_message: int = 3,
) -> Plan:
    """A valid plan with the blocks and owners of ``plan``, but other senders, rounds and stages.

    Parameters
    ----------
    plan : Plan
    rng : numpy.random.Generator
        The same state gives the same plan.
    share : float
        Chance that a transfer is sent by any rank that holds the block by then, and not by its owner.
    bystanders : float
        Chance, per block, that one rank which does not need the block receives it too.
    gaps : float
        Chance that a transfer leaves a round unused that it could have had; rounds may end up empty.
    blocks_per_message : int
        Blocks that a message may carry at most.

    Returns
    -------
    Plan
        Usually with more rounds than necessary. Stages end at random rounds, different ones on each rank.
    """
    tree = _random_trees(plan, rng, share, bystanders)
    timetable = _Timetable(plan.ranks_per_node, blocks_per_message)
    arrival: dict[tuple[int, int], int] = {}
    for src, dst, block in tree:
        earliest = arrival.get((src, block), -1) + 1
        while rng.random() < gaps:
            earliest += 1
        arrival[dst, block] = timetable.book(src, dst, block, earliest)
    messages, message_round = timetable.messages()
    num_rounds = int(message_round.max()) + 1 if message_round.size else 0
    schedule = order_by_round(messages, message_round, num_rounds, ())
    ends = random_stage_ends(schedule, plan.cp_size, rng)
    schedule = CommSchedule(num_rounds, schedule.messages, schedule.message_round, ends)
    return Plan(plan.table, plan.placement, schedule, plan.ranks_per_node)


def random_stage_ends(schedule: CommSchedule, cp_size: int, rng: np.random.Generator) -> tuple[IntArray, ...]:
    """Legal stage ends for ``schedule``, drawn for each rank on its own."""
    last = np.full(cp_size, -1, dtype=np.int64)
    np.maximum.at(last, schedule.messages.dst, schedule.message_round)
    ends: list[IntArray] = []
    for latest in last.tolist():
        chosen = np.flatnonzero(rng.random(schedule.num_rounds) < rng.random())
        if latest >= 0 and (not chosen.size or chosen[-1] < latest):
            chosen = np.append(chosen, rng.integers(latest, schedule.num_rounds))
        ends.append(frozen(chosen))
    return tuple(ends)


def with_random_stages(plan: Plan, rng: np.random.Generator) -> Plan:
    """``plan`` with the same rounds, but stages that end at random rounds, different ones on each rank."""
    old = plan.schedule
    ends = random_stage_ends(old, plan.cp_size, rng)
    schedule = CommSchedule(old.num_rounds, old.messages, old.message_round, ends)
    return Plan(plan.table, plan.placement, schedule, plan.ranks_per_node)


def _random_trees(plan: Plan, rng: np.random.Generator, share: float, bystanders: float) -> list[tuple[int, int, int]]:
    """(src, dst, block) of every transfer, a block's sender always listed after it has received the block itself."""
    _, _, dst, block = transfer_arrays(plan.schedule)
    lines: list[list[tuple[int, int, int]]] = []
    for b in np.unique(block).tolist():
        owner = int(plan.placement.block_rank[b])
        receivers = dst[block == b].tolist()
        others = np.setdiff1d(np.arange(plan.cp_size), [owner, *receivers])
        if others.size and rng.random() < bystanders:
            receivers.append(int(rng.choice(others)))
        rng.shuffle(receivers)
        holders, line = [owner], []
        for receiver in receivers:
            src = holders[rng.integers(len(holders))] if rng.random() < share else owner
            line.append((src, receiver, b))
            holders.append(receiver)
        lines.append(line)
    turns = np.repeat(np.arange(len(lines)), [len(line) for line in lines])
    rng.shuffle(turns)
    return [lines[turn].pop(0) for turn in turns.tolist()]


@dataclass
class _Timetable:
    """Rounds in which a rank sends at most once and receives at most once per tier."""

    ranks_per_node: int
    blocks_per_message: int
    _booked: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)  # (round, src, dst) -> blocks
    _busy: set[tuple[str, int, int, bool]] = field(default_factory=set)  # (side, round, rank, between nodes)

    def book(self, src: int, dst: int, block: int, earliest: int) -> int:
        """First round from ``earliest`` on in which ``src`` can send ``block`` to ``dst``."""
        between = src // self.ranks_per_node != dst // self.ranks_per_node
        round_ = earliest
        while True:
            together = self._booked.get((round_, src, dst))
            if together is not None and len(together) < self.blocks_per_message:
                together.append(block)
                return round_
            ends = {("src", round_, src, between), ("dst", round_, dst, between)}
            if not ends & self._busy:
                self._busy |= ends
                self._booked[round_, src, dst] = [block]
                return round_
            round_ += 1

    def messages(self) -> tuple[Messages, IntArray]:
        """All messages and the round of each."""
        blocks = [sorted(b) for b in self._booked.values()]
        round_, src, dst = (frozen([key[i] for key in self._booked]) for i in range(3))
        ptr = frozen(np.append(0, np.cumsum([len(b) for b in blocks], dtype=np.int64)))
        return Messages(src, dst, ptr, frozen([b for run in blocks for b in run])), round_
