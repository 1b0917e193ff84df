"""The data path of megatron-core 0.16 to 0.18, which hands no boundaries of pretraining batches on.

There the rank that reads the data finds the end-of-document tokens and sends the boundaries to its tensor-parallel
group itself; first and last pipeline stages both read the data, so both know them. Up to 0.17 the batch is read inside
``get_batch_on_this_tp_rank`` and packed batches are cut by a function of their own, which builds ``PackedSeqParams``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.integration import batch as newer
from megatron_fcp.integration import session

Batch = newer.Batch


def wrap_get_batch_on_this_tp_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam of 0.18: the boundaries go to the tensor-parallel group beside the batch."""

    def get_batch_on_this_tp_rank(batch: Batch, *args: Any, **kwargs: Any) -> Batch:
        newer.take_turn()
        tokens = batch.get("tokens")  # of the rank that reads the data, on any stage
        result = original(batch, *args, **kwargs)
        send_boundaries(result, tokens)
        return result

    return get_batch_on_this_tp_rank


def wrap_get_batch_from_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam of 0.16 and 0.17: the same, where the function reads the batch itself."""

    def get_batch_on_this_tp_rank(data_iterator: Any, *args: Any, **kwargs: Any) -> Batch:
        newer.take_turn()
        result = original(data_iterator, *args, **kwargs)
        send_boundaries(result, result.get("tokens"))
        return result

    return get_batch_on_this_tp_rank


def send_boundaries(batch: Batch, tokens: torch.Tensor | None) -> None:
    """Set ``cu_seqlens`` and ``max_seqlen`` of end-of-document batches on every tensor-parallel rank.

    Parameters
    ----------
    batch : dict
        Sets ``cu_seqlens``, int32 [1, num_offsets], of the micro-batch as one stream of samples.
    tokens : Tensor, shape [micro_batch_size, seq_length], optional
        Used on the first rank of the tensor-parallel group only.
    """
    run = session.current()
    if run is None or run.settings.documents != "eod":
        return
    from megatron.core import parallel_state as mpu
    from megatron.training import get_args

    args: Any = get_args()
    num_samples, seq_length = args.micro_batch_size, run.settings.seq_length
    offsets = torch.empty(1, num_samples * (seq_length + 1), dtype=torch.int32, device=torch.cuda.current_device())
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert tokens is not None, "the first tensor-parallel rank of the first and the last stage reads the data"
        found: Batch = {"tokens": tokens}
        newer.add_boundaries(found, newer.eod_token(run))
        starts = torch.arange(num_samples, dtype=torch.int32, device=tokens.device)[:, None] * seq_length
        offsets.copy_((found["cu_seqlens"] + starts).reshape(1, -1))
    if mpu.get_tensor_model_parallel_world_size() > 1:
        group: Any = mpu.get_tensor_model_parallel_group()
        torch.distributed.broadcast(offsets, mpu.get_tensor_model_parallel_src_rank(), group=group)
    batch["cu_seqlens"], batch["cu_seqlens_padded"] = offsets, None
    batch["max_seqlen"] = offsets.diff(dim=1).amax(dim=1)


def wrap_get_thd_batch_on_this_cp_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam of 0.16 and 0.17: a context-parallel rank's part of a packed batch, and its parameters."""

    def get_thd_batch_on_this_cp_rank(
        batch: Batch, cu_seqlens: Any, cu_seqlens_padded: Any, max_seqlen: Any, *args: Any, **kwargs: Any
    ) -> tuple[Batch, Any]:
        run = session.current()
        if run is None:
            return original(batch, cu_seqlens, cu_seqlens_padded, max_seqlen, *args, **kwargs)
        from megatron.core.packed_seq_params import PackedSeqParams

        keys = tuple(batch)  # callers unpack the batch by position
        offsets: Any = cu_seqlens.reshape(-1)
        padded: Any = None if cu_seqlens_padded is None else cu_seqlens_padded.reshape(-1)
        batch.update(cu_seqlens=offsets, cu_seqlens_padded=padded)
        newer.take_share(batch, run)
        longest = int(max_seqlen[0].item())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return {key: batch[key] for key in keys}, packed

    return get_thd_batch_on_this_cp_rank
