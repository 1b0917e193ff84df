"""Hybrid models: Mamba layers with Megatron's own context parallelism, attention layers with FCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fcp_runs import Runs, fcp

from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, TrainingResult, compare, tiny_model_args

pytestmark = pytest.mark.megatron

HYBRID: dict[str, Any] = {
    "script": str(Path(__file__).with_name("hybrid_script.py")),
    "before": ("megatron_fcp.testing.cpu_mamba:install",),
    "spec": ("megatron_fcp.testing.cpu_mamba", "stack_spec"),
    "hybrid_layer_pattern": "M*M-M*",
    "num_layers": None,
    "mamba_state_dim": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
}


@pytest.fixture(scope="module")
def hybrid(training_loop: TrainingLoop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags of the hybrid model, from weights that were drawn once: what Megatron draws depends on the layout."""
    start = tmp_path_factory.mktemp("hybrid")
    flags = {name: value for name, value in HYBRID.items() if name not in ("script", "before")}
    once = {"lr": 0, "train_iters": 1, "save": start, "save_interval": 1, "no_save_optim": True}
    argv = tiny_model_args(**flags, **once, ckpt_format="torch_dist")
    training_loop.run(TrainingJob(argv, script=HYBRID["script"], before=HYBRID["before"]))
    return {**HYBRID, "pretrained_checkpoint": start}


def assert_equal(result: TrainingResult, reference: TrainingResult) -> None:
    assert result.parameters.keys() == reference.parameters.keys()
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


@pytest.mark.feature("Models: hybrid (Mamba)", layout="reshuffle")
def test_mamba_and_attention_equal_one_rank(runs: Runs, hybrid: dict[str, Any]) -> None:
    reference = runs(**hybrid)
    assert {name.partition("mixer.")[2] for name in reference.gradients} >= {"A_log", "dt_bias", "D"}
    assert_equal(runs(2, **fcp("reshuffle"), **hybrid), reference)


@pytest.mark.feature("Models: hybrid (Mamba)", layout="reshuffle")
@pytest.mark.nightly(seconds=16)
def test_four_ranks(runs: Runs, hybrid: dict[str, Any]) -> None:
    two = {"micro_batch_size": 2, **hybrid}
    assert_equal(runs(4, **fcp("reshuffle", 4), **two), runs(**two))


def scan_by_steps(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs in a rank: the platform's scan, and the recurrence that it stands for, token by token in float64."""
    import torch
    import torch.nn.functional as F

    from megatron_fcp.testing.cpu_mamba import split_conv1d_scan

    generator = torch.Generator().manual_seed(seed)
    batch, length, heads, dim, groups, states, taps = 2, 11, 4, 3, 2, 5, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels = heads * dim + 2 * groups * states
    inputs, weight, bias = draw(batch, length, heads * dim + channels + heads), draw(channels, taps), draw(channels)
    dt_bias, a, d = draw(heads), -draw(heads).exp(), draw(heads)
    got = split_conv1d_scan(inputs, weight, bias, dt_bias, a, d, 128, headdim=dim, ngroups=groups)

    want = torch.zeros_like(got)
    for row in range(batch):
        state = torch.zeros(heads, dim, states, dtype=torch.float64)
        for t in range(length):
            gate, _, dt = inputs[row, t].split([heads * dim, channels, heads])
            seen = [inputs[row, t - back, heads * dim :][:channels] if t >= back else 0 for back in range(taps)]
            mixed = F.silu(sum(seen[back] * weight[:, taps - 1 - back] for back in range(taps)) + bias)
            x, b, c = mixed.split([heads * dim, groups * states, groups * states])
            x, step = x.view(heads, dim), F.softplus(dt + dt_bias)
            b, c = (v.view(groups, states).repeat_interleave(heads // groups, 0) for v in (b, c))
            state = (step * a).exp()[:, None, None] * state + step[:, None, None] * x[:, :, None] * b[:, None]
            out = (state * c[:, None]).sum(-1) + d[:, None] * x
            want[row, t] = out.reshape(-1) * F.silu(gate)
    return got.numpy(), want.numpy()


def test_scan_of_the_platform(training_loop: TrainingLoop) -> None:
    got, want = training_loop.call("test_fcp_hybrid:scan_by_steps", 3)
    np.testing.assert_allclose(got, want, atol=1e-12, rtol=1e-12)
