"""The few numbers a planner needs about hardware: what a piece of attention and a transfer take.

Work on ``nq`` queries and ``nk`` keys of one document in one kernel call runs at ``peak * nq / (nq + q_half) * nk / (nk
+ kv_half)``, so that ``pairs = nq * nk`` take ``(nq + q_half) * (nk + kv_half)`` pair times: a rectangle costs its area
and a rim. Everything that cuts a document adds rim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import FloatArray

LEAST_TOKEN, MOST_TOKEN = 1 << 10, 1 << 20
LEAST_MESSAGE, MOST_MESSAGE = 1 << 16, 1 << 30
BACKWARD_PAIR = 3  # times a pair's time in forward: 2.5 times the FLOP at 0.85 of the rate


@dataclass(frozen=True)
class PushPrices:
    """What moving partial dKV costs in backward, in query-key pairs that a rank attends to meanwhile.

    All that push rounds depend on of the hardware: powers of two, so that every machine derives the same rounds, and
    none below the defaults, which are those of an H100 with 45 GB/s and 10 us between nodes for Llama-3-70B's heads.

    Attributes
    ----------
    token : int
        Of a token of fp32 dKV between nodes; inside a node it costs an eighth.
    message : int
        Of a message by itself.

    Raises
    ------
    ValueError
        If a price is out of range.
    """

    token: int = LEAST_TOKEN
    message: int = LEAST_MESSAGE

    def __post_init__(self) -> None:
        for name, price, low, high in (
            ("token", self.token, LEAST_TOKEN, MOST_TOKEN),
            ("message", self.message, LEAST_MESSAGE, MOST_MESSAGE),
        ):
            if not low <= price <= high:
                raise ValueError(f"a pushed {name} must cost {low} to {high} pairs, got {price}")


def _power_of_two(value: float, low: int, high: int) -> int:
    """The power of two nearest to ``value``, as a factor, from ``low`` to ``high``, themselves such powers."""
    power = low
    while power < high and value * value > 2.0 * power * power:
        power *= 2
    return power


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
        return PushPrices(
            _power_of_two(2 * self.token_s(1) / pair_s, LEAST_TOKEN, MOST_TOKEN),  # dKV is fp32, KV has half of that
            _power_of_two(self.latency_s / pair_s, LEAST_MESSAGE, MOST_MESSAGE),
        )

    def token_s(self, tier: int) -> float:
        """Seconds per KV token on tier 0 (inside a node) or 1 (between nodes), without the latency."""
        return self.kv_bytes / (self.inter_bytes_per_s if tier else self.intra_bytes_per_s)
