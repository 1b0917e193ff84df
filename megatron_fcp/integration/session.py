"""The process's current training run with FCP: settings and caches, never anything of one batch.

What belongs to a batch rides on its ``PackedSeqParams``, because the pipeline schedule has several batches in flight
and activation recomputation comes back to old ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_fcp.integration.layouts import LayoutCache
from megatron_fcp.integration.record import PlanRecorder
from megatron_fcp.integration.settings import Settings
from megatron_fcp.runtime import Communicator

if TYPE_CHECKING:
    from megatron_fcp.integration.look_ahead import PlanAhead


class Session:
    """One run.

    Attributes
    ----------
    settings : Settings
    layouts : LayoutCache
        Layouts of the batches seen lately, and of those to come.
    ahead : PlanAhead or None
        What plans ahead of need, once the data iterators are there.
    eod_token : int or None
        End-of-document token, once the data set's configuration has named it.
    attention_layers : int
        Attention layers of FCP that this rank has built.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        recorder = PlanRecorder(settings.save_plans) if settings.save_plans else None
        self.layouts = LayoutCache(settings, on_new=recorder.record if recorder else None)
        self.ahead: PlanAhead | None = None
        self.eod_token: int | None = None
        self.attention_layers = 0
        self._communicators: dict[Any, Communicator] = {}

    def communicator(self, cp_group: torch.distributed.ProcessGroup) -> Communicator:
        """FCP's own communicator over the ranks of ``cp_group``; made on first use, by all of them."""
        if cp_group not in self._communicators:
            ranks = torch.distributed.get_process_group_ranks(cp_group)
            # A tensor tells where "cuda" is: on the CPU platform of the tests it is the CPU.
            device = torch.empty(0, device=torch.cuda.current_device()).device
            config = self.settings.config
            comm = Communicator.create(
                ranks, config.timeout_s, "context parallel", device=device, max_ctas=config.max_ctas
            )
            comm.note = self.settings.summary
            comm.agree(self.settings.summary, "the settings that plans are made by", _SAME_SETTINGS)
            comm.note = ""
            self._communicators[cp_group] = comm
        return self._communicators[cp_group]


_SAME_SETTINGS = (
    "give every rank the same flags, --fcp-config and --fcp-hardware files; in a job of several kinds of GPU name one "
    "cluster for all with --fcp-hardware"
)
_current: Session | None = None


def begin(settings: Settings) -> Session:
    """Begin the session of a run."""
    global _current
    _current = Session(settings)
    return _current


def end() -> None:
    """Forget the current session."""
    global _current
    if _current is not None and _current.ahead is not None:
        _current.ahead.close()
    _current = None


def current() -> Session | None:
    """The current session; None where FCP's attention does not run."""
    return _current


def required() -> Session:
    """The current session, in code that only runs within one."""
    assert _current is not None, "no run with --context-parallel-backend fcp has begun"
    return _current


def cp_group() -> Any:
    """Megatron's context-parallel group of this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def tp_group() -> Any:
    """Megatron's tensor-parallel group of this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
