"""Stand-ins for the kernel packages: their exact signatures and conventions, on any device, in plain torch.

Each behaves as its package does where an adapter could go wrong: names and number of arguments, layout and dtype of the
log-sum-exp, order of the results, gradients written in place or returned, which offsets count, how a causal mask is
aligned where lengths differ. Rows that no sequence owns come out as NaN. What an adapter must not do (empty sequences,
ranges that are not packed, a head dim that the kernel lacks) fails.

Computation is in float64 for float64 inputs, which no real package takes, so that adapters can be compared exactly.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.runtime.kernels.packages import Package
from megatron_fcp.testing.kernel_signatures import SIGNATURES

Arguments = dict[str, Any]
Mask = tuple[str, int, int] | None  # alignment; keys before and after its own that a query sees, -1 for all of them


def parse_signature(parameters: str) -> inspect.Signature:
    """Signature of a parameter list such as ``"q, k, causal=False"``, with literal defaults, annotations dropped."""
    (function,) = ast.parse(f"def f({parameters}): pass").body
    assert isinstance(function, ast.FunctionDef)
    return signature_of(function)


def signature_of(function: ast.FunctionDef) -> inspect.Signature:
    """Signature of a function in a syntax tree, annotations dropped."""
    args = function.args
    assert not args.posonlyargs, "positional-only parameters are not expected"
    assert args.vararg is None, "*args are not expected"
    assert args.kwarg is None, "**kwargs are not expected"
    missing = [inspect.Parameter.empty] * (len(args.args) - len(args.defaults))
    defaults = [*missing, *(ast.literal_eval(d) for d in args.defaults)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(a.arg, kind, default=d) for a, d in zip(args.args, defaults)]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults):
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        parameters.append(inspect.Parameter(arg.arg, inspect.Parameter.KEYWORD_ONLY, default=value))
    return inspect.Signature(parameters)


def _function(name: str, parameters: str, body: Callable[[Arguments], Any]) -> Callable[..., Any]:
    signature = parse_signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return body(dict(bound.arguments))

    call.__name__ = name
    call.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return call


def stand_in(distribution: str, version: str) -> Package:
    """The stand-in for a release in :data:`SIGNATURES`."""
    forward, backward = _BODIES[distribution]
    signatures = SIGNATURES[distribution, version]
    constants: dict[str, Any] = {}
    if distribution == "transformer-engine":
        constants = {"backend": "F16_arbitrary_seqlen", "dtypes": _TeDtypes()}
    return Package(
        version, _function(*signatures.forward, forward), _function(*signatures.backward, backward), constants
    )


# arithmetic


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _hidden(rows: int, keys: int, mask: Mask, device: torch.device) -> torch.Tensor:
    assert mask is not None
    align, left, right = mask
    own = torch.arange(rows, device=device)[:, None] + (keys - rows if align == "bottom-right" else 0)
    key = torch.arange(keys, device=device)[None]
    after = (key > own + right) if right >= 0 else torch.zeros((), dtype=torch.bool, device=device)
    return after | (key < own - left) if left >= 0 else after


def _spans(a: Arguments, names: tuple[str, str, str, str], kv_rows: int) -> list[tuple[slice, slice]]:
    """Row and key ranges of every sequence, after the checks that a kernel does not make."""
    cu_q, cu_k, max_q, max_k = (a[name] for name in names)
    assert {cu_q.dtype, cu_k.dtype} == {torch.int32}, "cumulative lengths must be int32"
    assert {type(max_q), type(max_k)} == {int}, "a maximum length on the device costs a host sync"
    q, k = cu_q.tolist(), cu_k.tolist()
    assert q[0] == k[0] == 0
    assert q[-1] <= a["q"].shape[0]
    assert k[-1] <= kv_rows
    spans = [(slice(*s), slice(*t)) for s, t in zip(itertools.pairwise(q), itertools.pairwise(k))]
    assert all(s.stop > s.start and t.stop > t.start for s, t in spans), "an empty sequence reached a kernel"
    assert max_q == max(s.stop - s.start for s, _ in spans)
    assert max_k == max(t.stop - t.start for _, t in spans)
    return spans


def _attend(a: Arguments, spans: list[tuple[slice, slice]], scale: float, mask: Mask) -> tuple[Any, Any]:
    """(out [rows, heads, dim_v], lse [rows, heads]), NaN on rows that no sequence owns."""
    q, k, v = a["q"], a["k"], a["v"]
    dtype = _precision(q.dtype)
    group = q.shape[1] // k.shape[1]
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], torch.nan, dtype=dtype, device=q.device)
    for rows, keys in spans:
        key, value = (t[keys].to(dtype).repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].to(dtype), key) * scale
        if mask is not None:
            scores.masked_fill_(_hidden(scores.shape[1], scores.shape[2], mask, q.device), -torch.inf)
        part = scores.logsumexp(-1)
        weights = (scores - part.masked_fill(part.isneginf(), 0.0).unsqueeze(-1)).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype)
        lse[rows] = part.T
    return out, lse


def _differentiate(
    a: Arguments, dout: Any, out: Any, lse: Any, spans: list[tuple[slice, slice]], scale: float, mask: Mask
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) from the given out and lse [rows, heads], NaN on rows that no sequence owns."""
    q, k, v = a["q"], a["k"], a["v"]
    dtype = _precision(q.dtype)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, k, v))
    for rows, keys in spans:
        query, grad = q[rows].to(dtype), dout[rows].to(dtype)
        key, value = (t[keys].to(dtype).repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        weights = (scores - lse[rows].T.to(dtype).unsqueeze(-1)).exp()
        if mask is not None:
            weights.masked_fill_(_hidden(scores.shape[1], scores.shape[2], mask, q.device), 0.0)
        delta = (grad * out[rows].to(dtype)).sum(-1).T.unsqueeze(-1)
        dscores = weights * (torch.einsum("qhd,khd->hqk", grad, value) - delta) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", dscores, key).to(q.dtype)
        for total, part in (
            (dk, torch.einsum("hqk,qhd->khd", dscores, query)),
            (dv, torch.einsum("hqk,qhd->khd", weights, grad)),
        ):
            total[keys] = part.unflatten(1, (k.shape[1], group)).sum(2).to(total.dtype)
    return dq, dk, dv


def _check_flash(a: Arguments, largest: int, *, equal_dims: bool) -> None:
    q, k, v = a["q"], a["k"], a["v"]
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "the last dimension must be contiguous"
    assert q.shape[2] == k.shape[2]
    assert k.shape[:2] == v.shape[:2]
    assert not q.shape[1] % k.shape[1]
    assert q.shape[2] % 8 == 0, "head dim"
    assert max(q.shape[2], v.shape[2]) <= largest, "head dim"
    assert not equal_dims or v.shape[2] == q.shape[2], "one head dim for q, k and v"
    assert a.get("dropout_p", 0.0) == 0.0, "no dropout"


def _packed_lse(a: Arguments, name: str) -> Any:
    """[heads, rows] as flash attention keeps it -> [rows, heads]."""
    lse, q = a[name], a["q"]
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    assert lse.dtype == _precision(q.dtype)
    return lse.T


# flash-attn 2, flash_attn_3

_FLASH = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _flash_2_forward(a: Arguments) -> Any:
    _check_flash(a, 256, equal_dims=True)
    out, lse = _attend(a, _spans(a, _FLASH, len(a["k"])), a["softmax_scale"], _bottom_right(a))
    return out, lse.T.contiguous(), torch.empty(0), torch.zeros(2, dtype=torch.int64)


def _flash_2_backward(a: Arguments) -> Any:
    _check_flash(a, 256, equal_dims=True)
    assert a["deterministic"] is True
    assert a["alibi_slopes"] is None
    assert a["softcap"] == 0.0
    return _in_place(a)


def _flash_3_forward(a: Arguments) -> Any:
    _check_flash(a, 256, equal_dims=False)
    assert a["num_splits"] == 1, "splits are summed in any order"
    out, lse = _attend(a, _spans(a, _FLASH, len(a["k"])), a["softmax_scale"], _bottom_right(a))
    return out, lse.T.contiguous(), torch.empty(0), torch.empty(0)


def _flash_3_backward(a: Arguments) -> Any:
    _check_flash(a, 255, equal_dims=False)
    assert a["deterministic"] is True
    return _in_place(a)


def _bottom_right(a: Arguments) -> Mask:
    """A causal mask closes the right side of the window, whatever it was; one argument or two say what it is."""
    left, right = a["window_size"] if "window_size" in a else (a["window_size_left"], a["window_size_right"])
    left, right = (-1 if side is None else side for side in (left, right))
    if a["causal" if "causal" in a else "is_causal"]:
        right = 0
    return None if left < 0 and right < 0 else ("bottom-right", left, right)


def _in_place(a: Arguments) -> Any:
    """Gradients into the tensors given; rows that no sequence owns keep what they hold."""
    spans = _spans(a, _FLASH, len(a["k"]))
    lse = _packed_lse(a, "softmax_lse")
    grads = _differentiate(a, a["dout"], a["out"], lse, spans, a["softmax_scale"], _bottom_right(a))
    for name, like, grad in zip(("dq", "dk", "dv"), ("q", "k", "v"), grads):
        assert a[name].shape == a[like].shape
        assert a[name].dtype == a[like].dtype
        assert a[name].stride(-1) == 1
        a[name].copy_(torch.where(grad.isnan(), a[name], grad))
    return torch.empty(0)


# flash-attn-4


def _flash_4_forward(a: Arguments) -> Any:
    _check_flash(a, 256, equal_dims=False)
    assert a["num_splits"] == 1
    assert all(a[n] is None for n in ("qv", "page_table", "learnable_sink"))
    out, lse = _attend(a, _spans(a, _FLASH, len(a["k"])), a["softmax_scale"], _bottom_right(a))
    rest = (None, None, None) if "aux_scalars" in a else ()  # later releases return more
    return out, lse.T.contiguous() if a["return_lse"] else None, *rest


def _flash_4_backward(a: Arguments) -> Any:
    _check_flash(a, 256, equal_dims=False)
    assert a["deterministic"] is True
    assert a["softcap"] == 0.0
    spans = _spans(a, _FLASH, len(a["k"]))
    lse = _packed_lse(a, "lse")
    return _differentiate(a, a["dout"], a["out"], lse, spans, a["softmax_scale"], _bottom_right(a))


# Transformer Engine


class _TeDtypes:
    """``TE_DType``: Transformer Engine's name of a torch dtype, by subscription."""

    def __getitem__(self, dtype: torch.dtype) -> tuple[str, torch.dtype]:
        return "TE_DType", dtype


def _te_spans(a: Arguments) -> list[tuple[slice, slice]]:
    """Lengths come from ``cu_seqlens``, offsets from their padded twins, without which cuDNN reads a null pointer."""
    assert a["cu_seqlens_q_padded"] is not None
    assert a["cu_seqlens_kv_padded"] is not None
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    spans = []
    offsets = zip(a["cu_seqlens_q_padded"].tolist(), a["cu_seqlens_kv_padded"].tolist())
    for (rows, keys), (q, k) in zip(_spans(a, names, len(a["k"])), offsets):
        spans.append((slice(q, q + rows.stop - rows.start), slice(k, k + keys.stop - keys.start)))
    return spans


def _check_te(a: Arguments) -> Mask:
    """Checks of both directions; the mask."""
    assert all(a[n].is_contiguous() for n in ("q", "k", "v")), "thd_thd_thd describes contiguous tensors"
    assert a["q"].shape[2] % 8 == a["v"].shape[2] % 8 == 0, "head dim"
    assert a["qkv_layout"] == "thd_thd_thd"
    assert a.get("o_format", "thd") == "thd"
    assert a["fused_attention_backend"] == "F16_arbitrary_seqlen"
    assert a["fake_dtype"] == a["q"].dtype
    assert a["attn_bias_type"] == "no_bias"
    assert a["softmax_type"] == "vanilla"
    assert a["dropout"] == 0.0
    alignments = {"padding": None, "padding_causal": "top-left", "padding_causal_bottom_right": "bottom-right"}
    align, (left, right) = alignments[a["attn_mask_type"]], a["window_size"]
    assert a.get("bottom_right_diagonal") is None, "it follows from the type of the mask"
    if align is None:
        assert (left, right) == (-1, -1)
        return None
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    assert align == "top-left" or a["max_seqlen_q"] <= a["max_seqlen_kv"]
    return align, left, 0


def _te_forward(a: Arguments) -> Any:
    mask = _check_te(a)
    out, lse = _attend(a, _te_spans(a), a["attn_scale"], mask)
    return out, [lse.unsqueeze(-1), torch.zeros(2, dtype=torch.int64)] if a["is_training"] else None


def _te_backward(a: Arguments) -> Any:
    mask = _check_te(a)
    assert a.get("do_format", "thd") == "thd"
    assert a.get("dqkv_layout", "thd_thd_thd") == "thd_thd_thd"
    assert a.get("dqkv_dtype", ("TE_DType", a["q"].dtype)) == ("TE_DType", a["q"].dtype)
    stats, state = a["aux_ctx_tensors"]
    assert stats.shape == (*a["q"].shape[:2], 1)
    assert stats.is_contiguous()
    assert stats.dtype == _precision(a["q"].dtype)
    assert state.shape == (2,)
    assert state.dtype == torch.int64
    assert a["o"].is_contiguous()
    assert a["d_o"].is_contiguous()
    return [*_differentiate(a, a["d_o"], a["o"], stats.squeeze(-1), _te_spans(a), a["attn_scale"], mask), None]


# PyTorch's operators

ATEN_FORWARD = (
    "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, "
    "scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, "
    "num_splits=None"
)
ATEN_BACKWARD = (
    "grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, "
    "unused, *, scale=None, window_size_left=None, window_size_right=None"
)
_ATEN = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")


def _aten_names(a: Arguments) -> Arguments:
    return a | {"q": a["query"], "k": a["key"], "v": a["value"], "causal": a["is_causal"]}


def _aten_forward(a: Arguments) -> Any:
    a = _aten_names(a)
    _check_flash(a, 256, equal_dims=True)
    out, lse = _attend(a, _spans(a, _ATEN, len(a["k"])), a["scale"], _bottom_right(a))
    return out, lse.T.contiguous(), torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _aten_backward(a: Arguments) -> Any:
    a = _aten_names(a)
    _check_flash(a, 256, equal_dims=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    spans = _spans(a, _ATEN, len(a["k"]))
    return _differentiate(a, a["grad_out"], a["out"], _packed_lse(a, "logsumexp"), spans, a["scale"], _bottom_right(a))


def aten_stand_in() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``aten::_flash_attention_forward`` and ``_backward``."""
    return (
        _function("_flash_attention_forward", ATEN_FORWARD, _aten_forward),
        _function("_flash_attention_backward", ATEN_BACKWARD, _aten_backward),
    )


_BODIES: dict[str, tuple[Callable[[Arguments], Any], Callable[[Arguments], Any]]] = {
    "flash-attn": (_flash_2_forward, _flash_2_backward),
    "flash_attn_3": (_flash_3_forward, _flash_3_backward),
    "flash-attn-4": (_flash_4_forward, _flash_4_backward),
    "transformer-engine": (_te_forward, _te_backward),
}
