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
        ({**two, "fcp_kv_buffer_tokens": 32}, ("> FCP: reshuffle layout",)),
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

    unset = dict.fromkeys(f"fcp_{name}" for name in (*vars(FcpConfig()), "timeout", "config", "hardware"))
    return [config_from_args(Namespace(**{**unset, **case}))[0].timeout_s for case in cases]


def test_a_hang_is_reported_before_nccl_ends_the_processes(training_loop: TrainingLoop) -> None:
    cases = [
        {"distributed_timeout_minutes": 10},  # Megatron's default, and what NCCL's watchdog allows its groups
        {"distributed_timeout_minutes": 60},
        {"distributed_timeout_minutes": 1},
        {"distributed_timeout_minutes": 10, "fcp_timeout": 3600.0},
    ]
    assert training_loop.call("test_fcp_settings:timeouts", cases) == [540.0, 600.0, 30.0, 3600.0]
