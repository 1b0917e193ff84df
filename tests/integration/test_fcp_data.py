"""Where batches come from: blends, splits, generated samples, a user's own iterators; and evaluation in between."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, Runs, fcp

from megatron_fcp.testing.loop import TrainingLoop, TrainingResult, compare

pytestmark = pytest.mark.megatron

OWN_SCRIPT = str(Path(__file__).with_name("own_script.py"))
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


@pytest.mark.parametrize(
    ("layout", "data"), [("reshuffle", EOD), ("resident", INDEX)], ids=["reshuffle, tokens", "resident, index"]
)
def test_blend_with_evaluation(runs: Runs, sources: list[str], layout: str, data: dict[str, Any]) -> None:
    blend: dict[str, Any] = {"data_path": ["0.3", sources[0], "0.7", sources[1]], "split": "80,10,10", **EVALUATION}
    assert_equal(runs(2, **fcp(layout), **blend, **data), runs(**blend, **EOD), 4)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generated_samples(runs: Runs, layout: str) -> None:
    mock: dict[str, Any] = {"mock_data": True, "data_path": None, **EVALUATION}
    assert_equal(runs(2, **fcp(layout), **mock, **EOD), runs(**mock, **EOD), 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_iterators_of_the_users_script(runs: Runs, layout: str) -> None:
    own: dict[str, Any] = {
        "script": OWN_SCRIPT,
        "dataloader_type": "external",
        "dataloader_inter_document_masking": True,
        "longest_document": 40,
        "micro_batch_size": 2,
        "data_path": None,
        **EVALUATION,
    }
    reference = runs(context_parallel_backend="fcp", **own)
    assert_equal(runs(2, **fcp(layout), **own), reference, 3)
