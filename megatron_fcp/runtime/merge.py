"""Merge of partial attention outputs over disjoint sets of keys, in the stable log-sum-exp form.

With partial outputs ``o_i`` and log-sum-exps ``l_i`` of the scores, the whole is ``o = sum_i w_i o_i / sum_i w_i`` with
``w_i = exp(l_i - m)`` and ``m = max_i l_i`` (Milakov and Gimelshein, arXiv 1805.02867). Nothing overflows, and a
partial without any key (``l_i = -inf``) has weight 0. Numerator and denominator are divided only at the end: a running
log-sum-exp would be rounded at every merge, and the error of the output would grow with their number.

A *sink* is one more logit per head, of a key whose value is zero: it takes weight and gives nothing (off-by-one
softmax, https://www.evanmiller.org/attention-is-off-by-one.html; learnable in gpt-oss, arXiv 2508.10925). It joins
once, after all keys, so kernels need not know of it: their backward takes the log-sum-exp of the whole, sink included.
"""

from __future__ import annotations

import torch

from megatron_fcp.runtime.kernels.base import Rows


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: 16-bit partial sums ruin gradients
    (https://github.com/zhuzilin/ring-flash-attention/issues/42)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Accumulator:
    """Running sums of a rank's queries; :meth:`finish` turns them into output and log-sum-exp.

    Parameters
    ----------
    num_tokens, num_heads, head_dim_v : int
    like : Tensor
        Queries, for device and dtype.
    """

    def __init__(self, num_tokens: int, num_heads: int, head_dim_v: int, like: torch.Tensor) -> None:
        dtype = accumulator_dtype(like.dtype)
        self._sum = torch.zeros(num_tokens, num_heads, head_dim_v, dtype=dtype, device=like.device)
        self._weight = torch.zeros(num_tokens, num_heads, dtype=dtype, device=like.device)
        self._peak = torch.full((num_tokens, num_heads), -torch.inf, dtype=dtype, device=like.device)
        self._merged = False

    def add(self, rows: Rows, out: torch.Tensor, lse: torch.Tensor, *, first: bool = False) -> None:
        """Merge a partial result.

        Parameters
        ----------
        rows : Rows
            Query tokens that it belongs to, each at most once.
        out : Tensor, shape [num_rows, num_heads, head_dim_v]
            Any floating dtype; ignored where ``lse`` is -inf. Overwritten.
        lse : Tensor, shape [num_rows, num_heads]
        first : bool
            Nothing has been added to these rows yet: copy instead of merging.
        """
        lse = lse.to(self._peak.dtype)
        nothing = torch.isneginf(lse)
        out = out.to(self._sum.dtype).masked_fill_(nothing.unsqueeze(-1), 0.0)
        if first:
            rows.put(self._sum, out)
            rows.put(self._weight, (~nothing).to(lse.dtype))
            rows.put(self._peak, lse)
            return
        self._merged = True
        old_peak = rows.take(self._peak)
        new_peak = torch.maximum(old_peak, lse)
        shift = new_peak.masked_fill(torch.isneginf(new_peak), 0.0)  # -inf - -inf would be NaN
        old, new = torch.exp(old_peak - shift), torch.exp(lse - shift)
        rows.put(self._sum, (rows.take(self._sum) * old.unsqueeze(-1)).addcmul_(out, new.unsqueeze(-1)))
        rows.put(self._weight, (rows.take(self._weight) * old).add_(new))
        rows.put(self._peak, new_peak)

    def finish(self, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp; call it once.

        Parameters
        ----------
        sink : Tensor, optional, shape [num_heads]
            Logit of a key without value, which every query that sees a key sees as well.

        Returns
        -------
        out : Tensor, shape [num_tokens, num_heads, head_dim_v], float32 or float64
            Exactly 0 where no key was seen.
        lse : Tensor, shape [num_tokens, num_heads]
            Of all keys and the sink; -inf where no key was seen.
        """
        if sink is not None:
            self._add_sink(sink.to(self._peak.dtype))
        if not self._merged:  # weights are 1, or 0 where nothing was seen
            return self._sum, self._peak
        lse = self._peak + torch.log(self._weight)
        nothing = self._weight == 0
        return self._sum.div_(self._weight.masked_fill_(nothing, 1.0).unsqueeze(-1)), lse

    def _add_sink(self, sink: torch.Tensor) -> None:
        self._merged = True
        nothing = torch.isneginf(self._peak)
        peak = torch.maximum(self._peak, sink).masked_fill_(nothing, 0.0)
        scale = torch.exp(self._peak - peak)
        self._sum.mul_(scale.unsqueeze(-1))
        self._weight.mul_(scale).add_(torch.exp(sink - peak).masked_fill_(nothing, 0.0))
        self._peak = peak.masked_fill_(nothing, -torch.inf)


def sink_gradient(sink: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Gradient of a sink: less of it is more of the output, so it is ``-sum(p * (out @ dout))`` over the tokens.

    ``p = exp(sink - lse)`` is the weight that it takes.

    Parameters
    ----------
    sink : Tensor, shape [num_heads]
    dout, out : Tensor, shape [num_tokens, num_heads, head_dim_v]
    lse : Tensor, shape [num_tokens, num_heads]
        As :meth:`Accumulator.finish` gave it; rows of -inf, where ``dout`` may hold anything, do not count.

    Returns
    -------
    Tensor, shape [num_heads], dtype of ``lse``
        The same bits in every run.
    """
    nothing = torch.isneginf(lse)
    taken = torch.exp(sink.to(lse.dtype) - lse.masked_fill(nothing, torch.inf))
    lost = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1).masked_fill_(nothing, 0.0)
    return -(taken * lost).sum(0)
