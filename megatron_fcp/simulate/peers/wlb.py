"""WLB-LLM's context parallelism: per-document or per-sequence sharding, whichever is predicted faster.

Source: WLB-LLM, OSDI 2025 (arXiv 2503.17924): per-document sharding cuts every document into ``2 * cp_size`` chunks and
balances perfectly but makes slivers; per-sequence sharding cuts the stream and keeps kernels long; a kernel-latency
predictor chooses per micro-batch. Both gather all KV. Its packing across pipeline micro-batches acts outside a
single attention call and is not modelled.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import FloatArray
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernels import suffix_s
from megatron_fcp.simulate.peers.all_gather import gather_program, sequence_seconds
from megatron_fcp.simulate.peers.ring import chunk_tokens
from megatron_fcp.simulate.program import Program


def wlb(case: Case, *, backward: bool = False) -> Program:
    """The faster of the two shardings, as an oracle predictor would choose."""
    choices = [sequence_seconds(case, backward=backward), document_seconds(case, backward=backward)]
    slow = case.slowdown()
    return gather_program(case, min(choices, key=lambda s: float((s * slow).max())), backward=backward)


def document_seconds(case: Case, *, backward: bool) -> FloatArray:
    """Kernel seconds by rank if every document is cut into ``2 * cp_size`` chunks; shape [cp_size]."""
    cost, n = case.cost(backward=backward), case.cp_size
    c, copies = np.unique(chunk_tokens(case.lengths, n), return_counts=True)
    chunk = np.array([float((suffix_s(c, i * c, cost) * copies).sum()) for i in range(2 * n)])
    return chunk[:n] + chunk[: n - 1 : -1]
