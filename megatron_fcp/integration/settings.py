"""What a training run asked for, read once from Megatron's parsed and validated arguments."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron_fcp.config import FcpConfig

Documents = Literal["none", "packed", "eod"]
Sharding = Literal["sequence", "document"]


@dataclass(frozen=True)
class Settings:
    """A run with ``--context-parallel-backend fcp``.

    Attributes
    ----------
    config : FcpConfig
    cp_size, seq_length : int
        Ranks per context-parallel group; tokens per sample.
    documents : {"none", "packed", "eod"}
        Where document boundaries come from: there are none and each sample is one document; the batch brings
        ``cu_seqlens``; or end-of-document tokens mark them (``--reset-attention-mask``).
    sharding : {"sequence", "document"}
        How Megatron cuts a packed batch in the reshuffle layout: the whole stream into ``2 * cp_size`` chunks
        (``--dataloader-inter-document-masking``), or every document (``--sft``).
    own_attention : bool
        Whether FCP's attention runs. At context-parallel size 1 Megatron's own does, except where
        ``--transformer-impl local`` has none: for packed batches and for MLA.
    """

    config: FcpConfig
    cp_size: int
    seq_length: int
    documents: Documents
    sharding: Sharding
    own_attention: bool
    save_plans: str | None = None

    @property
    def resident(self) -> bool:
        """Whether tokens stay where FCP places them."""
        return self.config.layout == "resident"


def config_from_args(args: Namespace) -> FcpConfig:
    """The :class:`FcpConfig` of a command line.

    Raises
    ------
    ValueError
        For a value outside its range; names the flag.
    """
    return FcpConfig(
        block_size=args.fcp_block_size,
        layout=args.fcp_layout,
        blocks_per_message=args.fcp_blocks_per_message,
        rounds_per_stage=args.fcp_rounds_per_stage,
        ranks_per_node=args.fcp_ranks_per_node,
        kernel=args.fcp_kernel,
        timeout_s=args.fcp_timeout,
    )


def documents_of(args: Namespace) -> Documents:
    """Where a command line takes document boundaries from."""
    if args.sft or args.dataloader_inter_document_masking:
        return "packed"
    return "eod" if args.reset_attention_mask else "none"


def settings_from_args(args: Namespace) -> Settings:
    """Settings of a command line that asks for FCP.

    Raises
    ------
    ValueError
        For a value outside its range or a block size that does not divide the tokens of a rank; names the flag.
    """
    config = config_from_args(args)
    documents = documents_of(args)
    for micro_batch_size in {args.micro_batch_size, args.eval_micro_batch_size}:
        config.resolve_block_size(args.seq_length * micro_batch_size // args.context_parallel_size)
    no_other = args.transformer_impl == "local" and (documents == "packed" or args.multi_latent_attention)
    return Settings(
        config=config,
        cp_size=args.context_parallel_size,
        seq_length=args.seq_length,
        documents=documents,
        sharding="document" if args.sft else "sequence",
        own_attention=args.context_parallel_size > 1 or no_other,
        save_plans=args.fcp_save_plans if args.rank == 0 else None,
    )
