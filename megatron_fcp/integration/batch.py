"""The data path: boundaries of every batch on every rank, and each rank's tokens.

::

    data loader (tensor-parallel rank 0 of every pipeline stage)
        | boundaries_from_tokens      end-of-document tokens become cu_seqlens
    get_batch_on_this_tp_rank         Megatron broadcasts the batch, cu_seqlens included
    flatten_batch_for_packed_sequences
    get_batch_on_this_cp_rank         the group compares notes; each rank takes its tokens
    PackedSeqParams(cu_seqlens)       the plan rides here from now on (packed.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.integration import session
from megatron_fcp.integration.end_of_document import end_of_document
from megatron_fcp.integration.layouts import Boundaries, Layout
from megatron_fcp.integration.session import Session

SEQUENCE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
Batch = dict[str, Any]
_MIX = 0x9E3779B97F4A7C1  # digits of the golden ratio: neighbouring places get unrelated weights


def wrap_dataset_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: with end-of-document boundaries Megatron's data set leaves positions and boundaries alone.

    ``--dataloader-inter-document-masking`` is on then, because it makes Megatron hand ``cu_seqlens`` to every rank;
    but boundaries and positions are those of ``--reset-attention-mask`` and ``--reset-position-ids``.
    """

    def __post_init__(self: Any) -> None:
        run = session.current()
        if run is not None and run.settings.documents == "eod":
            self.inter_document_masking = False
        original(self)
        if run is not None and run.settings.documents == "eod":
            run.eod_token = end_of_document(self)

    return __post_init__


def wrap_dataset_builder(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: every pipeline stage reads the data set where document boundaries matter, as it does for ``--sft``."""

    def __init__(self: Any, cls: Any, sizes: Any, is_built_on_rank: Callable[[], bool], config: Any) -> None:
        from megatron.core import parallel_state

        run = session.current()
        if run is not None and run.settings.documents != "none":
            asked = is_built_on_rank
            is_built_on_rank = lambda: asked() or parallel_state.get_tensor_model_parallel_rank() == 0  # noqa: E731
        original(self, cls, sizes, is_built_on_rank, config)

    return __init__


def wrap_get_batch_on_this_tp_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: the rank that reads the data adds ``cu_seqlens`` before Megatron broadcasts the batch."""

    def get_batch_on_this_tp_rank(batch: Batch, *args: Any, **kwargs: Any) -> Batch:
        run = session.current()
        take_turn()
        if run is not None and run.settings.documents == "eod" and batch.get("tokens") is not None:
            add_boundaries(batch, eod_token(run))
        return original(batch, *args, **kwargs)

    return get_batch_on_this_tp_rank


def take_turn() -> None:
    """Once per batch on every rank of a tensor-parallel group: what was read ahead is told, or heard."""
    run = session.current()
    if run is not None and run.ahead is not None:
        run.ahead.take_turn()


def eod_token(run: Session) -> int:
    """End-of-document token of the run's data set."""
    if run.eod_token is None:
        raise ValueError(
            "--reset-attention-mask with --context-parallel-backend fcp needs the end-of-document token, and no "
            "GPTDatasetConfig with a tokenizer was built; pass cu_seqlens in the batch instead "
            "(--dataloader-inter-document-masking)"
        )
    return run.eod_token


def add_boundaries(batch: Batch, eod_token: int) -> None:
    """Set ``cu_seqlens`` and ``max_seqlen`` of a batch from its end-of-document tokens.

    A document ends with its end-of-document token, as in Megatron's ``_get_ltor_masks_and_position_ids``.

    Parameters
    ----------
    batch : dict
        ``tokens`` has shape [micro_batch_size, seq_length]. Sets ``cu_seqlens``, int32 [micro_batch_size,
        seq_length + 1], each row filled up with ``seq_length``, and ``max_seqlen``, int32 [micro_batch_size]: the
        shapes of Megatron's own packed samples.
    eod_token : int
    """
    tokens = batch["tokens"]
    num_samples, seq_length = tokens.shape
    ends = torch.arange(1, seq_length + 1, device=tokens.device).expand(num_samples, -1)
    last = torch.full_like(ends, seq_length)
    offsets = torch.where(tokens == eod_token, ends, last).sort(dim=1).values
    cu_seqlens = torch.cat([torch.zeros_like(offsets[:, :1]), offsets], dim=1).to(torch.int32)
    batch["cu_seqlens"] = cu_seqlens
    batch["cu_seqlens_padded"] = None
    batch["max_seqlen"] = cu_seqlens.diff(dim=1).amax(dim=1)


def wrap_get_batch_on_this_cp_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: the tokens of a context-parallel rank."""

    def get_batch_on_this_cp_rank(batch: Batch, *args: Any, **kwargs: Any) -> Batch:
        run = session.current()
        if run is None:
            return original(batch, *args, **kwargs)
        if batch.get("cu_seqlens") is None and not run.settings.resident:
            check_batch(batch, run)
            return original(batch, *args, **kwargs)  # Megatron's own sharding of whole samples
        return take_share(batch, run)

    return get_batch_on_this_cp_rank


def check_batch(batch: Batch, run: Session) -> None:
    """Raise unless FCP's attention is there and the whole group was given this batch; drop its mask."""
    from megatron.core import parallel_state

    from megatron_fcp.integration.core_attention import HOW_TO_BUILD  # imports Megatron

    if not run.attention_layers and parallel_state.get_pipeline_model_parallel_world_size() == 1:
        raise RuntimeError(
            f"--context-parallel-backend fcp: the model was built without FCP's attention; {HOW_TO_BUILD}"
        )
    check_same_batch(batch, run, session.cp_group())
    batch["attention_mask"] = None


def take_share(batch: Batch, run: Session) -> Batch:
    """Keep the tokens that the layout of a batch gives to this context-parallel rank."""
    check_batch(batch, run)
    if all(batch.get(key) is None for key in SEQUENCE_KEYS):
        return batch  # boundaries alone, as on a middle pipeline stage
    layout = run.layouts.get(_boundaries(batch, run), session.cp_group().rank())
    return take_tokens(batch, layout, run.settings.seq_length)


def _boundaries(batch: Batch, run: Session) -> Boundaries:
    offsets = batch.get("cu_seqlens_padded") if batch.get("cu_seqlens_padded") is not None else batch.get("cu_seqlens")
    if offsets is not None:
        return Boundaries.of_packed(offsets, run.settings.seq_length)
    return Boundaries.of_samples(*next(batch[key] for key in SEQUENCE_KEYS if batch.get(key) is not None).shape)


def take_tokens(batch: Batch, layout: Layout, seq_length: int) -> Batch:
    """Keep the tokens that ``layout`` gives to this rank.

    The result has shape [num_samples, tokens_per_sample_and_rank] with the local tokens running down the columns: then
    a ``[sequence, batch]`` activation, which is its transpose, holds them in order, and all shapes are those that
    pipeline stages and sequence parallelism expect.
    """
    num_samples = layout.boundaries.num_tokens // seq_length if not layout.boundaries.plain else None
    for key in SEQUENCE_KEYS:
        value = batch.get(key)
        if value is None:
            continue
        rows = value.shape[0] if num_samples is None else num_samples
        stream = value.reshape(-1)
        if stream.numel() != layout.boundaries.num_tokens:
            raise ValueError(
                f"a batch of {stream.numel()} {key} came with cu_seqlens that describe {layout.boundaries.num_tokens}; "
                "the last offset must lie in the last sample"
            )
        batch[key] = stream[layout.index_on(value.device)].view(-1, rows).t().contiguous()
    return batch


def check_same_batch(batch: Batch, run: Session, cp_group: torch.distributed.ProcessGroup) -> None:
    """Raise on all ranks of ``cp_group``, naming those that differ, unless all were given the same batch."""
    values = [batch[key] for key in SEQUENCE_KEYS if batch.get(key) is not None]
    if run.settings.cp_size == 1 or not values:
        return
    marks = torch.stack([fingerprint(value) for value in values])
    digest = "".join(f"{mark % 2**64:016x}" for mark in marks.tolist())  # one trip to the host
    run.communicator(cp_group).agree(digest, "the tokens of a batch")


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum that depends on every value and its place."""
    flat = values.reshape(-1)
    numbers = flat if not flat.is_floating_point() else flat.to(torch.float32).view(torch.int32)
    places = torch.arange(1, flat.numel() + 1, device=flat.device)
    return ((numbers.to(torch.int64) + 1) * (places * _MIX | 1)).sum()  # wraps around; that is the point
