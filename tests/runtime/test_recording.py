"""A profiled run becomes a recording that the trace command puts beside the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_fcp.cli import main
from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.planfile import write_plan
from megatron_fcp.testing.attention_check import Model, random_inputs, run_rank
from megatron_fcp.testing.recording import recorded_events, write_recording
from megatron_fcp.testing.threads import run_ranks

pytest.importorskip("rich")
pytestmark = pytest.mark.runtime


def test_a_run_beside_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan([60, 4], cp_size=1, tokens_per_rank=64, config=FcpConfig(block_size=16))
    model = Model()
    inputs = random_inputs(plan, model, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_ranks(1, lambda comm: run_rank(comm, plan, model, inputs))
    events = recorded_events(profile, 0)
    assert {(e["pass"], e["kind"], e["index"]) for e in events} == {
        ("forward", "compute", 0),
        ("backward", "compute", 0),
    }
    assert all(e["end_s"] > e["start_s"] > 1e9 for e in events)  # seconds since 1970
    plan_file, recording, trace = (str(tmp_path / name) for name in ("plan.json", "run.json", "trace.json"))
    write_plan(plan, plan_file)
    write_recording(recording, plan.digest, [events])
    assert main(["trace", "--plan", plan_file, "--recording", recording, "--output", trace, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured_events"] == 2
    names = {e["name"] for e in json.loads(Path(trace).read_text())["traceEvents"] if e.get("cat") == "measured"}
    assert names == {"compute 0"}
