"""The plan of a batch rides on its ``PackedSeqParams``.

Megatron hands that object from the forward step to every layer and keeps it for recomputation, so the plan is where
its batch is, however many batches a pipeline schedule has in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_fcp.integration import session
from megatron_fcp.integration.layouts import Boundaries, Layout

QKV_FORMAT = "fcp"
_ATTRIBUTE = "fcp_layout"


def wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: a packed batch gets its layout when its parameters are built.

    Every rank of the context-parallel group builds them for every batch, in the same order, on every pipeline stage:
    where ranks were given different boundaries, all of them stop here.
    """

    def __post_init__(self: Any) -> None:
        original(self)
        _attach_layout(self)

    return __post_init__


def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam of megatron-core 0.16, whose parameters have no ``__post_init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _attach_layout(self)

    return __init__


def _attach_layout(params: Any) -> None:
    run = session.current()
    if run is None or params.cu_seqlens_q is None or params.qkv_format not in ("thd", QKV_FORMAT):
        return
    offsets = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    group = session.cp_group()
    boundaries = Boundaries.of_packed(offsets, run.settings.seq_length)
    layout = run.layouts.get(boundaries, group.rank())
    run.communicator(group).agree(layout.digest, "the documents of a batch")
    setattr(params, _ATTRIBUTE, layout)
    # Not "thd": attention then keeps [sequence, batch, heads, channels] and RoPE takes one frequency per token.
    params.qkv_format = QKV_FORMAT


def layout_of(packed_seq_params: Any, local_tokens: int, num_samples: int, rank: int) -> Layout:
    """The layout of a batch, for whoever sees its hidden states.

    Parameters
    ----------
    packed_seq_params : PackedSeqParams or None
        None for a batch without document boundaries.
    local_tokens : int
        Tokens of the batch on this rank.
    num_samples : int
        Size of the batch dimension; used only without ``packed_seq_params``.
    rank : int
        Rank in the context-parallel group.

    Raises
    ------
    RuntimeError
        If boundaries are missing where the batch has some, or those given are not of ``local_tokens``.
    """
    run = session.required()
    if packed_seq_params is not None:
        layout = getattr(packed_seq_params, _ATTRIBUTE, None)
        if layout is None:
            raise RuntimeError(
                "this batch's PackedSeqParams were built before megatron_fcp.register() or outside the run; "
                "build them in the forward step from the batch's cu_seqlens"
            )
    else:
        if run.settings.documents != "none":
            raise RuntimeError(
                "this batch has document boundaries but the model was called without packed_seq_params; "
                "pass PackedSeqParams built from the batch's cu_seqlens, as Megatron's pretrain_gpt.py does"
            )
        seq_length = local_tokens * run.settings.cp_size // num_samples
        layout = run.layouts.get(Boundaries.of_samples(num_samples, seq_length), rank)
    if layout.index.size != local_tokens:
        raise RuntimeError(
            f"this rank holds {local_tokens} tokens of a batch whose cu_seqlens end at "
            f"{layout.boundaries.offsets[-1]}, which gives {layout.index.size} tokens to each of "
            f"{run.settings.cp_size} ranks"
        )
    return layout
