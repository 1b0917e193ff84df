"""Measured kernel times as the planner's cost model: a peak rate and two half lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fcp.plan.arrays import FloatArray
from megatron_fcp.plan.work import StageWork
from megatron_fcp.simulate.kernels import work_shapes

HALF_LENGTHS = np.geomspace(1.0, 2048.0, 67)  # six per octave


@dataclass(frozen=True)
class KernelFit:
    """``seconds = calls * call_s + pair_s * sum over items of pairs * (1 + q_half / q) * (1 + kv_half / kv)``.

    All but the fixed time of a call is what :mod:`megatron_fcp.plan.cost` knows.

    Attributes
    ----------
    pair_s, q_half, kv_half : float
    call_s : float
    error : float
        Root mean square of the relative errors of the fit.
    """

    pair_s: float
    q_half: float
    kv_half: float
    call_s: float
    error: float


def fit_kernel(works: Sequence[Sequence[StageWork]], seconds: FloatArray, *, per_call: bool = True) -> KernelFit:
    """Least squares on relative errors: the two rates in closed form, the half lengths on a grid.

    Parameters
    ----------
    works : sequence of sequences of StageWork
        What was timed together: one kernel call, with a window up to three. None is empty.
    seconds : FloatArray, shape [len(works)]
        What each took; positive.
    per_call : bool
        Whether a call has a fixed time of its own; False for a cost model that has no place for one.
    """
    assert len(works) == seconds.size
    assert (seconds > 0).all()
    features = np.array([np.sum([_features(call) for call in calls], axis=0) for calls in works]) / seconds[:, None]
    fixed = np.array([len(calls) for calls in works]) / seconds
    best: KernelFit | None = None
    for q_half in HALF_LENGTHS:
        for kv_half in HALF_LENGTHS:
            moving = features @ np.array([1.0, q_half, kv_half, q_half * kv_half])
            pair_s, call_s = _two_rates(moving, fixed) if per_call else (_one_rate(moving), 0.0)
            error = float(np.sqrt(((moving * pair_s + fixed * call_s - 1) ** 2).mean()))
            if best is None or error < best.error:
                best = KernelFit(pair_s, float(q_half), float(kv_half), call_s, error)
    assert best is not None
    return best


def _two_rates(a: FloatArray, b: FloatArray) -> tuple[float, float]:
    """``x > 0`` and ``y >= 0`` that bring ``a x + b y`` nearest to 1."""
    aa, ab, bb = float(a @ a), float(a @ b), float(b @ b)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        x, y = (a.sum() * bb - b.sum() * ab) / determinant, (b.sum() * aa - a.sum() * ab) / determinant
        if x > 0 and y >= 0:
            return float(x), float(y)
    return _one_rate(a), 0.0


def _one_rate(a: FloatArray) -> float:
    """``x`` that brings ``a x`` nearest to 1."""
    return float(a.sum()) / float(a @ a)


def _features(work: StageWork) -> tuple[float, float, float, float]:
    """Sums over items of pairs, pairs / q, pairs / kv and pairs / (q * kv)."""
    pairs, q, kv = work_shapes(work)
    return float(pairs.sum()), float((pairs / q).sum()), float((pairs / kv).sum()), float((pairs / (q * kv)).sum())
