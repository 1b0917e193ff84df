"""Signatures of the attention functions that the adapters drive, by package and release.

Written down from the source of the oldest and the newest supported release of each package; a test compares them with
the source as the package index has it. flash_attn_3 3.0.0 is the state of the flash-attention repository at commit
0251105a (``hopper/flash_attn_interface.py``), which no index carries; its 3.0.0b1 travels in flash-attn 2.8.3.post2.
"""

from __future__ import annotations

from typing import NamedTuple


class Signatures(NamedTuple):
    """(name, parameters) of the forward and the backward function of one release."""

    forward: tuple[str, str]
    backward: tuple[str, str]


SIGNATURES: dict[tuple[str, str], Signatures] = {
    ("flash-attn", "2.7.0.post2"): Signatures(
        (
            "_flash_attn_varlen_forward",
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
            "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
            "block_table=None, leftpad_k=None, seqused_k=None",
        ),
        (
            "_flash_attn_varlen_backward",
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
            "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
            "deterministic, rng_state=None",
        ),
    ),
    ("flash-attn", "2.8.3.post2"): Signatures(
        (
            "_flash_attn_varlen_forward",
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
            "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
            "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
        ),
        (
            "_flash_attn_varlen_backward",
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
            "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
            "deterministic, rng_state=None, zero_tensors=False",
        ),
    ),
    ("flash-attn-4", "4.0.0b10"): Signatures(
        (
            "_flash_attn_fwd",
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
            "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
            "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, "
            "pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, "
            "return_lse=False, out=None, lse=None, aux_tensors=None, q_descale=None, k_descale=None, "
            "v_descale=None, gather_kv_indices=None",
        ),
        (
            "_flash_attn_bwd",
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
            "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, "
            "num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, "
            "AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, "
            "cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
            "deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None, "
            "aux_tensors=None, block_sparse_tensors=None, dlse=None",
        ),
    ),
    ("flash-attn-4", "4.0.0b36"): Signatures(
        (
            "_flash_attn_fwd",
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
            "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
            "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, "
            "pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, "
            "return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, "
            "k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
            "seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False",
        ),
        (
            "_flash_attn_bwd",
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
            "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, "
            "num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, "
            "AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, "
            "cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
            "deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None, "
            "aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None",
        ),
    ),
    ("flash_attn_3", "3.0.0"): Signatures(
        (
            "_flash_attn_forward",
            "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
            "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
            "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
            "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
            "causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, "
            "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
        ),
        (
            "_flash_attn_backward",
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, "
            "is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, "
            "sm_margin=0",
        ),
    ),
    ("flash_attn_3", "3.0.0b1"): Signatures(
        (
            "_flash_attn_forward",
            "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, "
            "max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, "
            "seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), "
            "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, "
            "pack_gqa=None, sm_margin=0",
        ),
        (
            "_flash_attn_backward",
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, "
            "max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, "
            "deterministic=False, sm_margin=0",
        ),
    ),
    ("transformer-engine", "2.20.2"): Signatures(
        (
            "fused_attn_fwd",
            "is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, "
            "fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
            "page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, "
            "dropout=0.0, fast_zero_fill=True, qkv_layout='sbh3d', o_format='sbhd', qkv_scale_inv_format=None, "
            "attn_bias_type='no_bias', attn_mask_type='padding', softmax_type='vanilla', window_size=(-1, -1), "
            "bottom_right_diagonal=None, rng_gen=None, softmax_offset=None, return_max_logit=False, "
            "cuda_graph=False",
        ),
        (
            "fused_attn_bwd",
            "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, "
            "aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
            "s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, "
            "fast_zero_fill=True, qkv_layout='sbh3d', o_format='sbhd', do_format='sbhd', dqkv_layout='sbh3d', "
            "qkv_scale_inv_format=None, do_scale_inv_format=None, attn_bias_type='no_bias', "
            "attn_mask_type='padding', softmax_type='vanilla', window_size=(-1, -1), bottom_right_diagonal=None, "
            "deterministic=False, cuda_graph=False",
        ),
    ),
    ("transformer-engine", "2.9.0"): Signatures(
        (
            "fused_attn_fwd",
            "is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, "
            "fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
            "page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, "
            "dropout=0.0, fast_zero_fill=True, qkv_layout='sbh3d', attn_bias_type='no_bias', "
            "attn_mask_type='padding', softmax_type='vanilla', window_size=(-1, -1), rng_gen=None, "
            "softmax_offset=None, return_max_logit=False",
        ),
        (
            "fused_attn_bwd",
            "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, "
            "aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
            "s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, "
            "fast_zero_fill=True, qkv_layout='sbh3d', attn_bias_type='no_bias', attn_mask_type='padding', "
            "softmax_type='vanilla', window_size=(-1, -1), deterministic=False",
        ),
    ),
}
