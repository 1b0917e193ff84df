"""The commands simulate, compare, tune and trace: what they print and write, and one line for bad input."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_fcp.cli import main
from megatron_fcp.commands.tune import flags
from megatron_fcp.config import FcpConfig
from megatron_fcp.config_file import read_config, write_config
from megatron_fcp.plan.planfile import read_plan
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.compare import Cell, ratios
from megatron_fcp.simulate.hardware import AttentionShape
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.reshuffle import with_reshuffle
from megatron_fcp.simulate.trace import RECORDING_FORMAT
from megatron_fcp.simulate.tune import Trial, candidates, tune

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.plan

SMALL = ["--cp-size", "8", "--tokens-per-rank", "4096", "--seed", "3"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        status = main(list(argv))
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    return err


def test_simulate_tells_both_passes_and_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(run(capsys, "simulate", *SMALL, "--model", "llama3-8b", "--tensor", "8", "--json"))
    for name in ("forward", "backward"):
        p = figures[name]
        assert 0 < p["efficiency"] <= p["efficiency_if_nobody_waited"] <= 1
    assert figures["rounds"] >= figures["rounds_lower_bound"]
    step = figures["step"]
    assert step["tokens_per_second"] == pytest.approx(8 * 4096 / step["seconds"])
    text = run(capsys, "simulate", *SMALL, "--model", "llama3-8b", "--tensor", "8", "--layout", "reshuffle")
    assert "training step of llama3-8b" in text
    assert "lower bound" in text


def test_simulate_takes_a_plan_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("9000\n300\n2000\n")
    stream = ["--lengths", str(tmp_path / "lengths.txt"), "--cp-size", "4", "--tokens-per-rank", "4096"]
    run(capsys, "plan", *stream, "--block-size", "1024", "--out", str(tmp_path / "p.json"))
    figures = json.loads(run(capsys, "simulate", "--plan", str(tmp_path / "p.json"), "--json"))
    assert (figures["cp_size"], figures["block_size"], figures["documents"]) == (4, 1024, 3)


def test_compare_prints_one_table_and_draws_one_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["compare", "--workloads", "longtail", "--scales", "4", "8", "--hardware", "flat5920", "--tokens-per-rank"]
    argv += ["4096", "--systems", "fcp", "te-ring", "--picture", str(tmp_path / "c.png")]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "efficiency forward / backward" in out
    assert "least speed-up" in out
    assert "4 simulations, about" in err  # the estimate comes before the work
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    cells = json.loads(run(capsys, *argv, "--json"))
    assert {(c["system"], c["cp_size"]) for c in cells} == {(s, n) for s in ("fcp", "te-ring") for n in (4, 8)}


def test_the_speed_up_that_counts_is_the_least() -> None:
    def cell(system: str, workload: str, forward: float) -> Cell:
        return Cell(system, workload, 64, "h", 0, forward, forward, 1.0, 0.0)

    cells = [cell("fcp", "a", 0.9), cell("ring", "a", 0.3), cell("fcp", "b", 0.8), cell("ring", "b", 0.4)]
    assert ratios(cells, 64) == {"ring": pytest.approx(2.0)}


def test_tune_writes_the_best_of_what_it_tried(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, picture = tmp_path / "fcp.yaml", tmp_path / "t.png"
    trials = json.loads(
        run(capsys, "tune", *SMALL, "--output", str(path), "--picture", str(picture), "--json", "--hardware", "h100-ib")
    )
    assert [t["seconds"] for t in trials] == sorted(t["seconds"] for t in trials)
    assert {t["layout"] for t in trials} == {"resident", "reshuffle"}
    config, cost = read_config(path)
    assert (config.block_size, config.layout) == (trials[0]["block_size"], trials[0]["layout"])
    assert cost == load_hardware("h100-ib").cost()
    assert picture.read_bytes().startswith(b"\x89PNG")
    argv = ["tune", *SMALL, "--layout", "resident"]
    assert "--fcp-hardware h100-ib --fcp-layout resident --fcp-block-size" in run(capsys, *argv)
    assert f"--fcp-config {path}" in run(capsys, *argv, "--output", str(path)).replace("\n", "")


def trial(block: int, groups: int, forward: float, seconds: float, step: float | None = None) -> Trial:
    config = FcpConfig(block_size=block, layout="reshuffle", head_groups=groups)
    return Trial(config, forward, 0.5, seconds, step, 1.0, 1, 1)


def test_both_passes_count_and_a_step_counts_more() -> None:
    assert min([trial(512, 4, 0.9, 3.0), trial(1024, 1, 0.7, 2.0)], key=lambda t: t.judged).config.block_size == 1024
    assert trial(512, 4, 0.9, 3.0, step=7.0).judged == 7.0
    assert trial(512, 4, 0.9, 3.0).as_dict()["head_groups"] == 4


@pytest.mark.parametrize("hardware", ["h100-ib", "flat5920"])
def test_tune_chooses_head_groups_by_the_simulated_exchange(hardware: str) -> None:
    lengths = draw_lengths("bimodal", num_tokens=16 * 8192, seed=1)
    case = Case(lengths, 16, 8192, load_hardware(hardware))
    configs = [c for c in candidates(case, ("reshuffle",)) if c.block_size in (512, 2048)]
    assert [c.head_groups for c in configs] == [1, 2, 4, 8] * 2
    trials = tune([case], configs)
    best = trials[0].config
    seconds = {}
    for config in configs:
        plan = fcp_plan(case, config)
        seconds[config] = sum(
            with_reshuffle(
                plan_program(plan, case, backward=backward, wait_for_room=True), plan, case, groups=config.head_groups,
                backward=backward,
            ).run().makespan
            for backward in (False, True)
        )  # fmt: skip
    assert best == min(configs, key=lambda c: seconds[c])
    assert trials[0].seconds == pytest.approx(seconds[best])
    assert len({seconds[c] for c in configs}) == len(configs)  # the number of groups makes a difference
    two_heads = case.replace(shape=AttentionShape(16, 2, 128))
    assert {c.head_groups for c in candidates(two_heads, ("reshuffle",))} == {1, 2}


def test_the_flags_of_a_winner(tmp_path: Path) -> None:
    config = FcpConfig(block_size=512, layout="reshuffle", head_groups=2)
    assert "--fcp-head-groups 2" in " ".join(flags(config, "h100-ib", None))
    write_config(tmp_path / "c.yaml", config)
    assert read_config(tmp_path / "c.yaml")[0].head_groups == 2


def test_configs_survive_the_file(tmp_path: Path) -> None:
    config = FcpConfig(block_size=512, layout="resident", timeout_s=30.0)
    write_config(tmp_path / "c.yaml", config, comment="two\nlines")
    assert (tmp_path / "c.yaml").read_text().startswith("# two\n# lines\nformat: fcp-config/1\n")
    assert read_config(tmp_path / "c.yaml") == (config, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: fcp-config/2\n", "expected format 'fcp-config/1', found 'fcp-config/2'"),
        ("- 1\n", "found 'list'"),
        ("format: fcp-config/1\nblok_size: 4\n", "unknown entry 'blok_size'"),
        ("format: fcp-config/1\nblock_size: 0\n", "--fcp-block-size must be an integer of at least 1"),
        ("format: fcp-config/1\nhardware: {pair_s: 1.0}\n", "hardware lacks"),
        ("format: [\n", "not YAML"),
    ],
)
def test_bad_configs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=r".*") as caught:
        read_config(tmp_path / "c.yaml")
    assert message in str(caught.value)
    with pytest.raises(ValueError, match="no such file"):
        read_config(tmp_path / "none.yaml")


def test_traces_show_every_operation_once_per_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    figures = json.loads(run(capsys, "trace", *SMALL, "--output", str(out), "--json"))
    trace = json.loads(out.read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == figures["planned_events"]
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {r}" for r in range(8)}
    for pid in range(0, 16, 2):
        for tid in range(5):
            lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == (pid, tid))
            assert all(b[0] >= a[1] - 1e-3 for a, b in itertools.pairwise(lane))  # nothing overlaps on one resource
    sends = [e for e in events if e["name"].startswith("to ")]
    assert len(sends) == len([e for e in events if e["name"].startswith("from ")]) > 0


def recorded(digest: str, **changes: object) -> dict[str, object]:
    events = [{"rank": 1, "kind": "compute", "index": 0, "start_s": 5.0, "end_s": 5.5}]
    return {"format": RECORDING_FORMAT, "digest": digest, "events": events, **changes}


def test_a_recording_lies_beside_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("9000\n300\n")
    plan, recording, out = tmp_path / "p.json.gz", tmp_path / "r.json", tmp_path / "t.json"
    stream = ["--lengths", str(tmp_path / "l.txt"), "--cp-size", "4", "--tokens-per-rank", "4096"]
    run(capsys, "plan", *stream, "--out", str(plan))
    digest = read_plan(plan).digest
    recording.write_text(json.dumps(recorded(digest)))
    run(capsys, "trace", "--plan", str(plan), "--recording", str(recording), "--output", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    measured = next(e for e in events if e.get("cat") == "measured")
    assert (measured["pid"], measured["ts"], measured["dur"]) == (3, 0.0, pytest.approx(5e5))
    for change, message in (
        ({"format": "fcp-recording/0"}, "expected format 'fcp-recording/1'"),
        ({"digest": "f" * 64}, "is of plan ffffffffffff, not of plan"),
        ({"events": [{"rank": 0}]}, "event 0 lacks"),
        ({"events": None}, "no list of events"),
    ):
        recording.write_text(json.dumps({**recorded(digest), **change}))
        argv = ["trace", "--plan", str(plan), "--recording", str(recording), "--output", str(out)]
        assert message in refused(capsys, *argv)


HARDWARE = {
    "missing": (lambda text: text.replace("latency_s: 1.0e-05\n", ""), "lacks latency_s"),
    "zero": (lambda text: text.replace("latency_s: 1.0e-05", "latency_s: 0"), "latency_s must be positive, got 0"),
    "negative": (lambda text: text.replace("q_half: 100", "q_half: -4"), "q_half must be positive, got -4"),
    "text": (lambda text: text.replace("q_half: 100", "q_half: wide"), "q_half must be a number, got 'wide'"),
}


@pytest.mark.parametrize("kind", HARDWARE)
def test_bad_hardware_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "hw.yaml"
    load_hardware("h100-ib").to_yaml(path)
    change, message = HARDWARE[kind]
    path.write_text(change(path.read_text()))
    assert message in refused(capsys, "simulate", *SMALL, "--hardware", str(path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["simulate", "--hardware", "h900"], "neither a file nor one of flat5920"),
        (["simulate", "--cp-size", "0"], "must be an integer"),
        (["simulate", "--workload", "tall"], "invalid choice: 'tall'"),
        (["simulate", "--lengths", "nowhere.txt"], "--lengths nowhere.txt"),
        (["simulate", "--plan", "nowhere.json"], "nowhere.json"),
        (["simulate", *SMALL, "--speeds", "nowhere.txt"], "--speeds nowhere.txt: no such file"),
        (["simulate", *SMALL, "--model", "llama3-405b"], "GB more than the 80.0 GB of h100-ib"),
        (["compare", "--systems", "fcp", "rung"], "--systems 'rung' is unknown"),
        (["compare", "--hardware", "h900"], "neither a file nor one of"),
        (["tune", "--plan", "nowhere.json"], "nowhere.json"),
        (["trace", *SMALL], "--output"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refused(capsys, *argv)


def test_too_many_tokens_for_the_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("\n".join(["5000"] * 10))
    argv = ["simulate", "--lengths", str(tmp_path / "l.txt"), "--cp-size", "2", "--tokens-per-rank", "4096"]
    assert "the documents hold 50000 tokens but the ranks have room for 8192, 41808 too few" in refused(capsys, *argv)


def test_slow_ranks_known_to_the_planner_cost_little(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps([1.0] * 7 + [0.5]))
    plain = json.loads(run(capsys, "simulate", *SMALL, "--json"))
    slow = json.loads(run(capsys, "simulate", *SMALL, "--speeds", str(tmp_path / "s.json"), "--json"))
    # a rank at half speed leaves 7.5 of 8; unknown to the planner it would take twice as long as the others
    assert plain["forward"]["makespan_s"] < slow["forward"]["makespan_s"] < 1.2 * plain["forward"]["makespan_s"]
    assert np.isfinite(slow["forward"]["efficiency"])
