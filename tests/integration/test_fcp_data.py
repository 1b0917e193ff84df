"""Where batches come from: blends, splits, generated samples, a user's own iterators; and evaluation in between."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, Runs, fcp

from megatron_fcp.testing.loop import TrainingLoop, TrainingResult, compare
from megatron_fcp.testing.pool import JobError

pytestmark = pytest.mark.megatron

OWN_SCRIPT = str(Path(__file__).with_name("own_script.py"))
OWN: dict[str, Any] = {
    "script": OWN_SCRIPT,
    "dataloader_type": "external",
    "dataloader_inter_document_masking": True,
    "longest_document": 40,
    "data_path": None,
}
EVALUATION: dict[str, Any] = {"eval_interval": 2, "eval_iters": 2, "train_iters": 4}


def evaluations(result: TrainingResult) -> list[float]:
    """Losses that evaluation printed, validation and test in order."""
    return [float(text) for text in re.findall(r"lm loss value: (\S+)", result.ranks[-1].log)]


def assert_equal(result: TrainingResult, reference: TrainingResult, num_evaluations: int) -> None:
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name
    assert len(evaluations(reference)) == num_evaluations
    assert evaluations(result) == pytest.approx(evaluations(reference), rel=1e-5)  # printed with 7 digits


@pytest.fixture(scope="module")
def sources(training_loop: TrainingLoop) -> list[str]:
    """Two data sets: the paragraphs of the standard library's first files, and its first files as a whole."""
    return [
        str(training_loop.corpus(paragraphs=paragraphs, max_tokens=tokens).prefix)
        for paragraphs, tokens in ((True, 200_000), (False, 60_000))
    ]


@pytest.mark.feature("Data: blended data sets, evaluation in between")
@pytest.mark.parametrize(
    ("layout", "data"), [("reshuffle", EOD), ("resident", INDEX)], ids=["reshuffle, tokens", "resident, index"]
)
def test_blend_with_evaluation(runs: Runs, sources: list[str], layout: str, data: dict[str, Any]) -> None:
    blend: dict[str, Any] = {"data_path": ["0.3", sources[0], "0.7", sources[1]], "split": "80,10,10", **EVALUATION}
    assert_equal(runs(2, **fcp(layout), **blend, **data), runs(**blend, **EOD), 4)


@pytest.mark.feature("Data: a blend for each split")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blends_of_each_split(runs: Runs, sources: list[str], layout: str) -> None:
    first, second = sources
    splits: dict[str, Any] = {
        "data_path": None,
        "split": None,
        "train_data_path": ["0.5", first, "0.5", second],
        "valid_data_path": [second],
        "test_data_path": [first],
        **EVALUATION,
    }
    assert_equal(runs(2, **fcp(layout), **splits, **INDEX), runs(**splits, **EOD), 4)


@pytest.mark.feature("Data: generated samples (`--mock-data`)")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_generated_samples(runs: Runs, layout: str) -> None:
    mock: dict[str, Any] = {"mock_data": True, "data_path": None, **EVALUATION}
    assert_equal(runs(2, **fcp(layout), **mock, **EOD), runs(**mock, **EOD), 4)


@pytest.mark.feature("Data: the script's own iterators (`--dataloader-type external`), micro-batch 2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_iterators_of_the_users_script(runs: Runs, layout: str) -> None:
    own = {**OWN, "micro_batch_size": 2, **EVALUATION}
    reference = runs(context_parallel_backend="fcp", **own)
    assert_equal(runs(2, **fcp(layout), **own), reference, 3)


def no_end_of_document() -> None:
    """Runs in the ranks: a tokenizer without an end-of-document token."""
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    NullTokenizer.eod = property(lambda self: None)  # type: ignore[assignment]


@pytest.mark.feature("Data: no end-of-document token", layout="both", refused="an error on every rank before training")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"before": ("test_fcp_data:no_end_of_document",)},
            ("the tokenizer, NullTokenizer, has no end-of-document token",),
        ),
        (
            {"null_tokenizer_eod_id": 300},
            ("none of the 64 documents read", "ends with", "token 300 (their last tokens: 256)", "--append-eod"),
        ),
    ],
    ids=["tokenizer", "data set"],
)
def test_end_of_document_token_is_missing(runs: Runs, flags: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(JobError) as caught:
        runs(4, **fcp("resident"), tensor_model_parallel_size=2, **EOD, **flags)
    for rank in caught.value.ranks:
        assert rank.error.startswith("ValueError: --reset-attention-mask with --context-parallel-backend fcp")
        for word in (*words, "--dataloader-inter-document-masking"):
            assert word in rank.error
        assert "before the start of training step" not in rank.log


def test_documents_that_do_not_fill_their_batch(runs: Runs, tmp_path: Path) -> None:
    """All ranks stop at the batch; what was saved before stays whole, and training goes on from it."""
    third_step = {"broken_batch": 2 * 4 + 2, "train_iters": 4}
    saves = {"save": tmp_path, "save_interval": 1, "ckpt_format": "torch_dist"}
    with pytest.raises(JobError) as caught:
        runs(2, **fcp("resident"), **OWN, **third_step, **saves)
    for rank in caught.value.ranks:
        assert rank.error.startswith("ValueError"), rank.error
        assert "128" in rank.error
        assert "256" in rank.error
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    going_on = runs(2, **fcp("resident"), **OWN, train_iters=4, load=tmp_path, ckpt_format="torch_dist")
    assert len(going_on.losses) == 2
