"""What a user may set. Every error names the flag, the value given and a legal value."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

Mask = Literal["causal", "full"]
Layout = Literal["reshuffle", "resident"]

MAX_AUTO_BLOCK_SIZE = 4096
HEAD_GROUPS = 4  # at most; each group repeats the latency of every message and the launch of every kernel


def check_choice(flag: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ValueError that names ``flag`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{flag} {value!r} is unknown; choose one of {', '.join(choices)}")


def check_at_least(flag: str, value: object, lowest: int) -> None:
    """Raise a ValueError that names ``flag`` unless ``value`` is an integer (numpy's too) of at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        raise ValueError(f"{flag} must be an integer of at least {lowest}, got {value!r}")


@dataclass(frozen=True)
class FcpConfig:
    """Settings of the FCP backend; the Megatron flags of the same names fill it.

    Attributes
    ----------
    block_size : int or None
        Tokens per block (``--fcp-block-size``). None picks the largest legal size up to 4096.
    layout : {"reshuffle", "resident"}
        Where tokens live outside attention (``--fcp-layout``): Megatron's own sharding, or FCP's placement.
    mask : {"causal", "full"}
        Attention inside a document.
    blocks_per_message : int
        Blocks that one point-to-point message may carry (``--fcp-blocks-per-message``).
    rounds_per_stage : int or None
        Communication rounds merged into one compute stage (``--fcp-rounds-per-stage``); None lets the planner cut.
    kv_buffer_tokens : int or None
        KV tokens of other ranks that a rank may hold at once (``--fcp-kv-buffer-tokens``); backward holds as many
        tokens of fp32 dKV and what arrives beside them. None: 32 times the tokens of a rank with a hardware model, no
        limit of its own without.
    ranks_per_node : int
        Ranks that share the fast network tier (``--fcp-ranks-per-node``); 1 means one flat network.
    kernel : str
        Attention kernel (``--fcp-kernel``); "auto" takes the best that can do the job and says why.
    timeout_s : float
        Seconds (``--fcp-timeout``) a transfer may take before every rank stops with a report.
    head_groups : int
        Groups of KV heads, at most (``--fcp-head-groups``), that the reshuffle layout brings in, attends to and takes
        home one after the other, so that each moves while another is attended to.
    max_ctas : int or None
        SMs that NCCL may take for FCP's transfers (``--fcp-max-ctas``); None leaves it to NCCL.

    Raises
    ------
    ValueError
        If a value is outside its range; the message names the flag.
    """

    block_size: int | None = None
    layout: Layout = "reshuffle"
    mask: Mask = "causal"
    blocks_per_message: int = 16
    rounds_per_stage: int | None = None
    kv_buffer_tokens: int | None = None
    ranks_per_node: int = 1
    kernel: str = "auto"
    timeout_s: float = 600.0
    max_ctas: int | None = None
    head_groups: int = HEAD_GROUPS

    def __post_init__(self) -> None:
        check_choice("--fcp-layout", self.layout, get_args(Layout))
        check_choice("mask", self.mask, get_args(Mask))
        if self.block_size is not None:
            check_at_least("--fcp-block-size", self.block_size, 1)
        if self.rounds_per_stage is not None:
            check_at_least("--fcp-rounds-per-stage", self.rounds_per_stage, 1)
        if self.kv_buffer_tokens is not None:
            check_at_least("--fcp-kv-buffer-tokens", self.kv_buffer_tokens, 1)
        if self.max_ctas is not None:
            check_at_least("--fcp-max-ctas", self.max_ctas, 1)
        check_at_least("--fcp-blocks-per-message", self.blocks_per_message, 1)
        check_at_least("--fcp-ranks-per-node", self.ranks_per_node, 1)
        check_at_least("--fcp-head-groups", self.head_groups, 1)
        if not self.timeout_s > 0:
            raise ValueError(f"--fcp-timeout must be a positive number of seconds, got {self.timeout_s!r}")

    def resolve_block_size(self, tokens_per_rank: int) -> int:
        """Block size for ``tokens_per_rank`` tokens on every rank.

        Raises
        ------
        ValueError
            If the configured size does not divide ``tokens_per_rank``; names the nearest sizes that do.
        """
        check_at_least("tokens per rank", tokens_per_rank, 1)
        divisors = _divisors(tokens_per_rank)
        if self.block_size is None:
            return max(d for d in divisors if d <= MAX_AUTO_BLOCK_SIZE)
        if tokens_per_rank % self.block_size:
            below = max(d for d in divisors if d <= self.block_size)
            above = min((d for d in divisors if d >= self.block_size), default=tokens_per_rank)
            raise ValueError(
                f"--fcp-block-size {self.block_size} does not divide the {tokens_per_rank} tokens per rank; "
                f"the nearest sizes that do are {below} and {above}"
            )
        return self.block_size


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
