"""Settings that would not do what they say are told at launch: refused with flag, value and remedy, or in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fcp_runs import EOD, fcp

from megatron_fcp.testing.loop import TrainingLoop, tiny_model_args

pytestmark = pytest.mark.megatron


def told(cases: list[dict[str, Any]]) -> list[str]:
    """Runs in a rank: what each command line is told, printed or raised."""
    import contextlib
    import io
    import os
    import sys

    from megatron.training import arguments

    import megatron_fcp
    from megatron_fcp.runtime.kernels.torch_cpu_flash import TorchCpuFlash

    megatron_fcp.register()
    refusal = TorchCpuFlash.refusal
    TorchCpuFlash.refusal = (  # type: ignore[method-assign]
        lambda self, request: "knows no windows today" if request.window else refusal(self, request)
    )
    said: list[str] = []
    for case in cases:
        os.environ.update(WORLD_SIZE=str(case.get("context_parallel_size", 1)), RANK="0", LOCAL_RANK="0")
        sys.argv = ["pretrain", *tiny_model_args(**case)]
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                arguments.validate_args(arguments.parse_args())
            said.append("\n".join(line for line in output.getvalue().splitlines() if line.startswith("> FCP")))
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_is_told_at_launch(training_loop: TrainingLoop, tmp_path: Path) -> None:
    full = tmp_path / "fcp.yaml"
    full.write_text("format: fcp-config/1\nmask: full\n")
    chosen = {"fcp_block_size": None, "fcp_hardware": "h100-ib"}
    two, native = fcp("reshuffle"), {"fcp_layout": "resident", "fcp_plan_ahead": 0}
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({**two, "fcp_config": full}, ("ValueError: --fcp-config", str(full), "mask full", "remove the entry")),
        ({**two, "fcp_timeout": "inf"}, ("ValueError: --fcp-timeout", "inf", "604800")),
        ({**two, "fcp_timeout": "1e12"}, ("ValueError: --fcp-timeout", "604800")),
        ({**two, "fcp_kv_buffer_tokens": 31}, ("ValueError: --fcp-kv-buffer-tokens 31", "raise it to at least 32")),
        ({**two, "fcp_kv_buffer_tokens": 32}, ("> FCP: reshuffle layout", "plans balance compute (--fcp-hardware")),
        ({**two, "fcp_hardware": "none"}, ("> FCP: reshuffle layout", "plans balance compute (--fcp-hardware")),
        ({**two, "fcp_hardware": "h100-ib"}, ("plans for h100-ib, 8 of its ranks per node; kernel",)),
        ({**two, **chosen, "fcp_kv_buffer_tokens": 255}, ("--fcp-kv-buffer-tokens 255", "raise it to at least 256")),
        ({**two, **chosen, "fcp_kv_buffer_tokens": 256}, ("> FCP: reshuffle layout, blocks of the planner's choice",)),
        ({**two, "fcp_block_size": 512}, ("ValueError: --fcp-block-size 512", "the nearest size that does is 64")),
        (
            {**two, "window_size": ("16,0",), "window_attn_skip_freq": 2},
            ("ValueError: no fast attention kernel", "a window"),
        ),
        ({**two, "window_size": ("16,0",), "fcp_kernel": "reference"}, ("reference was asked for", ", a window")),
        (native, ("> FCP: --fcp-layout, --fcp-plan-ahead given, and without effect", "pass fcp, or drop them")),
        ({**EOD, "context_parallel_backend": "fcp", "transformer_impl": "transformer_engine"}, ("so Megatron's own",)),
        ({}, ("",)),
    ]
    said = training_loop.call("test_fcp_settings:told", [flags for flags, _ in cases])
    for text, (flags, words) in zip(said, cases, strict=True):
        for word in words:
            assert word in text, (flags, text)
    assert said[-1] == ""


def timeouts(cases: list[dict[str, Any]]) -> list[float]:
    """Runs in a rank: the time-out of each command line."""
    from argparse import Namespace

    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration.settings import config_from_args

    unset: dict[str, Any] = dict.fromkeys(f"fcp_{name}" for name in (*vars(FcpConfig()), "timeout", "config"))
    unset["fcp_hardware"] = "none"
    return [config_from_args(Namespace(**{**unset, **case}))[0].timeout_s for case in cases]


def test_a_hang_is_reported_before_nccl_ends_the_processes(training_loop: TrainingLoop) -> None:
    cases = [
        {"distributed_timeout_minutes": 10},  # Megatron's default, and what NCCL's watchdog allows its groups
        {"distributed_timeout_minutes": 60},
        {"distributed_timeout_minutes": 1},
        {"distributed_timeout_minutes": 10, "fcp_timeout": 3600.0},
    ]
    assert training_loop.call("test_fcp_settings:timeouts", cases) == [540.0, 600.0, 30.0, 3600.0]


def clusters(cases: list[tuple[dict[str, Any], str | None, dict[str, str]]]) -> list[tuple[str, int] | None]:
    """Runs in a rank: name and ranks per node of the cluster that each command line's plans are made for."""
    import os
    from argparse import Namespace
    from unittest import mock

    from megatron_fcp.integration import cluster

    unset = dict.fromkeys(("fcp_hardware", "fcp_config", "fcp_blocks_per_message", "fcp_rounds_per_stage"))
    out: list[tuple[str, int] | None] = []
    for flags, gpu, environment in cases:
        bare = {name: value for name, value in os.environ.items() if name not in cluster.GPUS_OF_A_HOST}
        with (
            mock.patch.dict(os.environ, {**bare, **environment}, clear=True),
            mock.patch.object(cluster, "gpu_name", lambda _, gpu=gpu: gpu),
        ):
            found = cluster.cluster_of(Namespace(**{**unset, **flags}))
        out.append(found and (found.name, found.ranks_per_node))
    return out


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("flags", "gpu", "environment", "expected"),
    [
        ({}, H100, {}, ("h100-ib", 8)),
        ({}, "NVIDIA H200", {"LOCAL_WORLD_SIZE": "4"}, ("h200-ib", 4)),
        ({}, "NVIDIA B200", {"SLURM_NTASKS_PER_NODE": "8"}, ("b200-nvl72", 8)),
        ({}, "NVIDIA GB200", {"LOCAL_WORLD_SIZE": "4"}, ("b200-nvl72", 72)),
        ({}, "NVIDIA A100-SXM4-80GB", {"LOCAL_WORLD_SIZE": "8"}, ("h100-ib", 8)),
        ({}, None, {"LOCAL_WORLD_SIZE": "8"}, None),
        ({"fcp_hardware": "none"}, H100, {}, None),
        ({"fcp_hardware": "flat5920"}, H100, {"LOCAL_WORLD_SIZE": "8"}, ("flat5920", 1)),
        ({"fcp_config": "fcp.yaml"}, H100, {}, None),
        ({"fcp_rounds_per_stage": 2}, H100, {}, None),
        ({"fcp_blocks_per_message": 2}, H100, {}, None),
    ],
)
def test_plans_are_made_for_the_cluster_at_hand(
    training_loop: TrainingLoop, flags: dict[str, Any], gpu: str | None, environment: dict[str, str], expected: Any
) -> None:
    assert training_loop.call("test_fcp_settings:clusters", [(flags, gpu, environment)]) == [expected]
