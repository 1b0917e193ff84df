"""Plans for a window in the simulator: pairs against masks written out, rims by hand, models that mix both kinds."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_fcp.cli import main
from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan, with_window
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.work import StageWork
from megatron_fcp.simulate import HardwareModel, draw_lengths, load_hardware, price_plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.kernel_fit import fit_kernel
from megatron_fcp.simulate.kernels import causal_s, windowed_s, works_s
from megatron_fcp.simulate.lower import PUSH_FACTOR, plan_program, priced_tokens
from megatron_fcp.simulate.models import ModelShape, Parallel, find_model, parse_skip_freq
from megatron_fcp.simulate.peers import run_system
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.step import price_step
from megatron_fcp.simulate.view import page_data
from megatron_fcp.testing.strategies import windowed_cases
from megatron_fcp.testing.streams import Case as Stream

pytestmark = pytest.mark.plan

RIMLESS = dataclasses.replace(load_hardware("h100-ib"), q_half=1e-12, kv_half=1e-12, backward_rate=1.0)


def visible(plan: Plan) -> np.ndarray:
    """Which key each query of the stream sees, token by token; shape [num_tokens, num_tokens]."""
    documents = plan.table.token_documents()
    index = np.arange(documents.size)
    before = index[:, None] - index[None, :]
    window = documents.size if plan.table.window is None else plan.table.window
    return (documents[:, None] == documents[None, :]) & (documents[:, None] >= 0) & (before >= 0) & (before <= window)


def pairs_by_block(plan: Plan) -> np.ndarray:
    """Visible pairs between the queries of each rank and the keys of each block; shape [cp_size, num_blocks]."""
    nb, size = plan.table.num_blocks, plan.table.block_size
    by_block = visible(plan).reshape(nb, size, nb, size).sum(axis=(1, 3))
    out = np.zeros((plan.cp_size, nb), dtype=np.int64)
    np.add.at(out, plan.placement.block_rank, by_block)
    return out


def counted(plan: Plan, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Visible pairs of every call, with the local calls of a rank counted together under its first; and those ranks.

    Written from the plan's messages and the mask, without a look at the work lists.
    """
    m, pairs = plan.schedule.messages, pairs_by_block(plan)
    first = np.cumsum([0, *(ends.size + 1 for ends in plan.schedule.stage_ends)])
    calls = plan.calls.ptr if backward else first
    out = np.zeros(int(calls[-1]), dtype=np.int64)
    transfer = 0
    for i, (round_, dst) in enumerate(zip(plan.schedule.message_round.tolist(), m.dst.tolist())):
        stage = int(np.searchsorted(plan.schedule.stage_ends[dst], round_)) + 1
        for block in m.block[m.ptr[i] : m.ptr[i + 1]].tolist():
            out[plan.calls.of_transfer[transfer] if backward else first[dst] + stage] += pairs[dst, block]
            transfer += 1
    for rank in range(plan.cp_size):
        out[calls[rank]] += pairs[rank, plan.placement.block_rank == rank].sum()
    return out, calls


@settings(max_examples=60, deadline=None, derandomize=True)
@given(windowed_cases())
def test_without_rims_every_call_costs_its_visible_pairs(stream: Stream) -> None:
    plan = stream.plan()
    case = Case(plan.table.document_length, plan.cp_size, plan.tokens_per_rank, RIMLESS, window=plan.table.window)
    for backward in (False, True):
        cost = case.cost(backward=backward)
        want, ptr = counted(plan, backward=backward)
        got = windowed_s(plan, cost, backward=backward) / cost.pair_s
        if backward:  # a rank's local calls together, as they are counted
            local = plan.calls.stage == 0
            for a, b in itertools.pairwise(ptr.tolist()):
                rest = np.flatnonzero(local[a:b])[1:] + a
                got[a], got[rest] = got[a] + got[rest].sum(), 0.0
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-6)
        compute = plan_program(plan, case, backward=backward).run().compute / cost.pair_s
        np.testing.assert_allclose(compute, plan.placement.rank_cost(plan.table), rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(
            case.ideal(backward=backward) * plan.cp_size / cost.pair_s, visible(plan).sum(), rtol=1e-9, atol=1e-6
        )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(windowed_cases())
def test_forward_agrees_with_the_planners_pricing(stream: Stream) -> None:
    plan, hardware = stream.plan(), load_hardware("h100-ib")
    hardware = dataclasses.replace(hardware, ranks_per_node=plan.ranks_per_node)
    case = Case(plan.table.document_length, plan.cp_size, plan.tokens_per_rank, hardware, window=plan.table.window)
    price, timeline = price_plan(plan, case.forward), plan_program(plan, case).run()
    np.testing.assert_allclose(timeline.makespan, price.makespan, rtol=1e-9)
    np.testing.assert_allclose(timeline.compute, price.compute, rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(timeline.bytes_moved(1, sends=False), price.bytes_received[1])
    np.testing.assert_allclose(case.ideal(), price.ideal, rtol=1e-9)


def seconds(call: StageWork, cost: CostModel) -> float:
    return float(works_s([(0, call, np.zeros(1, dtype=np.int64))], 1, cost, call.window)[0])


def test_rims_by_hand() -> None:
    """Half lengths 2 and 3, one second a pair: a full rectangle, both triangles, and a square with a window."""
    cost = dataclasses.replace(load_hardware("flat5920").cost(), pair_s=1.0, q_half=2.0, kv_half=3.0)

    def call(q: int, kv: int, **how: object) -> StageWork:
        zero, q_stop, kv_stop = (np.array([n]) for n in (0, q, kv))
        settings = {"causal": False, "kv_tokens": kv, "blocks": zero, "block_offset": np.array([0, kv]), **how}
        return StageWork(zero, q_stop, zero, kv_stop, **settings)  # type: ignore[arg-type]

    for work, want in (
        (call(4, 10), 40 * (6 / 4) * (13 / 10)),
        (call(4, 10, anticausal=True), (10 + 9 + 8 + 7) * (6 / 4) * (13 / 10)),
        (call(6, 6, causal=True), 21 * (8 / 6) * (9 / 6)),
        (call(6, 6, causal=True, window=1), (1 + 5 * 2) * (8 / 6) * (5 / 2)),  # two keys long
        (call(6, 6, causal=True, window=9), 21 * (8 / 6) * (9 / 6)),  # longer than the document: no window
    ):
        assert seconds(work, cost) == pytest.approx(want)
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    works = [(0, call(4, 10), zero), (2, call(4, 10), zero), (2, call(4, 10), one)]
    assert works_s(works, 4, cost).tolist() == pytest.approx([78, 0, 156, 0])
    # Two ranges of queries of a document that see 5 and 10 of the same 10 keys are one piece of work in a call.
    steps = StageWork(np.array([0, 4]), np.array([4, 6]), np.array([5, 0]), np.array([10, 10]), False, 10, zero, zero)
    for window, keys in ((None, 10), (7, 8)):
        got = works_s([(0, steps, np.zeros(2, dtype=np.int64))], 1, cost, window)[0]
        assert got == pytest.approx((4 * 5 + 2 * 10) * (8 / 6) * (keys + 3) / keys)
    apart = works_s([(0, steps, np.arange(2))], 1, cost)[0]
    assert apart == pytest.approx(20 * (6 / 4) * (8 / 5) + 20 * (4 / 2) * (13 / 10))
    assert causal_s(6, cost, 1) == pytest.approx(11 * (8 / 6) * (5 / 2))
    assert causal_s(6, cost, 9) == pytest.approx(float(causal_s(6, cost)))
    fit = fit_kernel([[call(q, k, anticausal=True)] for q in (4, 32, 256) for k in (256, 1024)], np.array([
        seconds(call(q, k, anticausal=True), cost) for q in (4, 32, 256) for k in (256, 1024)
    ]), per_call=False)  # fmt: skip
    assert fit.error < 0.02  # on a grid of half lengths


def longtail(cp_size: int = 16, *, window: int | None, tokens: int = 8192, hardware: str = "h100-ib") -> Case:
    lengths = draw_lengths("longtail", num_tokens=cp_size * tokens, seed=3)
    return Case(lengths, cp_size, tokens, load_hardware(hardware), window=window)


def test_only_what_a_window_reaches_is_priced_on_the_way() -> None:
    case = longtail(window=100)
    plan = fcp_plan(case, FcpConfig(block_size=1024))
    tokens = priced_tokens(plan, plan.schedule.messages)
    assert (tokens > 0).all()
    assert (tokens <= 100 * np.diff(plan.schedule.messages.ptr)).all()
    moved = plan_program(plan, case).run().bytes_moved(1, sends=True).sum()
    moved += plan_program(plan, case).run().bytes_moved(0, sends=True).sum()
    assert moved == tokens.sum() * case.forward.kv_bytes
    both = plan_program(plan, case, backward=True).run()
    assert sum(both.bytes_moved(tier, sends=True).sum() for tier in (0, 1)) == moved * (1 + PUSH_FACTOR)


def test_narrower_windows_cost_less_and_a_wide_one_costs_what_whole_documents_do() -> None:
    case = longtail(window=None)
    whole = make_plan(case.lengths, cp_size=16, tokens_per_rank=8192, config=FcpConfig(block_size=1024))
    seconds = []
    for window in (100, 1000, 10000, int(case.lengths.max())):
        other = case.replace(window=window)
        compute = plan_program(with_window(whole, window), other).run().compute
        seconds.append(compute.sum())
        assert 0 < other.efficiency(plan_program(with_window(whole, window), other)) <= 1 + 1e-9
    assert seconds == sorted(seconds)
    bare = plan_program(whole, case).run().compute
    np.testing.assert_allclose(compute, bare, rtol=1e-9)
    wide = with_window(whole, window)
    back = [plan_program(p, c, backward=True).run().compute for p, c in ((wide, other), (whole, case))]
    np.testing.assert_allclose(*back, rtol=0.01)  # a document's pieces of the local stage are one there, two here
    assert case.replace(window=int(case.lengths.max())).ideal() == pytest.approx(case.ideal())


def test_another_window_is_refused() -> None:
    plan = make_plan([64], cp_size=2, tokens_per_rank=32, window=5)
    case = Case(np.array([64]), 2, 32, load_hardware("flat5920"))
    with pytest.raises(ValueError, match="the plan is for a window of 5, the case for whole documents"):
        plan_program(plan, case)
    with pytest.raises(ValueError, match="the plan is for whole documents, the case for a window of 6"):
        plan_program(with_window(plan, None), case.replace(window=6))
    with pytest.raises(ValueError, match="the window must be an integer of at least 0, got -1"):
        case.replace(window=-1)
    with pytest.raises(ValueError, match="only fcp is priced with a window"):
        run_system("te-ring", case.replace(window=6))
    assert run_system("fcp", case.replace(window=6)).run().makespan > 0


MODEL = dataclasses.replace(find_model("llama3-8b"), window=1024, window_skip_freq=2)
PARALLEL = Parallel(tensor=4, micro_batches=4)


def mixed_case(hardware: HardwareModel) -> Case:
    lengths = draw_lengths("longtail", num_tokens=16 * 8192, seed=5)
    return Case(lengths, 16, 8192, hardware, PARALLEL.attention(MODEL))


def test_a_step_prices_both_kinds_of_layers() -> None:
    case = mixed_case(load_hardware("h100-ib"))
    plan = fcp_plan(case)
    step = price_step(plan, case, MODEL, PARALLEL)
    full, windowed = step.kinds
    assert [(k.window, k.layers) for k in step.kinds] == [(None, 16), (1024, 16)]
    whole = price_step(plan, case, find_model("llama3-8b"), PARALLEL)
    assert (full.forward, full.backward) == (whole.forward, whole.backward)
    other = case.replace(window=1024)
    for backward, seconds in ((False, windowed.forward), (True, windowed.backward)):
        program = plan_program(with_window(plan, 1024), other, backward=backward, wait_for_room=True)
        assert seconds == program.run().makespan < (full.backward if backward else full.forward)
    assert step.forward == pytest.approx((full.forward + windowed.forward) / 2)
    assert step.layer == pytest.approx(step.forward + step.backward + step.linear)
    assert step.step == pytest.approx(whole.step - 4 * 16 * (full.forward + full.backward - sum(windowed.bare)))
    reshuffled = price_step(plan, case, MODEL, PARALLEL, layout="reshuffle")
    assert reshuffled.layer == pytest.approx(step.layer + reshuffled.reshuffle)
    everywhere = dataclasses.replace(MODEL, window_skip_freq=None)
    alone = price_step(fcp_plan(other), other, everywhere, PARALLEL)
    assert [k.window for k in alone.kinds] == [1024]
    assert alone.step < step.step < whole.step


def test_the_slowest_stage_is_the_one_with_most_whole_documents() -> None:
    """Four layers on two stages: windowed ones on the first, whole documents on the second."""
    case = mixed_case(load_hardware("h100-ib"))
    small = dataclasses.replace(MODEL, num_layers=4, window_skip_freq=(1, 1, 0, 0))
    plan = fcp_plan(case)
    step = price_step(plan, case, small, dataclasses.replace(PARALLEL, pipeline=2))
    assert step.forward == step.kinds[0].forward  # of the second stage's layers
    even = dataclasses.replace(small, window_skip_freq=(1, 0, 1, 0))
    assert price_step(plan, case, even, dataclasses.replace(PARALLEL, pipeline=2)).step < step.step


@pytest.mark.parametrize(
    ("skip", "windowed"),
    [(None, [1, 2, 3, 4]), (1, []), (2, [1, 3]), (4, [1, 2, 3]), ((0, 1, 1, 0), [2, 3])],
)
def test_which_layers_have_the_window(skip: int | tuple[int, ...] | None, windowed: list[int]) -> None:
    model = ModelShape("m", 4, 64, 64, 4, 4, 16, 100, window=7, window_skip_freq=skip)
    assert [layer for layer in range(1, 5) if model.layer_window(layer) == 7] == windowed
    assert sum(model.layers_by_window.values()) == 4
    assert next(iter(model.layers_by_window)) == (7 if len(windowed) == 4 else None)


@pytest.mark.parametrize("skip", [None, 1, 2, 3, (1, 0, 0, 1, 1, 0)])
def test_the_layers_are_those_that_training_gives_the_window(skip: int | tuple[int, ...] | None) -> None:
    pytest.importorskip("torch")
    from megatron_fcp.integration.windows import is_windowed

    model = ModelShape("m", 6, 64, 64, 4, 4, 16, 100, window=7, window_skip_freq=skip)
    for layer in range(1, 7):
        assert (model.layer_window(layer) == 7) == is_windowed(skip, layer)


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("[1,0]*2", (1, 0) * 2), ("2 * ([1]*2+[0])", (1, 1, 0) * 2)])
def test_patterns_as_megatron_writes_them(text: str, value: object) -> None:
    assert parse_skip_freq(text) == value


def test_layers_of_interleaved_and_uneven_stages() -> None:
    model = dataclasses.replace(MODEL, num_layers=8)
    assert Parallel(pipeline=2).layers_of_stages(model) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert Parallel(pipeline=2, virtual=2).layers_of_stages(model) == [[1, 2, 5, 6], [3, 4, 7, 8]]
    ends = Parallel(pipeline=5, embedding_as_layer=True, loss_as_layer=True)
    assert ends.layers_of_stages(model) == [[1], [2, 3], [4, 5], [6, 7], [8]]
    assert max(len(stage) for stage in ends.layers_of_stages(model)) == ends.stage_layers(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": None}, "--window-attn-skip-freq 2 has no window"),
        ({"window_skip_freq": 0}, "--window-attn-skip-freq must be an integer of at least 1, got 0"),
        ({"window_skip_freq": (1, 0)}, r"\[1, 0\] must be one 0 or 1 for each of the 32 layers"),
        ({"window": -3}, "the window must be an integer of at least 0, got -3"),
    ],
)
def test_patterns_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODEL, **change)


SMALL = ["--cp-size", "8", "--tokens-per-rank", "4096", "--seed", "3"]


def test_the_commands_take_windows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("rich")

    def run(*argv: str) -> str:
        assert main(list(argv)) == 0
        return capsys.readouterr().out

    figures = json.loads(run("simulate", *SMALL, "--window", "512", "--json"))
    whole = json.loads(run("simulate", *SMALL, "--json"))
    assert (figures["window"], whole["window"]) == (512, None)
    assert figures["forward"]["makespan_s"] < whole["forward"]["makespan_s"]
    model = ["--model", "llama3-8b", "--tensor", "8", "--window", "512", "--window-attn-skip-freq", "4"]
    mixed = json.loads(run("simulate", *SMALL, *model, "--json"))
    assert (mixed["window"], mixed["windowed"]["window"], mixed["windowed"]["layers"]) == (None, 512, 24)
    step = mixed["step"]
    assert step["layer_seconds"] == pytest.approx(step["attention_seconds"] + step["linear_seconds"])
    text = run("simulate", *SMALL, *model)
    assert "24 layers with a window of 512" in text
    plan, page, trace = tmp_path / "plan.json.gz", tmp_path / "v.html", tmp_path / "t.json"
    lengths = tmp_path / "l.txt"
    lengths.write_text("9000\n300\n2000\n")
    stream = ["--lengths", str(lengths), "--cp-size", "4", "--tokens-per-rank", "4096"]
    run("plan", *stream, "--block-size", "1024", "--window", "700", "--out", str(plan))
    from_file = json.loads(run("simulate", "--plan", str(plan), "--json"))
    assert from_file["window"] == 700
    run("view", "--plan", str(plan), "--output", str(page))
    assert "window of 700" in page.read_text()
    run("trace", "--plan", str(plan), "--output", str(trace))
    ends = [e["ts"] + e["dur"] for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "forward"]
    assert max(ends) <= from_file["forward"]["makespan_s"] * 1e6 * 1.5
    trials = json.loads(run("tune", *SMALL, "--layout", "resident", "--window", "512", "--json"))
    assert all(0 < t["forward"] <= 1 for t in trials)


def test_the_page_is_of_the_windowed_plan() -> None:
    case = longtail(window=500)
    data = page_data(fcp_plan(case), case)
    assert all(0 < p["efficiency"] <= 1 for p in data["passes"])
