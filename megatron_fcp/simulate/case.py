"""One question to the simulator: these documents, on this many ranks, of this hardware, with these heads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_fcp.config import check_at_least
from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.blocks import check_lengths, check_window
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.simulate.hardware import AttentionShape, HardwareModel
from megatron_fcp.simulate.kernels import backward_cost, ideal_s
from megatron_fcp.simulate.program import Builder, Program


@dataclass(frozen=True)
class Case:
    """What plans and peers are asked to run.

    Attributes
    ----------
    lengths : IntArray, shape [num_documents]
        In stream order; they fill at most ``cp_size * tokens_per_rank`` tokens.
    cp_size, tokens_per_rank : int
    hardware : HardwareModel
    shape : AttentionShape
        Heads of one rank.
    speed : FloatArray or None, shape [cp_size]
        Compute speed of each rank relative to the hardware's; None: the hardware file's, or all 1.
    window : int or None
        Tokens before a query that it attends to at most; None: all of its document.

    Raises
    ------
    ValueError
        If the lengths are bad or too long for the ranks, a speed is not positive or a window negative.
    """

    lengths: IntArray
    cp_size: int
    tokens_per_rank: int
    hardware: HardwareModel
    shape: AttentionShape = field(default_factory=AttentionShape)
    speed: FloatArray | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        check_at_least("--cp-size", self.cp_size, 1)
        check_at_least("--tokens-per-rank", self.tokens_per_rank, 1)
        check_window(self.window)
        length = check_lengths(self.lengths)
        object.__setattr__(self, "lengths", length[length > 0])
        room = self.cp_size * self.tokens_per_rank
        if self.lengths.sum() > room:
            raise ValueError(
                f"the documents hold {self.lengths.sum()} tokens but {self.cp_size} ranks with --tokens-per-rank "
                f"{self.tokens_per_rank} have room for {room}; raise one of the two"
            )
        given = self.hardware.speeds if self.speed is None and self.hardware.speeds else self.speed
        if given is not None:
            speed = np.asarray(given, dtype=np.float64)
            if speed.shape != (self.cp_size,):
                raise ValueError(
                    f"{speed.size} rank speeds were given for {self.cp_size} ranks; give one per rank, or none"
                )
            if not (np.isfinite(speed).all() and (speed > 0).all()):
                rank = int(np.flatnonzero(~(np.isfinite(speed) & (speed > 0)))[0])
                raise ValueError(f"the speed of rank {rank} must be positive, got {speed[rank]}")
            object.__setattr__(self, "speed", speed)

    @cached_property
    def forward(self) -> CostModel:
        """Prices of a forward pass."""
        cost = self.hardware.cost(self.shape)
        return cost if self.speed is None else replace(cost, speeds=tuple(self.speed.tolist()))

    @cached_property
    def backward(self) -> CostModel:
        """Prices of a backward pass."""
        return backward_cost(self.forward, self.hardware)

    def cost(self, *, backward: bool) -> CostModel:
        """Prices of one of the two passes."""
        return self.backward if backward else self.forward

    def ideal(self, *, backward: bool = False) -> float:
        """Seconds that a perfect cluster takes, every document one kernel call."""
        mean = 1.0 if self.speed is None else float(self.speed.mean())
        return ideal_s(self.lengths, self.cp_size, self.cost(backward=backward), self.window) / mean

    def slowdown(self) -> FloatArray:
        """Factor on kernel seconds by rank, shape [cp_size]."""
        return np.ones(self.cp_size) if self.speed is None else 1.0 / self.speed

    def builder(self) -> Builder:
        """An empty program for this case's ranks."""
        return Builder(self.cp_size, self.hardware.ranks_per_node)

    def efficiency(self, program: Program, *, backward: bool = False) -> float:
        """Share of the makespan of ``program`` in which a perfect cluster would be done."""
        makespan = program.run().makespan
        return self.ideal(backward=backward) / makespan if makespan else 1.0

    def replace(self, **changes: object) -> Case:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
