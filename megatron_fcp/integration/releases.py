"""How other releases than the newest have the places of :data:`megatron_fcp.integration.seams.SEAMS`.

Everything that differs from release to release and concerns where FCP enters is here; what Megatron can do at all is
asked in :mod:`megatron_fcp.integration.features`. A place is one of its known forms or it is refused by name.
"""

from __future__ import annotations

from megatron_fcp.integration import batch, batch_older, hybrid, mtp, packed
from megatron_fcp.integration.seams import Seam, attention_init

# megatron-core releases whose seams are known and were trained with; 0.20 is Megatron-LM's main branch.
RELEASES = ("0.16", "0.17", "0.18", "0.19", "0.20")
INSTALL = "'megatron-core>=0.16,<0.20'"

_MTP = "megatron.core.transformer.multi_token_prediction"
_MTP_MARKER = "loss_mask, num_tokens = roll_tensor("
_MTP_WHY = "divides by the number that roll_tensor returns for the loss mask"
_ATTENTION = (
    *("self", "config", "submodules", "layer_number", "attn_mask_type", "attention_type", "cp_comm_type"),
    "pg_collection",
)
_ATTENTION_WHY = "builds the core attention with these arguments; another one than FCP's is refused"
_ATTENTION_MARKERS = ("submodules.core_attention(", "pg_collection=self.pg_collection", "softmax_scale=")
_TP_RANK_WHY = "the rank that reads the data turns end-of-document tokens into cu_seqlens"

# By the name of the place in the newest release: its other forms, newest first.
OTHER_FORMS: dict[str, tuple[Seam, ...]] = {
    "megatron.core.utils.get_batch_on_this_tp_rank": (
        Seam(  # 0.18
            "megatron.core.utils",
            "get_batch_on_this_tp_rank",
            (
                *("batch", "is_sft", "is_hybrid_cp", "create_attention_mask_in_dataloader", "broadcast_src_rank"),
                *("broadcast_group", "cp_size", "tp_rank", "micro_batch_size", "seq_length", "mtp_on_this_rank"),
                *("pipeline_model_parallel_size", "is_pipeline_first_stage", "is_pipeline_last_stage"),
            ),
            _TP_RANK_WHY,
            batch_older.wrap_get_batch_on_this_tp_rank,
        ),
        Seam(  # 0.16, 0.17
            "megatron.training.utils",
            "get_batch_on_this_tp_rank",
            ("data_iterator", "mtp_on_this_rank"),
            _TP_RANK_WHY,
            batch_older.wrap_get_batch_from_iterator,
        ),
    ),
    "megatron.core.utils.get_batch_on_this_cp_rank": (
        Seam(  # 0.18
            "megatron.core.utils",
            "get_batch_on_this_cp_rank",
            ("batch", "is_hybrid_cp", "cp_group", "hybrid_cp_group_func"),
            "which tokens a rank holds",
            batch.wrap_get_batch_on_this_cp_rank,
        ),
        Seam(  # 0.16, 0.17
            "megatron.core.utils",
            "get_batch_on_this_cp_rank",
            ("batch", "cp_group"),
            "which tokens of whole samples a rank holds",
            batch.wrap_get_batch_on_this_cp_rank,
        ),
    ),
    "megatron.core.packed_seq_params.PackedSeqParams.__post_init__": (
        Seam(  # 0.16
            "megatron.core.packed_seq_params",
            "PackedSeqParams.__init__",
            (
                *("self", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"),
                *("cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "local_cp_size", "cp_group"),
            ),
            "carries the plan of a batch to every layer, through pipeline schedules and recomputation",
            packed.wrap_init,
        ),
    ),
    f"{_MTP}.process_mtp_loss": (
        Seam(  # 0.17, 0.18
            _MTP,
            "process_mtp_loss",
            (
                *("hidden_states", "labels", "loss_mask", "output_layer", "output_weight", "runtime_gather_output"),
                *("is_training", "compute_language_model_loss", "config", "cp_group", "packed_seq_params"),
                "scale_logits_fn",
            ),
            _MTP_WHY,
            markers=(_MTP_MARKER, "/ safe_num_tokens"),
        ),
        Seam(  # 0.16
            "megatron.core.models.gpt.gpt_model",
            "GPTModel._postprocess",
            (
                *("self", "hidden_states", "input_ids", "position_ids", "labels", "rotary_pos_emb", "rotary_pos_cos"),
                *("rotary_pos_sin", "mtp_in_postprocess", "loss_mask", "decoder_input", "attention_mask"),
                *("inference_params", "packed_seq_params", "sequence_len_offset", "runtime_gather_output"),
                *("extra_block_kwargs", "inference_context"),
            ),
            _MTP_WHY,
            markers=(_MTP_MARKER, "/ num_tokens"),
        ),
    ),
    f"{_MTP}.roll_tensor": (
        Seam(  # 0.20
            _MTP,
            "roll_tensor",
            ("tensor", "shifts", "dims", "cp_group", "packed_seq_params", "return_sum"),
            "multi-token prediction rolls by the layout; its loss is a mean over the whole group",
            mtp.wrap_roll_tensor,
        ),
    ),
    "megatron.core.transformer.attention.Attention.__init__": (
        Seam(  # 0.17
            "megatron.core.transformer.attention",
            "Attention.__init__",
            (*_ATTENTION, "pp_layer_offset"),
            _ATTENTION_WHY,
            attention_init,
            _ATTENTION_MARKERS,
        ),
        Seam(  # 0.16
            "megatron.core.transformer.attention",
            "Attention.__init__",
            _ATTENTION,
            _ATTENTION_WHY,
            attention_init,
            _ATTENTION_MARKERS,
        ),
    ),
}

# Places that only some releases have: beside the others, where they are there.
SOME_RELEASES: tuple[Seam, ...] = (
    Seam(  # 0.16, 0.17
        "megatron.core.utils",
        "get_thd_batch_on_this_cp_rank",
        ("batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "cp_size", "cp_rank"),
        "which tokens of a packed batch a rank holds",
        batch_older.wrap_get_thd_batch_on_this_cp_rank,
    ),
    Seam(  # from 0.18 on
        "megatron.core.models.hybrid.hybrid_block",
        "HybridStack.__init__",
        (
            *("self", "config", "submodules", "pre_process", "layer_type_list", "pp_layer_offset", "post_layer_norm"),
            *("post_process", "device", "dtype", "pg_collection", "is_mtp_layer", "name"),
        ),
        "the specs of hybrid models name an attention module directly",
        hybrid.wrap_stack_init,
    ),
)
