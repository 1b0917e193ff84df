"""What a profiled run did when, as ``fcp-recording/1`` for ``megatron-fcp trace --recording``.

::

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        fcp_attention(...)
    part = recorded_events(profile, rank)             # on every rank
    write_recording("run.json", digest, parts)        # the parts of all ranks, gathered

The runtime names its steps in profiles (:mod:`megatron_fcp.runtime.spans`): a round by its posting, a stage by the
issue of its kernels, which on a CPU is their run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_fcp.simulate.trace import RECORDING_FORMAT

_STEP = re.compile(r"fcp (forward|backward): (stage|pull round|push round) (\d+)")
_KIND = {"stage": "compute", "pull round": "pull", "push round": "push"}


def recorded_events(profile: torch.profiler.profile, rank: int) -> list[dict[str, Any]]:
    """Steps of ``rank`` in a finished profile, on the machine's clock."""
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None, "the profile must have ended"
    begin = results.trace_start_ns() / 1e9
    out: list[dict[str, Any]] = []
    for event in profile.events() or []:
        if match := _STEP.fullmatch(event.name):
            start, end = (begin + t / 1e6 for t in (event.time_range.start, event.time_range.end))
            kind, index = _KIND[match[2]], int(match[3])
            out.append({"rank": rank, "kind": kind, "index": index, "pass": match[1], "start_s": start, "end_s": end})
    return out


def write_recording(path: str | Path, digest: str, parts: Sequence[list[dict[str, Any]]]) -> None:
    """Write the events of all ranks of one run of the plan with ``digest``."""
    events = sorted((e for part in parts for e in part), key=lambda e: (e["start_s"], e["rank"]))
    body = {"format": RECORDING_FORMAT, "digest": digest, "events": events}
    Path(path).write_text(json.dumps(body), encoding="utf-8")
