"""A corpus every machine has: Python's standard library, byte by byte, as Megatron's indexed dataset.

One document per source file, tokens 0..255 are its bytes and :data:`EOD_TOKEN` ends it. Lengths have the long tail of
real corpora: empty ``__init__.py`` files next to modules of hundreds of thousands of bytes. Read it with
:data:`CORPUS_FLAGS`::

    python -m megatron_fcp.testing.corpus corpus/stdlib
    ... --data-path corpus/stdlib --tokenizer-type NullTokenizer --vocab-size 320 --null-tokenizer-eod-id 256
"""

from __future__ import annotations

import argparse
import dataclasses
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CORPUS_FLAGS", "EOD_TOKEN", "CorpusSummary", "build_corpus", "documents", "source_files"]

EOD_TOKEN = 256  # bytes are tokens 0..255

# Megatron's NullTokenizer only carries the vocabulary size and the end-of-document id, which is all that is needed.
# 16 * TP divides 320 for TP 1, 2 and 4: the padded vocabulary, hence the loss, is the same under each.
CORPUS_FLAGS: Mapping[str, Any] = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 320,
    "make_vocab_size_divisible_by": 16,
    "null_tokenizer_eod_id": EOD_TOKEN,
}


@dataclasses.dataclass(frozen=True)
class CorpusSummary:
    """What :func:`build_corpus` wrote.

    Attributes
    ----------
    prefix : Path
        Path for ``--data-path``: the files are ``<prefix>.bin`` and ``<prefix>.idx``.
    lengths : numpy.ndarray
        Tokens per document in stored order, end-of-document token included.
    """

    prefix: Path
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())


def source_files(root: Path | None = None) -> Iterator[Path]:
    """Python files below `root` (default: the standard library), by relative path, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in relative if not skipped.intersection(path.parts))
    return (root / path for path in sorted(kept, key=lambda path: path.parts))


def documents(root: Path | None = None, paragraphs: bool = False) -> Iterator[bytes]:
    """The documents of the corpus: whole source files, or their paragraphs (split at blank lines), which are short."""
    for path in source_files(root):
        content = path.read_bytes()
        yield from content.split(b"\n\n") if paragraphs else [content]


def build_corpus(
    prefix: str | Path, *, root: Path | None = None, paragraphs: bool = False, max_tokens: int | None = None
) -> CorpusSummary:
    """Write ``<prefix>.bin`` and ``<prefix>.idx``.

    Parameters
    ----------
    prefix : path
        Where to write; the folder is made.
    root : Path, optional
        Folder of source files, the standard library by default.
    paragraphs : bool, optional
        One document per paragraph instead of per file: many documents even in short samples.
    max_tokens : int, optional
        Stop after the document that reaches this many tokens.

    Returns
    -------
    CorpusSummary

    Raises
    ------
    ValueError
        When there is no source file below `root`.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    if next(source_files(root), None) is None:
        raise ValueError(f"no Python source files below {root or sysconfig.get_paths()['stdlib']}")
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.uint16)
    lengths: list[int] = []
    total = 0
    for content in documents(root, paragraphs):
        tokens = np.append(np.frombuffer(content, np.uint8).astype(np.int64), EOD_TOKEN)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
        lengths.append(len(tokens))
        total += len(tokens)
        if max_tokens is not None and total >= max_tokens:
            break
    builder.finalize(get_idx_path(str(prefix)))
    return CorpusSummary(prefix, np.array(lengths, np.int64))


def main(argv: list[str] | None = None) -> None:
    """Command line: write the corpus and say what is in it."""
    parser = argparse.ArgumentParser(description="Tokenise Python's standard library for Megatron.")
    parser.add_argument("prefix", help="write PREFIX.bin and PREFIX.idx")
    parser.add_argument("--root", type=Path, help="folder of source files (default: the standard library)")
    parser.add_argument("--paragraphs", action="store_true", help="one document per paragraph instead of per file")
    parser.add_argument("--max-tokens", type=int, help="stop after this many tokens (default: everything)")
    options = parser.parse_args(argv)
    summary = build_corpus(
        options.prefix, root=options.root, paragraphs=options.paragraphs, max_tokens=options.max_tokens
    )
    lengths = summary.lengths
    print(
        f"{len(lengths)} documents, {summary.num_tokens} tokens; length min {lengths.min()}, "
        f"median {int(np.median(lengths))}, mean {lengths.mean():.0f}, max {lengths.max()}"
    )


if __name__ == "__main__":
    main()
