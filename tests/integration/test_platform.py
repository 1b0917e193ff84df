"""Megatron's real training loop on the CPU platform: the same model in every layout, and what failures look like."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fcp.testing.corpus import EOD_TOKEN, documents
from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, TrainingResult, compare, tiny_model_args
from megatron_fcp.testing.pool import JobError, WorkerPool

pytestmark = pytest.mark.megatron

DENSE: dict[str, Any] = {}
MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
SPLIT_TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}

# Name: model, number of ranks, layout.
LAYOUTS = {
    "tp 2 + sp": (DENSE, 2, SPLIT_TENSORS),
    "pp 2": (DENSE, 2, {"pipeline_model_parallel_size": 2}),
    "pp 2 x tp 2 + sp": (DENSE, 4, {"pipeline_model_parallel_size": 2, **SPLIT_TENSORS}),
    "dp 2, distributed optimizer": (DENSE, 2, {"use_distributed_optimizer": True}),
    "ep 2": (MOE, 2, {"expert_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def train(training_loop: TrainingLoop) -> Any:
    """Train the tests' model on real documents, from the same weights in every layout."""
    data = {
        "mock_data": None,
        "data_path": training_loop.corpus().prefix,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
    }
    known: dict[str, TrainingResult] = {}

    def run(model: dict[str, Any], world_size: int = 1, **flags: Any) -> TrainingResult:
        start = training_loop.initial_checkpoint(**model)
        argv = tiny_model_args(**data, **model, pretrained_checkpoint=start, **flags)
        key = f"{world_size} {argv}"
        if key not in known:
            known[key] = training_loop.run(TrainingJob(argv, world_size, gradients=True, parameters=True))
        return known[key]

    return run


def assert_same_bits(result: TrainingResult, reference: TrainingResult) -> None:
    assert result.losses == reference.losses
    assert result.grad_norms == reference.grad_norms
    for name, expected in reference.gradients.items():
        np.testing.assert_array_equal(result.gradients[name], expected, err_msg=name)
    for name, expected in reference.parameters.items():
        np.testing.assert_array_equal(result.parameters[name], expected, err_msg=name)


def test_one_process_learns(train: Any) -> None:
    result = train(DENSE)
    assert len(result.losses) == 3
    # Untrained weights predict each of the 320 tokens alike.
    assert result.losses[0] == pytest.approx(np.log(320), rel=0.02)
    assert result.losses[2] < result.losses[1] < result.losses[0]
    assert result.gradients["decoder.layers.self_attention.linear_qkv.weight"].shape == (2, 64 + 2 * 32, 64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(train: Any, layout: str) -> None:
    model, world_size, flags = LAYOUTS[layout]
    difference = compare(train(model, world_size, **flags), train(model))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


def test_full_recomputation_changes_no_bit(train: Any) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert_same_bits(train(DENSE, **recompute), train(DENSE))


@pytest.mark.parametrize("flags", [{}, {"use_distributed_optimizer": True}], ids=["dp 2", "distributed optimizer"])
def test_resumed_run_continues_bit_for_bit(training_loop: TrainingLoop, tmp_path: Path, flags: dict[str, Any]) -> None:
    common = {"train_iters": 4, "ckpt_format": "torch_dist", **flags}

    def run(**more: Any) -> TrainingResult:
        return training_loop.run(TrainingJob(tiny_model_args(**common, **more), 2, parameters=True))

    whole = run()
    first = run(save=tmp_path, save_interval=2, exit_interval=2)
    second = run(load=tmp_path)
    assert first.losses + second.losses == whole.losses
    assert whole.parameters
    for name, expected in whole.parameters.items():
        np.testing.assert_array_equal(second.parameters[name], expected, err_msg=name)


def test_context_parallelism_of_megatron_itself_needs_transformer_engine(training_loop: TrainingLoop) -> None:
    with pytest.raises(JobError) as caught:
        training_loop.run(TrainingJob(tiny_model_args(context_parallel_size=2), 2))
    assert len(caught.value.errors) == 2
    assert "only supported by TEDotProductAttention" in caught.value.errors[0]


def fail_in_second_step() -> None:
    """Runs in the ranks: rank 1 raises where rank 0 waits for its gradients."""
    from megatron.training import training

    original = training.train_step

    def train_step(*args: Any, iteration: int = 0, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1" and iteration == 1:
            raise ArithmeticError("injected into rank 1")
        return original(*args, iteration=iteration, **kwargs)

    training.train_step = train_step


def test_exception_in_one_rank_shows_what_every_rank_did(training_loop: TrainingLoop) -> None:
    job = TrainingJob(tiny_model_args(), 2, before=["test_platform:fail_in_second_step"], grace=0.5)
    with pytest.raises(JobError) as caught:
        training_loop.run(job)
    waiting, failed = caught.value.ranks
    assert (failed.kind, failed.error) == ("raised", "ArithmeticError: injected into rank 1")
    assert "test_platform.py" in failed.details
    assert waiting.kind == "stalled"
    assert "forward_backward" in waiting.log  # the stack of the rank that waited, dumped before it was killed
    # The next job starts as if nothing had happened.
    assert len(training_loop.run(TrainingJob(tiny_model_args(train_iters=1))).losses) == 1


def test_refused_arguments_are_reported_with_megatrons_message(training_loop: TrainingLoop) -> None:
    with pytest.raises(JobError, match="unrecognized arguments: --no-such-flag"):
        training_loop.run(TrainingJob(tiny_model_args(no_such_flag=True)))


def read_corpus(prefix: str) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Runs in a rank: the stored documents; then tokens, offsets and positions of samples as Megatron cuts them."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    stored = IndexedDataset(prefix)
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=320, eod_id=EOD_TOKEN
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=512,
        blend=([prefix], None),
        split="1",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=True,
    )
    indices = np.arange(len(stored), dtype=np.int32)
    dataset = GPTDataset(stored, prefix, indices, 20, Split.train, config)
    samples = [
        (sample["tokens"].numpy(), sample["cu_seqlens"].numpy(), sample["position_ids"].numpy())
        for sample in (dataset[i] for i in range(20))
    ]
    return [stored[i].copy() for i in range(50)], samples  # views end with the dataset's memory map


def test_corpus_keeps_every_byte_and_document_boundary(training_loop: TrainingLoop) -> None:
    summary = training_loop.corpus()
    stored, samples = training_loop.call("test_platform:read_corpus", str(summary.prefix))
    for tokens, content in zip(stored, documents(paragraphs=True), strict=False):
        assert bytes(tokens[:-1].astype(np.uint8)) == content
        assert tokens[-1] == EOD_TOKEN
    boundaries = 0
    for tokens, padded_offsets, positions in samples:
        offsets = np.unique(padded_offsets)
        after_eod = np.flatnonzero(tokens == EOD_TOKEN) + 1
        np.testing.assert_array_equal(offsets, np.unique([0, *after_eod, len(tokens)]))
        starts = offsets[:-1]
        np.testing.assert_array_equal(
            positions, np.arange(512) - starts[np.searchsorted(offsets, np.arange(512), "right") - 1]
        )
        boundaries += len(after_eod)
    assert boundaries > 20


def inspect_platform(_: None) -> list[str]:
    """Runs in a rank that has the platform: the gaps whose file of Megatron does not exist."""
    import torch

    from megatron_fcp.testing import cpu_megatron, cpu_platform

    empty = torch.empty
    assert cpu_platform.install()  # was installed before
    assert torch.empty is empty
    modules = {gap.name: gap.where.split()[0].removesuffix(".py").replace("/", ".") for gap in cpu_megatron.GAPS}
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is None]


def test_gaps_are_in_files_that_exist(training_loop: TrainingLoop) -> None:
    assert training_loop.call("test_platform:inspect_platform", None) == []


def install_with_care(_: None) -> None:
    """Runs in a rank that has nothing imported yet."""
    import torch

    from megatron_fcp.testing import cpu_megatron, cpu_platform, cpu_torch  # noqa: F401  importing must change nothing

    assert torch.empty(1).type() == "torch.FloatTensor"
    assert not cpu_platform.is_installed()
    torch.cuda.is_available = lambda: True
    assert not cpu_platform.install()
    assert torch.empty(1).type() == "torch.FloatTensor"
    torch.cuda.is_available = lambda: False
    sys.modules["megatron"] = types.ModuleType("megatron")
    with pytest.raises(RuntimeError, match="before the first import of megatron"):
        cpu_platform.install()
    assert torch.empty(1).type() == "torch.FloatTensor"


def test_platform_leaves_gpus_and_late_callers_alone() -> None:
    with WorkerPool() as pool:
        pool.run(install_with_care, [None])
