"""A training job as the simulator sees it, read from Megatron's flags: model, how the GPUs are divided, batch sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_fcp.config import MAX_STREAM, NO_HARDWARE, NOT_WITH_HARDWARE, FcpConfig, check_choice, flag_of
from megatron_fcp.config_file import read_config
from megatron_fcp.launch_config import LaunchConfig, Value
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.simulate.models import ModelShape, Parallel, parse_skip_freq

# Models that the estimates do not know, by the flag that asks for them.
_NOT_ESTIMATED = (
    "--multi-latent-attention", "--hybrid-layer-pattern", "--mtp-num-layers", "--moe-layer-freq",
    "--moe-shared-expert-intermediate-size", "--moe-latent-size", "--heterogeneous-layers-config-path",
    "--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--tensor-parallel-num-weight-shards", "--use-megatron-fsdp", "--use-torch-fsdp2", "--fp8-format",
)  # fmt: skip
_FCP_NUMBERS = (
    "block_size", "ranks_per_node", "rounds_per_stage", "blocks_per_message", "kv_buffer_tokens", "head_groups",
)  # fmt: skip
_TP, _PP, _CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
_EP, _ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


@dataclass(frozen=True)
class Job:
    """What decides on a job's memory and time.

    Attributes
    ----------
    gpus : int
    model : ModelShape
    parallel : Parallel
        ``data`` does not count context-parallel ranks.
    cp_size, seq_length, micro_batch_size : int
    config : FcpConfig
    cost : CostModel or None
        Prices from ``--fcp-config`` that plans are made by.
    hardware : str or None
        ``--fcp-hardware``, if it names any.
    balanced : bool
        Whether plans only balance compute: they are made for no cluster.
    """

    gpus: int
    model: ModelShape
    parallel: Parallel
    cp_size: int
    seq_length: int
    micro_batch_size: int
    config: FcpConfig
    cost: CostModel | None
    hardware: str | None
    balanced: bool

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one context-parallel rank in one micro-batch."""
        return self.seq_length * self.micro_batch_size // self.cp_size

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""
        return self.micro_batch_size * self.parallel.data * self.parallel.micro_batches


class _Reader:
    """Reads numbers from flags and collects what is wrong with them."""

    def __init__(self, flags: Mapping[str, Value]) -> None:
        self.flags = flags
        self.problems: list[str] = []

    def whole(self, flag: str, default: int | None = None) -> int:
        """An integer of at least 1; 1 stands in for a missing or bad one, which becomes a problem."""
        value = self.flags.get(flag, default)
        if value is None:
            self.problems.append(f"{flag} is missing")
            return 1
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = value
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            self.problems.append(f"{flag} must be an integer of at least 1, got {value}")
            return 1
        return number

    def need(self, holds: bool, text: str) -> None:
        """Note a problem unless ``holds``."""
        if not holds:
            self.problems.append(text)


def read_job(launch: LaunchConfig) -> tuple[Job | None, list[str]]:
    """The job of a launch config, and everything that is wrong with how it divides GPUs, model and batch.

    Returns
    -------
    job : Job or None
        None where something is wrong.
    problems : list of str
        Each names flags, values and a remedy.
    """
    read = _Reader(launch.flags)
    model = _model(read)
    parallel = _parallel(read, launch.gpus, model)
    cp_size, seq_length = read.whole(_CP, 1), read.whole("--seq-length")
    micro = read.whole("--micro-batch-size")
    whole_zigzag = 2 * cp_size if cp_size > 1 else 1
    read.need(
        seq_length % (whole_zigzag * (parallel.tensor if "--sequence-parallel" in launch.flags else 1)) == 0,
        f"--seq-length {seq_length} is not a multiple of 2 x {_CP} {cp_size}, times {_TP} {parallel.tensor} under "
        "--sequence-parallel; choose a multiple",
    )
    config, cost = FcpConfig(), None
    try:
        config, cost = _fcp(launch.flags)
        config.resolve_block_size(max(seq_length * micro // cp_size, 1))
    except ValueError as error:
        read.problems.append(str(error))
    hardware = launch.flags.get("--fcp-hardware")
    read.need(
        seq_length * micro <= MAX_STREAM,
        f"--seq-length {seq_length} times --micro-batch-size {micro} is more than the {MAX_STREAM} tokens that can be "
        "planned; lower one of the two",
    )
    if read.problems:
        return None, read.problems
    name = None if hardware in (None, NO_HARDWARE) else str(hardware)
    said = ("--fcp-hardware", "--fcp-config", *(flag_of(setting) for setting in NOT_WITH_HARDWARE))
    balanced = name is None and cost is None and any(flag in launch.flags for flag in said)
    return Job(launch.gpus, model, parallel, cp_size, seq_length, micro, config, cost, name, balanced), []


def _model(read: _Reader) -> ModelShape:
    flags = read.flags
    hidden, heads = read.whole("--hidden-size"), read.whole("--num-attention-heads")
    kv_heads = read.whole("--num-query-groups", 1) if "--group-query-attention" in flags else heads
    read.need(heads % kv_heads == 0, f"--num-query-groups {kv_heads} does not divide --num-attention-heads {heads}")
    experts = read.whole("--num-experts", 1)
    ffn = read.whole("--ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 or 1)
    if "--num-experts" in flags:
        ffn = read.whole("--moe-ffn-hidden-size", ffn)
    chunk = read.whole("--make-vocab-size-divisible-by", 128) * read.whole(_TP, 1)
    return ModelShape(
        name="the model",
        num_layers=read.whole("--num-layers"),
        hidden=hidden,
        ffn=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=read.whole("--kv-channels", max(hidden // heads, 1)),
        vocab=-(-read.whole("--vocab-size") // chunk) * chunk,
        experts=experts,
        top_k=read.whole("--moe-router-topk", 2) if "--num-experts" in flags else 1,
        tied="--untie-embeddings-and-output-weights" not in flags,
        **_windows(read),
    )


def _windows(read: _Reader) -> dict[str, Any]:
    """Which layers see whole documents and which a window."""
    given, pattern = read.flags.get("--window-size"), read.flags.get("--window-attn-skip-freq")
    if given is None:
        return {}  # Megatron ignores a pattern without a window, too
    match = re.fullmatch(r"\(?\s*(-?[0-9]{1,10})\s*,\s*(-?[0-9]{1,10})\s*\)?", str(given))
    before, after = (int(size) for size in match.groups()) if match else (0, 1)
    if (before, after) == (-1, -1):
        return {}
    if after != 0 or before < -1:
        read.problems.append(
            f"--window-size {given} is not W,0: tokens before a query, and none after it, for causal attention"
        )
        return {}
    if before == -1:
        return {}
    try:
        skip = None if pattern is None else parse_skip_freq(str(pattern))
        layers = read.whole("--num-layers")
        ModelShape("", layers, 1, 1, 1, 1, 1, 1, window=before, window_skip_freq=skip)
    except ValueError as error:
        text = str(error)
        read.problems.append(text if text.startswith("--") else f"--window-attn-skip-freq {text}")
        return {}
    return {"window": before, "window_skip_freq": skip}


def _parallel(read: _Reader, gpus: int, model: ModelShape) -> Parallel:
    flags = read.flags
    tp, pp, cp, ep = (read.whole(flag, 1) for flag in (_TP, _PP, _CP, _EP))
    etp = read.whole(_ETP, tp)
    size = tp * pp * cp
    read.need(
        gpus % size == 0,
        f"GPUS {gpus} is not a multiple of {_TP} {tp} x {_PP} {pp} x {_CP} {cp} = {size}; lower one of the three, or "
        f"use {-(-gpus // size) * size} GPUs",
    )
    read.need(model.num_heads % tp == 0, f"{_TP} {tp} does not divide --num-attention-heads {model.num_heads}")
    if ep > 1:
        read.need(
            gpus % (etp * ep * pp) == 0,
            f"GPUS {gpus} is not a multiple of {_ETP} {etp} x {_EP} {ep} x {_PP} {pp} = {etp * ep * pp}; lower {_EP}",
        )
        read.need(model.experts % ep == 0, f"{_EP} {ep} does not divide --num-experts {model.experts}; use a divisor")
    ends = tuple(f"--account-for-{end}-in-pipeline-split" in flags for end in ("embedding", "loss"))
    layers = model.num_layers + sum(ends)
    read.need(
        layers % pp == 0,
        f"{_PP} {pp} does not divide --num-layers {model.num_layers}"
        + (f" and {sum(ends)} for its ends" if any(ends) else "")
        + "; use a divisor, or --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split",
    )
    stage = layers // pp
    chunk = read.whole("--num-layers-per-virtual-pipeline-stage", max(stage, 1))
    read.need(stage % chunk == 0, f"--num-layers-per-virtual-pipeline-stage {chunk} does not divide a stage's {stage}")
    data = max(gpus // size, 1)
    per_turn = read.whole("--micro-batch-size") * data
    batch = read.whole("--global-batch-size", per_turn)
    read.need(
        batch % per_turn == 0,
        f"--global-batch-size {batch} is not a multiple of --micro-batch-size x data-parallel size = {per_turn}; "
        f"use {max(batch // per_turn, 1) * per_turn}",
    )
    return Parallel(
        tp, pp, ep, data, max(batch // per_turn, 1), _recomputes(read, stage), max(stage // chunk, 1), etp, *ends
    )


def _recomputes(read: _Reader, stage: int) -> bool:
    """Whether whole layers are recomputed, all of them; what is recomputed in part counts as kept."""
    if read.flags.get("--recompute-granularity") != "full":
        return False
    layers = read.whole("--recompute-num-layers", 1)
    return read.flags.get("--recompute-method") == "uniform" or layers >= stage


def _fcp(flags: Mapping[str, Value]) -> tuple[FcpConfig, CostModel | None]:
    """Settings of the flags, then of ``--fcp-config``, then the defaults, as in training."""
    config, cost = FcpConfig(), None
    if path := flags.get("--fcp-config"):
        config, cost = read_config(str(path))
    given = {}
    read = _Reader(flags)
    for name in _FCP_NUMBERS:
        if flag_of(name) in flags:
            given[name] = read.whole(flag_of(name))
    if read.problems:
        raise ValueError("; ".join(read.problems))
    if layout := flags.get("--fcp-layout"):
        check_choice("--fcp-layout", layout, ("reshuffle", "resident"))
        given["layout"] = layout
    return replace(config, **given), None if "--fcp-hardware" in flags else cost


def why_no_estimate(launch: LaunchConfig) -> str | None:
    """What keeps the simulator from estimating a job, if anything."""
    if found := [flag for flag in _NOT_ESTIMATED if flag in launch.flags]:
        return f"no estimate: {found[0]} is not in the simulator's model"
    if missing := [flag for flag in ("--swiglu", "--bf16") if flag not in launch.flags]:
        return f"no estimate: the simulator knows training with {missing[0]} only"
    return None


def assumptions(launch: LaunchConfig, job: Job) -> list[str]:
    """What the estimate takes for granted although the flags say otherwise."""
    flags, out = launch.flags, []
    if "--use-distributed-optimizer" not in flags:
        out.append("optimizer states are counted as sharded; pass --use-distributed-optimizer")
    if job.parallel.tensor > 1 and "--sequence-parallel" not in flags:
        out.append("activations are counted as sharded over tensor-parallel ranks; pass --sequence-parallel")
    if "--recompute-granularity" in flags and not job.parallel.recompute:
        out.append("what is recomputed in part counts as kept: activations are an upper bound")
    return out
