"""Where document boundaries come from, and that they reach every rank: tensor-, context- and pipeline-parallel."""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, MLA, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.testing.loop import TrainingResult, compare

pytestmark = pytest.mark.megatron

STAGES_3 = {"pipeline_model_parallel_size": 3}
CHUNKS = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}


def assert_equal(result: TrainingResult, reference: TrainingResult) -> None:
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


def test_boundaries_matter(runs: Runs) -> None:
    """What all tests here rest on: without the boundaries the losses are others."""
    whole = {"reset_position_ids": True, "eod_mask_loss": True}
    difference = compare(runs(**whole), runs(**EOD))
    assert difference.loss > 1e-4
    assert difference.gradient > 1e-2


@pytest.mark.feature("Data: documents by the index (`--dataloader-inter-document-masking`)")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flags", [{}, SPLIT_TENSORS], ids=["cp 2", "cp 2 x tp 2 + sp"])
def test_boundaries_of_the_index_equal_those_of_the_tokens(runs: Runs, flags: dict[str, Any], layout: str) -> None:
    # Every document of the corpus ends with its end-of-document token, so both say the same.
    assert_equal(runs(4 if flags else 2, **fcp(layout), **INDEX, **flags), runs(**EOD))


def test_one_rank_runs_packed_batches(runs: Runs) -> None:
    """Megatron's local attention refuses them, so FCP's runs, on one rank as well."""
    assert_equal(runs(context_parallel_backend="fcp", **INDEX), runs(**EOD))


@pytest.mark.feature("Parallelism: cp 2 x pp 3, documents")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", [EOD, INDEX], ids=["tokens", "index"])
def test_middle_pipeline_stages_get_the_boundaries(runs: Runs, data: dict[str, Any], layout: str) -> None:
    three = {"num_layers": 3}
    assert_equal(runs(6, three, **fcp(layout), **STAGES_3, **data), runs(model=three, **EOD))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interleaved_pipeline(runs: Runs, layout: str) -> None:
    four = {"num_layers": 4}
    assert_equal(runs(4, four, **fcp(layout), **CHUNKS, **EOD), runs(model=four, **EOD))


POSITIONS = {
    "learned": {"position_embedding_type": "learned_absolute"},
    "none": {"position_embedding_type": "none"},
    "RoPE on half of the channels, interleaved": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "RoPE scaled as in Llama 3": {"use_rope_scaling": True},
}


@pytest.mark.feature("Positions: {kind}")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions(runs: Runs, kind: str, layout: str) -> None:
    assert_equal(runs(2, POSITIONS[kind], **fcp(layout), **EOD), runs(model=POSITIONS[kind], **EOD))


@pytest.mark.feature("Attention: multi-latent (MLA)", "Positions: MLA with {rope}")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rope", "data"),
    [("yarn", {}), ("yarn", EOD), ("rope", {"micro_batch_size": 2, **EOD})],
    ids=["yarn, samples", "yarn, documents", "rope, two samples"],
)
def test_multi_latent_attention(runs: Runs, rope: str, data: dict[str, Any], layout: str) -> None:
    model = {**MLA, "rope_type": rope}
    assert_equal(runs(2, model, **fcp(layout), **data), runs(model=model, **data))


def converse() -> None:
    """Runs in the ranks: SFT on generated conversations, each padded to a multiple of 2 * cp_size by Megatron."""
    import numpy as np
    import torch
    from megatron.core.tokenizers.text.models.default_tokenizer import DefaultTokenizerText
    from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset

    rng = np.random.default_rng(7)
    packs: list[list[dict[str, Any]]] = []
    for _ in range(16):
        room, pack = 112, []
        while room > 12:
            length = int(min(rng.integers(2, 60), room - 8))
            pack.append({"role": "system", "content": rng.integers(0, 256, length).tolist()})
            room -= length + 8  # what padding may add
        packs.append(pack)

    def tokenize(self: Any, conversation: Any, return_target: bool, add_generation_prompt: bool) -> Any:
        tokens = torch.tensor([*conversation[0]["content"], self.eod])
        targets = tokens.clone()
        targets[0] = IGNORE_INDEX  # nothing predicts a conversation's first token
        return tokens, targets

    SFTDataset.build_low_level_dataset = staticmethod(lambda path, config: packs)
    DefaultTokenizerText.tokenize_conversation = tokenize


@pytest.mark.feature("Data: packed conversations (`--sft`)")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("world_size", "cp_size", "flags"),
    [(2, 2, {}), (4, 4, {}), (4, 2, {"pipeline_model_parallel_size": 2})],
    ids=["cp 2", "cp 4", "cp 2 x pp 2"],
)
def test_packed_conversations(runs: Runs, world_size: int, cp_size: int, flags: dict[str, Any], layout: str) -> None:
    sft = {
        "sft": True,
        "data_path": "generated",
        "null_tokenizer_pad_id": 300,
        "no_create_attention_mask_in_dataloader": True,
        "before": ("test_fcp_documents:converse",),
    }
    assert_equal(runs(world_size, **fcp(layout, cp_size), **sft, **flags), runs(context_parallel_backend="fcp", **sft))
