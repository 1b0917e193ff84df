"""Simulated passes, and recorded ones beside them, as Chrome trace events that https://ui.perfetto.dev opens.

Every rank is a process with a thread for its kernels and one per link and direction; recorded events of the same rank
come right below, so that planned and measured times line up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fcp.files import write_whole
from megatron_fcp.simulate.program import COLLECTIVE, COMPUTE, MESSAGE, Timeline

RECORDING_FORMAT = "fcp-recording/1"
KERNELS = 0
LINKS = {(0, True): 1, (0, False): 2, (1, True): 3, (1, False): 4}
THREADS = ("kernels", "send inside node", "receive inside node", "send between nodes", "receive between nodes")
MEASURED_THREADS = {"compute": 0, "pull": 1, "push": 2}


def trace_events(timeline: Timeline, *, shift_s: float = 0.0, name: str = "planned") -> list[dict[str, Any]]:
    """Events of a simulated pass, ``shift_s`` seconds into the trace."""
    p = timeline.program
    out: list[dict[str, Any]] = []
    for i in np.flatnonzero((p.kind == COMPUTE) | (p.kind == MESSAGE) | (p.kind == COLLECTIVE)).tolist():
        if p.seconds[i] <= 0:
            continue
        src, dst, stage, round_ = int(p.src[i]), int(p.dst[i]), int(p.stage[i]), int(p.round[i])
        event = {
            "ph": "X", "ts": (timeline.start[i] + shift_s) * 1e6, "dur": (timeline.end[i] - timeline.start[i]) * 1e6,
            "cat": name,
        }  # fmt: skip
        if p.kind[i] == COMPUTE:
            title = "local" if stage == 0 else f"stage {stage}"
            out.append({**event, "name": title, "pid": 2 * src, "tid": KERNELS, "args": {"stage": stage}})
            continue
        args = {"bytes": int(p.size[i]), "round": round_}
        for rank, sends, peer in ((src, True, f"to {dst}"), (dst, False, f"from {src}")):
            tid = LINKS[(int(p.tier[i]), sends)]
            title = "collective" if p.kind[i] == COLLECTIVE else peer
            out.append({**event, "name": title, "pid": 2 * rank, "tid": tid, "args": args})
    return out


def measured_events(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a recording."""
    first = min((e["start_s"] for e in recording["events"]), default=0.0)
    return [
        {
            "ph": "X", "cat": "measured", "pid": 2 * e["rank"] + 1, "tid": MEASURED_THREADS[e["kind"]],
            "name": f"{e['kind']} {e['index']}", "ts": (e["start_s"] - first) * 1e6,
            "dur": (e["end_s"] - e["start_s"]) * 1e6, "args": {"index": e["index"]},
        }
        for e in recording["events"]
    ]  # fmt: skip


def read_recording(path: str | Path, digest: str) -> dict[str, Any]:
    """A recording of the plan with ``digest``.

    Raises
    ------
    ValueError
        If the file is missing, not JSON, of another version, of another plan, or an event lacks something.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--recording {path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--recording {path}: truncated or not JSON ({error}); record again") from None
    found = value.get("format") if isinstance(value, dict) else None
    if found != RECORDING_FORMAT:
        raise ValueError(f"--recording {path}: expected format {RECORDING_FORMAT!r}, found {found!r}; record again")
    if value.get("digest") != digest:
        raise ValueError(
            f"--recording {path} is of plan {str(value.get('digest'))[:12]}, not of plan {digest[:12]}; "
            "pass the plan that was run"
        )
    events = value.get("events")
    if not isinstance(events, list):
        raise ValueError(f"--recording {path} has no list of events")
    for i, event in enumerate(events):
        if problem := _wrong_with(event):
            raise ValueError(f"--recording {path}: event {i} lacks {problem}; record again")
    return value


def _wrong_with(event: Any) -> str | None:
    """What a recorded event lacks."""
    if not isinstance(event, dict):
        return "everything"
    if missing := {"rank", "kind", "index", "start_s", "end_s"} - set(event):
        return str(sorted(missing))
    if not isinstance(event["kind"], str) or event["kind"] not in MEASURED_THREADS:
        return "a known kind"
    if any(type(event[name]) is not int or not 0 <= event[name] < 2**31 for name in ("rank", "index")):
        return "a whole number as rank and index"
    times = (event["start_s"], event["end_s"])
    if any(type(t) not in (int, float) or not -1e300 < t < 1e300 for t in times) or times[1] < times[0]:
        return "an end after its start"
    return None


def write_trace(path: str | Path, events: list[dict[str, Any]], num_ranks: int) -> None:
    """Write ``events`` with names for every process and thread that occurs."""
    used = {(e["pid"], e["tid"]) for e in events}
    meta: list[dict[str, Any]] = []
    for pid in sorted({pid for pid, _ in used}):
        measured = pid % 2 == 1
        title = f"rank {pid // 2}" + (" measured" if measured else "")
        meta.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}})
        meta.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for pid, tid in sorted(used):
        names = tuple(MEASURED_THREADS) if pid % 2 else THREADS
        meta.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": names[tid]}})
    body = {"traceEvents": meta + events, "displayTimeUnit": "ms", "otherData": {"ranks": num_ranks}}
    write_whole(path, json.dumps(body, separators=(",", ":"), allow_nan=False))
