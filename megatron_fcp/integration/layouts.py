"""From document boundaries to where every token lies: plans, positions, and their cache.

A layout is a pure function of the boundaries and the settings, so every rank that knows the boundaries of a batch
derives the same one: data-parallel rank or not, first pipeline stage or last, ahead of need or when it is needed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron_fcp.integration.plan_worker import PlanWorker
from megatron_fcp.integration.settings import Settings
from megatron_fcp.integration.waits import PlanWaits
from megatron_fcp.plan import Plan, RankPlan, make_plan, with_window
from megatron_fcp.plan.arrays import IntArray, frozen, ranges
from megatron_fcp.plan.route import RankRoute, make_route
from megatron_fcp.plan.sharding import batched, zigzag, zigzag_per_document
from megatron_fcp.runtime import CompiledPlan, CompiledRoute

LAYOUTS_KEPT = 32  # micro-batches in flight keep theirs alive by themselves
_HOST = torch.device("cpu")


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
        offsets = rows.reshape(-1)
        offsets = frozen(offsets[np.append(True, offsets[1:] != offsets[:-1])[: offsets.size]])  # Megatron pads rows
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
        self.plan: Plan | None = make_plan(
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

    def derived(self) -> Layout:
        """This layout, with all that layers will ask of it derived from the plan; needs no torch."""
        for window in self._settings.windows:
            self.rank_plan_for(window)
        if not self._settings.resident:
            _ = self._rank_route
        return self

    def rank_plan_for(self, window: int | None) -> RankPlan:
        """What layers of this window execute; tokens lie where :attr:`rank_plan` has them."""
        if window not in self._rank_plans:
            assert self.plan is not None, f"layers of window {window} were not known when this layout was derived"
            self._rank_plans[window] = with_window(self.plan, window, self._settings.config).rank_plan(self.rank)
        return self._rank_plans[window]

    def on_host(self) -> None:
        """Build the index arrays of kernels and transfers on the host; what is left is to copy them to the device."""
        for window in self._settings.windows:
            self.compiled(_HOST, window)
        if not self._settings.resident:
            self.route(_HOST).reverse()

    def __getstate__(self) -> dict[str, Any]:
        """A derived layout needs the whole plan, by far its largest part, only to save it."""
        return self.__dict__ if self._settings.save_plans else {**self.__dict__, "plan": None}

    @cached_property
    def _rank_route(self) -> RankRoute:
        padding = frozen(np.arange(self.boundaries.offsets[-1], self.boundaries.num_tokens))
        outside = megatron_sharding(self.boundaries, self._settings)
        assert self.plan is not None, "a layout that has come from another process was not derived there"
        return make_route(outside, placed_tokens(self.plan), skipped=padding).rank_route(self.rank)

    def route(self, device: torch.device) -> CompiledRoute:
        """Reshuffle: the way from Megatron's sharding to FCP's placement, ready to run on ``device``."""
        if device not in self._routes:
            host = self._routes.get(_HOST) or CompiledRoute(self._rank_route)
            self._routes[device] = host if device == _HOST else host.to(device)
        return self._routes[device]

    def compiled(self, device: torch.device, window: int | None = None) -> CompiledPlan:
        """The plan for layers of a window (None: whole documents), ready to run on ``device``."""
        if (device, window) not in self._compiled:
            host = self._compiled.get((_HOST, window)) or CompiledPlan(self.rank_plan_for(window))
            self._compiled[device, window] = host if device == _HOST else host.to(device)
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
    """The layouts used last, and those on the way.

    Attributes
    ----------
    waits : PlanWaits
        What the training thread found when it asked.
    worker : PlanWorker or None
        Makes layouts ahead of need, once there is one.
    settle : callable or None
        Called before a layout that nobody announced is made here: what other ranks have announced is then known.
    """

    def __init__(
        self, settings: Settings, capacity: int = LAYOUTS_KEPT, on_new: Callable[[Plan], None] | None = None
    ) -> None:
        self._settings, self._capacity, self._on_new = settings, capacity, on_new
        self._kept: OrderedDict[tuple[object, int], Layout] = OrderedDict()
        self._coming: dict[tuple[object, int], Future[Layout | None]] = {}
        self._lock = threading.Lock()  # announcements come in a thread
        self.waits = PlanWaits()
        self.worker: PlanWorker[Layout] | None = None
        self.settle: Callable[[], object] | None = None

    def expect(self, boundaries: Boundaries, rank: int) -> None:
        """Have the layout of a coming batch made; returns at once, and never raises for what the boundaries say."""
        key = (boundaries.key, rank)
        with self._lock:
            if self.worker is not None and key not in self._kept and key not in self._coming:
                self._coming[key] = self.worker.submit(boundaries, rank)

    def get(self, boundaries: Boundaries, rank: int) -> Layout:
        """Layout of ``boundaries`` for ``rank`` of the group; for the training thread alone."""
        start = time.perf_counter()
        key = (boundaries.key, rank)
        if key in self._kept:
            self._kept.move_to_end(key)
            self.waits.repeated += 1
            layout = self._kept[key]
        else:
            layout = self._fetch(key) or self._plan(boundaries, rank)
            with self._lock:
                self._kept[key] = layout
                self._coming.pop(key, None)  # announced while it was made here
                if len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)
            if self._on_new is not None and layout.plan is not None:
                self._on_new(layout.plan)
            layout.plan = None  # all ranks' parts, by far the largest; this rank's have been derived
        self.waits.seconds += time.perf_counter() - start
        return layout

    def _fetch(self, key: tuple[object, int]) -> Layout | None:
        """A layout that was expected; None where it must be made here."""
        with self._lock:
            future = self._coming.pop(key, None)
        ready = future is not None and future.done()
        if future is None and self.settle is not None:
            self.settle()
            with self._lock:
                future = self._coming.pop(key, None)
        if future is None or self.worker is None:
            return None
        layout = self.worker.result(future)
        if layout is not None:
            self.waits.ready += ready
            self.waits.waited += not ready
        return layout

    def _plan(self, boundaries: Boundaries, rank: int) -> Layout:
        self.waits.planned += 1
        return Layout(boundaries, self._settings, rank).derived()


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
