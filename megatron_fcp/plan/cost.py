"""The few numbers a planner needs about hardware: what a piece of attention and a transfer take.

Work on ``nq`` queries and ``nk`` keys of one document in one kernel call runs at ``peak * nq / (nq + q_half) * nk / (nk
+ kv_half)``, so that ``pairs = nq * nk`` take ``(nq + q_half) * (nk + kv_half)`` pair times: a rectangle costs its area
and a rim. Everything that cuts a document adds rim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import FloatArray

MOST_TOKEN, MOST_MESSAGE = 1 << 20, 1 << 30
BACKWARD_PAIR = 3  # times a pair's time in forward: 2.5 times the FLOP at 0.85 of the rate


@dataclass(frozen=True)
class PushPrices:
    """What moving partial dKV costs in backward, in query-key pairs that a rank attends to meanwhile.

    All that push rounds depend on of the hardware; whole numbers, so that every machine derives the same rounds. The
    defaults are those of an H100 with 45 GB/s and 10 us between nodes and 300 GB/s inside, for Llama-3-70B's heads.
    Links carry rounds in their order: where a price is off by a quarter, backward takes up to a tenth longer.

    Attributes
    ----------
    token, inside : int
        Of a token of fp32 dKV between nodes and inside one.
    message : int
        Of a message by itself.

    Raises
    ------
    ValueError
        If a price is out of range.
    """

    token: int = 1222
    inside: int = 183
    message: int = 67139

    def __post_init__(self) -> None:
        for name, price, high in (
            ("token between nodes", self.token, MOST_TOKEN),
            ("token inside a node", self.inside, MOST_TOKEN),
            ("message", self.message, MOST_MESSAGE),
        ):
            if not 1 <= price <= high:
                raise ValueError(f"a pushed {name} must cost 1 to {high} pairs, got {price}")


@dataclass(frozen=True)
class CostModel:
    """Prices in seconds.

    Attributes
    ----------
    pair_s : float
        Seconds per query-key pair (all heads of the rank) at the kernel's peak rate.
    q_half, kv_half : float
        Lengths at which a kernel reaches half of its peak rate.
    kv_bytes : int
        Bytes of K and V per token.
    inter_bytes_per_s, intra_bytes_per_s : float
        Bandwidth per rank and direction between nodes, and inside a node.
    latency_s : float
        Fixed cost of a transfer.
    ranks_per_node : int
        1 means one flat network.
    speeds : tuple of float
        Compute speed of each rank relative to ``pair_s``, by rank; empty: all 1. Slow ranks get less work.
    """

    pair_s: float
    q_half: float
    kv_half: float
    kv_bytes: int
    inter_bytes_per_s: float
    intra_bytes_per_s: float
    latency_s: float
    ranks_per_node: int
    speeds: tuple[float, ...] = ()

    def speed_of_ranks(self, cp_size: int) -> FloatArray:
        """Speed of every rank, shape [cp_size].

        Raises
        ------
        ValueError
            If speeds are given for another number of ranks.
        """
        if not self.speeds:
            return np.ones(cp_size)
        if len(self.speeds) != cp_size:
            raise ValueError(
                f"the hardware has speeds for {len(self.speeds)} ranks, but --context-parallel-size is {cp_size}; give "
                "one speed per rank, or none"
            )
        return np.array(self.speeds)

    def push_prices(self) -> PushPrices:
        """What pushes cost beside backward's attention."""
        pair_s = BACKWARD_PAIR * self.pair_s
        token, inside = (2 * self.token_s(tier) / pair_s for tier in (1, 0))  # dKV is fp32, KV has half of that
        prices = ((token, MOST_TOKEN), (inside, MOST_TOKEN), (self.latency_s / pair_s, MOST_MESSAGE))
        return PushPrices(*(max(round(min(price, most)), 1) for price, most in prices))

    def token_s(self, tier: int) -> float:
        """Seconds per KV token on tier 0 (inside a node) or 1 (between nodes), without the latency."""
        return self.kv_bytes / (self.inter_bytes_per_s if tier else self.intra_bytes_per_s)
