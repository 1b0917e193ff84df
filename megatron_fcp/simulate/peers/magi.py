"""MagiAttention: equal numbers of chunks dealt out by a min-heap on area, hierarchical group-cast, staged overlap.

Source: SandAI-org/MagiAttention 1.1 (Apache-2.0) and its documentation: chunks of 2048 tokens; the dispatch solver
gives every rank the same number of chunks and minimises the largest area, largest first, without looking at traffic;
group-cast moves exactly the KV that a rank needs, once per node over the network and from there inside the node;
one to four stages of casts overlap with kernels. The all-to-all of a stage visits peers in the same rotation on every
rank; nothing keeps two senders from meeting at one receiver otherwise. The stage count is the best of one to four.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.blocks import BlockTable, build_block_table
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.transfers import needed_blocks
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import local_s, remote_s
from megatron_fcp.simulate.program import Builder, Program

CHUNK = 2048
STAGES = (1, 2, 3, 4)
REDUCE_FACTOR = 2  # dKV goes back in fp32


def magi(case: Case, *, backward: bool = False, chunk: int = CHUNK) -> Program:
    """The fastest stage count."""
    size = math.gcd(chunk, case.tokens_per_rank)
    table = build_block_table(case.lengths, num_tokens=case.cp_size * case.tokens_per_rank, block_size=size)
    placement = dispatch(table, case.cp_size)
    programs = [_cast_program(case, table, placement, stages, backward) for stages in STAGES]
    return min(programs, key=lambda program: program.run().makespan)


def dispatch(table: BlockTable, cp_size: int) -> Placement:
    """Largest area first to the rank with the least area that may still take a chunk."""
    slots = table.num_blocks // cp_size
    owner = np.empty(table.num_blocks, dtype=np.int64)
    heap, used = [(0, rank) for rank in range(cp_size)], [0] * cp_size
    for block in np.argsort(-table.block_cost, kind="stable").tolist():
        area, rank = heapq.heappop(heap)
        owner[block] = rank
        used[rank] += 1
        if used[rank] < slots:
            heapq.heappush(heap, (area + int(table.block_cost[block]), rank))
    return Placement(cp_size, frozen(owner))


def _cast_program(case: Case, table: BlockTable, placement: Placement, stages: int, backward: bool) -> Program:
    out, n, g = case.builder(), case.cp_size, case.hardware.ranks_per_node
    cost, owner = case.cost(backward=backward), placement.block_rank
    rank, block = needed_blocks(table, placement)
    stage = _stage_of(rank // g, block, table.num_blocks, stages)
    slow, ranks = case.slowdown(), np.arange(n)
    seconds = remote_s(table, owner, rank, rank * stages + stage, block, n * stages, cost).reshape(n, stages)
    moves = _hops(owner[block], rank, block, stage, table, n, g)
    casts = [_cast(out, case, [m[3] == s for m in moves], moves, factor=1, after=None) for s in range(stages)]
    calls = [out.compute(ranks, local_s(table, owner, n, cost) * slow)]
    for s in range(stages):
        calls.append(out.compute(ranks, seconds[:, s] * slow, stage=s + 1))
        out.depend(calls[-1][casts[s][0]], casts[s][1])
        if backward:  # group-reduce: the same hops the other way, the node's partials summed before they leave it
            back = [(dst, src, size, st) for src, dst, size, st in reversed(moves)]
            _cast(out, case, [m[3] == s for m in back], back, factor=REDUCE_FACTOR, after=calls[-1])
    return out.build()


def _stage_of(node: IntArray, block: IntArray, num_blocks: int, stages: int) -> IntArray:
    """Stage of each needed block: a node's blocks in stream order, in equal parts."""
    key, index = np.unique(node * num_blocks + block, return_inverse=True)
    first = np.searchsorted(key, (key // num_blocks) * num_blocks)
    count = np.searchsorted(key, (key // num_blocks + 1) * num_blocks) - first
    return ((np.arange(key.size) - first) * stages // np.maximum(count, 1))[index]


Hop = tuple[IntArray, IntArray, IntArray, IntArray]  # src, dst, tokens, stage


def _hops(
    src: IntArray, dst: IntArray, block: IntArray, stage: IntArray, table: BlockTable, n: int, g: int
) -> list[Hop]:
    """Between nodes first, once per node, to the rank of the owner's place in it; then inside the node."""
    tokens = (table.shared_stop - table.shared_start)[block]
    node = dst // g * g
    proxy = np.where(src // g * g == node, src, node + src % np.minimum(g, n - node))  # the last node may be smaller
    crosses = np.flatnonzero(proxy != src)
    _, once = np.unique(proxy[crosses] * table.num_blocks + block[crosses], return_index=True)
    crosses = crosses[once]
    inside = np.flatnonzero(proxy != dst)
    return [
        (src[crosses], proxy[crosses], tokens[crosses], stage[crosses]),
        (proxy[inside], dst[inside], tokens[inside], stage[inside]),
    ]


def _cast(
    out: Builder, case: Case, chosen: list[np.ndarray], hops: list[Hop], *, factor: int, after: IntArray | None
) -> tuple[IntArray, IntArray]:
    """One all-to-all per hop, each rank's second one after all that its first one brought; (receivers, messages)."""
    cost, n = case.forward, case.cp_size
    gate = np.full(n, -1) if after is None else after
    receivers, messages = [], []
    for mine, (src, dst, tokens, _) in zip(chosen, hops):
        pair, index = np.unique(src[mine] * n + dst[mine], return_inverse=True)
        volume = np.bincount(index, tokens[mine], minlength=pair.size).astype(np.int64)
        order = np.lexsort((pair // n, (pair % n - pair // n) % n))  # rotation: distance first
        s, d, volume = pair[order] // n, pair[order] % n, volume[order]
        token_s = np.where(out.tier(s, d) == 1, cost.token_s(1), cost.token_s(0))
        ops = out.message(s, d, cost.latency_s + volume * token_s * factor, volume * cost.kv_bytes * factor)
        out.depend(ops, gate[s])
        receivers.append(d)
        messages.append(ops)
        if ops.size:
            gate = gate.copy()
            for rank in np.unique(d):
                gate[rank] = out.join(ops[d == rank])[0]
    return np.concatenate(receivers), np.concatenate(messages)
