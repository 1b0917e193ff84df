"""Checkpoints of one context-parallel size or backend do not resume with another, or not where training stopped.

Here they go from Megatron's own backend to FCP and back, and every run goes on as if never interrupted.
https://github.com/NVIDIA/Megatron-LM/issues/4828, https://github.com/NVIDIA/Megatron-LM/issues/6858
"""

from __future__ import annotations

import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fcp_runs import LAYOUTS, Runs, fcp

from megatron_fcp.testing.loop import TrainingResult

pytestmark = pytest.mark.megatron

NATIVE_CP = "megatron_fcp.testing.native_cp:install"
WATCH = "test_32_resumed_elsewhere:watch_random_numbers"
# A learning rate that differs at every step, and six steps in three runs of two.
SCHEDULE: dict[str, Any] = {
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 1,
    "min_lr": 1e-4,
    "train_iters": 6,
    "global_batch_size": 2,
    "ckpt_format": "torch_dist",
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain optimizer": {},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "distributed optimizer, fully reshardable": {
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
    },
}


def watch_random_numbers() -> None:
    """Runs in the ranks: notes the state of every generator when a checkpoint is saved and when it has been loaded."""
    from megatron.training import training

    from megatron_fcp.testing.loop_rank import note

    load, save = training.load_checkpoint, training.save_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        note("loaded", generators())
        return result

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        note("saved", generators())
        return save(*args, **kwargs)

    training.load_checkpoint, training.save_checkpoint = load_checkpoint, save_checkpoint


def generators() -> dict[str, int]:
    """Digest of the state of every random generator that Megatron saves."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  what Megatron saves
        "torch": torch.get_rng_state().tolist(),
        **{name: state.tolist() for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    return {name: zlib.crc32(pickle.dumps(state)) for name, state in states.items()}


def logged(result: TrainingResult, name: str) -> list[str]:
    return re.findall(rf"{name}: +(\S+)", result.ranks[-1].log)


def native(cp_size: int) -> dict[str, Any]:
    more = {"context_parallel_size": cp_size} if cp_size > 1 else {}
    return {**more, "before": (NATIVE_CP, WATCH)}


def with_fcp(layout: str, cp_size: int) -> dict[str, Any]:
    return {**fcp(layout, cp_size), "before": (WATCH,)}


def contents(checkpoint: Path) -> dict[str, tuple[int, ...] | None]:
    """Names, and shapes of tensors, of what a checkpoint holds for the model and a plain optimizer."""
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
    # Left out: Megatron's own object per rank, and the distributed optimizer's buffers, which follow the group's size.
    return {
        name: tuple(getattr(entry, "size", ())) for name, entry in entries if not re.match("rerun_state|.*bucket", name)
    }


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> TrainingResult:
    """Six steps on one rank, without FCP."""
    return runs(**SCHEDULE)


def test_native_context_parallelism_of_the_tests_equals_one_rank(runs: Runs, uninterrupted: TrainingResult) -> None:
    whole = runs(2, **SCHEDULE, **native(2))
    assert whole.losses == pytest.approx(uninterrupted.losses, rel=1e-5)


QUICK = {("reshuffle", "distributed optimizer"), ("resident", "plain optimizer")}
CASES = [
    pytest.param(
        layout,
        optimizer,
        marks=() if (layout, optimizer) in QUICK else pytest.mark.nightly(seconds=22),
        id=f"{layout}, {optimizer}",
    )
    for layout in LAYOUTS
    for optimizer in OPTIMIZERS
]


@pytest.mark.feature("Checkpoints: {optimizer}; Megatron's own cp 2, then FCP at cp 4, then Megatron's own cp 1")
@pytest.mark.parametrize(("layout", "optimizer"), CASES)
def test_resumed_with_fcp_and_back(
    runs: Runs, uninterrupted: TrainingResult, tmp_path: Path, layout: str, optimizer: str
) -> None:
    check_chain(runs, uninterrupted, tmp_path, [native(2), with_fcp(layout, 4), native(1)], OPTIMIZERS[optimizer])


@pytest.mark.nightly(seconds=16)
@pytest.mark.feature("Checkpoints: resumed in the other layout and at another cp size", layout="both")
def test_resumed_in_the_other_layout(runs: Runs, uninterrupted: TrainingResult, tmp_path: Path) -> None:
    """A checkpoint knows nothing of layouts, so there is nothing to refuse."""
    chain = [with_fcp("reshuffle", 4), with_fcp("resident", 2), native(2)]
    check_chain(runs, uninterrupted, tmp_path, chain, OPTIMIZERS["distributed optimizer"])


def check_chain(
    runs: Runs, uninterrupted: TrainingResult, folder: Path, chain: list[dict[str, Any]], optimizer: dict[str, Any]
) -> None:
    """Two steps each, one run after the other from the checkpoint of the one before."""
    folders = [folder / str(number) for number in range(3)]
    losses: list[float] = []
    held: list[dict[str, Any]] = []
    previous: TrainingResult | None = None
    for number, flags in enumerate(chain):
        done = 2 * number
        files: dict[str, Any] = {"save": folders[number], "save_interval": 2, "exit_interval": 2}
        files["load"] = folders[number - 1] if number else None
        result = runs(flags.get("context_parallel_size", 1), **SCHEDULE, **optimizer, **flags, **files)
        assert len(result.losses) == 2
        losses += result.losses
        assert logged(result, "consumed samples") == [str(2 * (done + 1)), str(2 * (done + 2))]
        assert logged(result, "learning rate") == logged(uninterrupted, "learning rate")[done : done + 2]
        if previous is not None:  # every rank draws what the first rank of the saving run would have drawn
            assert {str(rank.notes["loaded"]) for rank in result.ranks} == {str(previous.ranks[0].notes["saved"])}
        previous = result
        checkpoint = folders[number] / f"iter_{done + 2:07d}"
        held.append(contents(checkpoint))
        for file in checkpoint.iterdir():
            assert b"megatron_fcp" not in file.read_bytes(), file  # Megatron alone can read it
    assert losses == pytest.approx(uninterrupted.losses, rel=1e-5)
    assert held[0] == held[1] == held[2]
    assert {name for name in held[0] if name.startswith("decoder.")}
    for name, parameter in uninterrupted.parameters.items():
        np.testing.assert_allclose(result.parameters[name], parameter, atol=1e-6, err_msg=name)
