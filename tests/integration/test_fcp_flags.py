"""Every flag of Megatron that may touch attention, positions, batches or memory of activations has been decided on.

The parser of the installed megatron-core is asked. A flag that a release adds, or takes away, fails here until someone
has looked at it and written down which it is.
"""

from __future__ import annotations

import re

import pytest

from megatron_fcp.testing.loop import TrainingLoop

pytestmark = pytest.mark.megatron

TOUCHES = re.compile(
    r"attention|attn|softmax|rope|rotary|yarn|window|mask|context|(^|_)cp_|graph|offload|fp8|fp4|seq|position|document"
    r"|head|qk|kv|query|mla|mtp|dropout|batch_size|invariant|flash|recompute|logit|sft|fsdp|fake|spec$"
)
OTHER_PROGRAMS = re.compile(r"(inference|rl|langrl|grpo|dino|ict|biencoder|bert|indexer|mamba|logits_(load|save)|dsa)_")
DECIDED: dict[str, str] = {
    "a row of docs/matrix.md shows it working": """
        add_qkv_bias apply_query_key_layer_scaling attention_output_gate attention_softmax_in_fp32
        context_parallel_size dataloader_inter_document_masking eod_mask_loss eval_global_batch_size
        eval_micro_batch_size global_batch_size group_query_attention micro_batch_size mrope_section mtp_num_layers
        multi_latent_attention mup_base_head_dim mup_attn_scale_power no_rope_freq num_attention_heads num_query_groups
        position_embedding_type qk_layernorm rampup_batch_size recompute_activations recompute_granularity
        recompute_method recompute_modules recompute_num_layers reset_attention_mask reset_position_ids rope_type
        rotary_interleaved rotary_percent rotary_scaling_factor seq_length sequence_parallel sft softmax_type
        step_batch_size_schedule use_megatron_fsdp use_rope_scaling use_torch_fsdp2 window_attn_skip_freq window_size
        yarn_original_max_position_embeddings""",
    "the sizes and names of what such a row shows": """
        add_position_embedding encoder_seq_length kv_channels kv_lora_rank max_position_embeddings qk_head_dim
        qk_pos_emb_head_dim relative_attention_max_distance relative_attention_num_buckets rope_scaling_factor
        rotary_base rotary_seq_len_interpolation_factor use_rotary_position_embeddings v_head_dim yarn_beta_fast
        yarn_beta_slow yarn_correction_range_round_to_int""",
    "refused by integration/refusals.py": """
        attention_backend attention_dropout batch_invariant_mode cp_comm_type cpu_offloading_num_layers cuda_graph_impl
        decoder_seq_length enable_cuda_graph experimental_attention_variant external_cuda_graph fake_process_group
        fine_grained_activation_offloading flash_attention_version flash_decode hierarchical_context_parallel_sizes
        hybrid_context_parallel log_max_attention_logit offload_modules optimizer_cuda_graph qk_clip
        use_kitchen_attention""",
    "settings of something refused, without effect alone": """
        activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers cuda_graph_modules
        cuda_graph_scope_deprecated cuda_graph_warmup_steps decode_only_cuda_graphs delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks ep_overlap_early_attn_memory_release
        fine_grained_offloading_max_inflight_offloads kitchen_attention_backend linear_attention_freq
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
        max_seqlen_per_dp_cp_rank min_offloaded_tensor_size moe_pad_experts_for_cuda_graph_inference qk_clip_alpha
        qk_clip_threshold""",
    "changes layers outside core attention only": """
        apply_wd_to_qk_layernorm bias_dropout_fusion hidden_dropout mla_down_proj_fusion moe_layer_recompute
        moe_router_pre_softmax moe_routing_trace_capture_logits mtp_detach_heads mtp_hybrid_override_pattern
        mtp_loss_scaling_factor mtp_standalone mtp_use_repeated_layer muon_split_qkv qk_l2_norm""",
    "FP8 and FP4 of linear layers and parameters, inside Transformer Engine": """
        fp4 fp4_param_gather fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len
        fp8_interval fp8_margin fp8_output_proj fp8_param_gather fp8_quantizer_factory fp8_recipe fp8_wgrad
        keep_fp8_transpose_cache moe_router_padding_for_fp8 reuse_grad_buf_for_mxfp8_param_ag""",
    "optimizer, sharding of parameters and data loading; attention sees the same batches": """
        batch_size decrease_batch_size_if_needed fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer
        fsdp_manual_registration loss_scale_window megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
        megatron_fsdp_max_pool_double_buffer optimizer_cpu_offload optimizer_offload_fraction
        per_dataset_sequences_path strict_fsdp_dtensor_load torch_fsdp2_reshard_after_forward
        use_torch_optimizer_for_cpu_offload""",
    "of no effect on FCP: which fused kernel, which mask tensor, what is logged": """
        apply_rope_fusion create_attention_mask_in_dataloader masked_softmax_fusion use_flash_attn
        cache_mla_latents sft_tokenizer_prompt_format spec""",
    "other programs of Megatron (vision, BERT, T5)": """
        head_lr_mult mask_factor mask_prob mask_type query_in_block_prob short_seq_prob""",
}


def arguments(_: None) -> list[str]:
    """Runs in a rank: names of all of Megatron's arguments."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return sorted({action.dest for action in parser._actions})


def test_every_flag_near_attention_is_decided(training_loop: TrainingLoop) -> None:
    names = training_loop.call("test_fcp_flags:arguments", None)
    near = {name for name in names if TOUCHES.search(name) and not OTHER_PROGRAMS.match(name)}
    decided = [name for names in DECIDED.values() for name in names.split()]
    assert len(decided) == len({*decided})
    assert near - {*decided} == set(), "new flags: decide what each does to FCP"
    assert {*decided} - near == set(), "flags that are gone"
