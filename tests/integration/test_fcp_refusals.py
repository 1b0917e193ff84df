"""What cannot work is refused with flag, value, reason and remedy, on every rank, before anything is built."""

from __future__ import annotations

import copy
import os
import re
import sys
from typing import Any

import pytest
from fcp_runs import fcp

from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, tiny_model_args
from megatron_fcp.testing.pool import JobError

pytestmark = pytest.mark.megatron

RESIDENT = {"fcp_layout": "resident"}


def case(row: str, flags: dict[str, Any], *words: str, layout: str = "both") -> Any:
    """Arguments that ``row`` of the matrix stands for, and what the message must name."""
    mark = pytest.mark.feature(row, layout=layout, refused=True)
    return pytest.param(row, flags, words, id=words[0].strip(), marks=mark)


# Arguments as Megatron hands them on after its own checks, and what the message must name. Megatron itself refuses some
# of these values without a GPU or Transformer Engine, so the table is asked directly.
CASES = [
    case("Attention: dropout", {"attention_dropout": 0.1}, "--attention-dropout 0.1", "pass --attention-dropout 0"),
    case(
        "Attention: window that does not end at the query",
        {"window_size": (128, 16)},
        "--window-size (128, 16)",
        "ends at the query itself",
        "pass W,0",
    ),
    case(
        "Attention: fewer KV heads than tensor-parallel ranks",
        {"tensor_model_parallel_size": 4},
        "--num-query-groups 2",
        "lower --tensor-model-parallel-size",
    ),
    case("Attention: QK clip", {"qk_clip": True}, "--qk-clip ", "leave it off"),
    case(
        "Attention: log of the largest logit",
        {"log_max_attention_logit": True},
        "--log-max-attention-logit ",
        "leave it off",
    ),
    case(
        "Data: the script's own iterators, boundaries from tokens",
        {"dataloader_type": "external", "reset_attention_mask": True},
        "--dataloader-type external",
        "--reset-attention-mask under",
        "pass --dataloader-inter-document-masking",
    ),
    case(
        "Attention: experimental variants (sparse, gated delta net)",
        {"experimental_attention_variant": "dsa"},
        "--experimental-attention-variant dsa",
    ),
    case("Attention: Kitchen's", {"use_kitchen_attention": True}, "--use-kitchen-attention "),
    case("Other flags: `--optimizer-cuda-graph`", {"optimizer_cuda_graph": True}, "--optimizer-cuda-graph "),
    case(
        "Models: hybrid (Mamba)",
        {"hybrid_layer_pattern": "M*M*", **RESIDENT},
        "--hybrid-layer-pattern M*M*",
        "--fcp-layout resident",
        "--fcp-layout reshuffle",
        layout="resident",
    ),
    case(
        "Models: hybrid (Mamba), documents",
        {"hybrid_layer_pattern": "M*M-", "reset_attention_mask": True},
        "--hybrid-layer-pattern M*M-",
        "train on whole samples",
    ),
    case(
        "Models: Mamba without attention",
        {"hybrid_layer_pattern": "MM-"},
        "--hybrid-layer-pattern MM-",
        "--context-parallel-backend native",
    ),
    case(
        "Models: hybrid with sparse attention",
        {"hybrid_layer_pattern": "M*D-"},
        "--hybrid-layer-pattern M*D-",
        "use full attention (*)",
    ),
    case(
        "Models: heterogeneous layers",
        {"heterogeneous_layers_config_path": "c.json"},
        "--heterogeneous-layers-config-path c.json",
    ),
    case(
        "Models: heterogeneous layers",
        {"heterogeneous_layers_config_encoded_json": "{}"},
        "--heterogeneous-layers-config-encoded-json {}",
    ),
    case("Models: encoder and decoder", {"decoder_seq_length": 64}, "--decoder-seq-length 64", "decoder-only"),
    case(
        "Positions: relative, as a bias",
        {"position_embedding_type": "relative"},
        "--position-embedding-type relative",
        "use rope",
    ),
    case(
        "Models: layers for inference",
        {"transformer_impl": "inference_optimized"},
        "--transformer-impl inference_optimized",
    ),
    case(
        "Attention: choice of Megatron's kernel",
        {"attention_backend": "flash"},
        "--attention-backend flash",
        "--fcp-kernel",
    ),
    case(
        "Attention: choice of Megatron's kernel",
        {"flash_attention_version": 3},
        "--flash-attention-version 3",
        "--fcp-kernel",
    ),
    case("Attention: batch-invariant kernels", {"batch_invariant_mode": True}, "--batch-invariant-mode ", "drop it"),
    case(
        "Other flags: activations of attention offloaded to the host",
        {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm", "core_attn"]},
        "--offload-modules core_attn",
        "leave core_attn out",
    ),
    case(
        "Other flags: activations of attention offloaded to the host",
        {"cpu_offloading_num_layers": 1},
        "--cpu-offloading-num-layers 1",
        "--recompute-granularity",
    ),
    case(
        "Other flags: logits saved or loaded for distillation",
        {"logits_save_dir": "logits"},
        "--logits-save-dir logits",
        "--context-parallel-backend native",
    ),
    case(
        "Other flags: logits saved or loaded for distillation",
        {"logits_load_dir": "logits"},
        "--logits-load-dir logits",
        "--context-parallel-backend native",
    ),
    case("Other flags: `--fake-process-group`", {"fake_process_group": True}, "--fake-process-group ", "simulate"),
    case("Other flags: `--inprocess-restart`", {"inprocess_restart": True}, "--inprocess-restart ", "checkpoint"),
    case(
        "Experts: Sinkhorn balancing",
        {"moe_router_load_balancing_type": "sinkhorn", "num_experts": 4},
        "--moe-router-load-balancing-type sinkhorn",
        "use aux_loss",
    ),
    case("Schedule: CUDA graphs", {"cuda_graph_impl": "local"}, "--cuda-graph-impl local", "pass none"),
    case(
        "Parallelism: Megatron's hybrid context parallelism",
        {"hybrid_context_parallel": True},
        "--hybrid-context-parallel ",
        "drop it",
    ),
    case(
        "Parallelism: Megatron's hierarchical context parallelism",
        {"hierarchical_context_parallel_sizes": [2, 2]},
        "--hierarchical-context-parallel-sizes [2, 2]",
    ),
    case(
        "Parallelism: Megatron's exchanges (all-gather, all-to-all)",
        {"cp_comm_type": ["a2a"]},
        "--cp-comm-type a2a",
        "drop it",
    ),
    case(
        "Experts: overlap of two micro-batches",
        {"overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm ",
    ),
    case("Models: reinforcement learning", {"perform_rl_step": True}, "--perform-rl-step ", "no inference path"),
    case("Models: decoding", {"flash_decode": True}, "--flash-decode ", "no inference path"),
    case(
        "Loss: multi-token prediction with per-token loss",
        {"mtp_num_layers": 1, "calculate_per_token_loss": True},
        "--mtp-num-layers 1",
        "--calculate-per-token-loss",
    ),
    case(
        "Experts: sequence auxiliary loss",
        {"moe_router_load_balancing_type": "seq_aux_loss", "num_experts": 4, **RESIDENT},
        "--moe-router-load-balancing-type seq_aux_loss",
        "--fcp-layout resident",
        "aux_loss",
        layout="resident",
    ),
    case(
        "Experts: sequence auxiliary loss, documents, micro-batch 2",
        {"moe_router_load_balancing_type": ["seq_aux_loss"], "num_experts": 4, "micro_batch_size": 2, "sft": True},
        "--moe-router-load-balancing-type seq_aux_loss",
        "--micro-batch-size 1",
    ),
    case(
        "Positions: M-RoPE, whole samples",
        {"position_embedding_type": "mrope", **RESIDENT},
        "--position-embedding-type mrope",
        "reshuffle",
        layout="resident",
    ),
    case(
        "Positions: M-RoPE, documents",
        {"position_embedding_type": "mrope", "sft": True},
        "--position-embedding-type mrope",
        "document boundaries",
    ),
    case(
        "Positions: fused RoPE with micro-batch 2, positions per token",
        {"apply_rope_fusion": True, "micro_batch_size": 2, **RESIDENT},
        "--micro-batch-size > 1",
        "pass --no-rope-fusion",
    ),
    case(
        "Positions: fused RoPE of MLA, positions per token",
        {"apply_rope_fusion": True, "multi_latent_attention": True, **RESIDENT},
        "--multi-latent-attention",
        "pass --no-rope-fusion",
    ),
]


def _validated(argv: list[str], world_size: int = 4) -> Any:
    from megatron.training.arguments import parse_args, validate_args

    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain", *argv]
    return validate_args(parse_args())


def messages(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Runs in a rank: the refusals of each case."""
    from megatron.core.transformer.enums import AttnBackend

    import megatron_fcp
    from megatron_fcp.integration.refusals import refused

    megatron_fcp.register()
    accepted = _validated(tiny_model_args(context_parallel_size=2))
    found = []
    for case in cases:
        args = copy.copy(accepted)
        for name, value in case.items():
            assert hasattr(args, name), f"Megatron has no argument {name}"
            setattr(args, name, AttnBackend[value] if name == "attention_backend" else value)
        found.append(list(refused(args)))
    return found


@pytest.fixture(scope="module")
def said(training_loop: TrainingLoop) -> list[list[str]]:
    """What is said of every case, and last of a command line with nothing to refuse."""
    flags = [parameters.values[1] for parameters in CASES]
    return training_loop.call("test_fcp_refusals:messages", [*flags, {}])


@pytest.mark.parametrize(("row", "flags", "words"), CASES)
def test_refusal(said: list[list[str]], row: str, flags: dict[str, Any], words: tuple[str, ...]) -> None:
    from megatron_fcp.integration.refusals import REFUSALS

    texts = said[[parameters.values[1] for parameters in CASES].index(flags)]
    for word in words:
        assert word in "\n".join(texts)
    for text in texts:
        assert re.fullmatch(r".+ cannot be combined with .+: .+; .+", text)
    told = {text.partition(": ")[2] for text in texts}
    assert row in {r.feature for r in REFUSALS if f"{r.reason}; {r.remedy}" in told}


def test_every_refusal_has_a_case(said: list[list[str]]) -> None:
    from megatron_fcp.integration.refusals import REFUSALS

    *refused, accepted = said
    assert accepted == []
    told = {text.partition(": ")[2] for texts in refused for text in texts}
    assert [r.flag for r in REFUSALS if f"{r.reason}; {r.remedy}" not in told] == []


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"fcp_block_size": 24}, "ValueError", ("--fcp-block-size 24", "64 tokens per rank", "16", "32")),
        ({"fcp_block_size": 0}, "ValueError", ("--fcp-block-size", "at least 1", "0")),
        ({"fcp_timeout": -1}, "ValueError", ("--fcp-timeout", "positive", "-1")),
        ({"fcp_ranks_per_node": 0}, "ValueError", ("--fcp-ranks-per-node", "at least 1")),
        ({"fcp_blocks_per_message": 0}, "ValueError", ("--fcp-blocks-per-message", "at least 1")),
        ({"fcp_max_ctas": 0}, "ValueError", ("--fcp-max-ctas", "at least 1")),
        ({"fcp_kernel": "cudnn9"}, "ValueError", ("--fcp-kernel 'cudnn9'", "auto")),
        ({"fcp_hardware": "h900"}, "ValueError", ("--fcp-hardware 'h900'", "h100-ib")),
        ({"fcp_config": "none.yaml"}, "ValueError", ("--fcp-config", "none.yaml", "megatron-fcp tune")),
        (
            {"fcp_hardware": "h100-ib", "fcp_rounds_per_stage": 2},
            "ValueError",
            ("--fcp-rounds-per-stage 2", "--fcp-hardware", "drop --fcp-rounds-per-stage"),
        ),
        ({"yaml_cfg": "run.yaml"}, "ValueError", ("--yaml-cfg run.yaml", "pass flags instead")),
        ({"attention_dropout": 0.1}, "ValueError", ("--attention-dropout 0.1", "pass --attention-dropout 0")),
        ({"enable_cuda_graph": True}, "ValueError", ("--cuda-graph-impl local", "pass none")),  # older spellings
        ({"external_cuda_graph": True}, "ValueError", ("--cuda-graph-impl transformer_engine", "pass none")),
        ({"num_query_groups": 1, "tensor_model_parallel_size": 2}, "ValueError", ("--num-query-groups 1",)),
        ({"fcp_layout": "zigzag"}, "SystemExit", ("--fcp-layout", "'zigzag'", "reshuffle", "resident")),
        ({"context_parallel_backend": "te"}, "SystemExit", ("--context-parallel-backend", "'te'", "native", "fcp")),
        ({"fcp_block_size": "x"}, "SystemExit", ("--fcp-block-size", "'x'")),
    ],
)
def test_all_ranks_refuse_before_anything_is_built(
    training_loop: TrainingLoop, flags: dict[str, Any], error: str, words: tuple[str, ...]
) -> None:
    world_size = 2 * flags.get("tensor_model_parallel_size", 1)
    # grace: the other ranks come to the same end by themselves, on a busy machine a little later
    job = TrainingJob(tiny_model_args(**{**fcp("reshuffle"), **flags}), world_size, grace=30)
    with pytest.raises(JobError) as caught:
        training_loop.run(job)
    for rank in caught.value.ranks:
        assert rank.kind == "raised"
        assert rank.error.startswith(error)
        text = rank.error if error == "ValueError" else rank.log
        for word in words:
            assert word in text
        assert "initializing torch distributed" not in rank.log


def test_block_size_is_checked_on_one_rank_as_well(training_loop: TrainingLoop) -> None:
    with pytest.raises(JobError, match="--fcp-block-size 24 does not divide the 128 tokens"):
        training_loop.run(TrainingJob(tiny_model_args(context_parallel_backend="fcp", fcp_block_size=24)))


def layer_messages(cases: list[dict[str, Any]]) -> list[str]:
    """Runs in a rank: what FCP's attention says to layers that the command line does not show."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_fcp.integration.core_attention import FcpCoreAttention

    said = []
    for case in cases:
        call = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
        names = {"attn_mask_type", "attention_type"} & case.keys()
        call.update({name: case[name] for name in names})
        if "attn_mask_type" in names:
            call["attn_mask_type"] = AttnMaskType[case["attn_mask_type"]]
        settings = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0}
        config = TransformerConfig(**{**settings, **{k: v for k, v in case.items() if k not in names}})
        with pytest.raises(ValueError) as caught:
            FcpCoreAttention(config, 1, **call)
        said.append(str(caught.value))
    return said


FP8 = "is not supported by FCP's attention yet; set it to False; pass --fp8-format alone"


@pytest.mark.feature(
    "Precision: FP8 attention (`fp8_dot_product_attention`, `fp8_multi_head_attention`)",
    layout="both",
    refused=f"fp8_dot_product_attention True {FP8}",
)
def test_layers_that_the_command_line_does_not_show(training_loop: TrainingLoop) -> None:
    cases = [
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"softmax_type": "sparsemax"}, "softmax_type sparsemax"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention True"),
        ({"fp8_multi_head_attention": True}, "fp8_multi_head_attention True"),
        ({"attention_type": "cross"}, "attention_type cross"),
        ({"attn_mask_type": "no_mask"}, "attn_mask_type AttnMaskType.no_mask"),
    ]
    said = training_loop.call("test_fcp_refusals:layer_messages", [case for case, _ in cases])
    for text, (_, expected) in zip(said, cases, strict=True):
        assert text.startswith(f"{expected} is not supported by FCP's attention yet; ")
    assert [text for text in said if text.endswith(FP8)] == said[2:4]


def test_flags_are_in_the_help(training_loop: TrainingLoop) -> None:
    text = training_loop.run(TrainingJob(["--help"])).ranks[0].log
    assert "flexible context parallelism (FCP)" in text
    for flag in ("backend", "layout", "block-size", "kernel", "rounds-per-stage", "blocks-per-message"):
        assert re.search(rf"--(fcp|context-parallel)-{flag}\b", text), flag
