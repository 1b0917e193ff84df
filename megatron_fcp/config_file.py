"""``fcp-config/1``: settings as a YAML file, as ``megatron-fcp tune`` writes them.

::

    format: fcp-config/1
    block_size: 1024
    layout: resident
    ...
    hardware: {pair_s: 5.0e-11, ...}    # prices the planner chose by: a CostModel's numbers, for one rank's heads
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_fcp.config import FcpConfig
from megatron_fcp.files import write_whole
from megatron_fcp.plan.cost import CostModel

FORMAT = "fcp-config/1"


def write_config(path: str | Path, config: FcpConfig, cost: CostModel | None = None, comment: str = "") -> None:
    """Write ``config``, the planner's prices and ``comment`` (line by line) to ``path``."""
    import yaml

    head = "".join(f"# {line}\n" for line in comment.splitlines())
    body = {"format": FORMAT, **dataclasses.asdict(config)}
    if cost is not None:
        body["hardware"] = {**dataclasses.asdict(cost), "speeds": list(cost.speeds)}
    write_whole(path, head + yaml.safe_dump(body, sort_keys=False))


def read_config(path: str | Path) -> tuple[FcpConfig, CostModel | None]:
    """Read settings, and the prices to plan by if the file has them.

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
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"FCP config {path}: not YAML ({error})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ValueError(
            f"FCP config {path}: expected format {FORMAT!r}, found {found!r}; run `megatron-fcp tune` again"
        )
    values = {str(name): value for name, value in values.items() if name != "format"}
    cost = _cost(path, values.pop("hardware", None))
    known = {field.name for field in dataclasses.fields(FcpConfig)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"FCP config {path} has the unknown entry {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    try:
        return FcpConfig(**values), cost
    except (ValueError, TypeError) as error:
        raise ValueError(f"FCP config {path}: {error}") from error


def _cost(path: Path, values: object) -> CostModel | None:
    if values is None:
        return None
    fields = {field.name: field.type for field in dataclasses.fields(CostModel) if field.name != "speeds"}
    speeds: object = values.pop("speeds", []) if isinstance(values, dict) else []
    if not isinstance(speeds, list) or not all(type(s) in (int, float) and 0 < s < 1e300 for s in speeds):
        raise ValueError(f"FCP config {path}: hardware's speeds must be a list of positive numbers, got {speeds!r}")
    if not isinstance(values, dict) or set(values) != set(fields):
        wrong = sorted(set(fields) ^ set(values)) if isinstance(values, dict) else [type(values).__name__]
        raise ValueError(f"FCP config {path}: hardware lacks or has too much: {', '.join(map(str, wrong))}")
    for name, value in values.items():
        whole = fields[name] == "int"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 1e300:
            raise ValueError(f"FCP config {path}: hardware's {name} must be a positive number, got {value!r}")
    return CostModel(**values, speeds=tuple(float(s) for s in speeds))
