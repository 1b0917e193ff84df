"""What cannot run with FCP's attention, as one table: flag, when, why, and the nearest thing that works.

A combination that is not refused here works. Checked once, after Megatron's own checks of the command line, on every
rank, before any model, optimizer or process group exists.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_fcp.integration.refusal import (
    NOT_YET,
    RESIDENT,
    Refusal,
    attention_backend,
    batched_sequence_aux_loss,
    comm_type,
    encoder_decoder,
    fused_rope,
    in_resident,
    is_set,
    kv_heads,
    mla_fused_rope,
    offloaded_attention,
    sequence_aux_loss,
    sinkhorn,
    sparse_attention,
    unless,
    with_documents,
    without_attention,
)
from megatron_fcp.integration.windows import window_problem

_NATIVE = "or train this model with --context-parallel-backend native"
_RESHUFFLE = "pass --fcp-layout reshuffle, which keeps Megatron's own token order outside attention"
_DOCUMENTS = "document boundaries under --context-parallel-backend fcp"

# Not in the table: Megatron replaces the parsed arguments by those of the file, and never comes to check them.
YAML = Refusal(
    "--yaml-cfg",
    is_set("yaml_cfg"),
    "a YAML configuration takes the place of all flags, this one included",
    "pass flags instead",
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--attention-dropout",
        is_set("attention_dropout"),
        NOT_YET,
        "pass --attention-dropout 0",
        row="Attention: dropout",
    ),
    Refusal(
        "--window-size",
        lambda args: args.window_size if args.window_size and window_problem(args.window_size) else None,
        "the mask is causal: a window ends at the query itself",
        "pass W,0 for a query and the W tokens before it",
        row="Attention: window that does not end at the query",
    ),
    Refusal(
        "--num-query-groups",
        kv_heads,
        "every tensor-parallel rank needs at least one KV head",
        "lower --tensor-model-parallel-size to at most the number of KV heads",
        row="Attention: fewer KV heads than tensor-parallel ranks",
    ),
    Refusal(
        "--qk-clip",
        is_set("qk_clip"),
        "the largest logit is not recorded",
        f"leave it off, {_NATIVE}",
        row="Attention: QK clip",
    ),
    Refusal(
        "--log-max-attention-logit",
        is_set("log_max_attention_logit"),
        "it is not recorded",
        "leave it off",
        row="Attention: log of the largest logit",
    ),
    Refusal(
        "--experimental-attention-variant",
        is_set("experimental_attention_variant"),
        "its layers bring their own attention",
        f"leave it off, {_NATIVE}",
        row="Attention: experimental variants (sparse, gated delta net)",
    ),
    Refusal(
        "--use-kitchen-attention",
        is_set("use_kitchen_attention"),
        "it replaces the core attention",
        "leave it off",
        row="Attention: Kitchen's",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        in_resident(is_set("hybrid_layer_pattern")),
        "Mamba layers undo the zig-zag order of Megatron's own sharding",
        _RESHUFFLE,
        RESIDENT,
        row="Models: hybrid (Mamba)",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        with_documents(is_set("hybrid_layer_pattern")),
        "Mamba layers undo a zig-zag inside every document, and the data loader cuts whole samples",
        "train on whole samples",
        _DOCUMENTS,
        row="Models: hybrid (Mamba), documents",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        without_attention,
        "the model has no attention layers (* or +)",
        "use --context-parallel-backend native",
        row="Models: Mamba without attention",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        sparse_attention,
        "sparse attention (D) chooses keys over the whole sequence",
        f"use full attention (*), {_NATIVE}",
        row="Models: hybrid with sparse attention",
    ),
    Refusal(
        "--heterogeneous-layers-config-path",
        is_set("heterogeneous_layers_config_path"),
        "heterogeneous specs name Megatron's attention directly",
        "use --context-parallel-backend native for heterogeneous models",
        row="Models: heterogeneous layers",
    ),
    Refusal(
        "--heterogeneous-layers-config-encoded-json",
        is_set("heterogeneous_layers_config_encoded_json"),
        "heterogeneous specs name Megatron's attention directly",
        "use --context-parallel-backend native for heterogeneous models",
        row="Models: heterogeneous layers",
    ),
    Refusal(
        "--decoder-seq-length",
        encoder_decoder,
        "cross attention between sequences of different length has no plan",
        "use decoder-only models",
        row="Models: encoder and decoder",
    ),
    Refusal(
        "--position-embedding-type",
        lambda args: args.position_embedding_type if args.position_embedding_type == "relative" else None,
        "it adds a bias to the logits",
        "use rope, yarn, learned_absolute or none",
        row="Positions: relative, as a bias",
    ),
    Refusal(
        "--transformer-impl",
        unless("transformer_impl", "transformer_engine", "local"),
        "it is for inference",
        "use transformer_engine or local",
        row="Models: layers for inference",
    ),
    Refusal(
        "--attention-backend",
        attention_backend,
        "it chooses a kernel of Megatron's own attention",
        "drop it and choose with --fcp-kernel",
        row="Attention: choice of Megatron's kernel",
    ),
    Refusal(
        "--flash-attention-version",
        is_set("flash_attention_version"),
        "it chooses a kernel of Megatron's own attention",
        "drop it and choose with --fcp-kernel",
        row="Attention: choice of Megatron's kernel",
    ),
    Refusal(
        "--batch-invariant-mode",
        is_set("batch_invariant_mode"),
        "its kernels know no context parallelism",
        "drop it: with FCP, runs of the same batches are bitwise the same",
        row="Attention: batch-invariant kernels",
    ),
    Refusal(
        "--offload-modules",
        offloaded_attention,
        "offloading what FCP's attention saves for backward has not been tried",
        "leave core_attn out of the modules",
        row="Other flags: activations of attention offloaded to the host",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        is_set("cpu_offloading_num_layers"),
        "offloading what FCP's attention saves for backward has not been tried",
        "recompute activations (--recompute-granularity), or offload modules other than core_attn",
        row="Other flags: activations of attention offloaded to the host",
    ),
    Refusal(
        "--logits-save-dir",
        is_set("logits_save_dir"),
        "logits are saved in the order in which each rank holds its tokens, and nothing saves that order",
        "save and load logits with --context-parallel-backend native",
        row="Other flags: logits saved or loaded for distillation",
    ),
    Refusal(
        "--logits-load-dir",
        is_set("logits_load_dir"),
        "logits were saved in an order of tokens that need not be this plan's",
        "save and load logits with --context-parallel-backend native",
        row="Other flags: logits saved or loaded for distillation",
    ),
    Refusal(
        "--fake-process-group",
        is_set("fake_process_group"),
        "FCP's ranks compare what they exchange, and there nothing is exchanged",
        "ask megatron-fcp simulate for figures without a cluster",
        row="Other flags: `--fake-process-group`",
    ),
    Refusal(
        "--inprocess-restart",
        is_set("inprocess_restart"),
        "FCP's communicators would outlive their process groups",
        "restart the job from a checkpoint",
        row="Other flags: `--inprocess-restart`",
    ),
    Refusal(
        "--cuda-graph-impl",
        unless("cuda_graph_impl", "none"),
        "every batch has a plan of its own, and a graph replays one",
        "pass none",
        row="Schedule: CUDA graphs",
    ),
    Refusal(
        "--optimizer-cuda-graph",
        is_set("optimizer_cuda_graph"),
        "while it is captured no other thread may ask the GPU anything, and FCP's watch does",
        "leave it off",
        row="Other flags: `--optimizer-cuda-graph`",
    ),
    Refusal(
        "--hybrid-context-parallel",
        is_set("hybrid_context_parallel"),
        "both decide which rank holds which tokens",
        "drop it: FCP balances documents of any length inside one group",
        row="Parallelism: Megatron's hybrid context parallelism",
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes",
        is_set("hierarchical_context_parallel_sizes"),
        "it cuts the group for Transformer Engine's exchange",
        "drop it and pass --fcp-ranks-per-node",
        row="Parallelism: Megatron's hierarchical context parallelism",
    ),
    Refusal(
        "--cp-comm-type",
        comm_type,
        "it chooses the exchange of Megatron's own context parallelism",
        "drop it",
        row="Parallelism: Megatron's exchanges (all-gather, all-to-all)",
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        is_set("overlap_moe_expert_parallel_comm"),
        "its schedule runs attention apart from the forward step and drops packed_seq_params",
        f"leave it off, {_NATIVE}",
        row="Experts: overlap of two micro-batches",
    ),
    Refusal(
        "--perform-rl-step",
        is_set("perform_rl_step"),
        "FCP has no inference path",
        "use native for RL",
        row="Models: reinforcement learning",
    ),
    Refusal(
        "--flash-decode",
        is_set("flash_decode"),
        "FCP has no inference path",
        "leave it off",
        row="Models: decoding",
    ),
    Refusal(
        "--mtp-num-layers",
        lambda args: args.mtp_num_layers if args.mtp_num_layers and args.calculate_per_token_loss else None,
        "Megatron weighs the extra losses by each rank's own number of valid tokens then",
        "drop --calculate-per-token-loss; the loss is the mean over valid tokens without it as well",
        "--calculate-per-token-loss under --context-parallel-backend fcp",
        row="Loss: multi-token prediction with per-token loss",
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        sinkhorn,
        "each rank balances its own tokens, so the result depends on where tokens are",
        "use aux_loss or global_aux_loss",
        row="Experts: Sinkhorn balancing",
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        in_resident(sequence_aux_loss),
        "the loss needs whole sequences",
        f"use aux_loss or global_aux_loss, or {_RESHUFFLE}",
        RESIDENT,
        row="Experts: sequence auxiliary loss",
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        with_documents(batched_sequence_aux_loss),
        "samples of one micro-batch are packed into one stream",
        "pass --micro-batch-size 1, or use aux_loss or global_aux_loss",
        _DOCUMENTS,
        row="Experts: sequence auxiliary loss, documents, micro-batch 2",
    ),
    Refusal(
        "--position-embedding-type",
        in_resident(lambda args: "mrope" if args.position_embedding_type == "mrope" else None),
        "its positions have three axes",
        _RESHUFFLE,
        RESIDENT,
        row="Positions: M-RoPE, whole samples",
    ),
    Refusal(
        "--dataloader-type",
        lambda args: args.dataloader_type if args.dataloader_type == "external" and args.reset_attention_mask else None,
        "batches of a script's own iterators bring their boundaries as cu_seqlens",
        "pass --dataloader-inter-document-masking in place of --reset-attention-mask",
        "--reset-attention-mask under --context-parallel-backend fcp",
        row="Data: the script's own iterators, boundaries from tokens",
    ),
    Refusal(
        "--position-embedding-type",
        with_documents(lambda args: "mrope" if args.position_embedding_type == "mrope" else None),
        "its positions have three axes",
        "use rope",
        _DOCUMENTS,
        row="Positions: M-RoPE, documents",
    ),
    Refusal(
        "RoPE fusion with --micro-batch-size > 1",
        fused_rope,
        "the fused kernel takes one position per row, not per token",
        "pass --no-rope-fusion",
        row="Positions: fused RoPE with micro-batch 2, positions per token",
    ),
    Refusal(
        "RoPE fusion with --multi-latent-attention",
        mla_fused_rope,
        "the fused kernel derives positions from the rank",
        "pass --no-rope-fusion",
        row="Positions: fused RoPE of MLA, positions per token",
    ),
)


def refused(args: Namespace) -> Iterator[str]:
    """Error texts of every refused combination in ``args``."""
    for refusal in REFUSALS:
        value = refusal.value(args)
        if value is not None:
            yield refusal.message(value)


def check_combinations(args: Namespace) -> None:
    """Refuse a command line that FCP's attention cannot run.

    Raises
    ------
    ValueError
        Naming, for each refused combination, the flag, its value, the reason and the nearest thing that works.
    """
    problems = list(refused(args))
    if problems:
        raise ValueError("\n".join(problems))
