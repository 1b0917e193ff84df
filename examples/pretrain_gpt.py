"""Pretrain a GPT-style model with Megatron's own loop: ``megatron.training.pretrain``.

A short script of the usual shape: batch, loss, forward step, datasets, main. It runs with Megatron's own context
parallelism and, through ``megatron_fcp.register()``, with ``--context-parallel-backend fcp``. Functions of Megatron
that a context-parallel backend may replace are looked up through their modules at every call.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --context-parallel-size 4 --context-parallel-backend fcp ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import megatron_fcp

megatron_fcp.register()  # adds the flags to Megatron's parser; acts only when they ask for it

import torch  # noqa: E402
from megatron.core import mpu, packed_seq_params  # noqa: E402
from megatron.core import utils as core_utils  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank  # noqa: E402
from megatron.training import get_args, get_timers, pretrain, print_rank_0  # noqa: E402
from megatron.training import training as training_loop  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args  # noqa: E402
from megatron.training.datasets.sft_dataset import SFTDataset  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage  # noqa: E402

BATCH_KEYS = (
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "hybrid_cp_group",
    "labels",
    "local_cp_size",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
)

Batch = dict[str, Any]


def batches_are_packed(args: Any) -> bool:
    """Whether every batch carries document offsets (``cu_seqlens``)."""
    return args.sft or args.dataloader_inter_document_masking


def holds_mtp_layers(args: Any, vp_stage: int | None) -> bool:
    """Whether this pipeline stage holds multi-token-prediction layers, which need tokens and labels both."""
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None = None) -> Batch:
    """The next micro-batch as this rank needs it, with every key of :data:`BATCH_KEYS`.

    Tensor-parallel rank 0 reads it from the data loader and broadcasts it inside its group; each context-parallel rank
    then keeps its own tokens. Middle pipeline stages get the document offsets alone, or nothing.
    """
    args = get_args()
    packed = batches_are_packed(args)
    holds_mtp = holds_mtp_layers(args, vp_stage)
    reads_tokens = holds_mtp or is_first_or_last_pipeline_stage(vp_stage)
    if not reads_tokens and not packed:
        return dict.fromkeys(BATCH_KEYS)

    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        assert data_iterator is not None
        batch = next(data_iterator)
        for key in BATCH_KEYS:
            value = batch.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)

    batch = core_utils.get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=holds_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = core_utils.flatten_batch_for_packed_sequences(batch)
    if reads_tokens:
        batch = core_utils.get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=args.hybrid_context_parallel,
            cp_group=mpu.get_context_parallel_group(),
            hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
        )
    return {key: batch.get(key) for key in BATCH_KEYS}


def packed_params(batch: Batch, args: Any) -> Any:
    """Megatron's ``PackedSeqParams`` of a batch with document offsets, None for any other batch."""
    if batch["cu_seqlens"] is None:
        return None
    offsets = batch["cu_seqlens"].squeeze(0)  # the batch keeps [1, n]; attention takes [n]
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    training_loop.update_seqlen_stats_from_cu_seqlens(offsets)  # FLOP figures count real tokens only
    effective = offsets if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    local_cp_size = batch["local_cp_size"]
    return packed_seq_params.PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=effective,
        cu_seqlens_kv=effective,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if local_cp_size is None else int(local_cp_size.item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=args.seq_length,
    )


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Summed loss of this rank's valid labels, their number, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: ~torch.isfinite(value),
            message="the local loss is NaN or infinite",
            tolerance=0.0,
            fatal=True,
        )
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One micro-batch through this rank's part of the model."""
    args = get_args()
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, core_utils.get_attr_wrapped_model(model, "vp_stage"))
    params = packed_params(batch, args)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params,
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Megatron's dataset configuration from the command line."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test datasets; each rank builds only what its pipeline stage reads."""
    args = get_args()

    def is_built_here() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        return batches_are_packed(args) or is_first_or_last_pipeline_stage(vp_stage) or holds_mtp_layers(args, vp_stage)

    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building {kind.__name__} datasets ...")
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, dataset_config(args)).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every data-parallel rank builds its own


def main() -> None:
    """Parse Megatron's command line and train."""
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
