"""The time that training waited for plans, among Megatron's own timers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_fcp.integration import session

TIMER = "fcp-plan-wait"
TRAINING_TIMER = "forward-backward"  # on the list that Megatron's training log shows, and on no other


def wrap_timers_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: Megatron's training log shows the time that training waited for plans, least and most over all ranks.

    Either every rank of a job runs with FCP or none does, so all add the same name.
    """

    def log(
        self: Any,
        names: Sequence[str],
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> Any:
        return original(self, _with_ours(self, names, reset), rank, normalizer, reset, barrier)

    return log


def wrap_timers_write(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: so do TensorBoard and Weights & Biases."""

    def write(
        self: Any,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> Any:
        return original(self, _with_ours(self, names, reset), writer, iteration, normalizer, reset, barrier)

    return write


def _with_ours(timers: Any, names: Sequence[str], reset: bool) -> Sequence[str]:
    run = session.current()
    if run is None or TRAINING_TIMER not in names:
        return names
    timers(TIMER, log_level=0).set_elapsed(run.layouts.waits.since_last(reset))
    return [*names, TIMER]
