"""Merge of partial attention outputs over disjoint sets of keys, in the stable log-sum-exp form.

With partial outputs ``o_i`` and log-sum-exps ``l_i`` of the scores, the whole is ``l = log(sum_i exp(l_i))`` and
``o = sum_i exp(l_i - l) o_i`` (Milakov and Gimelshein, arXiv 1805.02867). Only differences of log-sum-exps are
exponentiated, so nothing overflows, and a partial without any key (``l_i = -inf``) has weight 0.
"""

from __future__ import annotations

import torch

from megatron_fcp.runtime.kernels.base import Rows


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: 16-bit partial sums ruin gradients
    (https://github.com/zhuzilin/ring-flash-attention/issues/42)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Accumulator:
    """Running output and log-sum-exp of a rank's queries.

    Attributes
    ----------
    out : Tensor, shape [num_tokens, num_heads, head_dim_v], float32 or float64
        Zero where no key was seen yet.
    lse : Tensor, shape [num_tokens, num_heads], float32 or float64
        -inf where no key was seen yet.
    """

    def __init__(self, num_tokens: int, num_heads: int, head_dim_v: int, like: torch.Tensor) -> None:
        dtype = accumulator_dtype(like.dtype)
        self.out = torch.zeros(num_tokens, num_heads, head_dim_v, dtype=dtype, device=like.device)
        self.lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=dtype, device=like.device)

    def add(self, rows: Rows, out: torch.Tensor, lse: torch.Tensor, *, first: bool = False) -> None:
        """Merge a partial result.

        Parameters
        ----------
        rows : Rows
            Query tokens that it belongs to, each at most once.
        out : Tensor, shape [num_rows, num_heads, head_dim_v]
            Any floating dtype; ignored where ``lse`` is -inf.
        lse : Tensor, shape [num_rows, num_heads]
        first : bool
            Nothing has been added to these rows yet: copy instead of merging.
        """
        lse = lse.to(self.lse.dtype)
        out = out.to(self.out.dtype).masked_fill_(torch.isneginf(lse).unsqueeze(-1), 0.0)
        if first:
            rows.put(self.out, out)
            rows.put(self.lse, lse)
            return
        old_lse = rows.take(self.lse)
        new_lse = torch.logaddexp(old_lse, lse)
        shift = new_lse.masked_fill(torch.isneginf(new_lse), 0.0)  # -inf - -inf would be NaN
        old_weight = torch.exp(old_lse - shift).unsqueeze(-1)
        merged = (rows.take(self.out) * old_weight).addcmul_(out, torch.exp(lse - shift).unsqueeze(-1))
        rows.put(self.out, merged)
        rows.put(self.lse, new_lse)
