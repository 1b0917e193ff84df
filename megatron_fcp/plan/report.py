"""The figures of a plan: balance, traffic, rounds and memory, beside those of a ring over the same stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.backward import transfer_arrays
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import rounds_lower_bound, tier_of

DKV_BYTES = 4  # partial gradients travel and add up in fp32
TIERS = ("inside nodes", "between nodes")


@dataclass(frozen=True)
class TierTraffic:
    """KV tokens that ranks receive and send in forward over one tier of the network; backward moves as many twice."""

    name: str
    received_mean: float
    received_max: int
    sent_mean: float
    sent_max: int


@dataclass(frozen=True)
class PlanReport:
    """Figures of one plan; tokens and query-key pairs where no other unit is named.

    Attributes
    ----------
    pairs_mean, pairs_max : float, int
        Query-key pairs of a rank: its share of the attention's compute.
    real_tokens_min, real_tokens_max : int
        Tokens of documents on a rank; padding fills each up to ``tokens_per_rank``.
    rounds, rounds_lower_bound, push_rounds : int
        Rounds that pull KV, the fewest that any schedule of the same messages needs, and rounds that push dKV.
    stages_max : int
        Most kernel stages of a rank, the local one included.
    kv_tokens : int
        KV tokens that all ranks receive together in forward.
    ring_kv_tokens : int
        The same for a zig-zag ring over the stream, in which every rank passes on all KV ``cp_size - 1`` times,
        whatever the documents need.
    traffic : tuple of TierTraffic
    held_kv_tokens_forward, held_kv_tokens_backward, held_dkv_tokens_backward : int
        Most tokens that a rank holds at once beside its own.
    forward_bytes, backward_bytes : int
        What the busiest rank allocates for them at most, in one layer.
    """

    cp_size: int
    ranks_per_node: int
    mask: str
    window: int | None
    tokens_per_rank: int
    block_size: int
    num_blocks: int
    num_documents: int
    real_tokens: int
    real_tokens_min: int
    real_tokens_max: int
    pairs_mean: float
    pairs_max: int
    rounds: int
    rounds_lower_bound: int
    push_rounds: int
    stages_max: int
    num_messages: int
    kv_tokens: int
    ring_kv_tokens: int
    traffic: tuple[TierTraffic, ...]
    held_kv_tokens_forward: int
    held_kv_tokens_backward: int
    held_dkv_tokens_backward: int
    forward_bytes: int
    backward_bytes: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    digest: str

    @property
    def compute_imbalance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 is perfect."""
        return self.pairs_max / self.pairs_mean if self.pairs_mean else 1.0

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def kv_megabytes(self) -> float:
        """KV that all ranks receive together in forward, MB per layer."""
        return self.kv_tokens * self.kv_token_bytes / 1e6

    @property
    def ring_megabytes(self) -> float:
        """KV that a zig-zag ring would move, MB per layer."""
        return self.ring_kv_tokens * self.kv_token_bytes / 1e6

    def to_dict(self) -> dict[str, Any]:
        """All figures, derived ones included, as JSON can hold them."""
        derived = ("compute_imbalance", "kv_token_bytes", "kv_megabytes", "ring_megabytes")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def report(plan: Plan, *, num_kv_heads: int = 8, head_dim: int = 128, dtype_bytes: int = 2) -> PlanReport:
    """Work out the figures of ``plan``.

    Parameters
    ----------
    plan : Plan
    num_kv_heads, head_dim, dtype_bytes : int
        KV heads that one rank holds (those of the model divided by the tensor-parallel size), elements per head, bytes
        per element: they turn tokens into bytes.
    """
    table, placement, messages = plan.table, plan.placement, plan.schedule.messages
    pairs = placement.rank_cost(table)
    real = np.bincount(
        placement.block_rank[table.fragment_block], weights=table.fragment_length, minlength=plan.cp_size
    ).astype(np.int64)
    rank_plans = [plan.rank_plan(rank) for rank in range(plan.cp_size)]
    kv_bytes, dkv_bytes = (2 * num_kv_heads * head_dim * size for size in (dtype_bytes, DKV_BYTES))
    forward, backward = [p.peak_forward for p in rank_plans], [p.peak_backward for p in rank_plans]
    _, _, _, block = transfer_arrays(plan.schedule)
    return PlanReport(
        cp_size=plan.cp_size,
        ranks_per_node=plan.ranks_per_node,
        mask=table.mask,
        window=table.window,
        tokens_per_rank=plan.tokens_per_rank,
        block_size=table.block_size,
        num_blocks=table.num_blocks,
        num_documents=table.document_length.size,
        real_tokens=table.real_tokens,
        real_tokens_min=int(real.min()),
        real_tokens_max=int(real.max()),
        pairs_mean=float(pairs.mean()),
        pairs_max=int(pairs.max()),
        rounds=plan.schedule.num_rounds,
        rounds_lower_bound=rounds_lower_bound(messages, plan.ranks_per_node),
        push_rounds=plan.push.num_rounds,
        stages_max=max(len(p.stages) for p in rank_plans),
        num_messages=len(messages),
        kv_tokens=int(_shared_tokens(table, block).sum()),
        ring_kv_tokens=(plan.cp_size - 1) * table.num_tokens,
        traffic=_traffic(plan),
        held_kv_tokens_forward=max(p.kv_tokens for p in forward),
        held_kv_tokens_backward=max(p.kv_tokens for p in backward),
        held_dkv_tokens_backward=max(p.dkv_tokens for p in backward),
        forward_bytes=max(p.kv_tokens * kv_bytes for p in forward),
        backward_bytes=max(p.kv_tokens * kv_bytes + p.dkv_tokens * dkv_bytes for p in backward),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
        digest=plan.digest,
    )


def _shared_tokens(table: BlockTable, block: IntArray) -> IntArray:
    return table.shared_stop[block] - table.shared_start[block]


def _traffic(plan: Plan) -> tuple[TierTraffic, ...]:
    """Traffic per tier; a network of one rank per node has one tier, and so has a single node."""
    _, src, dst, block = transfer_arrays(plan.schedule)
    tokens, tier = _shared_tokens(plan.table, block), tier_of(src, dst, plan.ranks_per_node)
    possible = (plan.ranks_per_node > 1, plan.ranks_per_node < plan.cp_size)
    traffic: list[TierTraffic] = []
    for t in (t for t in (0, 1) if possible[t]):
        received, sent = np.zeros(plan.cp_size, dtype=np.int64), np.zeros(plan.cp_size, dtype=np.int64)
        np.add.at(received, dst[tier == t], tokens[tier == t])
        np.add.at(sent, src[tier == t], tokens[tier == t])
        traffic.append(
            TierTraffic(TIERS[t], float(received.mean()), int(received.max()), float(sent.mean()), int(sent.max()))
        )
    return tuple(traffic)
