"""What a user may set. Every error names the flag, the value given and a legal value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Literal, get_args

Mask = Literal["causal", "full"]
Layout = Literal["reshuffle", "resident"]

MAX_AUTO_BLOCK_SIZE = 4096
SLIVER = 16  # tokens, below which a block is not worth its place in a plan
MAX_NUMBER = 2**31  # no size or count is larger, and none below it can overflow
MAX_STREAM = 2**28  # tokens that are planned together: 8192 ranks of 32K; every rank keeps a few numbers per token
MAX_TIMEOUT_S = 7 * 86400.0
NO_HARDWARE = "none"  # value of --fcp-hardware
NOT_WITH_HARDWARE = ("blocks_per_message", "rounds_per_stage")  # which the planner chooses for a cluster
HEAD_GROUPS = 4  # at most; each group repeats the latency of every message and the launch of every kernel


def flag_of(setting: str) -> str:
    """Megatron's flag for one of :class:`FcpConfig`'s settings."""
    return "--fcp-" + setting.replace("_", "-")


def check_choice(flag: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ValueError that names ``flag`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{flag} {value!r} is unknown; choose one of {', '.join(choices)}")


def check_at_least(flag: str, value: object, lowest: int) -> int:
    """``value`` as an int if it is an integer (numpy's too) of at least ``lowest``, else a ValueError naming ``flag``.

    ``MAX_NUMBER`` is the most that is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        raise ValueError(f"{flag} must be an integer of at least {lowest}, got {value!r}")
    if int(value) > MAX_NUMBER:
        raise ValueError(f"{flag} {value!r} is past the limit of {MAX_NUMBER}")
    return int(value)


def check_stream(
    cp_size: object, tokens_per_rank: object, names: tuple[str, str] = ("--context-parallel-size", "tokens per rank")
) -> tuple[int, int]:
    """Both as ints, if that many ranks of that many tokens can be planned, else a ValueError with their ``names``."""
    ranks = check_at_least(names[0], cp_size, 1)
    tokens = check_at_least(names[1], tokens_per_rank, 1)
    if ranks * tokens > MAX_STREAM:
        raise ValueError(
            f"{names[0]} {ranks} times {names[1]} {tokens} is a stream of {ranks * tokens:,} tokens; at most "
            f"{MAX_STREAM:,} can be planned together: {MAX_STREAM // ranks:,} per rank on {ranks:,} ranks"
        )
    return ranks, tokens


_COUNTS = frozenset(
    ("block_size", "blocks_per_message", "rounds_per_stage", "kv_buffer_tokens", "ranks_per_node", "max_ctas",
     "head_groups")
)  # fmt: skip


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
        for field in fields(self):
            value: object = getattr(self, field.name)
            if field.name in _COUNTS and (value is not None or field.default is not None):
                object.__setattr__(self, field.name, check_at_least(flag_of(field.name), value, 1))
        seconds: object = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < float(seconds) <= MAX_TIMEOUT_S:
            raise ValueError(
                f"--fcp-timeout must be a positive number of seconds and at most a week, {MAX_TIMEOUT_S:g}; "
                f"got {seconds!r}"
            )

    def resolve_block_size(self, tokens_per_rank: int) -> int:
        """Block size for ``tokens_per_rank`` tokens on every rank.

        Raises
        ------
        ValueError
            If the configured size does not divide ``tokens_per_rank``; names the nearest sizes that do.
        """
        tokens_per_rank = check_at_least("tokens per rank", tokens_per_rank, 1)
        divisors = divisors_of(tokens_per_rank)
        if self.block_size is None:
            return largest_block(tokens_per_rank, MAX_AUTO_BLOCK_SIZE)
        if tokens_per_rank % self.block_size:
            below = max(d for d in divisors if d <= self.block_size)
            above = min((d for d in divisors if d >= self.block_size), default=below)
            nearest = f"sizes that do are {below} and {above}" if below != above else f"size that does is {below}"
            raise ValueError(
                f"--fcp-block-size {self.block_size} does not divide the {tokens_per_rank} tokens per rank; "
                f"the nearest {nearest}"
            )
        return self.block_size


def largest_block(tokens_per_rank: int, limit: int) -> int:
    """Largest divisor of ``tokens_per_rank`` up to ``limit``; if only slivers are, the next one above it.

    A prime number of tokens per rank would be cut into single tokens otherwise, which takes minutes to plan.
    """
    divisors = divisors_of(tokens_per_rank)
    below = max(d for d in divisors if d <= limit)
    return below if below >= SLIVER else min((d for d in divisors if d > limit), default=below)


def divisors_of(n: int) -> list[int]:
    """All divisors of ``n``, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
