"""Every place where FCP enters Megatron, in one table: where, what is expected there, and why.

A seam is replaced by :mod:`megatron_fcp.integration.hooks` when its module, its name and its parameters are those of
this table; anything else is another Megatron, and refused by name. Where a seam has markers, FCP relies on what the
source says there; most of those are not replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_fcp.integration import arguments, batch, look_ahead, loss, mtp, packed, rotary, timers

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Seam:
    """One place in Megatron.

    Attributes
    ----------
    module, attribute : str
        Where it is; the attribute may be dotted (a method).
    parameters : tuple of str
        Names of its parameters, in order.
    why : str
    wrap : callable, optional
        Makes the replacement from the original.
    markers : tuple of str
        Pieces of source text that must occur there.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    why: str
    wrap: Wrapper | None = None
    markers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Where it is, in one word."""
        return f"{self.module}.{self.attribute}"


def _core_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_fcp.integration.core_attention import wrap_core_attention  # imports Megatron

    return wrap_core_attention(original)


def attention_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper of the constructor of attention layers."""
    from megatron_fcp.integration.core_attention import wrap_attention_init  # imports Megatron

    return wrap_attention_init(original)


_ROTARY = "megatron.core.models.common.embeddings.rotary_pos_embedding"
_YARN = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding"
_CALL = ("self", "max_seq_len", "offset", "packed_seq", "cp_group")

SEAMS: tuple[Seam, ...] = (
    Seam(
        "megatron.training.arguments",
        "add_megatron_arguments",
        ("parser",),
        "the flags",
        arguments.wrap_add_megatron_arguments,
    ),
    Seam(
        "megatron.training.arguments",
        "validate_args",
        ("args", "defaults"),
        "checks of the flags, before anything is built; begins the run's session",
        arguments.wrap_validate_args,
    ),
    Seam(
        "megatron.core.models.backends",
        "LocalSpecProvider.core_attention",
        ("self",),
        "the attention module of --transformer-impl local",
        _core_attention,
    ),
    Seam(
        "megatron.core.extensions.transformer_engine_spec_provider",
        "TESpecProvider.core_attention",
        ("self",),
        "the attention module of --transformer-impl transformer_engine",
        _core_attention,
    ),
    Seam(
        "megatron.core.datasets.gpt_dataset",
        "GPTDatasetConfig.__post_init__",
        ("self",),
        "the end-of-document token; boundaries from tokens instead of the index",
        batch.wrap_dataset_config,
    ),
    Seam(
        "megatron.core.datasets.blended_megatron_dataset_builder",
        "BlendedMegatronDatasetBuilder.__init__",
        ("self", "cls", "sizes", "is_built_on_rank", "config"),
        "middle pipeline stages need the boundaries of every batch as well",
        batch.wrap_dataset_builder,
    ),
    Seam(
        "megatron.training.training",
        "build_train_valid_test_data_iterators",
        ("build_train_valid_test_datasets_provider",),
        "batches are read ahead so that their plans are ready in time",
        look_ahead.wrap_build_iterators,
    ),
    Seam(
        "megatron.core.timers",
        "Timers.log",
        ("self", "names", "rank", "normalizer", "reset", "barrier"),
        "shows how long training waited for plans",
        timers.wrap_timers_log,
    ),
    Seam(
        "megatron.core.timers",
        "Timers.write",
        ("self", "names", "writer", "iteration", "normalizer", "reset", "barrier"),
        "shows how long training waited for plans",
        timers.wrap_timers_write,
    ),
    Seam(
        "megatron.core.utils",
        "get_batch_on_this_tp_rank",
        (
            *("batch", "has_cu_seqlens", "is_hybrid_cp", "create_attention_mask_in_dataloader", "broadcast_src_rank"),
            *("broadcast_group", "cp_size", "tp_rank", "micro_batch_size", "seq_length", "mtp_on_this_rank"),
            *("pipeline_model_parallel_size", "is_pipeline_first_stage", "is_pipeline_last_stage"),
        ),
        "the rank that reads the data turns end-of-document tokens into cu_seqlens",
        batch.wrap_get_batch_on_this_tp_rank,
    ),
    Seam(
        "megatron.core.utils",
        "get_batch_on_this_cp_rank",
        ("batch", "is_hybrid_cp", "cp_group", "hybrid_cp_group_func", "use_per_sequence_balancing"),
        "which tokens a rank holds",
        batch.wrap_get_batch_on_this_cp_rank,
    ),
    Seam(
        "megatron.core.packed_seq_params",
        "PackedSeqParams.__post_init__",
        ("self",),
        "carries the plan of a batch to every layer, through pipeline schedules and recomputation",
        packed.wrap_post_init,
    ),
    Seam(
        _ROTARY,
        "RotaryEmbedding.get_rotary_seq_len",
        (
            *("self", "inference_context", "transformer", "transformer_input", "transformer_config"),
            *("packed_seq_params", "inference_params"),
        ),
        "positions are those of the tokens held",
        rotary.wrap_get_rotary_seq_len,
    ),
    Seam(_ROTARY, "RotaryEmbedding.forward", _CALL, "one frequency per token", rotary.wrap_forward),
    Seam(_YARN, "YarnRotaryEmbedding.forward", _CALL, "one frequency per token", rotary.wrap_forward),
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        "forward_step_calc_loss",
        (
            *("model", "output_tensor", "loss_func", "config", "vp_stage", "collect_non_loss_data"),
            *("num_microbatches", "forward_data_store", "cp_group_size", "is_last_stage"),
        ),
        "the loss is the mean over the valid tokens of the whole context-parallel group",
        loss.wrap_forward_step_calc_loss,
    ),
    Seam(
        "megatron.core.transformer.multi_token_prediction",
        "roll_tensor",
        ("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
        "multi-token prediction rolls by the layout; its loss is a mean over the whole group",
        mtp.wrap_roll_tensor,
    ),
    Seam(
        "megatron.core.transformer.multi_token_prediction",
        "process_mtp_loss",
        (
            *("hidden_states", "labels", "loss_mask", "output_layer", "output_weight", "runtime_gather_output"),
            *("is_training", "compute_language_model_loss", "config", "cp_group", "tp_group", "packed_seq_params"),
            *("scale_logits_fn", "input_ids"),
        ),
        "divides by the number that roll_tensor returns for the loss mask",
        markers=("loss_mask, num_tokens = roll_tensor(", "/ safe_num_tokens"),
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        "forward_step",
        (
            *("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store"),
            *("config", "cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch"),
            *("is_first_microbatch", "current_microbatch", "vp_stage", "is_last_stage"),
        ),
        "normalises the loss in forward_step_calc_loss",
        markers=("forward_step_calc_loss(",),
    ),
    Seam(
        "megatron.core.transformer.attention",
        "Attention.__init__",
        (
            *("self", "config", "submodules", "layer_number", "attn_mask_type", "attention_type", "cp_comm_type"),
            *("pg_collection", "pp_layer_offset", "name"),
        ),
        "builds the core attention with these arguments; another one than FCP's is refused",
        attention_init,
        ("submodules.core_attention(", "pg_collection=self.pg_collection", "softmax_scale="),
    ),
    Seam(
        "megatron.core.transformer.attention",
        "Attention.forward",
        (
            *("self", "hidden_states", "attention_mask", "key_value_states", "inference_context", "rotary_pos_emb"),
            *("rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "attention_bias", "packed_seq_params"),
            *("sequence_len_offset", "inference_params"),
        ),
        "treats a batch as [sequence, batch, ...] unless qkv_format is 'thd'",
        markers=("packed_seq_params.qkv_format == 'thd'", "apply_rotary_pos_emb("),
    ),
    Seam(
        "megatron.core.models.gpt.gpt_model",
        "GPTModel._preprocess",
        (
            *("self", "input_ids", "position_ids", "decoder_input", "inference_context", "packed_seq_params"),
            "padding_mask",
        ),
        "gives the rotary module the length it has just asked it for",
        markers=("rotary_seq_len = self.rotary_pos_emb.get_rotary_seq_len(", "self.rotary_pos_emb("),
    ),
)
