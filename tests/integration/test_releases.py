"""Every release of Megatron from 0.16 to main, by its own unmodified scripts: launcher, ``register()`` and patch.

    python -m pytest -m releases --megatron PATH [--megatron PATH ...]

PATH is a checkout of Megatron-LM (of a release branch such as core_r0.18.0, or of main). docs/releases.md has the
results. Each checkout takes about four minutes on two cores; 0.16 needs the packages six, regex and pydantic.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, MLA, MOE, RECOMPUTE, SPLIT_TENSORS, Runs, fcp
from test_fcp_hybrid import HYBRID
from test_patches import apply

from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, TrainingResult, compare, tiny_model_args
from megatron_fcp.testing.pool import JobError

pytestmark = [pytest.mark.megatron, pytest.mark.releases]

STAGES = {"pipeline_model_parallel_size": 2}
REGISTER = ("megatron_fcp:register",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    paths = metafunc.config.getoption("--megatron")
    missing = pytest.param(None, marks=pytest.mark.skip(reason="needs --megatron PATH, a checkout of Megatron-LM"))
    names = [*map(_name, paths)] or None
    metafunc.parametrize("checkout", paths or [missing], ids=names, indirect=True, scope="module")


def _name(path: str) -> str:
    return apply.release_of(Path(path)) + " " + Path(path).name


@dataclass(frozen=True)
class Checkout:
    """A Megatron-LM, and runs of its script from the same weights on the same data."""

    path: Path
    release: tuple[int, int]
    runs: Runs

    @property
    def model(self) -> dict[str, Any]:
        """Up to 0.17 the tests' tokenizer has its end-of-document token behind its vocabulary.

        Padded to the same number of entries at every tensor-parallel size.
        """
        older = {"null_tokenizer_eod_id": None, "vocab_size": 256, "make_vocab_size_divisible_by": 160}
        return older if self.release < (0, 18) else {}

    def train(self, world_size: int = 1, model: dict[str, Any] | None = None, **flags: Any) -> TrainingResult:
        """Train with FCP registered by ``megatron_fcp.register()``."""
        return self.runs(world_size, {**self.model, **(model or {})}, **flags)


@pytest.fixture(scope="module")
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    path = Path(request.param).resolve()
    major, minor = apply.release_of(path).split(".")
    with TrainingLoop(tmp_path_factory.mktemp("checkout"), path, before=REGISTER) as loop:
        yield Checkout(path, (int(major), int(minor)), Runs(loop))


def assert_equal(result: TrainingResult, reference: TrainingResult) -> None:
    difference = compare(result, reference)
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


# Name: ranks, flags of the model, other flags, flags of the run on one rank.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "samples": (2, {}, {}, {}),
    "documents": (2, {}, EOD, EOD),
    "documents, two samples": (2, {}, {"micro_batch_size": 2, **EOD}, {"micro_batch_size": 2, **EOD}),
    "documents, tp 2 + sp": (4, {}, {**SPLIT_TENSORS, **EOD}, EOD),
    "documents, pp 2": (4, {}, {**STAGES, **EOD}, EOD),
    "documents, tp 2 x pp 2, two samples": (
        8,
        {},
        {**SPLIT_TENSORS, **STAGES, "micro_batch_size": 2, **EOD},
        {"micro_batch_size": 2, **EOD},
    ),
    "full recomputation": (2, {}, {**RECOMPUTE, **EOD}, EOD),
    "mixture of experts": (2, MOE, EOD, EOD),
    "distributed optimizer": (2, {}, {"use_distributed_optimizer": True, **EOD}, EOD),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_rank(checkout: Checkout, case: str, layout: str) -> None:
    ranks, model, flags, alone = CASES[case]
    assert_equal(checkout.train(ranks, model, **fcp(layout), **flags), checkout.train(model=model, **alone))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", [{}, EOD], ids=["samples", "documents"])
def test_multi_token_prediction_equals_one_rank(checkout: Checkout, data: dict[str, Any], layout: str) -> None:
    model = {"mtp_num_layers": 1}
    alone = {**data, "context_parallel_backend": "fcp"}  # of itself Megatron rolls across the ends of documents
    assert_equal(checkout.train(2, model, **fcp(layout), **data), checkout.train(model=model, **alone))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boundaries_of_the_index_equal_those_of_the_tokens(checkout: Checkout, layout: str) -> None:
    if checkout.release < (0, 19):
        pytest.skip("--dataloader-inter-document-masking came with 0.19")
    assert_equal(checkout.train(2, **fcp(layout), **INDEX), checkout.train(**EOD))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_conversations_equal_one_rank(checkout: Checkout, layout: str) -> None:
    if checkout.release < (0, 18):
        pytest.skip("refused on 0.16; not tried on 0.17, whose test tokenizer has no padding token")
    if checkout.release > (0, 19):
        pytest.skip("not tried on main, which moved the tokenizer that the test's conversations stand in for")
    sft = {
        "sft": True,
        "data_path": "generated",
        "null_tokenizer_pad_id": 300,
        "no_create_attention_mask_in_dataloader": True,
    }
    before = ("test_fcp_documents:converse",)
    runs = checkout.runs
    alone = runs(context_parallel_backend="fcp", before=before, **sft)
    assert_equal(runs(2, before=before, **fcp(layout), **sft), alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_attention_equals_one_rank(checkout: Checkout, layout: str) -> None:
    if checkout.release < (0, 19):
        pytest.skip("MLA was tried with 0.19 and newer")
    model = {**MLA, "rope_type": "yarn"}
    assert_equal(checkout.train(2, model, **fcp(layout), **EOD), checkout.train(model=model, **EOD))


def test_middle_stages_without_data_are_refused(checkout: Checkout) -> None:
    if checkout.release >= (0, 19):
        pytest.skip("middle stages read data from 0.19 on")
    with pytest.raises(JobError, match=r"--pipeline-model-parallel-size 3 cannot be combined with"):
        checkout.train(6, {"num_layers": 3}, **fcp("resident"), pipeline_model_parallel_size=3, **EOD)


def test_hybrid_models_equal_one_rank(checkout: Checkout, tmp_path: Path) -> None:
    """The release's own script, with a scan in plain PyTorch in place of Mamba's GPU kernels."""
    if checkout.release < (0, 18):
        pytest.skip("hybrid models are refused before 0.18")
    script = str(checkout.path / "pretrain_hybrid.py")
    start = {"lr": 0, "train_iters": 1, "save": tmp_path, "save_interval": 1, "no_save_optim": True}
    model = {name: value for name, value in HYBRID.items() if name not in ("script", "before")}
    argv = tiny_model_args(**{**checkout.model, **model, **start, "ckpt_format": "torch_dist"})
    checkout.runs.loop.run(TrainingJob(argv, script=script, before=HYBRID["before"]))
    flags = {**HYBRID, "script": script, "pretrained_checkpoint": tmp_path}
    assert_equal(checkout.train(2, **fcp("reshuffle"), **flags), checkout.train(**flags))


def test_hybrid_models_are_refused_at_argument_time(checkout: Checkout) -> None:
    """Up to 0.17 their specs name their attention without asking a backend; documents are refused everywhere."""
    flag = "hybrid_override_pattern" if checkout.release == (0, 16) else "hybrid_layer_pattern"
    documents = EOD if checkout.release >= (0, 18) else {}
    scripts = [name for name in ("pretrain_hybrid.py", "pretrain_mamba.py") if (checkout.path / name).exists()]
    assert scripts
    for name in scripts:
        argv = tiny_model_args(**{**checkout.model, **fcp("reshuffle"), **documents, flag: "M*"})
        with pytest.raises(AssertionError, match=f"--{flag.replace('_', '-')} M\\* cannot be combined with"):
            launch(checkout.path / name, 2, argv)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_patched_checkout_trains_without_launcher(checkout: Checkout, layout: str, tmp_path: Path) -> None:
    for part in ("megatron", *(path.name for path in checkout.path.glob("*.py"))):
        copy = shutil.copytree if (checkout.path / part).is_dir() else shutil.copy
        copy(checkout.path / part, tmp_path / part)
    assert apply.run("apply", tmp_path)[0] is True
    with TrainingLoop(tmp_path / "own", tmp_path) as loop:
        result = Runs(loop)(2, checkout.model, **fcp(layout), **EOD)
    assert "FCP:" in result.ranks[0].log
    assert_equal(result, checkout.train(2, **fcp(layout), **EOD))


def launch(script: Path, ranks: int, argv: list[str]) -> list[float]:
    """The command of docs/releases.md; the losses that it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "-m", "megatron_fcp.run", "--fcp-platform", "cpu", str(script), *argv]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-9000:]
    return [float(value) for value in re.findall(r"lm loss: (\S+)", done.stdout)]


@pytest.mark.parametrize("data", [{}, EOD], ids=["samples", "documents"])
def test_unmodified_script_under_the_launcher(checkout: Checkout, data: dict[str, Any]) -> None:
    loop = checkout.runs.loop
    corpus = {"mock_data": None, "data_path": loop.corpus().prefix}
    start = {"pretrained_checkpoint": loop.initial_checkpoint(**checkout.model)}
    flags = {**corpus, **start, **checkout.model, **data, "train_iters": 5, "distributed_backend": "gloo"}
    script = checkout.path / "pretrain_gpt.py"
    alone = launch(script, 1, tiny_model_args(**flags))
    assert len(alone) == 5
    for layout in LAYOUTS:
        losses = launch(script, 2, tiny_model_args(**flags, **fcp(layout)))
        assert losses == pytest.approx(alone, rel=2e-6)  # printed with seven digits


def test_the_command_of_the_docs(checkout: Checkout) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "releases.md").read_text()
    found = re.search(r"```\nMEGATRON=/path/to/Megatron-LM\n(.*?)```", text, re.DOTALL)
    assert found is not None
    command = f"MEGATRON={shlex.quote(str(checkout.path))}\n{found[1]}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-9000:]
    losses = [float(value) for value in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] < 6.5
    assert "FCP: resident layout, 8 blocks of 8 tokens on each of 2 ranks" in done.stdout
