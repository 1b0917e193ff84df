"""Names of steps in profiles: NVTX ranges under Nsight, record functions under torch's profiler, nothing otherwise.

Megatron's ``--profile`` turns on ``torch.autograd.profiler.emit_nvtx``, under which a record function is an NVTX range;
so no switch of our own is needed, and without a profiler a step costs one call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_fcp.plan.program import Compute, Exchange, Reduce, Step

_NOTHING = nullcontext()
profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]


def span(task: str, step: Step) -> AbstractContextManager[object]:
    """Context in which a step of ``task`` is carried out."""
    if not profiled():
        return _NOTHING
    return torch.profiler.record_function(f"fcp {task}: {name_of(step)}")


def name_of(step: Step) -> str:
    """Such as "pull round 3" or "stage 2"."""
    if isinstance(step, Exchange):
        return f"{step.kind} round {step.round}"
    if isinstance(step, Compute):
        return f"stage {step.stage}"
    if isinstance(step, Reduce):
        return f"reduce round {step.round}"
    return f"release {step.kind} {step.buffer}"
