"""Everything one rank needs to execute a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen, ranges
from megatron_fcp.plan.backward import PushSchedule
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.program import (
    LOCAL,
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
from megatron_fcp.plan.work import StageWork, local_stage, remote_stage


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
    stages : tuple of StageWork
        Stage 0 is local.
    forward, backward : tuple of Step
        The two passes as straight lines of steps.
    """

    rank: int
    cp_size: int
    digest: str
    local_token_global_indices: IntArray
    position_ids: IntArray
    document_ids: IntArray
    stages: tuple[StageWork, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    peak_forward: Peak = field(init=False)
    peak_backward: Peak = field(init=False)

    def __post_init__(self) -> None:
        tokens = [stage.kv_tokens for stage in self.stages]
        object.__setattr__(self, "peak_forward", peak_memory(self.forward, tokens))
        object.__setattr__(self, "peak_backward", peak_memory(self.backward, tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens that the rank owns, padding included."""
        return self.local_token_global_indices.size

    @property
    def max_position(self) -> int:
        """Largest position id among the rank's tokens."""
        return int(self.position_ids.max(initial=0))


class _Buffers:
    """Where each block's shared tokens lie on every rank: its own tokens, or the buffer of a stage."""

    def __init__(self, table: BlockTable, placement: Placement, schedule: CommSchedule) -> None:
        self.table, self.placement, self.schedule = table, placement, schedule
        counts = np.diff(schedule.messages.ptr)
        self._dst = np.repeat(schedule.messages.dst, counts)
        self._round = np.repeat(schedule.message_round, counts)
        self._by_rank: dict[int, tuple[dict[int, int], list[IntArray]]] = {}

    def stage_of_block(self, rank: int) -> dict[int, int]:
        """Block -> stage for everything that ``rank`` receives."""
        return self._of(rank)[0]

    def stage_blocks(self, rank: int) -> list[IntArray]:
        """Ascending blocks of stage 1, 2, ... of ``rank``."""
        return self._of(rank)[1]

    def _of(self, rank: int) -> tuple[dict[int, int], list[IntArray]]:
        if rank not in self._by_rank:
            mine = np.flatnonzero(self._dst == rank)
            block = self.schedule.messages.block[mine]
            stage = self.schedule.stage_of_round(rank)[self._round[mine]]
            num_stages = self.schedule.stage_ends[rank].size
            blocks = [np.sort(block[stage == s]) for s in range(1, num_stages + 1)]
            self._by_rank[rank] = (dict(zip(block.tolist(), stage.tolist())), blocks)
        return self._by_rank[rank]

    def buffer(self, rank: int, block: int) -> int:
        """Buffer of ``rank`` that holds ``block``."""
        return LOCAL if self.placement.block_rank[block] == rank else self.stage_of_block(rank)[block]


def derive_rank_plan(
    table: BlockTable, placement: Placement, schedule: CommSchedule, push: PushSchedule, rank: int, digest: str
) -> RankPlan:
    """Derive what ``rank`` executes; a pure function of the shared decisions."""
    local_blocks = placement.blocks_of(rank)
    index = ranges(local_blocks * table.block_size, np.full(local_blocks.size, table.block_size))
    position, document = _positions(table, index)
    buffers = _Buffers(table, placement, schedule)
    stages = [local_stage(table, local_blocks)]
    stages += [remote_stage(table, local_blocks, blocks) for blocks in buffers.stage_blocks(rank)]
    place = _Place(buffers, rank, local_blocks, stages)
    pulls = place.exchanges("pull", schedule.messages, schedule.message_round)
    pushes = place.exchanges("push", push.messages, push.message_round)
    stage_of_round = schedule.stage_of_round(rank)
    pull_slots = [Slot(pulls[r], int(stage_of_round[r])) for r in sorted(pulls)]
    push_slots = [Slot(pushes[p], LOCAL) for p in sorted(pushes)]
    merged = sorted(
        [*pull_slots, *push_slots],
        key=lambda s: (
            (s.exchange.round, 0)
            if s.exchange.kind == "pull"
            else (int(push.after_pull[s.exchange.round]), 1 + s.exchange.round)
        ),
    )
    tokens = [stage.kv_tokens for stage in stages]
    return RankPlan(
        rank=rank,
        cp_size=placement.cp_size,
        digest=digest,
        local_token_global_indices=frozen(index),
        position_ids=frozen(position),
        document_ids=frozen(document),
        stages=tuple(stages),
        forward=pass_steps(pull_slots, tokens),
        backward=pass_steps(merged, tokens),
    )


def _positions(table: BlockTable, index: IntArray) -> tuple[IntArray, IntArray]:
    """Position in its document and document of each token of ``index``; 0 and -1 on padding."""
    if not table.document_start.size:
        return np.zeros(index.size, dtype=np.int64), np.full(index.size, -1, dtype=np.int64)
    document = np.searchsorted(table.document_start, index, side="right") - 1
    position = index - table.document_start[document]
    padding = (document < 0) | (position >= table.document_length[document])
    return np.where(padding, 0, position), np.where(padding, -1, document)


class _Place:
    """Turns messages into the segments of one rank's buffers."""

    def __init__(self, buffers: _Buffers, rank: int, local_blocks: IntArray, stages: Sequence[StageWork]) -> None:
        self.buffers, self.rank, self.table = buffers, rank, buffers.table
        self._slot = {int(b): i for i, b in enumerate(local_blocks)}
        self._offset = [{int(b): int(o) for b, o in zip(stage.blocks, stage.block_offset)} for stage in stages]

    def exchanges(self, kind: str, messages: Messages, message_round: IntArray) -> dict[int, Exchange]:
        """Exchanges of the rank by round."""
        sends: dict[int, list[Transfer]] = {}
        recvs: dict[int, list[Transfer]] = {}
        for m in np.flatnonzero((messages.src == self.rank) | (messages.dst == self.rank)).tolist():
            src, dst = int(messages.src[m]), int(messages.dst[m])
            blocks = messages.block[messages.ptr[m] : messages.ptr[m + 1]].tolist()
            runs = self._runs(blocks, holder=src if kind == "pull" else dst, taker=dst if kind == "pull" else src)
            segments = tuple(self._segment(run) for run in runs)
            table, peer = (sends, dst) if src == self.rank else (recvs, src)
            table.setdefault(int(message_round[m]), []).append(Transfer(peer, segments))
        return {
            r: Exchange("pull" if kind == "pull" else "push", r, tuple(sends.get(r, ())), tuple(recvs.get(r, ())))
            for r in sorted(sends.keys() | recvs.keys())
        }

    def _runs(self, blocks: list[int], holder: int, taker: int) -> list[list[int]]:
        """Split a message where it is not contiguous in the buffers of both sides."""
        runs: list[list[int]] = []
        for block in blocks:
            before = runs[-1][-1] if runs else -2
            if (
                block == before + 1
                and self.table.shared_stop[before] == self.table.shared_start[block]
                and self.buffers.buffer(holder, before) == self.buffers.buffer(holder, block)
                and self.buffers.buffer(taker, before) == self.buffers.buffer(taker, block)
            ):
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs

    def _segment(self, run: list[int]) -> Segment:
        first, last = run[0], run[-1]
        tokens = int(self.table.shared_stop[last] - self.table.shared_start[first])
        buffer = self.buffers.buffer(self.rank, first)
        if buffer == LOCAL:
            inside = int(self.table.shared_start[first]) - first * self.table.block_size
            start = self._slot[first] * self.table.block_size + inside
        else:
            start = self._offset[buffer][first]
        return Segment(buffer, start, start + tokens)
