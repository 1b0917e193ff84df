"""Fully sharded data parallelism around FCP: Megatron's own and PyTorch's, against one rank without it.

What sharding wraps are parameters, and FCP's attention has none. The sharded runs cannot start from the tests' initial
checkpoint, so every run draws the same weights; losses of several steps and gradient norms are compared.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
from fcp_runs import EOD, LAYOUTS, Runs, fcp

from megatron_fcp.testing.loop import TrainingJob, TrainingResult, tiny_model_args

pytestmark = pytest.mark.megatron

MEGATRON = {
    "use_megatron_fsdp": True,
    "use_distributed_optimizer": True,
    "no_gradient_reduce_div_fusion": True,  # gloo cannot multiply while it reduces
    "ckpt_format": "fsdp_dtensor",
}
SHARDING: dict[str, dict[str, Any]] = {
    "Megatron-FSDP, parameters": {**MEGATRON, "data_parallel_sharding_strategy": "optim_grads_params"},
    "Megatron-FSDP, gradients": {**MEGATRON, "data_parallel_sharding_strategy": "optim_grads"},
    "Megatron-FSDP, optimizer": {**MEGATRON, "data_parallel_sharding_strategy": "optim"},
    "Megatron-FSDP, nothing": {**MEGATRON, "data_parallel_sharding_strategy": "no_shard"},
    "PyTorch FSDP2": {"use_torch_fsdp2": True, "ckpt_format": "torch_dist"},
}


def same_weights() -> None:
    """Runs in the ranks: weights do not depend on what was drawn before, and FCP's attention is looked at."""
    import torch
    from megatron.core.models.gpt import GPTModel

    from megatron_fcp.integration.core_attention import FcpCoreAttention
    from megatron_fcp.testing.loop_rank import note

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # Megatron refuses sharding with 1
    original = GPTModel.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.manual_seed(7)
        original(self, *args, **kwargs)
        ours = [module for module in self.modules() if isinstance(module, FcpCoreAttention)]
        note("layers", len(ours))
        note("state", [name for m in ours for name in (*m.state_dict(), *dict(m.named_buffers()))])

    GPTModel.__init__ = __init__


@pytest.fixture(scope="module")
def train(runs: Runs) -> Any:
    """Trains the tests' model from the same drawn weights, each run once."""

    @functools.cache
    def run(world_size: int, items: tuple[tuple[str, Any], ...]) -> TrainingResult:
        data = {"mock_data": None, "data_path": runs.loop.corpus().prefix, "train_iters": 5, **EOD}
        argv = tiny_model_args(**{**data, **dict(items)})
        return runs.loop.run(TrainingJob(argv, world_size, before=("test_fcp_sharded:same_weights",)))

    return lambda world_size, **flags: run(world_size, tuple(flags.items()))


IN_EVERY_RUN = {("Megatron-FSDP, parameters", layout) for layout in LAYOUTS} | {("PyTorch FSDP2", "resident")}
CASES = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in IN_EVERY_RUN else pytest.mark.nightly(seconds=14))
    for kind in SHARDING
    for layout in LAYOUTS
]


@pytest.mark.feature("Optimizer: {kind} sharded, cp 2 x dp 2")
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_sharded_equals_one_rank(train: Any, kind: str, layout: str) -> None:
    """The nightly cases took 11 to 16 s each while the two cores were shared."""
    result, reference = train(4, **fcp(layout), **SHARDING[kind]), train(1)
    assert len(reference.losses) == 5
    np.testing.assert_allclose(result.losses, reference.losses, rtol=1e-5)
    np.testing.assert_allclose(result.grad_norms, reference.grad_norms, rtol=1e-5)
    for rank in result.ranks:
        assert rank.notes["layers"] == 2
        assert rank.notes["state"] == []
