"""What the ``reshuffle`` layout adds to a pass: tokens move to FCP's owners at its head and home at its tail.

Home is Megatron's own sharding: the stream in ``2 * cp_size`` chunks, of which rank ``i`` has chunks ``i`` and ``2 *
cp_size - 1 - i``. Forward brings Q, K and V and takes the output home; backward brings the output's gradient and takes
dQ, dK and dV home (Q, K and V were kept). Overlapped is what the runtime does: heads go through in groups::

    exposed      |-- in --|==== attention ====|-- home --|
    overlapped   |in 0|in 1| KV 0 |in 2|KV 1|home 0|in 3|KV 2|home 1| ...
                      |== attend to 0 ==|== attend to 1 ==| ...
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.config import HEAD_GROUPS
from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.coloring import color_edges
from megatron_fcp.plan.head_groups import head_groups
from megatron_fcp.plan.plan import Plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.program import COMPUTE, MESSAGE, Builder, Program


def with_reshuffle(
    program: Program, plan: Plan, case: Case, *, groups: int = HEAD_GROUPS, backward: bool = False
) -> Program:
    """``program``, which is ``plan`` lowered, with the way in and the way home around it.

    ``groups`` of heads go through one after the other, where there are as many KV heads (``--fcp-head-groups``); 1: no
    overlap.
    """
    cut = head_groups(case.shape.num_heads, case.shape.num_kv_heads, groups)
    return _Wrapped(program, plan, case, len(cut), backward).build()


def home_ranks(plan: Plan) -> tuple[IntArray, IntArray, IntArray]:
    """(block, home rank, tokens) of each piece of a block that lies in one of Megatron's chunks."""
    size, n = plan.table.block_size, plan.cp_size
    chunk = -(-plan.tokens_per_rank // 2)
    edges = np.unique(np.append(np.arange(0, plan.table.num_tokens + 1, size), np.arange(chunk, chunk * 2 * n, chunk)))
    edges = edges[edges <= plan.table.num_tokens]
    start = edges[:-1]
    place = np.minimum(start // chunk, 2 * n - 1)
    return start // size, np.minimum(place, 2 * n - 1 - place), np.diff(edges)


class _Wrapped:
    """The program once per group of heads, each with its share of kernel time and bytes."""

    def __init__(self, program: Program, plan: Plan, case: Case, groups: int, backward: bool) -> None:
        self.program, self.plan, self.case, self.groups = program, plan, case, groups
        self.out = Builder(plan.cp_size, plan.ranks_per_node)
        self.block, self.home, self.tokens = home_ranks(plan)
        self.owner = plan.placement.block_rank[self.block]
        q = case.shape.num_heads * case.shape.head_dim * case.shape.bytes_per_element
        kv = case.forward.kv_bytes
        self.bytes_in, self.bytes_home = (
            (q // groups, (q + kv) // groups) if backward else ((q + kv) // groups, q // groups)
        )
        messages = np.flatnonzero(program.kind == MESSAGE)
        pulls = messages[program.stage[messages] > 0]  # pushes belong to no stage
        pushes = messages[program.stage[messages] <= 0]
        between = pushes.size == 0 or pulls.size == 0 or pulls.max() < pushes.min()
        self.place = int((pulls if between else messages).max(initial=-1)) + 1  # where the group before goes home

    def build(self) -> Program:
        arrived = [self._move_in()]
        done: IntArray | None = None
        for i in range(self.groups):
            if i + 1 < self.groups:
                arrived.append(self._move_in())
            done = self._group(arrived[i], done)
        assert done is not None
        self._move_home(done)
        return self.out.build()

    def _move_in(self) -> IntArray:
        """For each rank an operation that waits for all that it receives; -1 where that is nothing."""
        ops, _, receiver = self._move(self.home, self.owner, self.bytes_in)
        out = np.full(self.plan.cp_size, -1)
        for rank in np.unique(receiver):
            out[rank] = self.out.join(ops[receiver == rank])[0]
        return out

    def _group(self, arrived: IntArray, before: IntArray | None) -> IntArray:
        """Copy the program in for one group; returns the last operation that each rank's results depend on."""
        p = self.program
        ops = self._copy(0, self.place)
        if before is not None:
            self._move_home(before)
        ops = np.append(ops, self._copy(self.place, len(p)))
        self.out.depend(np.repeat(ops, np.diff(p.dep_ptr)), ops[p.dep])
        work = np.flatnonzero((p.kind == COMPUTE) | (p.kind == MESSAGE))
        self.out.depend(ops[work], arrived[p.src[work]])
        done = np.full((2, self.plan.cp_size), -1, dtype=np.int64)
        for row, kind in enumerate((COMPUTE, MESSAGE)):
            mine = np.flatnonzero(p.kind == kind)
            done[row, p.dst[mine]] = ops[mine]
        return done

    def _copy(self, start: int, stop: int) -> IntArray:
        p, part = self.program, slice(start, stop)
        if start >= stop:
            return np.zeros(0, dtype=np.int64)
        latency = np.where(p.kind[part] == MESSAGE, self.case.forward.latency_s, 0.0)
        seconds = (p.seconds[part] - latency) / self.groups + latency
        return self.out.add(
            p.kind[part], p.src[part], p.dst[part], seconds, tier=p.tier[part], size=p.size[part] // self.groups,
            stage=p.stage[part], round=p.round[part],
        )  # fmt: skip

    def _move_home(self, done: IntArray) -> None:
        ops, sender, _ = self._move(self.owner, self.home, self.bytes_home)
        for row in done:
            self.out.depend(ops, row[sender])

    def _move(self, src: IntArray, dst: IntArray, token_bytes: int) -> tuple[IntArray, IntArray, IntArray]:
        """(operations, senders, receivers): one message per pair of ranks in congestion-free rounds."""
        cost, n = self.case.forward, self.plan.cp_size
        away = np.flatnonzero(src != dst)
        pair, place = np.unique(src[away] * n + dst[away], return_inverse=True)
        tokens = np.bincount(place, self.tokens[away], minlength=pair.size).astype(np.int64)
        src, dst = pair // n, pair % n
        token_s = np.where(self.out.tier(src, dst) == 1, 1 / cost.inter_bytes_per_s, 1 / cost.intra_bytes_per_s)
        turn = color_edges(src, dst, n)
        order = np.lexsort((src, turn))
        src, dst, turn, tokens, token_s = (a[order] for a in (src, dst, turn, tokens, token_s))
        seconds = cost.latency_s + tokens * token_bytes * token_s
        return self.out.message(src, dst, seconds, tokens * token_bytes, round=turn), src, dst
