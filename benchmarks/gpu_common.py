"""What the GPU benchmarks share: timing, the machine's name, results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def parser(what: str | None) -> argparse.ArgumentParser:
    """Arguments of every GPU benchmark."""
    out = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--out", type=Path, required=True, help="folder for the results")
    out.add_argument("--device", default="cuda", help="cpu tries the code out on tiny shapes; its figures mean nothing")
    out.add_argument("--seconds", type=float, default=100.0, help="stop taking new measurements after this long")
    return out


def machine(device: torch.device) -> dict[str, Any]:
    """Date, commit, GPU, driver and versions: what a figure must not travel without."""
    out: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    out["commit"] = _run(["git", "rev-parse", "--short", "HEAD"]) or os.environ.get("COMMIT", "unknown")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        out |= {"gpu": properties.name, "sms": properties.multi_processor_count, "cuda": torch.version.cuda}
        out["cudnn"] = torch.backends.cudnn.version()
        out["driver"] = _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    else:
        out["gpu"] = "none: figures of a CPU, which only show that the script runs"
    return out


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return ""


def seconds(run: Callable[[], object], device: torch.device, *, target_s: float = 0.15, most: int = 30) -> float:
    """Median seconds of ``run`` over repeated calls, by events on a GPU."""
    run()
    before = time.perf_counter()
    run()
    synchronize(device)
    repeats = max(3, min(most, int(target_s / max(time.perf_counter() - before, 1e-6))))
    times: list[float] = []
    if device.type != "cuda":
        for _ in range(min(repeats, 3)):
            before = time.perf_counter()
            run()
            times.append(time.perf_counter() - before)
    else:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, stop in pairs:
            start.record()
            run()
            stop.record()
        synchronize(device)
        times = [start.elapsed_time(stop) / 1e3 for start, stop in pairs]
    return sorted(times)[len(times) // 2]


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(path: Path, results: dict[str, Any]) -> None:
    """Results as JSON, also after every measurement, so that a run that is cut short leaves what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
