"""Launch configs pass Megatron's own parser and checks; memory against Megatron's report; the scripts launch."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fcp.launch_config import read_launch_config
from megatron_fcp.simulate.job import read_job
from megatron_fcp.simulate.memory import activation_bytes, weight_bytes
from megatron_fcp.testing.loop import PRETRAIN_SCRIPT, TINY_MODEL, TINY_RUN, TrainingLoop

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
NEEDED = [f"llama3-70b-{k}k-{n}gpu" for k in (64, 128, 512) for n in (64, 256)]
NEEDED += ["llama3-8b-128k", "llama3-405b", "qwen3-30b-a3b"]


def checked(requests: list[tuple[list[str], int, dict[str, str]]]) -> list[dict[str, Any]]:
    """Runs in a rank: what Megatron and FCP say to command lines, and Megatron's own memory figures."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.training import theoretical_memory_usage as theory

    from megatron_fcp.integration.preflight import check_command_line

    found = []
    for argv, world_size, environment in requests:
        args, problems = check_command_line(argv, world_size, environment)
        entry: dict[str, Any] = {"problems": problems}
        if args is not None and not problems:
            args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)
            entry["data"] = args.data_parallel_size
            entry["layers"] = args.num_layers, args.virtual_pipeline_model_parallel_size
            # Megatron's report forgets that the distributed optimizer spreads over context-parallel ranks as well.
            args.data_parallel_size *= args.context_parallel_size
            with contextlib.redirect_stdout(io.StringIO()):
                entry["weights"] = theory.compute_weight_and_optimizer_memory(args)
                activations = theory.compute_activation_memory(args, args.global_batch_size)
            entry["activations"] = activations / args.context_parallel_size  # nor does it know of these
        found.append(entry)
    return found


@pytest.fixture(scope="module")
def configs(training_loop: TrainingLoop) -> dict[str, dict[str, Any]]:
    """All launch configs, checked in one process."""
    launches = [read_launch_config(path) for path in CONFIGS]
    requests = [(launch.argv(), launch.gpus, dict(launch.environment)) for launch in launches]
    found = training_loop.call("test_launch_configs:checked", requests)
    return {Path(launch.path).stem: entry for launch, entry in zip(launches, found, strict=True)}


def test_all_configs_pass_megatrons_parser_and_checks(configs: dict[str, dict[str, Any]]) -> None:
    assert {name: entry["problems"] for name, entry in configs.items() if entry["problems"]} == {}
    for name in NEEDED:
        assert any(config.startswith(name) for config in configs), name


def test_memory_is_megatrons(configs: dict[str, dict[str, Any]]) -> None:
    for path in CONFIGS:
        job, entry = read_job(read_launch_config(path))[0], configs[path.stem]
        assert job is not None
        assert entry["data"] == job.parallel.data
        weights = sum(weight_bytes(job.model, job.parallel, job.cp_size))
        # Megatron's report spreads 126 layers evenly, and has no norms of queries and keys.
        tolerance = 0.03 if job.parallel.embedding_as_layer else 1e-6
        assert weights == pytest.approx(entry["weights"], rel=tolerance), path.stem
        if job.model.experts == 1 and not job.parallel.recompute:
            # Its formula is that of MHA and ungated MLPs (arXiv 2205.05198, table 2).
            ours = activation_bytes(job.tokens_per_rank, job.model, job.parallel)
            assert ours == pytest.approx(entry["activations"], rel=0.15), path.stem


def test_refusals_come_together_with_flag_and_remedy(training_loop: TrainingLoop) -> None:
    launch = read_launch_config(ROOT / "configs" / "llama3-8b-128k-32gpu.yaml")
    cases: list[tuple[str, list[tuple[str, str]]]] = [
        ("--attention-backend flash --qk-clip", [("fcp", "--attention-backend flash"), ("fcp", "--qk-clip")]),
        ("--no-such-flag --qk-clip", [("parser", "unrecognized arguments: --no-such-flag"), ("fcp", "--qk-clip")]),
        ("--num-layers many", [("parser", "--num-layers: invalid int value: 'many'")]),
        ("--fcp-block-size 3000", [("fcp", "--fcp-block-size 3000 does not divide the 8192 tokens")]),
        # Megatron stops at its first complaint; what FCP has to say comes with it.
        ("--context-parallel-size 5 --cp-comm-type a2a", [("megatron", "world size"), ("fcp", "--cp-comm-type a2a")]),
    ]
    flags = [launch.with_flags(text.split()) for text, _ in cases]
    requests = [(changed.argv(), launch.gpus, dict(launch.environment)) for changed in flags]
    found = training_loop.call("test_launch_configs:checked", requests)
    for (text, expected), entry in zip(cases, found, strict=True):
        said = entry["problems"]
        for by, words in expected:
            assert any(who == by and words in problem for who, problem in said), (text, said)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_scripts_ask_the_doctor_and_train(tmp_path: Path) -> None:
    """The Slurm script on one node, with stand-ins for Slurm's commands, trains two CPU ranks through torchrun.sh."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in {**TINY_MODEL, **TINY_RUN}.items() if value}
    more = {"--context-parallel-size": 2, "--context-parallel-backend": "fcp", "--seed": 7, "--attention-dropout": 0}
    config = tmp_path / "tiny.yaml"
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": 1, "OMP_NUM_THREADS": 1}
    args = {**flags, "--hidden-dropout": 0, "--eval-iters": 0, "--num-workers": 0, **more}
    config.write_text(yaml.safe_dump({"GPUS": 2, "ENV_VARS": environment, "MODEL_ARGS": args}))
    for name, body in (("scontrol", "echo 127.0.0.1"), ("srun", 'shift; SLURM_NODEID=0 exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "RUN_FLAGS": "--fcp-platform cpu",
        "MASTER_PORT": str(free_port()),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "1",
    }

    def submit(*flags: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "examples" / "slurm.sbatch"), str(config), str(PRETRAIN_SCRIPT), *flags]
        with subprocess.Popen(
            command, env={**environ, **changes}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=400)
                return subprocess.CompletedProcess(command, process.returncode, out, err)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever torchrun may have left

    ran = submit("--train-iters", "1")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "ready to launch" in ran.stdout
    assert "iteration        1/       1" in ran.stdout
    assert "> FCP: reshuffle layout" in ran.stdout
    refused = submit("--global-batch-size", "3", "--micro-batch-size", "2", "--qk-clip", "--no-such-flag")
    assert refused.returncode == 1
    assert "--global-batch-size 3 is not a multiple" in refused.stdout
    assert "initializing torch distributed" not in refused.stdout
    # The doctor's own finding and FCP's come together; Megatron's, which says the former again, is left out.
    assert "--no-such-flag" in refused.stdout
    assert "3 refused" in refused.stdout
    elsewhere = submit(SLURM_JOB_NUM_NODES="2")
    assert elsewhere.returncode == 2
    assert "is for 1 nodes of 2 GPUs, and this job has 2" in elsewhere.stderr
    config.write_text(config.read_text().replace("GPUS: 2", "GPUS: 16"))
    command = ["bash", str(ROOT / "examples" / "torchrun.sh"), str(config), str(PRETRAIN_SCRIPT)]
    several = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=100)
    assert several.returncode == 2
    assert "is for 2 nodes; set NODE_RANK and MASTER_ADDR on each of them" in several.stderr
