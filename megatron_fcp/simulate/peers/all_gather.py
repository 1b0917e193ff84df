"""All-gather KV, then attend (``--cp-comm-type all_gather``; Llama 3, arXiv 2407.21783 section 3.3.2).

The stream is cut into ``2 * cp_size`` chunks and rank ``i`` holds chunks ``i`` and ``2 * cp_size - 1 - i``, whatever
the documents; all KV is gathered before the kernels start. Backward gathers again and reduce-scatters dKV.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.blocks import build_block_table
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import suffix_s
from megatron_fcp.simulate.program import Builder, Program


def all_gather(case: Case, *, backward: bool = False) -> Program:
    """Per-sequence sharding and one all-gather."""
    return gather_program(case, sequence_seconds(case, backward=backward), backward=backward)


def gather_program(case: Case, seconds: FloatArray, *, backward: bool) -> Program:
    """Gather all KV, then run ``seconds`` of kernels on each rank (and scatter dKV)."""
    out, ranks = case.builder(), np.arange(case.cp_size)
    gathered = gather(out, case, ranks)
    calls = out.compute(ranks, seconds * case.slowdown())
    for ops in gathered:
        out.depend(calls, ops)
    if backward and case.cp_size > 1:
        done = out.join(calls)
        for ops in gather(out, case, ranks):  # a reduce-scatter moves what an all-gather does
            out.depend(ops, done)
    return out.build()


def gather(out: Builder, case: Case, ranks: IntArray) -> list[IntArray]:
    """All-gather of all ranks' KV; a node's ranks share what crosses the network. One array per tier used."""
    cost, n = case.forward, ranks.size
    node = min(out.ranks_per_node, n)
    volume = case.tokens_per_rank * cost.kv_bytes
    steps = np.log2(max(n, 2)) * cost.latency_s
    parts: list[IntArray] = []
    if n > node:
        size = (n - node) * volume // node
        parts.append(out.collective(ranks, 1, steps + size / cost.inter_bytes_per_s, size))
    if node > 1:
        size = (n - 1) * volume
        parts.append(out.collective(ranks, 0, steps + size / cost.intra_bytes_per_s, size))
    return parts


def sequence_seconds(case: Case, *, backward: bool) -> FloatArray:
    """Kernel seconds by rank if the stream is cut, whatever the documents; shape [cp_size]."""
    chunk = max(case.tokens_per_rank // 2, 1)
    num_tokens = max(2 * case.cp_size * chunk, int(-(-case.lengths.sum() // chunk) * chunk))
    table = build_block_table(case.lengths, num_tokens=num_tokens, block_size=chunk)
    before = table.fragment_start - table.document_start[table.fragment_document]
    seconds = suffix_s(table.fragment_length, before, case.cost(backward=backward))
    owner = np.minimum(table.fragment_block, np.maximum(2 * case.cp_size - 1 - table.fragment_block, 0))
    return np.bincount(owner, seconds, minlength=case.cp_size)
