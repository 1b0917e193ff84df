"""``megatron-fcp doctor`` and launch configs, without Megatron and torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fcp.cli import main
from megatron_fcp.launch_config import read_launch_config
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.forecast import HEADROOM, job_case, splits_that_fit
from megatron_fcp.simulate.job import read_job
from megatron_fcp.simulate.memory import activation_bytes, step_memory, weight_bytes
from megatron_fcp.simulate.models import MODELS, Parallel

pytestmark = pytest.mark.plan

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
SMALL: dict[str, Any] = {
    "--num-layers": 8,
    "--hidden-size": 1024,
    "--num-attention-heads": 8,
    "--seq-length": 8192,
    "--vocab-size": 1000,
    "--swiglu": True,
    "--bf16": True,
    "--use-distributed-optimizer": True,
    "--micro-batch-size": 1,
    "--global-batch-size": 8,
    "--context-parallel-size": 4,
    "--context-parallel-backend": "fcp",
}
Write = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Write:
    """Writes a launch config: the small one with some flags changed, None for those left out."""

    def write(gpus: int = 8, **flags: object) -> str:
        changed = {**SMALL, **{"--" + name.replace("_", "-"): value for name, value in flags.items()}}
        model_args = {flag: value for flag, value in changed.items() if value is not None}
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump({"GPUS": gpus, "MODEL_ARGS": model_args}, sort_keys=False))
        return str(path)

    return write


def doctor(capsys: pytest.CaptureFixture[str], path: str, *argv: str) -> tuple[int, dict[str, Any]]:
    options = [*argv[: argv.index("--")]] if "--" in argv else [*argv]
    extra = [*argv[len(options) :]]
    status = main(["doctor", "--config", path, "--no-megatron", "--no-tune", "--json", *options, *extra])
    return status, json.loads(capsys.readouterr().out)


def test_what_a_job_needs_is_what_the_simulator_says(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, config(tensor_model_parallel_size=2, sequence_parallel=True))
    assert (status, found["refused"]) == (0, [])
    division = {"tensor": 2, "pipeline": 1, "context": 4, "data": 1, "expert": 1, "micro_batches": 8}
    assert found["division"] == {**division, "tokens_per_rank": 2048}
    memory = found["memory_bytes"]
    parameters = 8 * (1024 * 1024 * 4 + 3 * 1024 * 2688) / 2 + 1024 * 1024 / 2 + 17 * 1024  # tied, 1000 padded to 1024
    assert memory["parameters"] == pytest.approx(2 * parameters)
    assert memory["gradients"] == pytest.approx(4 * parameters)
    assert memory["optimizer"] == pytest.approx(12 * parameters / 4)
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    assert memory["total"] == pytest.approx(sum(memory[part] for part in parts))
    assert found["step"]["seconds"] == pytest.approx(8 * 8 * found["step"]["layer_seconds"], rel=0.2)  # and the ends


def test_people_get_tables_and_the_tuners_best(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--config", config(), "--no-megatron", "--hardware", "h200-ib"])
    out = capsys.readouterr().out
    assert status == 0
    for words in (
        "8 GPUs on 1 node",
        "memory of a GPU with 141 GB",
        "as configured",
        "tuner's best",
        "ready to launch",
    ):
        assert words in out
    assert "note: Megatron's own checks were left out" in out


@pytest.mark.parametrize(
    ("gpus", "flags", "words"),
    [
        (6, {}, ["GPUS 6 is not a multiple of", "--context-parallel-size 4 = 4", "use 8 GPUs"]),
        (8, {"pipeline_model_parallel_size": 2, "num_layers": 7}, ["--pipeline-model-parallel-size 2 does not divide"]),
        (8, {"global_batch_size": 9}, ["--global-batch-size 9 is not a multiple", "= 2; use 8"]),
        (8, {"seq_length": 8190}, ["--seq-length 8190 is not a multiple of 2 x --context-parallel-size 4"]),
        (8, {"seq_length": None}, ["--seq-length is missing"]),
        (8, {"hidden_size": "wide"}, ["--hidden-size must be an integer of at least 1, got wide"]),
        (8, {"num_experts": 6, "expert_model_parallel_size": 4}, ["4 does not divide --num-experts 6"]),
        (8, {"fcp_block_size": 300}, ["--fcp-block-size 300 does not divide the 2048 tokens per rank"]),
        (8, {"fcp_layout": "ring"}, ["--fcp-layout 'ring' is unknown"]),
        (8, {"fcp_config": "none.yaml"}, ["FCP config none.yaml: no such file"]),
        (8, {"num_layers_per_virtual_pipeline_stage": 3}, ["3 does not divide a stage's 8"]),
        (
            8,
            {"tensor_model_parallel_size": 3, "num_query_groups": 3, "group_query_attention": True},
            ["GPUS 8 is not a multiple of", "3 does not divide --num-attention-heads 8", "--num-query-groups 3"],
        ),
    ],
)
def test_all_that_is_wrong_is_said_at_once(
    config: Write, capsys: pytest.CaptureFixture[str], gpus: int, flags: dict[str, Any], words: list[str]
) -> None:
    status, found = doctor(capsys, config(gpus, **flags))
    assert status == 1
    assert "memory_bytes" not in found
    for word in words:
        assert any(word in problem for problem in found["refused"]), found["refused"]


def test_windows_of_some_layers_are_priced(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    _, whole = doctor(capsys, config())
    _, mixed = doctor(capsys, config(window_size="256,0", window_attn_skip_freq=2))
    _, windowed = doctor(capsys, config(), "--", "--window-size", "(256, 0)")
    seconds = [found["step"]["seconds"] for found in (windowed, mixed, whole)]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 3
    flops = [found["step"]["model_flops"] for found in (windowed, mixed, whole)]
    assert flops[1] == pytest.approx((flops[0] + flops[2]) / 2)
    _, same = doctor(capsys, config(window_size="-1,-1", window_attn_skip_freq=2))
    assert same["step"] == whole["step"]
    for flags, message in (
        ({"window_size": "256,5"}, "--window-size 256,5 is not W,0"),
        ({"window_size": "wide"}, "--window-size wide is not W,0"),
        ({"window_size": "256,0", "window_attn_skip_freq": "[1]*3"}, "must be one 0 or 1 for each of the 8 layers"),
        ({"window_size": "256,0", "window_attn_skip_freq": "often"}, "--window-attn-skip-freq must be an integer"),
        ({"recompute_granularity": "full", "recompute_num_layers": "all"}, "--recompute-num-layers must be an integer"),
        ({"seq_length": 2**40}, "tokens that can be planned"),
        ({"fcp_head_groups": 0}, "--fcp-head-groups must be an integer of at least 1"),
    ):
        status, found = doctor(capsys, config(**flags))
        assert status == 1
        assert any(message in problem for problem in found["refused"]), found["refused"]


@pytest.mark.parametrize("flag", ["--multi-latent-attention", "--mtp-num-layers"])
def test_no_estimate_of_what_is_not_modelled(config: Write, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    status, found = doctor(capsys, config(), "--", flag, "1")
    assert status == 0
    assert f"no estimate: {flag} is not in the simulator's model" in found["notes"]
    assert "memory_bytes" not in found


def test_assumptions_are_named(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"use_distributed_optimizer": None, "tensor_model_parallel_size": 2, "recompute_granularity": "selective"}
    _, found = doctor(capsys, config(**flags))
    for word in ("--use-distributed-optimizer", "--sequence-parallel", "upper bound"):
        assert any(word in text for text in found["notes"])


def test_too_little_memory_is_refused_and_splits_that_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(str(path) for path in CONFIGS if path.stem == "llama3-70b-512k-64gpu")
    status, found = doctor(capsys, path, "--", "--pipeline-model-parallel-size", "1", "--context-parallel-size", "8")
    assert status == 1
    assert len(found["refused"]) == 1
    assert "GB more than the 80 GB of h100-ib" in found["refused"][0]
    assert found["splits_that_fit"]
    for split in found["splits_that_fit"]:
        assert split["memory_bytes"] <= HEADROOM * 80e9
        assert split["pipeline"] * split["context"] * split["data"] * 8 == 64
    best = found["splits_that_fit"][0]
    flags = f"--pipeline-model-parallel-size {best['pipeline']} --context-parallel-size {best['context']}"
    status, found = doctor(capsys, path, "--", *flags.split())
    assert (status, found["refused"]) == (0, [])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_fits_its_gpus(path: Path) -> None:
    launch = read_launch_config(path)
    job, problems = read_job(launch)
    assert problems == []
    assert job is not None
    shape, parts = MODELS[next(name for name in MODELS if path.stem.startswith(name))], path.stem.split("-")
    fields = ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "experts", "top_k")
    assert [getattr(job.model, name) for name in fields] == [getattr(shape, name) for name in fields]
    assert job.model.vocab >= shape.vocab
    assert (f"{job.gpus}gpu", f"{job.seq_length // 1024}k") == (parts[-1], parts[-2])
    lengths = draw_lengths("longtail", num_tokens=job.seq_length, seed=0)
    memory = step_memory(None, job_case(job, lengths, load_hardware("h100-ib")), job.model, job.parallel)
    assert memory.total < HEADROOM * 80e9  # others' KV adds at most 0.8 GB, where one document fills a sample
    assert splits_that_fit(job, job_case(job, lengths, load_hardware("h100-ib")))


def test_uneven_and_interleaved_pipelines() -> None:
    model = MODELS["llama3-405b"]
    even = Parallel(tensor=8, pipeline=8, micro_batches=32, recompute=True, embedding_as_layer=True, loss_as_layer=True)
    assert even.stage_layers(model) == 16
    assert even.attention(model).num_heads == 16
    layer = (model.attention_parameters + model.mlp_parameters) / 8 + 2 * model.hidden
    assert weight_bytes(model, even, 1)[0] == pytest.approx(2 * (16 * layer + model.hidden))  # a middle stage
    parts = Parallel(**{**vars(even), "virtual": 4})
    more = activation_bytes(1024, model, parts) - activation_bytes(1024, model, even)
    held = 1024 * 2 * model.hidden / 8 * 16 * 7  # layer inputs: 16 layers, 7 micro-batches in the second stage
    assert more < held
    with pytest.raises(ValueError, match="--pipeline 9 does not divide the 128 layers"):
        Parallel(tensor=8, pipeline=9, embedding_as_layer=True, loss_as_layer=True).attention(model)


def test_experts_have_a_split_of_their_own() -> None:
    model = MODELS["qwen3-30b-a3b"]
    one = Parallel(tensor=2, expert=8, expert_tensor=1)
    expert_parameters = model.num_layers * model.experts * model.mlp_parameters / 8
    whole = weight_bytes(model, one, 16)
    shared = whole[0] / 2 - expert_parameters
    assert whole[2] == pytest.approx(12 * (shared / 16 + expert_parameters / 4))  # 32 GPUs hold each expert 4 times
    assert weight_bytes(model, Parallel(tensor=2, expert=8), 16)[0] / 2 == pytest.approx(shared + expert_parameters / 2)


def test_estimates_do_without_torch_and_megatron(config: Write) -> None:
    code = (
        "import sys; from megatron_fcp.cli import main; status = main(sys.argv[1:]); "
        "print(status, any(name.partition('.')[0] in ('torch', 'megatron') for name in sys.modules))"
    )
    argv = ["doctor", "--config", config(), "--no-megatron", "--no-tune"]
    out = subprocess.check_output([sys.executable, "-c", code, *argv], text=True)
    assert "memory of a GPU" in out
    assert out.endswith("0 False\n")


@pytest.mark.parametrize(("absent", "named"), [("torch", "PyTorch"), ("megatron.training", "Megatron")])
def test_where_megatron_is_not_installed_the_doctor_says_so(
    config: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, absent: str, named: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else object())
    assert main(["doctor", "--config", config(), "--no-tune", "--json"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["notes"]
    assert text == f"{named} is not installed here, so Megatron's own checks of the flags did not run"


def test_checks_that_cannot_run_are_no_pass(
    config: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["doctor", "--config", config(), "--no-tune"]) == 1
    assert "refused: Megatron's checks could not run: exit status 1" in capsys.readouterr().out


def test_scripts_get_what_the_config_says(config: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = config(data_path=["0.3", "a b", "0.7", "c"])
    body = yaml.safe_load(Path(path).read_text())
    Path(path).write_text(yaml.safe_dump({**body, "ENV_VARS": {"A": "x y", "CUDA_DEVICE_MAX_CONNECTIONS": 1}}))
    argv = ["doctor", "--config", path, "--print"]
    assert main([*argv, "flags", "--", "--lr=1e-4", "--seq-length", "4096", "--data-path", "d", "e", "--fp16"]) == 0
    flags = capsys.readouterr().out.splitlines()
    expected = read_launch_config(path).argv()
    assert expected[expected.index("--data-path") : expected.index("--data-path") + 5][1:] == ["0.3", "a b", "0.7", "c"]
    for flag, values in (("--lr", ["1e-4"]), ("--seq-length", ["4096"]), ("--data-path", ["d", "e"]), ("--fp16", [])):
        start = flags.index(flag)
        assert flags.count(flag) == 1
        assert flags[start + 1 : start + 1 + len(values)] == values
    assert main([*argv, "env"]) == 0
    shell = capsys.readouterr().out + 'echo "$A|$GPUS|$GPUS_PER_NODE|$NODES|$CUDA_DEVICE_MAX_CONNECTIONS"'
    assert subprocess.check_output(["bash", "-c", shell], text=True) == "x y|8|8|1|1\n"
    assert shlex.split(shell)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GPUS: [", "not YAML"),
        ("- 1\n", "expected the entries GPUS, GPUS_PER_NODE, ENV_VARS, MODEL_ARGS"),
        ("GPUS: 8\n", "lacks MODEL_ARGS"),
        ("GPUS: 8\nMODEL_ARGS: {}\nMODEL: {}\n", "has the unknown entry 'MODEL'"),
        ("GPUS: 0\nMODEL_ARGS: {}\n", "GPUS must be an integer of at least 1, got 0"),
        ("GPUS: 12\nMODEL_ARGS: {}\n", "GPUS 12 is not a multiple of GPUS_PER_NODE 8"),
        ("GPUS: 8\nMODEL_ARGS: {--lr: 1, --lr: 2}\n", "has '--lr' twice"),
        ("GPUS: 8\nMODEL_ARGS: {lr: 1}\n", "'lr' is not a flag"),
        ("GPUS: 8\nMODEL_ARGS: {--bf16: false}\n", "--bf16 has no value; write true"),
        ("GPUS: 8\nMODEL_ARGS: {--lr: {a: 1}}\n", "--lr must be true, a number, a text or a list"),
        ("GPUS: 8\nMODEL_ARGS: {}\nENV_VARS: [1]\n", "ENV_VARS must map names to values"),
        ("GPUS: 8\nMODEL_ARGS: {}\nENV_VARS: {'a b': 1}\n", "ENV_VARS must map names to values, got 'a b': 1"),
    ],
)
def test_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(text)
    assert main(["doctor", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"--config {path}" in err
    assert message in err


def test_no_file_and_no_flag(capsys: pytest.CaptureFixture[str], config: Write) -> None:
    assert main(["doctor", "--config", "none.yaml"]) == 2
    assert "--config none.yaml: cannot be read" in capsys.readouterr().err
    assert main(["doctor", "--config", config(), "--no-megatron", "--", "8"]) == 2
    assert "expected a Megatron flag after --, got '8'" in capsys.readouterr().err
    assert main(["doctor", "--config", config(), "--no-megatron", "--hardware", "h900"]) == 2
    assert "--hardware 'h900'" in capsys.readouterr().err
