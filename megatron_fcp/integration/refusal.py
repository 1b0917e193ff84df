"""One combination that is refused, and the conditions of the table in :mod:`megatron_fcp.integration.refusals`.

A condition takes the parsed arguments and returns the offending value, or None where there is nothing to refuse.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron_fcp.integration.cluster import kv_heads_of
from megatron_fcp.integration.settings import documents_of

RESIDENT = "--fcp-layout resident"
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
    row : str
        The feature's row in docs/matrix.md, where it is not the flag.
    """

    flag: str
    value: Callable[[Namespace], object | None]
    reason: str
    remedy: str
    where: str = "--context-parallel-backend fcp"
    row: str | None = None

    @property
    def feature(self) -> str:
        """The row of docs/matrix.md that this refusal fills."""
        return self.row or f"Other flags: {self.flag}"

    @property
    def layouts(self) -> tuple[str, ...]:
        """The columns of docs/matrix.md."""
        return ("resident",) if self.where == RESIDENT else ("reshuffle", "resident")

    def message(self, value: object) -> str:
        """The error text for ``value``."""
        shown = "" if value is True else f" {value}"
        return f"{self.flag}{shown} cannot be combined with {self.where}: {self.reason}; {self.remedy}"


def is_set(name: str) -> Callable[[Namespace], object | None]:
    return lambda args: getattr(args, name, None) or None


def unless(name: str, *allowed: object) -> Callable[[Namespace], object | None]:
    return lambda args: value if (value := getattr(args, name, allowed[0])) not in allowed else None


def in_resident(value: Callable[[Namespace], object | None]) -> Callable[[Namespace], object | None]:
    return lambda args: value(args) if args.fcp_layout == "resident" else None


def with_documents(value: Callable[[Namespace], object | None]) -> Callable[[Namespace], object | None]:
    return lambda args: value(args) if documents_of(args) != "none" else None


def kv_heads(args: Namespace) -> object | None:
    heads = kv_heads_of(args)
    return heads if heads < args.tensor_model_parallel_size and not args.multi_latent_attention else None


def attention_backend(args: Namespace) -> object | None:
    name = args.attention_backend.name
    # Megatron's local implementation is always unfused: there the value chooses nothing.
    return None if name == "auto" or (name == "unfused" and args.transformer_impl == "local") else name


def encoder_decoder(args: Namespace) -> object | None:
    return args.decoder_seq_length if args.decoder_seq_length not in (None, args.seq_length) else None


def comm_type(args: Namespace) -> object | None:
    return " ".join(args.cp_comm_type) if list(args.cp_comm_type) != ["p2p"] else None


def offloaded_attention(args: Namespace) -> object | None:
    return "core_attn" if args.fine_grained_activation_offloading and "core_attn" in args.offload_modules else None


def sinkhorn(args: Namespace) -> object | None:
    kinds = args.moe_router_load_balancing_type
    return "sinkhorn" if args.num_experts and "sinkhorn" in (kinds if isinstance(kinds, list) else [kinds]) else None


def sequence_aux_loss(args: Namespace) -> object | None:
    kinds = args.moe_router_load_balancing_type
    chosen = kinds if isinstance(kinds, list) else [kinds]
    return "seq_aux_loss" if args.num_experts and "seq_aux_loss" in chosen else None


def batched_sequence_aux_loss(args: Namespace) -> object | None:
    batched = max(args.micro_batch_size, args.eval_micro_batch_size) > 1
    return sequence_aux_loss(args) if batched else None


def fused_rope(args: Namespace) -> object | None:
    batched = max(args.micro_batch_size, args.eval_micro_batch_size) > 1
    per_token = args.fcp_layout == "resident" or documents_of(args) != "none"
    uses_rope = args.position_embedding_type in ("rope", "yarn")
    return True if args.apply_rope_fusion and uses_rope and per_token and batched else None


def mla_fused_rope(args: Namespace) -> object | None:
    per_token = args.fcp_layout == "resident" or documents_of(args) != "none"
    return True if args.multi_latent_attention and args.apply_rope_fusion and per_token else None


def without_attention(args: Namespace) -> object | None:
    """The layer pattern of a hybrid model that has neither self-attention (*) nor MLA (+): nothing for FCP to do."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    return pattern if pattern and not set("*+") & set(pattern) else None


def sparse_attention(args: Namespace) -> object | None:
    """The layer pattern of a hybrid model with layers of sparse attention (D)."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    return pattern if pattern and "D" in pattern else None
