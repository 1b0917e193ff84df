"""Small runs of Megatron's real training loop for tests: exact losses, gradients comparable across layouts.

A :class:`TrainingJob` is a command line, a number of ranks and what to bring back; :class:`TrainingLoop` runs jobs in
freshly forked processes (:mod:`megatron_fcp.testing.pool`) on the CPU platform. Losses come from the loop's own loss
dictionary, not from its log lines, which round. Gradients and parameters are put together from all ranks by the
sharding that Megatron's distributed checkpoints use, so a run at TP 2 x PP 2 compares with a single process, name by
name. Weights are comparable when both runs start from :meth:`TrainingLoop.initial_checkpoint`: what Megatron draws
depends on the layout.

This module imports neither torch nor Megatron; the ranks do (:mod:`megatron_fcp.testing.loop_rank`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fcp.testing.corpus import CORPUS_FLAGS, CorpusSummary
from megatron_fcp.testing.pool import Outcome, WorkerPool

__all__ = [
    "PRETRAIN_SCRIPT",
    "TINY_MODEL",
    "TINY_RUN",
    "Difference",
    "RankRecord",
    "TrainingJob",
    "TrainingLoop",
    "TrainingResult",
    "compare",
    "tiny_model_args",
    "to_argv",
]

PRETRAIN_SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"

# The one place with the flags of the model that tests train: a two-layer Llama-style model.
TINY_MODEL: Mapping[str, Any] = {
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "attention_backend": "unfused",
    # Fused kernels that need Apex, Transformer Engine or a compiler.
    "no_masked_softmax_fusion": True,
    "no_bias_gelu_fusion": True,
    "no_bias_swiglu_fusion": True,
    "no_bias_dropout_fusion": True,
    "no_rope_fusion": True,
    "no_gradient_accumulation_fusion": True,
    "no_persist_layer_norm": True,
    **CORPUS_FLAGS,
}

# How it is trained.
TINY_RUN: Mapping[str, Any] = {
    "distributed_timeout_minutes": 2,
    "mock_data": True,
    "split": "100,0,0",
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "eval_iters": 0,
    "eval_interval": 1000,
    "log_interval": 1,
    "num_workers": 0,
}


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """Command line of a mapping from flag names to values.

    Parameters
    ----------
    flags : mapping
        ``num_layers=2`` becomes ``--num-layers 2``; True gives the bare flag, None and False leave it out, a list or
        tuple gives several values.

    Returns
    -------
    list of str
    """
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, (list, tuple)) else [value]
            argv.extend(str(item) for item in values)
    return argv


def tiny_model_args(**overrides: Any) -> list[str]:
    """Command line that trains the tests' model; `overrides` add, replace or (None) remove flags."""
    return to_argv({**TINY_MODEL, **TINY_RUN, **overrides})


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """One training run.

    Attributes
    ----------
    argv : sequence of str
        The script's command line.
    world_size : int
        Number of ranks.
    script : str, optional
        Script to run. Default: the loop's.
    gradients : bool
        Bring back the gradients of the first step.
    parameters : bool
        Bring back the parameters after the last step.
    before : sequence of str
        ``"module:function"`` called without arguments, in this order, in every rank before the script starts, with
        ``sys.argv`` set: to install hooks or to inject faults. ``RANK`` is in the environment.
    timeout : float
        Seconds for the whole job.
    grace : float
        Seconds the other ranks get to end by themselves after the first failure.
    """

    argv: Sequence[str]
    world_size: int = 1
    script: str | None = None
    gradients: bool = False
    parameters: bool = False
    before: Sequence[str] = ()
    timeout: float = 120.0
    grace: float = 2.0


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """What one rank saw.

    Attributes
    ----------
    losses : list of dict
        Per step, the loss dictionary of ``train_step`` (empty but on the last pipeline stage), exact.
    grad_norms : list of float
        Gradient norm per step.
    gradients, parameters : list of tuple
        This rank's pieces: (name, global shape, global offset, prepended axes, array).
    notes : dict
        What hooks left with :func:`megatron_fcp.testing.loop_rank.note`.
    log : str
        Output of the rank.
    """

    losses: list[dict[str, float]]
    grad_norms: list[float]
    gradients: list[tuple[Any, ...]]
    parameters: list[tuple[Any, ...]]
    notes: dict[str, Any]
    log: str = ""


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    Attributes
    ----------
    losses : list of float
        ``lm loss`` per step, exact.
    grad_norms : list of float
        Gradient norm per step.
    gradients : dict of str to numpy.ndarray
        Whole gradient tensors of the first step, by checkpoint name; empty when not asked for.
    parameters : dict of str to numpy.ndarray
        Whole parameters after the last step; empty when not asked for.
    ranks : list of RankRecord
        What each rank saw.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    ranks: list[RankRecord]


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a run is from its reference.

    Attributes
    ----------
    loss : float
        Largest relative difference of a step's loss.
    gradient : float
        Largest difference of a gradient element over the largest element of that reference tensor.
    name : str
        The tensor in which `gradient` was found; empty when neither run has gradients.
    """

    loss: float
    gradient: float
    name: str


def compare(result: TrainingResult, reference: TrainingResult) -> Difference:
    """Compare losses and first-step gradients of two runs of the same model.

    Raises
    ------
    ValueError
        When the runs have different numbers of steps or different parameters.
    """
    if len(result.losses) != len(reference.losses) or not reference.losses:
        raise ValueError(f"runs of {len(result.losses)} and {len(reference.losses)} steps cannot be compared")
    if unmatched := sorted(result.gradients.keys() ^ reference.gradients.keys()):
        raise ValueError(f"gradients of one run only: {unmatched}")
    loss = max(abs(a - b) / abs(b) for a, b in zip(result.losses, reference.losses, strict=True))
    worst = [
        (float(np.abs(result.gradients[name] - expected).max() / np.abs(expected).max()), name)
        for name, expected in reference.gradients.items()
    ]
    gradient, name = max(worst, default=(0.0, ""))
    return Difference(loss, gradient, name)


class TrainingLoop:
    """Runs training jobs; keep one per test session.

    Parameters
    ----------
    directory : path
        Where initial checkpoints and corpora are kept.
    megatron : path, optional
        A checkout of Megatron-LM: its ``megatron`` is trained with, by its ``pretrain_gpt.py``. Default: the installed
        one, by ``examples/pretrain_gpt.py``.
    before : sequence of str, optional
        Called in every rank of every job, ahead of the job's own ``before``.
    """

    def __init__(self, directory: str | Path, megatron: str | Path | None = None, before: Sequence[str] = ()) -> None:
        self._before = tuple(before)
        self._directory = Path(directory)
        self._checkpoints: dict[str, Path] = {}
        self._corpora: dict[tuple[bool, int], CorpusSummary] = {}
        path = () if megatron is None else (str(Path(megatron).resolve()),)
        self._script = str(PRETRAIN_SCRIPT if megatron is None else Path(*path) / "pretrain_gpt.py")
        self._pool = WorkerPool("megatron_fcp.testing.loop_rank:preload", {"CUDA_VISIBLE_DEVICES": ""}, path)

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server process."""
        self._pool.close()

    def run(self, job: TrainingJob) -> TrainingResult:
        """Train.

        Raises
        ------
        JobError
            When a rank failed or stalled: names what each rank was doing.
        """
        job = dataclasses.replace(job, script=job.script or self._script, before=(*self._before, *job.before))
        port = _free_port()
        arguments = [(job, rank, port) for rank in range(job.world_size)]
        outcomes = self._pool.run(
            "megatron_fcp.testing.loop_rank:train", arguments, timeout=job.timeout, grace=job.grace
        )
        return _gather(outcomes)

    def call(self, function: str, argument: Any) -> Any:
        """``function(argument)``, named ``"module:function"``, in one fresh process that has Megatron imported."""
        return self._pool.run(function, [argument])[0].value

    def corpus(self, *, paragraphs: bool = True, max_tokens: int = 200_000) -> CorpusSummary:
        """A part of the standard library as an indexed dataset, made once: pass ``data_path=corpus.prefix``.

        Parameters
        ----------
        paragraphs, max_tokens
            As for :func:`megatron_fcp.testing.corpus.build_corpus`.
        """
        key = (paragraphs, max_tokens)
        if key not in self._corpora:
            prefix = self._directory / f"corpus-{'paragraphs' if paragraphs else 'files'}-{max_tokens}" / "stdlib"
            options = {"prefix": prefix, "paragraphs": paragraphs, "max_tokens": max_tokens}
            self._corpora[key] = self.call("megatron_fcp.testing.loop_rank:write_corpus", options)
        return self._corpora[key]

    def initial_checkpoint(self, **overrides: Any) -> Path:
        """Weights to start from: a distributed checkpoint of the tests' model, as one process initialises it.

        Pass it on with ``pretrained_checkpoint=path`` at any layout. Made once per set of `overrides`.

        Parameters
        ----------
        **overrides
            Model flags as for :func:`tiny_model_args`; parallelism has no place here.
        """
        flags = {**TINY_MODEL, **TINY_RUN, **overrides}
        key = hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self._checkpoints:
            path = self._directory / f"initial-{key}"
            # One step at learning rate zero: Megatron saves only after training, and Adam times zero changes nothing.
            once = {"lr": 0, "min_lr": 0, "train_iters": 1, "save": path, "save_interval": 1}
            self.run(TrainingJob(to_argv({**flags, **once, "ckpt_format": "torch_dist", "no_save_optim": True})))
            self._checkpoints[key] = path
        return self._checkpoints[key]


def _gather(outcomes: Sequence[Outcome]) -> TrainingResult:
    ranks = [dataclasses.replace(outcome.value, log=outcome.log) for outcome in outcomes]
    losses = next(([step["lm loss"] for step in rank.losses] for rank in ranks if any(rank.losses)), [])
    return TrainingResult(
        losses=losses,
        grad_norms=ranks[0].grad_norms,
        gradients=_assemble([piece for rank in ranks for piece in rank.gradients]),
        parameters=_assemble([piece for rank in ranks for piece in rank.parameters]),
        ranks=ranks,
    )


def _assemble(pieces: Sequence[tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """Whole tensors from the pieces of all ranks; every element must come from exactly one piece."""
    whole: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for name, shape, offset, prepended, array in pieces:
        tensor = whole.setdefault(name, np.zeros(shape, array.dtype))
        count = filled.setdefault(name, np.zeros(shape, np.int8))
        extent = (1,) * prepended + array.shape
        window = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        tensor[window] = array.reshape(extent)
        count[window] += 1
    for name, count in filled.items():
        assert (count == 1).all(), f"{name}: elements covered {np.unique(count)} times by the ranks' pieces"
    return whole


def _free_port() -> int:
    """A port below the ephemeral range, so that no outgoing connection takes it before the job listens on it."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
