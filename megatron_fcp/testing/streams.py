"""Random packed streams that look for trouble: the lengths at which packing, blocks and padding go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.plan import Plan, make_plan, with_window

Kind = Literal["edges", "giant", "ones", "random", "few"]
KINDS: tuple[Kind, ...] = ("edges", "giant", "ones", "random", "few")


@dataclass(frozen=True)
class Case:
    """A stream and how to plan it; ``starts`` is None where documents lie one after the other.

    With ``layers`` "mixed" the plan of a window is derived from one for whole documents, else it is made as such.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None
    cp_size: int
    tokens_per_rank: int
    config: FcpConfig
    window: int | None = None
    layers: Literal["alike", "mixed"] = "alike"

    def plan(self) -> Plan:
        """The plan of this case."""
        plan = make_plan(
            self.lengths,
            starts=self.starts,
            cp_size=self.cp_size,
            tokens_per_rank=self.tokens_per_rank,
            config=self.config,
            window=None if self.layers == "mixed" else self.window,
        )
        return with_window(plan, self.window, self.config)


def edge_lengths(block_size: int) -> tuple[int, ...]:
    """Document lengths around the edges of blocks: empty, one token, a block more or less one."""
    return tuple(sorted({0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1}))


def edge_windows(block_size: int, length: int) -> tuple[int, ...]:
    """Windows around the edges of blocks: none, one token, a block more or less one, all of ``length`` and beyond."""
    return tuple(sorted({0, 1, max(block_size - 1, 0), block_size, block_size + 1, 2 * block_size + 1, length + 1}))


def random_lengths(rng: np.random.Generator, kind: Kind, num_tokens: int, block_size: int) -> list[int]:
    """Document lengths of at most ``num_tokens`` in total; most kinds leave padding at the tail now and then.

    Parameters
    ----------
    rng : numpy.random.Generator
    kind : str
        "edges" (see :func:`edge_lengths`), "giant" (one document of most of the stream among short ones), "ones"
        (mostly documents of one token), "random" (long-tailed), "few" (one to three documents, much padding).
    num_tokens, block_size : int
    """
    if kind == "edges":
        drawn = rng.choice(edge_lengths(block_size), size=4 + 2 * num_tokens // block_size)
    elif kind == "giant":
        giant = int(rng.integers(num_tokens // 2, num_tokens + 1))
        drawn = np.append(rng.integers(0, block_size + 2, size=8), giant)
        rng.shuffle(drawn)
        drawn[drawn == giant] = num_tokens - (drawn.sum() - giant) if rng.random() < 0.5 else giant
    elif kind == "ones":
        drawn = rng.choice([0, 1, 1, 1, 1, block_size + 1], size=num_tokens)
    elif kind == "random":
        drawn = np.minimum(rng.lognormal(np.log(2 * block_size), 1.2, size=num_tokens), num_tokens).astype(np.int64)
    else:
        drawn = rng.integers(0, num_tokens // 2 + 1, size=int(rng.integers(1, 4)))
    lengths: list[int] = []
    room = int(num_tokens - rng.integers(0, block_size * 2) * (rng.random() < 0.5))
    for length in np.maximum(drawn, 0).tolist():
        if length > room:
            break
        lengths.append(length)
        room -= length
    return lengths


def random_starts(rng: np.random.Generator, lengths: list[int], num_tokens: int) -> list[int]:
    """Starts that spread part of the padding between the documents."""
    room = num_tokens - sum(lengths)
    cuts = np.sort(rng.integers(0, room + 1, size=len(lengths)))
    return [int(cut) + before for cut, before in zip(cuts, np.append(0, np.cumsum(lengths))[:-1].tolist())]


def random_case(rng: np.random.Generator, *, max_cp_size: int = 9, max_blocks_per_rank: int = 5) -> Case:
    """A case whose every setting is drawn: sizes, kind of lengths, gaps, mask, tiers, stages, message size."""
    block_size = int(rng.choice([1, 2, 3, 4, 8]))
    cp_size = int(rng.integers(1, max_cp_size + 1))
    tokens_per_rank = block_size * int(rng.integers(1, max_blocks_per_rank + 1))
    num_tokens = cp_size * tokens_per_rank
    lengths = random_lengths(rng, KINDS[rng.integers(len(KINDS))], num_tokens, block_size)
    mask: Mask = "full" if rng.random() < 0.3 else "causal"
    config = FcpConfig(
        block_size=block_size,
        mask=mask,
        blocks_per_message=int(rng.choice([1, 2, 16])),
        rounds_per_stage=None if rng.random() < 0.5 else int(rng.integers(1, 5)),
        ranks_per_node=int(rng.choice([1, 1, 2, 3, 8])),
    )
    starts = tuple(random_starts(rng, lengths, num_tokens)) if rng.random() < 0.25 else None
    return Case(tuple(lengths), starts, cp_size, tokens_per_rank, config)
