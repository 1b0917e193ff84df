"""``fcp-config/1``: settings as a YAML file, as ``megatron-fcp tune`` writes them.

::

    format: fcp-config/1
    block_size: 1024
    layout: resident
    rounds_per_stage: 12
    ...
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_fcp.config import FcpConfig

FORMAT = "fcp-config/1"


def write_config(path: str | Path, config: FcpConfig, comment: str = "") -> None:
    """Write ``config`` (and ``comment``, line by line) to ``path``."""
    import yaml

    head = "".join(f"# {line}\n" for line in comment.splitlines())
    body = {"format": FORMAT, **dataclasses.asdict(config)}
    Path(path).write_text(head + yaml.safe_dump(body, sort_keys=False), encoding="utf-8")


def read_config(path: str | Path) -> FcpConfig:
    """Read a config.

    Raises
    ------
    ValueError
        If the file is missing, of another format, or holds an unknown or bad value; names file and entry.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"FCP config {path}: no such file; `megatron-fcp tune --output {path}` writes one")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"FCP config {path}: not YAML ({error})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ValueError(
            f"FCP config {path}: expected format {FORMAT!r}, found {found!r}; run `megatron-fcp tune` again"
        )
    values = {str(name): value for name, value in values.items() if name != "format"}
    known = {field.name for field in dataclasses.fields(FcpConfig)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"FCP config {path} has the unknown entry {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    try:
        return FcpConfig(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"FCP config {path}: {error}") from error
