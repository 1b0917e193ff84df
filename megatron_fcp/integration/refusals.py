"""What cannot run with FCP's attention, as one table: flag, when, why, and the nearest thing that works.

A combination that is not refused here works. Checked once, after Megatron's own checks of the command line, on every
rank, before any model, optimizer or process group exists.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_fcp.integration.settings import documents_of

NOT_YET = "FCP's attention does not support it yet"


@dataclass(frozen=True)
class Refusal:
    """One combination that is refused.

    Attributes
    ----------
    flag : str
        Megatron's flag.
    value : callable
        Takes the parsed arguments; returns the offending value, or None where there is nothing to refuse.
    reason, remedy : str
        Why it cannot work, and the nearest thing that does.
    where : str
        The other half of the combination, when it is not the backend alone.
    """

    flag: str
    value: Callable[[Namespace], object | None]
    reason: str
    remedy: str
    where: str = "--context-parallel-backend fcp"

    def message(self, value: object) -> str:
        """The error text for ``value``."""
        shown = "" if value is True else f" {value}"
        return f"{self.flag}{shown} cannot be combined with {self.where}: {self.reason}; {self.remedy}"


def _is_set(name: str) -> Callable[[Namespace], object | None]:
    return lambda args: getattr(args, name, None) or None


def _unless(name: str, *allowed: object) -> Callable[[Namespace], object | None]:
    return lambda args: value if (value := getattr(args, name, allowed[0])) not in allowed else None


def _in_resident(value: Callable[[Namespace], object | None]) -> Callable[[Namespace], object | None]:
    return lambda args: value(args) if args.fcp_layout == "resident" else None


def _with_documents(value: Callable[[Namespace], object | None]) -> Callable[[Namespace], object | None]:
    return lambda args: value(args) if documents_of(args) != "none" else None


def _kv_heads(args: Namespace) -> object | None:
    heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return heads if heads < args.tensor_model_parallel_size and not args.multi_latent_attention else None


def _attention_backend(args: Namespace) -> object | None:
    name = args.attention_backend.name
    # Megatron's local implementation is always unfused: there the value chooses nothing.
    return None if name == "auto" or (name == "unfused" and args.transformer_impl == "local") else name


def _encoder_decoder(args: Namespace) -> object | None:
    return args.decoder_seq_length if args.decoder_seq_length not in (None, args.seq_length) else None


def _comm_type(args: Namespace) -> object | None:
    return " ".join(args.cp_comm_type) if list(args.cp_comm_type) != ["p2p"] else None


def _sequence_aux_loss(args: Namespace) -> object | None:
    kinds = args.moe_router_load_balancing_type
    chosen = kinds if isinstance(kinds, list) else [kinds]
    return "seq_aux_loss" if args.num_experts and "seq_aux_loss" in chosen else None


def _batched_sequence_aux_loss(args: Namespace) -> object | None:
    batched = max(args.micro_batch_size, args.eval_micro_batch_size) > 1
    return _sequence_aux_loss(args) if batched else None


def _fused_rope(args: Namespace) -> object | None:
    batched = max(args.micro_batch_size, args.eval_micro_batch_size) > 1
    per_token = args.fcp_layout == "resident" or documents_of(args) != "none"
    uses_rope = args.position_embedding_type in ("rope", "yarn")
    return True if args.apply_rope_fusion and uses_rope and per_token and batched else None


def _mla_fused_rope(args: Namespace) -> object | None:
    per_token = args.fcp_layout == "resident" or documents_of(args) != "none"
    return True if args.multi_latent_attention and args.apply_rope_fusion and per_token else None


_NATIVE = "or train this model with --context-parallel-backend native"
_RESHUFFLE = "pass --fcp-layout reshuffle, which keeps Megatron's own token order outside attention"
_RESIDENT = "--fcp-layout resident"
_DOCUMENTS = "document boundaries under --context-parallel-backend fcp"

# Not in the table: Megatron replaces the parsed arguments by those of the file, and never comes to check them.
YAML = Refusal(
    "--yaml-cfg",
    _is_set("yaml_cfg"),
    "a YAML configuration takes the place of all flags, this one included",
    "pass flags instead",
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal("--attention-dropout", _is_set("attention_dropout"), NOT_YET, "pass --attention-dropout 0"),
    Refusal("--window-size", _is_set("window_size"), NOT_YET, f"leave sliding windows off, {_NATIVE}"),
    Refusal("--softmax-type", _unless("softmax_type", "vanilla"), f"it adds a sink, and {NOT_YET}", "pass vanilla"),
    Refusal(
        "--num-query-groups",
        _kv_heads,
        "every tensor-parallel rank needs at least one KV head",
        "lower --tensor-model-parallel-size to at most the number of KV heads",
    ),
    Refusal("--qk-clip", _is_set("qk_clip"), "the largest logit is not recorded", f"leave it off, {_NATIVE}"),
    Refusal("--log-max-attention-logit", _is_set("log_max_attention_logit"), "it is not recorded", "leave it off"),
    Refusal(
        "--experimental-attention-variant",
        _is_set("experimental_attention_variant"),
        "its layers bring their own attention",
        f"leave it off, {_NATIVE}",
    ),
    Refusal(
        "--use-kitchen-attention", _is_set("use_kitchen_attention"), "it replaces the core attention", "leave it off"
    ),
    Refusal(
        "--hybrid-layer-pattern",
        _is_set("hybrid_layer_pattern"),
        "the specs of hybrid models name Transformer Engine's attention directly",
        "use --context-parallel-backend native for hybrid models",
    ),
    Refusal(
        "--heterogeneous-layers-config-path",
        _is_set("heterogeneous_layers_config_path"),
        "heterogeneous specs name Megatron's attention directly",
        "use --context-parallel-backend native for heterogeneous models",
    ),
    Refusal(
        "--heterogeneous-layers-config-encoded-json",
        _is_set("heterogeneous_layers_config_encoded_json"),
        "heterogeneous specs name Megatron's attention directly",
        "use --context-parallel-backend native for heterogeneous models",
    ),
    Refusal(
        "--decoder-seq-length",
        _encoder_decoder,
        "cross attention between sequences of different length has no plan",
        "use decoder-only models",
    ),
    Refusal(
        "--position-embedding-type",
        lambda args: args.position_embedding_type if args.position_embedding_type == "relative" else None,
        "it adds a bias to the logits",
        "use rope, yarn, learned_absolute or none",
    ),
    Refusal(
        "--transformer-impl",
        _unless("transformer_impl", "transformer_engine", "local"),
        "it is for inference",
        "use transformer_engine or local",
    ),
    Refusal(
        "--attention-backend",
        _attention_backend,
        "it chooses a kernel of Megatron's own attention",
        "drop it and choose with --fcp-kernel",
    ),
    Refusal(
        "--cuda-graph-impl",
        _unless("cuda_graph_impl", "none"),
        "every batch has a plan of its own, and a graph replays one",
        "pass none",
    ),
    Refusal(
        "--hybrid-context-parallel",
        _is_set("hybrid_context_parallel"),
        "both decide which rank holds which tokens",
        "drop it: FCP balances documents of any length inside one group",
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes",
        _is_set("hierarchical_context_parallel_sizes"),
        "it cuts the group for Transformer Engine's exchange",
        "drop it and pass --fcp-ranks-per-node",
    ),
    Refusal("--cp-comm-type", _comm_type, "it chooses the exchange of Megatron's own context parallelism", "drop it"),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        _is_set("overlap_moe_expert_parallel_comm"),
        "its schedule runs attention apart from the forward step and drops packed_seq_params",
        f"leave it off, {_NATIVE}",
    ),
    Refusal("--perform-rl-step", _is_set("perform_rl_step"), "FCP has no inference path", "use native for RL"),
    Refusal("--flash-decode", _is_set("flash_decode"), "FCP has no inference path", "leave it off"),
    Refusal(
        "--mtp-num-layers", _in_resident(_is_set("mtp_num_layers")), "it rolls tokens in order", _RESHUFFLE, _RESIDENT
    ),
    Refusal(
        "--mtp-num-layers",
        lambda args: args.mtp_num_layers if args.mtp_num_layers and args.calculate_per_token_loss else None,
        "Megatron weighs the extra losses by each rank's own number of valid tokens then",
        "drop --calculate-per-token-loss; the loss is the mean over valid tokens without it as well",
        "--calculate-per-token-loss under --context-parallel-backend fcp",
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        _in_resident(_sequence_aux_loss),
        "the loss needs whole sequences",
        f"use aux_loss or global_aux_loss, or {_RESHUFFLE}",
        _RESIDENT,
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        _with_documents(_batched_sequence_aux_loss),
        "samples of one micro-batch are packed into one stream",
        "pass --micro-batch-size 1, or use aux_loss or global_aux_loss",
        _DOCUMENTS,
    ),
    Refusal(
        "--position-embedding-type",
        _in_resident(lambda args: "mrope" if args.position_embedding_type == "mrope" else None),
        "its positions have three axes",
        _RESHUFFLE,
        _RESIDENT,
    ),
    Refusal(
        "--mtp-num-layers",
        _with_documents(_is_set("mtp_num_layers")),
        "Megatron rolls labels by another cut of the documents than its data loader makes",
        "leave it off, or train on samples without document masking",
        _DOCUMENTS,
    ),
    Refusal(
        "--position-embedding-type",
        _with_documents(lambda args: "mrope" if args.position_embedding_type == "mrope" else None),
        "its positions have three axes",
        "use rope",
        _DOCUMENTS,
    ),
    Refusal(
        "RoPE fusion with --micro-batch-size > 1",
        _fused_rope,
        "the fused kernel takes one position per row, not per token",
        "pass --no-rope-fusion",
    ),
    Refusal(
        "RoPE fusion with --multi-latent-attention",
        _mla_fused_rope,
        "the fused kernel derives positions from the rank",
        "pass --no-rope-fusion",
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
