"""What a training run asked for, read once from Megatron's parsed and validated arguments."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Literal

from megatron_fcp.config import NO_HARDWARE, NOT_WITH_HARDWARE, FcpConfig, flag_of
from megatron_fcp.config_file import read_config
from megatron_fcp.integration.cluster import cluster_of, prices
from megatron_fcp.integration.windows import model_windows
from megatron_fcp.plan.bounded import check_limit
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.makespan import LARGEST
from megatron_fcp.runtime.communicator import REPORT_S

PLAN_AHEAD = 2  # micro-batches; one would do but for batches that are quickly through
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
        ``--transformer-impl local`` has none: for packed batches and for MLA, and for windows where
        ``--reset-attention-mask`` gives boundaries, which the local implementation drops then; and where multi-token
        prediction would cross the boundaries that end-of-document tokens mark.
    hardware : CostModel or None
        What plans keep the makespan small on; None: they balance compute.
    save_plans : str or None
        Folder for the run's first plans.
    windows : tuple of int or None
        Windows of the model's layers, each once (None: whole documents), first the one that tokens are placed for.
    plan_ahead : int
        Micro-batches that are read before they are needed, so that their plans are ready then; 0: none.
    """

    config: FcpConfig
    cp_size: int
    seq_length: int
    documents: Documents
    sharding: Sharding
    own_attention: bool
    hardware: CostModel | None = None
    save_plans: str | None = None
    plan_ahead: int = 0
    windows: tuple[int | None, ...] = (None,)

    @property
    def resident(self) -> bool:
        """Whether tokens stay where FCP places them."""
        return self.config.layout == "resident"

    @property
    def summary(self) -> str:
        """All that plans depend on but the batch: the same on every rank."""
        return f"{self.config}, {self.hardware}, {self.windows}, {self.documents}, {self.sharding}, {self.seq_length}"


def config_from_args(args: Namespace) -> tuple[FcpConfig, CostModel | None]:
    """Settings and prices of a command line: its flags, then those of ``--fcp-config``, then the defaults.

    Raises
    ------
    ValueError
        For a value outside its range or a file that cannot be read; names the flag.
    """
    config, cost = FcpConfig(), None
    if args.fcp_config:
        try:
            config, cost = read_config(args.fcp_config)
        except ValueError as error:
            raise ValueError(f"--fcp-config: {error}") from error
        if config.mask != "causal":
            raise ValueError(
                f"--fcp-config: FCP config {args.fcp_config}: mask {config.mask} is for plans of the command line, and "
                "Megatron trains with a causal mask; remove the entry"
            )
    flags = {
        "block_size": args.fcp_block_size,
        "layout": args.fcp_layout,
        "blocks_per_message": args.fcp_blocks_per_message,
        "rounds_per_stage": args.fcp_rounds_per_stage,
        "kv_buffer_tokens": args.fcp_kv_buffer_tokens,
        "ranks_per_node": args.fcp_ranks_per_node,
        "kernel": args.fcp_kernel,
        "timeout_s": args.fcp_timeout,
        "max_ctas": args.fcp_max_ctas,
        "head_groups": args.fcp_head_groups,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if args.fcp_timeout is None:
        given["timeout_s"] = min(config.timeout_s, _before_others(args))
    config = replace(config, **given)
    if args.fcp_hardware == NO_HARDWARE:
        cost = None
    elif hardware := cluster_of(args):
        cost = prices(hardware, args)
    if cost is None:
        return config, None
    for name in NOT_WITH_HARDWARE:
        if name in given:
            flag = flag_of(name)
            source = "--fcp-hardware" if args.fcp_hardware else "the hardware in --fcp-config"
            raise ValueError(f"{flag} {given[name]} has no effect with {source}: the planner chooses; drop {flag}")
    return config, replace(cost, ranks_per_node=config.ranks_per_node) if "ranks_per_node" in given else cost


def _before_others(args: Namespace) -> float:
    """A time-out that leaves FCP the time to name the cause before NCCL ends the processes at Megatron's."""
    others = 60.0 * args.distributed_timeout_minutes
    return max(others - REPORT_S, others / 2)


def documents_of(args: Namespace) -> Documents:
    """Where a command line takes document boundaries from."""
    if args.sft or args.dataloader_inter_document_masking:
        return "packed"
    return "eod" if args.reset_attention_mask else "none"


def plan_ahead_of(args: Namespace) -> int:
    """Micro-batches to read ahead on a command line.

    Raises
    ------
    ValueError
        For a negative number, or where the state of the data loader is saved and would be ahead of training.
    """
    given = args.fcp_plan_ahead
    if given is not None and given < 0:
        raise ValueError(f"--fcp-plan-ahead {given} must be at least 0 micro-batches")
    if documents_of(args) == "none":
        return 0  # every batch has the same boundaries, hence one plan
    if args.dataloader_type != "external":
        return PLAN_AHEAD if given is None else given
    if given and getattr(args, "dataloader_save", None):
        raise ValueError(
            f"--fcp-plan-ahead {given} cannot be combined with --dataloader-save: the saved state of an external data "
            "loader would be past batches that were not trained on; drop --fcp-plan-ahead"
        )
    return given or 0  # whether it may be read before its batches are needed is for its owner to say


def settings_from_args(args: Namespace) -> Settings:
    """Settings of a command line that asks for FCP.

    Raises
    ------
    ValueError
        For a value outside its range or a block size that does not divide the tokens of a rank; names the flag.
    """
    config, hardware = config_from_args(args)
    documents = documents_of(args)
    for micro_batch_size in sorted({args.micro_batch_size, args.eval_micro_batch_size}):
        size = config.resolve_block_size(args.seq_length * micro_batch_size // args.context_parallel_size)
        planner_chooses = hardware is not None and config.block_size is None
        if config.kv_buffer_tokens is not None:  # the planner may need blocks of LARGEST, and takes more where they fit
            check_limit(config.kv_buffer_tokens, min(size, LARGEST) if planner_chooses else size)
    windows = model_windows(args)
    dropped = documents == "packed" or (documents == "eod" and windows != (None,))
    no_other = args.transformer_impl == "local" and (dropped or args.multi_latent_attention)
    rolls = bool(args.mtp_num_layers) and documents == "eod"
    return Settings(
        config=config,
        cp_size=args.context_parallel_size,
        seq_length=args.seq_length,
        documents=documents,
        sharding="document" if args.sft else "sequence",
        own_attention=args.context_parallel_size > 1 or no_other or rolls,
        hardware=hardware,
        save_plans=args.fcp_save_plans if args.rank == 0 else None,
        plan_ahead=plan_ahead_of(args),
        windows=windows,
    )
