"""The flags, and what happens to them once Megatron has checked its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, get_args

from megatron_fcp.config import FcpConfig, Layout
from megatron_fcp.integration import features, session
from megatron_fcp.integration.cluster import cluster_of, device_of, gpu_name, is_chosen, kv_heads_of
from megatron_fcp.integration.refusals import YAML, check_combinations
from megatron_fcp.integration.settings import PLAN_AHEAD, Settings, settings_from_args
from megatron_fcp.runtime import select_kernel

_DEFAULTS = FcpConfig()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group of FCP's flags to ``parser``."""
    group = parser.add_argument_group(
        "flexible context parallelism (FCP)",
        "Blocks of the packed stream on any rank, only the KV that is needed moved, in congestion-free rounds.",
    )
    group.add_argument(
        "--context-parallel-backend",
        choices=("native", "fcp"),
        default="native",
        help="Who runs attention across the context-parallel group: Megatron's own context parallelism, or FCP.",
    )
    group.add_argument(
        "--fcp-layout",
        choices=get_args(Layout),
        default=None,
        help="Where tokens live outside attention. reshuffle: Megatron's own sharding; Q, K, V and the output move at "
        "every attention. resident: FCP's placement from the batch to the loss; nothing else moves. "
        f"(default: {_DEFAULTS.layout})",
    )
    group.add_argument(
        "--fcp-block-size",
        type=int,
        default=None,
        metavar="TOKENS",
        help="Tokens per block; must divide the tokens of a rank. Default: the largest such size up to 4096.",
    )
    group.add_argument(
        "--fcp-kernel",
        default=None,
        help="Attention kernel. auto, the default, takes the best that can do the job and says why.",
    )
    group.add_argument(
        "--fcp-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="Seconds a transfer may take before every rank stops with a report (default: "
        f"{_DEFAULTS.timeout_s:g}, or a minute less than --distributed-timeout-minutes where that is less).",
    )
    group.add_argument(
        "--fcp-max-ctas",
        type=int,
        default=None,
        metavar="N",
        help="SMs that NCCL may take for FCP's transfers; the rest stays with attention. Default: NCCL decides.",
    )
    group.add_argument(
        "--fcp-head-groups",
        type=int,
        default=None,
        metavar="N",
        help="Groups of KV heads, at most, that the reshuffle layout brings in, attends to and takes home in turn: one "
        f"moves while another is attended to. 1: no overlap (default: {_DEFAULTS.head_groups}).",
    )
    _add_planner_arguments(group)
    return parser


def _add_planner_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags that shape plans, and those that read and write files of the command line."""
    group.add_argument(
        "--fcp-rounds-per-stage",
        type=int,
        default=None,
        metavar="N",
        help="Communication rounds attended to by one kernel call. Default: the planner decides.",
    )
    group.add_argument(
        "--fcp-blocks-per-message",
        type=int,
        default=None,
        metavar="N",
        help=f"Blocks that one message may carry (default: {_DEFAULTS.blocks_per_message}).",
    )
    group.add_argument(
        "--fcp-kv-buffer-tokens",
        type=int,
        default=None,
        metavar="TOKENS",
        help="KV tokens of other ranks that a rank may hold at once, and of fp32 dKV in backward. Default: with a "
        "hardware model 32 times the tokens of a rank.",
    )
    group.add_argument(
        "--fcp-ranks-per-node",
        type=int,
        default=None,
        metavar="N",
        help="Context-parallel ranks that share a node's fast network; 1 means one flat network "
        f"(default: {_DEFAULTS.ranks_per_node}, or what the hardware has).",
    )
    group.add_argument(
        "--fcp-hardware",
        metavar="NAME|FILE",
        help="Plan for the smallest makespan on this cluster: a preset or a YAML file of `megatron-fcp profile`. The "
        "planner then chooses block size (unless given), messages and stages. none: balance compute, owners send. "
        "Default: on GPUs the preset nearest to them, unless --fcp-config, --fcp-blocks-per-message or "
        "--fcp-rounds-per-stage is given; on CPUs none.",
    )
    group.add_argument(
        "--fcp-config",
        metavar="FILE",
        help="Settings that `megatron-fcp tune` wrote, hardware included; flags on the command line go before them.",
    )
    group.add_argument(
        "--fcp-plan-ahead",
        type=int,
        default=None,
        metavar="N",
        help="Micro-batches to read before they are needed, so that a process beside training has their plans ready. "
        f"Default: {PLAN_AHEAD}; 0, which plans when a batch is used, for --dataloader-type external.",
    )
    group.add_argument(
        "--fcp-save-plans",
        metavar="FOLDER",
        help="Write the first plans of the run to FOLDER, for `megatron-fcp view`, `simulate`, `trace` and `replay`.",
    )


def wrap_add_megatron_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: Megatron's parser gets FCP's group as well."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return extend(original(parser))

    return add_megatron_arguments


def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add FCP's flags to Megatron's complete parser."""
    parser = add_arguments(parser)
    _repair_help(parser)
    _refuse_yaml()
    return parser


def _refuse_yaml() -> None:
    """Refuse ``--yaml-cfg`` together with FCP while both flags can still be seen."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg")
    parser.add_argument("--context-parallel-backend")
    seen, _ = parser.parse_known_args()
    if seen.yaml_cfg and seen.context_parallel_backend == "fcp":
        raise ValueError(YAML.message(seen.yaml_cfg))


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Make ``--help`` work: in megatron-core 0.19.2 it stops at a per cent sign that a help text does not escape."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except ValueError:
            assert action.help is not None
            action.help = action.help.replace("%", "%%")


def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: after Megatron's own checks, FCP's; then the session of this run begins."""

    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> argparse.Namespace:  # noqa: B006
        session.end()
        validated = original(args, defaults)
        begin_session(validated)
        return validated

    return validate_args


def begin_session(args: argparse.Namespace) -> None:
    """Check validated arguments and, where they ask for FCP, begin its session.

    Raises
    ------
    ValueError
        For values or combinations that cannot work; names flag, value, reason and remedy.
    """
    if getattr(args, "context_parallel_backend", "native") != "fcp":
        if args.rank == 0 and (unused := given_flags(args)):
            print(
                f"> FCP: {', '.join(unused)} given, and without effect: --context-parallel-backend is native; "
                "pass fcp, or drop them",
                flush=True,
            )
        return
    features.complete(args)
    settings = settings_from_args(args)
    args.fcp_layout = settings.config.layout  # as the other settings, it may come from --fcp-config
    if not settings.own_attention:  # one rank: Megatron's own attention, and nothing of ours in its way
        if args.rank == 0:
            print("> FCP: --context-parallel-size is 1, so Megatron's own attention runs", flush=True)
        return
    if problems := list(features.refused(args)):
        raise ValueError("\n".join(problems))
    check_combinations(args)
    reason = kernel_for(args, settings.config.kernel, settings.windows)
    if args.rank == 0:
        tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
        chosen = settings.hardware is not None and settings.config.block_size is None
        block_size = settings.config.resolve_block_size(tokens)
        blocks = "blocks of the planner's choice" if chosen else f"{tokens // block_size} blocks of {block_size} tokens"
        print(
            f"> FCP: {settings.config.layout} layout, {blocks} on each of {settings.cp_size} ranks; "
            f"{_planned_for(args, settings)}; kernel: {reason}",
            flush=True,
        )
    # Plans replace masks: samples need no [s, s] mask from the data loader, which native packing drops as well.
    args.create_attention_mask_in_dataloader = False
    if settings.documents == "eod" and features.hands_on_boundaries():
        # The switch by which Megatron hands document boundaries to every tensor- and pipeline-parallel rank.
        args.dataloader_inter_document_masking = True
    session.begin(settings)


def _planned_for(args: argparse.Namespace, settings: Settings) -> str:
    """In words, what plans are made for."""
    if settings.hardware is None:
        return "plans balance compute (--fcp-hardware names a cluster to plan for)"
    hardware = cluster_of(args)
    if hardware is None:
        return "plans for the hardware of --fcp-config"
    nodes = f"{settings.hardware.ranks_per_node} of its ranks per node"
    if not is_chosen(args):
        return f"plans for {hardware.name}, {nodes}"
    return (
        f"plans for {hardware.name}, {nodes}, the preset nearest to {gpu_name(args)} (--fcp-hardware names another, "
        "`megatron-fcp profile` measures yours)"
    )


def given_flags(args: argparse.Namespace) -> list[str]:
    """FCP's own flags on a command line, all of which are unset by default."""
    given = (name for name, value in vars(args).items() if name.startswith("fcp_") and value is not None)
    return [f"--{name.replace('_', '-')}" for name in given]


def kernel_for(args: argparse.Namespace, name: str, windows: Sequence[int | None] = (None,)) -> str:
    """Check that kernels can do what the model's layers need, and say which ones and why.

    Raises
    ------
    ValueError
        If there is no such kernel, or none can do it; lists each with its reason.
    """
    tp_size = args.tensor_model_parallel_size
    mla = args.multi_latent_attention
    reasons = [
        select_kernel(
            name,
            device=device_of(args),
            dtype=args.params_dtype,
            head_dim_qk=args.qk_head_dim + args.qk_pos_emb_head_dim if mla else args.kv_channels,
            head_dim_v=args.v_head_dim if mla else args.kv_channels,
            num_heads=args.num_attention_heads // tp_size,
            num_kv_heads=(args.num_attention_heads if mla else kv_heads_of(args)) // tp_size,
            window=window,
        )[1]
        for window in sorted({window is not None for window in windows})
    ]
    return "; in layers with a window ".join(reasons)
