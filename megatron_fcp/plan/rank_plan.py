"""Everything one rank needs to execute a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Literal

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen, ranges
from megatron_fcp.plan.backward import PushSchedule
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.calls import Calls
from megatron_fcp.plan.layout import PlanLayout, Segments
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.program import (
    LOCAL,
    Compute,
    Exchange,
    Peak,
    Segment,
    Slot,
    Step,
    Transfer,
    pass_steps,
    peak_memory,
)
from megatron_fcp.plan.schedule import CommSchedule
from megatron_fcp.plan.transfers import Messages
from megatron_fcp.plan.window import local_calls, remote_calls, windowed_stages
from megatron_fcp.plan.work import StageWork, local_fragments, part_of_local, part_of_stage, stage_works


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan; derived by :func:`derive_rank_plan`.

    Attributes
    ----------
    rank, cp_size : int
    digest : str
        Digest of the whole plan, equal on all ranks.
    local_token_global_indices : IntArray, shape [tokens_per_rank]
        Stream index of each local token, ascending: the one truth about the layout.
    position_ids : IntArray, shape [tokens_per_rank]
        Position inside the document; 0 on padding.
    document_ids : IntArray, shape [tokens_per_rank]
        Document of each local token, -1 on padding.
    calls : tuple of tuple of StageWork
        What forward attends to in each stage, as one kernel call, or with a window up to three. Stage 0 is local.
    parts : tuple of tuple of tuple of StageWork
        What backward attends to in each part of each stage, as one, two or three kernel calls.
    forward, backward : tuple of Step
        The two passes as straight lines of steps.
    pulls_first : bool
        In backward every push of every rank follows the last pull of all.
    """

    rank: int
    cp_size: int
    digest: str
    local_token_global_indices: IntArray
    position_ids: IntArray
    document_ids: IntArray
    calls: tuple[tuple[StageWork, ...], ...]
    parts: tuple[tuple[tuple[StageWork, ...], ...], ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    pulls_first: bool

    @property
    def stages(self) -> tuple[StageWork, ...]:
        """The first call of each stage, which as every call says what the stage's buffer holds."""
        return tuple(calls[0] for calls in self.calls)

    @cached_property
    def peak_forward(self) -> Peak:
        """Most tokens held at once in forward beside the rank's own."""
        return peak_memory(self.forward, [stage.kv_tokens for stage in self.stages])

    @cached_property
    def peak_backward(self) -> Peak:
        """Most tokens held at once in backward beside the rank's own."""
        return peak_memory(self.backward, [stage.kv_tokens for stage in self.stages])

    @property
    def num_tokens(self) -> int:
        """Tokens that the rank owns, padding included."""
        return self.local_token_global_indices.size

    @property
    def max_position(self) -> int:
        """Largest position id among the rank's tokens."""
        return int(self.position_ids.max(initial=0))


def derive_rank_plan(
    table: BlockTable,
    placement: Placement,
    schedule: CommSchedule,
    calls: Calls,
    push: PushSchedule,
    layout: PlanLayout,
    attended: tuple[IntArray, ...],
    rank: int,
    digest: str,
) -> RankPlan:
    """Derive what ``rank`` executes; a pure function of the shared decisions."""
    local_blocks = placement.blocks_of(rank)
    index = ranges(local_blocks * table.block_size, np.full(local_blocks.size, table.block_size))
    position, document = _positions(table, index)
    arrived = layout.stage_blocks(rank, schedule.stage_ends[rank].size)
    if table.window is None:
        stages = tuple((stage,) for stage in stage_works(table, local_blocks, arrived))
    else:
        stages = windowed_stages(table, local_blocks, arrived)
    tokens = [stage.kv_tokens for stage, *_ in stages]
    pulls = _exchanges("pull", rank, schedule.messages, schedule.message_round, layout.pull)
    pushes = _exchanges("push", rank, push.messages, push.message_round, layout.push)
    stage_of_round = schedule.stage_of_round(rank).tolist()
    after_pull = push.after_pull.tolist()
    pull_slots = [Slot(exchange, stage_of_round[exchange.round]) for exchange in pulls]
    begun = _calls_before(push, rank)
    before = attended[rank].tolist()
    merged = [((slot.exchange.round, 0), slot) for slot in pull_slots]
    merged += [
        ((after_pull[exchange.round], 1 + exchange.round), Slot(exchange, LOCAL, begun.get(exchange.round)))
        for exchange in pushes
    ]
    merged.sort(key=itemgetter(0))
    mine = slice(calls.ptr[rank], calls.ptr[rank + 1])
    backward = [Compute(s, p) for s, p in zip(calls.stage[mine].tolist(), calls.part[mine].tolist())]
    return RankPlan(
        rank=rank,
        cp_size=placement.cp_size,
        digest=digest,
        local_token_global_indices=frozen(index),
        position_ids=frozen(position),
        document_ids=frozen(document),
        calls=stages,
        parts=_parts(table, local_blocks, stages, calls, layout, rank),
        forward=pass_steps(pull_slots, [Compute(stage) for stage in range(len(stages))], tokens, before),
        backward=pass_steps([slot for _, slot in merged], backward, tokens, before),
        pulls_first=bool((push.after_pull >= schedule.num_rounds - 1).all()),
    )


def _calls_before(push: PushSchedule, rank: int) -> dict[int, int]:
    """Calls that ``rank`` makes before each of its push rounds, where the schedule says so."""
    out: dict[int, int] = {}
    for side, calls in ((push.messages.src, push.sender_calls), (push.messages.dst, push.receiver_calls)):
        if calls is not None:
            chosen = np.flatnonzero(side == rank)
            for round_, count in zip(push.message_round[chosen].tolist(), calls[chosen].tolist()):
                out[round_] = max(out.get(round_, 0), count)
    return out


def _parts(
    table: BlockTable,
    local_blocks: IntArray,
    stages: tuple[tuple[StageWork, ...], ...],
    calls: Calls,
    layout: PlanLayout,
    rank: int,
) -> tuple[tuple[tuple[StageWork, ...], ...], ...]:
    """What ``rank`` attends to in each part of each of its stages."""
    mine = slice(calls.ptr[rank], calls.ptr[rank + 1])
    count: list[int] = np.bincount(calls.stage[mine], minlength=len(stages)).tolist()
    local, *remote = stages
    out = [(local,) if count[LOCAL] == 1 else _local_parts(table, local_blocks, local[0], calls, rank, count[LOCAL])]
    arrived = layout.arrived_part(rank, calls)
    fragments = None if table.window is None else local_fragments(table, local_blocks)
    at = 0
    for stage, parts in zip(remote, count[1:]):
        blocks = stage[0].blocks.size
        if parts == 1:
            out.append((stage,))
        else:
            edges = np.searchsorted(arrived[at : at + blocks], np.arange(parts + 1)).tolist()
            if fragments is None:
                out.append(tuple((part_of_stage(table, local_blocks, stage[0], i, j),) for i, j in pairwise(edges)))
            else:
                out.append(tuple(remote_calls(table, fragments, stage[0], i, j) for i, j in pairwise(edges)))
        at += blocks
    return tuple(out)


def _local_parts(
    table: BlockTable, local_blocks: IntArray, local: StageWork, calls: Calls, rank: int, count: int
) -> tuple[tuple[StageWork, ...], ...]:
    """The local stage of ``rank`` in ``count`` parts."""
    pieces = slice(calls.local.ptr[rank], calls.local.ptr[rank + 1])
    cuts = calls.local
    part, item, start, stop = (a[pieces] for a in (cuts.part, cuts.item, cuts.start, cuts.stop))
    if table.window is not None:
        f = local_fragments(table, local_blocks)
        begin = f.start[np.flatnonzero(np.append(True, f.document[1:] != f.document[:-1]))]  # of each document
        return local_calls(table, f, local, begin[item] + start, part)
    edges: list[int] = np.searchsorted(part, np.arange(count + 1)).tolist()
    return tuple(part_of_local(local, item[i:j], start[i:j], stop[i:j]) for i, j in pairwise(edges))


def _positions(table: BlockTable, index: IntArray) -> tuple[IntArray, IntArray]:
    """Position in its document and document of each token of ``index``; 0 and -1 on padding."""
    if not table.document_start.size:
        return np.zeros(index.size, dtype=np.int64), np.full(index.size, -1, dtype=np.int64)
    document = np.searchsorted(table.document_start, index, side="right") - 1
    position = index - table.document_start[document]
    padding = (document < 0) | (position >= table.document_length[document])
    return np.where(padding, 0, position), np.where(padding, -1, document)


def _exchanges(
    kind: Literal["pull", "push"], rank: int, messages: Messages, message_round: IntArray, segments: Segments
) -> list[Exchange]:
    """Exchanges of ``rank`` in the order of their rounds."""
    sends: dict[int, list[Transfer]] = {}
    recvs: dict[int, list[Transfer]] = {}
    for mine, peers, buffer, start, table in (
        (messages.src, messages.dst, segments.send_buffer, segments.send_start, sends),
        (messages.dst, messages.src, segments.recv_buffer, segments.recv_start, recvs),
    ):
        chosen = np.flatnonzero(mine == rank)
        first, stop = segments.ptr[chosen].tolist(), segments.ptr[chosen + 1].tolist()
        for round_, peer, i, j in zip(message_round[chosen].tolist(), peers[chosen].tolist(), first, stop):
            pieces = zip(buffer[i:j].tolist(), start[i:j].tolist(), segments.tokens[i:j].tolist())
            transfer = Transfer(peer, tuple(Segment(b, s, s + tokens) for b, s, tokens in pieces))
            table.setdefault(round_, []).append(transfer)
    return [Exchange(kind, r, tuple(sends.get(r, ())), tuple(recvs.get(r, ()))) for r in sorted(sends | recvs)]
