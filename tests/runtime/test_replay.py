"""Replay on the CPU: what is run is the plan, and measured seconds take the place of predicted ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_fcp.cli import main
from megatron_fcp.commands.replay import choose_ranks, combine
from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.planfile import write_plan
from megatron_fcp.plan.program import Compute
from megatron_fcp.runtime.kernels import WorkList
from megatron_fcp.runtime.kernels.reference import Reference
from megatron_fcp.runtime.replay import ReplayShape, StageSeconds, replay_rank
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import AttentionShape, load_hardware
from megatron_fcp.simulate.kernel_fit import fit_kernel
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.program import COMPUTE, Program
from megatron_fcp.testing.measure import Sample, fit_rates, shapes

pytestmark = pytest.mark.runtime

LENGTHS = [700, 30, 1, 64, 5, 90, 120, 2]
SHAPE = ReplayShape(4, 2, 16, 8, torch.float32)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(LENGTHS, cp_size=4, tokens_per_rank=256, config=FcpConfig(block_size=32))


def program_of(plan: Plan, *, backward: bool) -> tuple[Case, Program]:
    case = Case(plan.table.document_length, 4, 256, load_hardware("h100-ib"), AttentionShape(8, 2, 64))
    return case, plan_program(plan, case, backward=backward, wait_for_room=True)


class Spy(Reference):
    """The reference kernel, which also writes down what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[tuple[tuple[tuple[int, int, int, int], ...], torch.Size]] = []
        self.backward_pairs = 0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: WorkList, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.forwards.append((work.items, k.shape))
        out, lse = super().forward(q, k, v, work, scale)
        assert not out.isnan().any(), "the kernel read memory that nothing was received into"
        return out, lse

    def backward(self, *args: object) -> None:
        work = args[6]
        assert isinstance(work, WorkList)
        for q_start, q_stop, kv_start, kv_stop in work.items:
            q, kv = q_stop - q_start, kv_stop - kv_start
            self.backward_pairs += q * (q + 1) // 2 if work.causal else q * kv
        super().backward(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", range(4))
def test_runs_the_stages_of_the_plan_in_their_order(plan: Plan, rank: int) -> None:
    spy = Spy()
    rank_plan = plan.rank_plan(rank)
    times = replay_rank(rank_plan, SHAPE, spy, repeats=2)
    expected = []
    for step in rank_plan.forward:
        if isinstance(step, Compute) and (work := rank_plan.stages[step.stage]).num_items:
            columns = (work.q_start, work.q_stop, work.kv_start, work.kv_stop)
            items = tuple(zip(*(c.tolist() for c in columns)))
            expected.append((items, torch.Size((work.kv_tokens, 2, 16))))
    assert spy.forwards == expected * 3  # one run that is not timed, two that are
    assert spy.backward_pairs == 3 * sum(stage.pairs for stage in rank_plan.stages)
    worked = np.array([stage.num_items > 0 for stage in rank_plan.stages])
    assert ((times.forward > 0) == worked).all()
    assert ((times.backward > 0) == worked).all()


def test_forward_alone(plan: Plan) -> None:
    times = replay_rank(plan.rank_plan(3), SHAPE, Reference(), backward=False, repeats=1)
    assert times.forward.any()
    assert not times.backward.any()


def seconds_of(program: Program, plan: Plan, rank: int, factor: float) -> np.ndarray:
    out = np.zeros(len(plan.rank_plan(rank).stages))
    mine = (program.kind == COMPUTE) & (program.src == rank)
    np.add.at(out, program.stage[mine], program.seconds[mine])
    return out * factor


@pytest.mark.parametrize("backward", [False, True])
def test_the_prediction_itself_as_measurement_changes_nothing(plan: Plan, backward: bool) -> None:
    case, program = program_of(plan, backward=backward)
    times = [StageSeconds(r, *(seconds_of(program, plan, r, 1.0),) * 2) for r in range(4)]
    result = combine(plan, case, program, times, backward=backward)
    assert (result.measured.end == result.predicted.end).all()
    assert (result.ratio == 1).all()


@pytest.mark.parametrize("backward", [False, True])
def test_ranks_that_were_not_run_take_the_median_ratio(plan: Plan, backward: bool) -> None:
    case, program = program_of(plan, backward=backward)
    factors = {0: 3.0, 2: 5.0, 3: 4.0}
    times = [StageSeconds(r, *(seconds_of(program, plan, r, f),) * 2) for r, f in factors.items()]
    result = combine(plan, case, program, times, backward=backward)
    np.testing.assert_allclose(result.ratio, list(factors.values()))
    ratio = result.measured.compute / result.predicted.compute
    np.testing.assert_allclose(ratio, [3, 4, 5, 4])
    length = np.array(LENGTHS)
    flops = (length * (length + 1) // 2).sum() * 4 * 8 * 64 * (2.5 if backward else 1)
    assert result.tflops(result.measured) == pytest.approx(flops / 4 / result.measured.makespan / 1e12)


def test_a_network_that_takes_no_time_leaves_the_heaviest_rank(plan: Plan) -> None:
    """With kernels a thousand times slower than the network's latencies, the makespan is a rank's kernel time."""
    case, program = program_of(plan, backward=False)
    times = [StageSeconds(r, *(seconds_of(program, plan, r, 1e6),) * 2) for r in range(4)]
    measured = combine(plan, case, program, times, backward=False).measured
    assert measured.makespan == pytest.approx(measured.compute.max(), rel=1e-3)


def test_fit_finds_the_model_that_made_the_times() -> None:
    plan = make_plan([9000, 50, 800, 3000, 20], cp_size=4, tokens_per_rank=4096, config=FcpConfig(block_size=512))
    works = [w for rank in range(4) for w in plan.rank_plan(rank).stages if w.num_items]
    pair_s, q_half, kv_half, call_s = 2e-11, 128.0, 32.0, 7e-6  # half lengths that lie on the grid

    def seconds(work: object) -> float:
        total = call_s
        for q, kv in zip(work.q_stop - work.q_start, work.kv_stop - work.kv_start):  # type: ignore[attr-defined]
            pairs = q * (q + 1) / 2 if work.causal else q * kv  # type: ignore[attr-defined]
            total += pairs * (q + q_half) / q * (kv + kv_half) / kv * pair_s
        return float(total)

    fit = fit_kernel([[w] for w in works], np.array([seconds(w) for w in works]))
    assert fit.error < 1e-9
    got = fit.pair_s, fit.q_half, fit.kv_half, fit.call_s
    np.testing.assert_allclose(got, (pair_s, q_half, kv_half, call_s), rtol=1e-6)


def test_profile_fits_the_same_model() -> None:
    samples = [
        Sample(q, k, (q + 128.0) * (k + 32.0) * 2e-11, (q + 128.0) * (k + 32.0) * 2e-11 * 2.5 / 0.8)
        for q, k in shapes(4096)
    ]
    rates = fit_rates(samples, flops_per_pair=2048)
    assert rates.spread < 1e-9
    got = rates.flops, rates.q_half, rates.kv_half, rates.backward_rate
    np.testing.assert_allclose(got, (2048 / 2e-11, 128, 32, 0.8), rtol=1e-6)


def test_choice_of_ranks() -> None:
    compute = np.array([3.0, 9.0, 1.0, 9.0, 4.0])
    assert choose_ranks("all", compute) == [0, 1, 2, 3, 4]
    assert choose_ranks("worst:1", compute) == [1]
    assert choose_ranks("worst:3", compute) == [1, 3, 4]
    assert choose_ranks("worst:99", compute) == [0, 1, 2, 3, 4]
    assert choose_ranks("4,0,4", compute) == [0, 4]
    for bad in ("", "worst", "worst:0", "worst:-1", "best:2", "1,", "a"):
        with pytest.raises(ValueError, match=r"--ranks .*worst:K"):
            choose_ranks(bad, compute)
    with pytest.raises(ValueError, match="the plan has ranks 0 to 4"):
        choose_ranks("5", compute)


ARGUMENTS = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--dtype", "float32", "--device", "cpu"]


def test_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, hardware = tmp_path / "plan.json.gz", tmp_path / "hardware.yaml"
    write_plan(plan, file)
    arguments = ["replay", "--plan", str(file), "--ranks", "worst:2", "--peak-tflops", "0.1", *ARGUMENTS]
    assert main([*arguments, "--save-hardware", str(hardware), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["plan"] == plan.digest
    assert len(figures["ranks"]) == 2
    assert figures["measured_with"]["kernel"] == "torch-cpu"
    for name in ("forward", "backward"):
        f = figures[name]
        assert f["makespan_s"]["measured"] >= f["kernel_s_max"]["measured"] > 0
        assert f["mfu"]["measured"] == pytest.approx(f["tflops_per_rank"]["measured"] / 0.1)
    model, base = load_hardware(str(hardware)), load_hardware("h100-ib")
    assert model.kernel_flops == pytest.approx(4 * 4 * 16 / figures["forward"]["fit"]["pair_s"])
    assert model.inter_bytes_per_s == base.inter_bytes_per_s
    head = hardware.read_text().splitlines()
    assert "# kernel: torch-cpu" in head
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "2 of 4 ranks replayed" in text
    assert "TFLOP/s per rank" in text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--ranks", "worst:x"], "--ranks 'worst:x'"),
        (["--ranks", "7"], "the plan has ranks 0 to 3"),
        (["--device", "warp"], "--device warp"),
        (["--kernel", "none"], "--kernel 'none' is unknown"),
        (["--kernel", "torch-cuda"], "--kernel torch-cuda cannot do torch.float32 on cpu"),
        (["--num-kv-heads", "3"], "--num-heads 4 is not a multiple of --num-kv-heads 3; use --num-kv-heads 2"),
        (["--hardware", "nowhere"], "--hardware 'nowhere'"),
        (["--peak-tflops", "0"], "--peak-tflops must be a positive number"),
    ],
)
def test_bad_arguments(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    assert main(["replay", "--plan", str(file), *ARGUMENTS, *extra]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert message in error[0]


@pytest.mark.parametrize("command", ["replay", "profile"])
def test_without_torch(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    monkeypatch.delitem(sys.modules, "megatron_fcp.testing.measure")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([command, *(["--plan", str(file)] if command == "replay" else [])]) == 2
    message = "needs the package torch, which is not installed; `pip install 'megatron-fcp[megatron]'`"
    assert capsys.readouterr().err == f"megatron-fcp {command}: error: {message}\n"
