"""The end-of-document token, where it marks the boundaries: found and checked before training, on every rank.

``--reset-attention-mask`` takes boundaries from tokens. A tokenizer without such a token, or data sets tokenised
without ``--append-eod``, would train across documents and never say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENTS_READ = 64  # per data set: one of them that ends as it should is enough
_INDEX = (
    "take the boundaries from the data set's index instead: --dataloader-inter-document-masking without "
    "--reset-attention-mask"
)


def end_of_document(config: Any) -> int:
    """The token that ends documents, for the data sets of ``config``.

    Parameters
    ----------
    config : GPTDatasetConfig

    Raises
    ------
    ValueError
        If the tokenizer has none, or an indexed data set has documents and not one of those read ends with it; names
        the flag, what was found and the way out.
    """
    token = _token_of(config.tokenizer)
    for prefix in sorted(set(_prefixes(config))):
        _check_documents(prefix, token)
    return token


def _token_of(tokenizer: Any) -> int:
    try:
        token = tokenizer.eod
    except (AttributeError, NotImplementedError):
        token = None
    if token is None or int(token) < 0:
        name = type(getattr(tokenizer, "_tokenizer", tokenizer)).__name__
        raise ValueError(
            f"--reset-attention-mask with --context-parallel-backend fcp: the tokenizer, {name}, has no "
            f"end-of-document token (eod is {token}); use one that has, or {_INDEX}"
        )
    return int(token)


def _prefixes(config: Any) -> Iterator[str]:
    """Paths of all indexed data sets of a blend that lie on this machine's file system."""
    from megatron.core.datasets.indexed_dataset import get_bin_path, get_idx_path

    for blend in (config.blend, *(config.blend_per_split or ())):
        for prefix in () if blend is None else blend[0]:
            if Path(get_idx_path(prefix)).is_file() and Path(get_bin_path(prefix)).is_file():
                yield prefix


def _check_documents(prefix: str, token: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    stored = IndexedDataset(prefix)
    last = np.asarray(stored.document_indices[1:]) - 1  # the last sequence of each document
    last = last[np.asarray(stored.sequence_lengths)[last] > 0]
    chosen = last[np.linspace(0, last.size - 1, min(last.size, DOCUMENTS_READ)).astype(np.int64)]
    ends = [int(stored.get(int(i), offset=int(stored.sequence_lengths[i]) - 1)[-1]) for i in chosen]
    if ends and token not in ends:
        raise ValueError(
            f"--reset-attention-mask with --context-parallel-backend fcp: none of the {len(ends)} documents read from "
            f"--data-path {prefix} ends with the tokenizer's end-of-document token {token} (their last tokens: "
            f"{', '.join(map(str, sorted(set(ends))[:5]))}); tokenise them with --append-eod, or {_INDEX}"
        )
