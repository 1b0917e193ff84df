"""From document boundaries to where every token lies: plans, positions, and their cache.

A layout is a pure function of the boundaries and the settings, so every rank that knows the boundaries of a batch
derives the same one: data-parallel rank or not, first pipeline stage or last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from megatron_fcp.integration.settings import Settings
from megatron_fcp.plan import Plan, RankPlan, make_plan, with_window
from megatron_fcp.plan.arrays import IntArray, frozen, ranges
from megatron_fcp.plan.route import RankRoute, make_route
from megatron_fcp.plan.sharding import batched, zigzag, zigzag_per_document
from megatron_fcp.runtime import CompiledPlan, CompiledRoute

LAYOUTS_KEPT = 32  # micro-batches in flight keep theirs alive by themselves


@dataclass(frozen=True)
class Boundaries:
    """Documents of one micro-batch, seen as one stream of samples.

    Attributes
    ----------
    offsets : IntArray, shape [num_documents + 1]
        ``cu_seqlens`` of the stream: the documents fill it from 0 to the last offset.
    num_tokens : int
        Tokens of the stream; what lies behind the last offset is padding.
    plain : bool
        Each sample is one document, and Megatron shards each by itself. Only the reshuffle layout tells the
        difference: local tokens are in the order of a ``[sequence, batch]`` tensor then.
    """

    offsets: IntArray
    num_tokens: int
    plain: bool

    @staticmethod
    def of_samples(num_samples: int, seq_length: int) -> Boundaries:
        """Samples without document boundaries inside."""
        return Boundaries(frozen(np.arange(num_samples + 1) * seq_length), num_samples * seq_length, True)

    @staticmethod
    def of_packed(cu_seqlens: torch.Tensor, seq_length: int) -> Boundaries:
        """A packed stream of whole samples of ``seq_length`` tokens.

        Parameters
        ----------
        cu_seqlens : Tensor, shape [num_documents + 1] or [num_samples, num_documents + 1]
            Rows count from the start of their sample.
        seq_length : int

        Raises
        ------
        ValueError
            If the offsets do not begin with 0.
        """
        rows = cu_seqlens.cpu().numpy().astype(np.int64)
        if rows.ndim == 2:
            rows = rows + np.arange(rows.shape[0])[:, None] * seq_length
        offsets = frozen(rows.reshape(-1))
        if not offsets.size or offsets[0]:
            raise ValueError(f"cu_seqlens must begin with 0, got {offsets[:4].tolist()}...")
        num_tokens = -(-int(offsets[-1]) // seq_length) * seq_length
        return Boundaries(offsets, num_tokens, False)

    @property
    def key(self) -> tuple[bytes, int, bool]:
        """Equal for equal boundaries."""
        return self.offsets.tobytes(), self.num_tokens, self.plain


class Layout:
    """Where the tokens of one micro-batch lie on one rank.

    Attributes
    ----------
    boundaries : Boundaries
    rank_plan : RankPlan
    index : IntArray, shape [tokens_per_rank]
        Stream index of each local token *outside* attention, in memory order of a ``[sequence, batch]`` tensor.
    positions : IntArray, shape [tokens_per_rank]
        Place of those tokens in their documents; 0 on padding.
    """

    def __init__(self, boundaries: Boundaries, settings: Settings, rank: int) -> None:
        self.boundaries, self.rank = boundaries, rank
        self._settings = settings
        cp_size = settings.cp_size
        if boundaries.num_tokens % cp_size:
            raise ValueError(
                f"--seq-length {settings.seq_length}: a stream of {boundaries.num_tokens} tokens cannot be dealt "
                f"evenly to --context-parallel-size {cp_size} ranks; use --seq-length {_nearest(settings)}"
            )
        self.plan = make_plan(
            np.diff(boundaries.offsets),
            starts=boundaries.offsets[:-1],
            cp_size=cp_size,
            tokens_per_rank=boundaries.num_tokens // cp_size,
            config=settings.config,
            hardware=settings.hardware,
            window=settings.windows[0],
        )
        self.rank_plan: RankPlan = self.plan.rank_plan(rank)
        self._rank_plans: dict[int | None, RankPlan] = {settings.windows[0]: self.rank_plan}
        if settings.resident:
            self.index = self.rank_plan.local_token_global_indices
        else:
            self.index = megatron_sharding(boundaries, settings)[rank]
        self.positions = _positions(boundaries, self.index)
        self._compiled: dict[tuple[torch.device, int | None], CompiledPlan] = {}
        self._routes: dict[torch.device, CompiledRoute] = {}
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}

    @property
    def digest(self) -> str:
        """Digest of the plan, equal on all ranks of the group."""
        return self.rank_plan.digest

    @cached_property
    def _rank_route(self) -> RankRoute:
        padding = frozen(np.arange(self.boundaries.offsets[-1], self.boundaries.num_tokens))
        outside = megatron_sharding(self.boundaries, self._settings)
        return make_route(outside, placed_tokens(self.plan), skipped=padding).rank_route(self.rank)

    def route(self, device: torch.device) -> CompiledRoute:
        """Reshuffle: the way from Megatron's sharding to FCP's placement, ready to run on ``device``."""
        if device not in self._routes:
            self._routes[device] = CompiledRoute(self._rank_route, device)
        return self._routes[device]

    def rank_plan_for(self, window: int | None) -> RankPlan:
        """What layers of this window execute; tokens lie where :attr:`rank_plan` has them."""
        if window not in self._rank_plans:
            self._rank_plans[window] = with_window(self.plan, window, self._settings.config).rank_plan(self.rank)
        return self._rank_plans[window]

    def compiled(self, device: torch.device, window: int | None = None) -> CompiledPlan:
        """The plan for layers of a window (None: whole documents), ready to run on ``device``."""
        if (device, window) not in self._compiled:
            self._compiled[device, window] = CompiledPlan(self.rank_plan_for(window), device)
        return self._compiled[device, window]

    def index_on(self, device: torch.device) -> torch.Tensor:
        """:attr:`index` on ``device``, int64."""
        return self._tensor("index", self.index, device)

    def positions_on(self, device: torch.device) -> torch.Tensor:
        """:attr:`positions` on ``device``, int64."""
        return self._tensor("positions", self.positions, device)

    def _tensor(self, name: str, array: IntArray, device: torch.device) -> torch.Tensor:
        if (name, device) not in self._on_device:
            self._on_device[name, device] = torch.tensor(array, device=device)
        return self._on_device[name, device]


class LayoutCache:
    """The layouts used last."""

    def __init__(
        self, settings: Settings, capacity: int = LAYOUTS_KEPT, on_new: Callable[[Plan], None] | None = None
    ) -> None:
        self._settings, self._capacity, self._on_new = settings, capacity, on_new
        self._kept: OrderedDict[tuple[object, int], Layout] = OrderedDict()

    def get(self, boundaries: Boundaries, rank: int) -> Layout:
        """Layout of ``boundaries`` for ``rank`` of the group."""
        key = (boundaries.key, rank)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        layout = self._kept[key] = Layout(boundaries, self._settings, rank)
        if self._on_new is not None:
            self._on_new(layout.plan)
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return layout


def _nearest(settings: Settings) -> str:
    """The sequence lengths around the one asked for that Megatron can cut, which takes ``2 * cp_size`` chunks."""
    step = 2 * settings.cp_size
    below = settings.seq_length // step * step
    return f"{below} or {below + step}" if below else f"{below + step}"


def megatron_sharding(boundaries: Boundaries, settings: Settings) -> tuple[IntArray, ...]:
    """Stream index of the tokens that Megatron's own sharding gives to each rank, in local memory order.

    Raises
    ------
    ValueError
        For samples or documents that cannot be cut into ``2 * cp_size`` equal chunks where Megatron does so.
    """
    if boundaries.plain:
        sample = zigzag(int(boundaries.offsets[1]), settings.cp_size)
        return batched(sample, boundaries.offsets.size - 1, "sb")
    if settings.sharding == "document":
        return zigzag_per_document(boundaries.offsets, settings.cp_size)
    return zigzag(boundaries.num_tokens, settings.cp_size)


def placed_tokens(plan: Plan) -> tuple[IntArray, ...]:
    """Stream index of the tokens that a plan gives to each rank, in local order."""
    size = plan.table.block_size
    blocks = (plan.placement.blocks_of(rank) for rank in range(plan.cp_size))
    return tuple(frozen(ranges(b * size, np.full(b.size, size))) for b in blocks)


def _positions(boundaries: Boundaries, index: IntArray) -> IntArray:
    starts, ends = boundaries.offsets[:-1], boundaries.offsets[1:]
    filled = starts < ends  # repeated offsets are empty documents
    starts, ends = starts[filled], ends[filled]
    if not starts.size:
        return frozen(np.zeros_like(index))
    document = np.maximum(np.searchsorted(starts, index, side="right") - 1, 0)
    return frozen(np.where(index < ends[document], index - starts[document], 0))
