"""Merging partial attention: exact, stable, and no worse for many parts."""

import numpy as np
import pytest
import torch

from megatron_fcp.runtime.kernels import Rows
from megatron_fcp.runtime.merge import Accumulator

pytestmark = pytest.mark.runtime


def merged(scores: torch.Tensor, v: torch.Tensor, parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``scores`` [rows, heads, keys] merged from ``parts`` runs of keys, each computed in ``dtype``."""
    acc = Accumulator(scores.shape[0], scores.shape[1], v.shape[2], like=torch.empty(0, dtype=dtype))
    rows = Rows.of(np.arange(scores.shape[0]), scores.device)
    for i, keys in enumerate(torch.arange(scores.shape[2]).tensor_split(parts)):
        part = scores[..., keys].to(dtype)
        weights = part.softmax(-1)
        out = torch.einsum("qhk,khd->qhd", weights, v[keys].to(dtype))
        acc.add(rows, out, part.logsumexp(-1), first=i == 0)
    return acc.finish()


@pytest.mark.parametrize("parts", [1, 2, 7, 64])
def test_merge_equals_the_whole_in_fp64(parts: int) -> None:
    g = torch.Generator().manual_seed(parts)
    scores = torch.randn(5, 3, 64, generator=g, dtype=torch.float64) * 3
    v = torch.randn(64, 3, 4, generator=g, dtype=torch.float64)
    out, lse = merged(scores, v, parts, torch.float64)
    want = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-14)


def test_fp32_error_does_not_grow_with_the_number_of_parts() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 2, 512, generator=g, dtype=torch.float64) * 2
    v = torch.randn(512, 2, 8, generator=g, dtype=torch.float64)
    want = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    errors = {p: float((merged(scores, v, p, torch.float32)[0] - want).abs().max()) for p in (1, 4, 32, 256)}
    assert max(errors.values()) < 2 * errors[1], errors
    assert errors[1] < 1e-6


@pytest.mark.parametrize("logit", [80.0, -80.0, 5000.0])
def test_large_logits_do_not_overflow(logit: float) -> None:
    g = torch.Generator().manual_seed(1)
    scores = torch.randn(4, 1, 16, generator=g, dtype=torch.float64)
    scores[..., 8:] += logit
    v = torch.randn(16, 1, 4, generator=g, dtype=torch.float64)
    out, _ = merged(scores, v, 2, torch.float32)
    want = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-3 if abs(logit) > 1000 else 1e-5)


def test_parts_without_a_key_weigh_nothing_even_if_their_output_is_nan() -> None:
    nothing = torch.full((2, 1), -torch.inf)
    rows = Rows.of(np.array([0, 2]), torch.device("cpu"))
    out, lse = torch.tensor([[[3.0]], [[4.0]]]), torch.tensor([[1.0], [2.0]])
    for order in ("nothing first", "nothing last", "only nothing"):
        acc = Accumulator(3, 1, 1, like=torch.empty(0))
        if order != "nothing last":
            acc.add(rows, torch.full((2, 1, 1), torch.nan), nothing, first=True)
        if order != "only nothing":
            acc.add(rows, out.clone(), lse.clone(), first=order == "nothing last")
        acc.add(rows, torch.full((2, 1, 1), torch.nan), nothing)
        total, total_lse = acc.finish()
        if order == "only nothing":
            assert total.flatten().tolist() == [0, 0, 0]
            assert total_lse.isneginf().all()
        else:
            assert total.flatten().tolist() == [3, 0, 4]
            assert total_lse.flatten().tolist() == [1, -torch.inf, 2]


def test_accumulators_are_fp32_for_16_bit_and_fp64_for_fp64() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        out, lse = Accumulator(1, 1, 1, like=torch.empty(0, dtype=dtype)).finish()
        assert (out.dtype, lse.dtype) == (wide, wide)
