"""Draws of document lengths to plan, price and compare with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.simulate.histograms import HISTOGRAMS

SHORTEST, LONGEST = 16, 524288  # tokens; arXiv 2605.08524 evaluates documents of up to 512K

Draw = Callable[[np.random.Generator], float]


def _lognormal(mean: float, sigma: float) -> Draw:
    """Lognormal whose token-weighted median is ``mean`` (half of all tokens lie in shorter documents)."""
    return lambda rng: float(rng.lognormal(np.log(mean) - sigma**2, sigma))


def _bimodal(rng: np.random.Generator) -> float:
    if rng.random() < 0.002:
        return float(rng.uniform(LONGEST / 2, LONGEST))
    return float(rng.lognormal(np.log(2048) - 0.25, 0.5))


def _from_histogram(name: str) -> Draw:
    bins = np.array(HISTOGRAMS[name], dtype=float)
    weight = bins[:, 2] / bins[:, 2].sum()

    def draw(rng: np.random.Generator) -> float:
        low, high, _ = bins[rng.choice(len(bins), p=weight)]
        return float(rng.uniform(low + 1, high))

    return draw


# The lognormals put half of all tokens into documents under 4K, as arXiv 2605.08524 reports of its internal trace; its
# weak-tail and bimodal parameters are unpublished, so these are ours.
_DRAWS: dict[str, Draw] = {
    "longtail": _lognormal(4096, 1.8),
    "weaktail": _lognormal(4096, 1.0),
    "bimodal": _bimodal,
    **{name: _from_histogram(name) for name in HISTOGRAMS},
    "uniform-512k": lambda _: LONGEST,
    "uniform-4k": lambda _: 4096,
}
WORKLOADS = tuple(_DRAWS)


def draw_lengths(workload: str, *, num_tokens: int, seed: int) -> IntArray:
    """Document lengths that fill a stream of ``num_tokens`` tokens exactly, shape [num_documents], shuffled.

    Parameters
    ----------
    workload : str
        One of :data:`WORKLOADS`.
    num_tokens : int
        The last document drawn is cut to fit. Documents of the histogram workloads are capped at a quarter of it.
    seed : int

    Raises
    ------
    ValueError
        If the workload is unknown or ``num_tokens`` is not positive.
    """
    if workload not in _DRAWS:
        raise ValueError(f"workload {workload!r} is unknown; choose one of {', '.join(WORKLOADS)}")
    if num_tokens < 1:
        raise ValueError(f"a workload needs at least 1 token, got {num_tokens}")
    rng = np.random.default_rng(seed)
    draw = _DRAWS[workload]
    cap = max(SHORTEST, num_tokens // 4) if workload in HISTOGRAMS else LONGEST
    lengths: list[int] = []
    left = num_tokens
    while left > 0:
        length = min(int(min(max(min(draw(rng), cap), SHORTEST), LONGEST)), left)
        lengths.append(length)
        left -= length
    out = np.array(lengths, dtype=np.int64)
    rng.shuffle(out)
    return out
