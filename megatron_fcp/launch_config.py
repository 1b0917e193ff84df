"""Launch configs: the flags of a training job as YAML, as Megatron-LM's own functional tests write them.

::

    GPUS: 256
    GPUS_PER_NODE: 8
    ENV_VARS:
      CUDA_DEVICE_MAX_CONNECTIONS: 1
    MODEL_ARGS:
      --tensor-model-parallel-size: 8
      --sequence-parallel: true            # a flag without a value
      --context-parallel-backend: fcp

``GPUS`` and ``GPUS_PER_NODE`` are this project's; the other two are those of Megatron-LM's
``tests/functional_tests/test_cases/*/*/model_config.yaml``. What belongs to one run only (data, tokenizer, checkpoints)
is left to the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fcp.config import check_at_least

Value = bool | int | float | str | tuple["bool | int | float | str", ...]

_KEYS = ("GPUS", "GPUS_PER_NODE", "ENV_VARS", "MODEL_ARGS")
_FLAG = re.compile(r"--[a-z0-9][a-z0-9_-]*", re.IGNORECASE)
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*", re.IGNORECASE)


@dataclass(frozen=True)
class LaunchConfig:
    """A job as its launch config describes it.

    Attributes
    ----------
    path : str
        Where it was read.
    gpus, gpus_per_node : int
    environment : mapping of str to str
        Environment variables of every process.
    flags : mapping of str to value
        ``--flag`` to its value, True for one without a value, a tuple for several values.
    """

    path: str
    gpus: int
    gpus_per_node: int
    environment: Mapping[str, str]
    flags: Mapping[str, Value]

    @property
    def nodes(self) -> int:
        """Machines that hold the GPUS."""
        return -(-self.gpus // self.gpus_per_node)

    def argv(self) -> list[str]:
        """Megatron's command line."""
        out: list[str] = []
        for flag, value in self.flags.items():
            out.append(flag)
            if value is not True:
                out.extend(str(item) for item in (value if isinstance(value, tuple) else (value,)))
        return out

    def with_flags(self, argv: Sequence[str]) -> LaunchConfig:
        """The same with further flags, which replace those of the same name.

        Raises
        ------
        ValueError
            If `argv` does not begin with a flag.
        """
        more: dict[str, list[str]] = {}
        name = ""
        for token in argv:
            if _FLAG.match(token):
                name, separator, value = token.partition("=")
                more[name] = [value] if separator else []
            elif not name:
                raise ValueError(f"expected a Megatron flag after --, got {token!r}")
            else:
                more[name].append(token)
        new = {flag: _of_text(values) for flag, values in more.items()}
        return replace(self, flags={**self.flags, **new})


def _of_text(values: list[str]) -> Value:
    return True if not values else values[0] if len(values) == 1 else tuple(values)


def read_launch_config(path: str | Path) -> LaunchConfig:
    """Read a launch config.

    Raises
    ------
    ValueError
        If the file is missing or not such a file, or an entry is unknown, missing, twice there or of the wrong kind;
        names file and entry.
    """
    path = Path(path)
    where = f"--config {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ValueError(f"{where}: cannot be read: {reason}; configs/ has examples") from error
    values = _load(text, where)
    if unknown := [key for key in values if key not in _KEYS]:
        raise ValueError(f"{where} has the unknown entry {unknown[0]!r}; known are {', '.join(_KEYS)}")
    if missing := [key for key in ("GPUS", "MODEL_ARGS") if key not in values]:
        raise ValueError(f"{where} lacks {' and '.join(missing)}")
    gpus, per_node = values["GPUS"], values.get("GPUS_PER_NODE", 8)
    for name, value in (("GPUS", gpus), ("GPUS_PER_NODE", per_node)):
        check_at_least(f"{where}: {name}", value, 1)
    per_node = min(gpus, per_node)
    if gpus % per_node:
        raise ValueError(f"{where}: GPUS {gpus} is not a multiple of GPUS_PER_NODE {per_node}; use whole nodes")
    return LaunchConfig(
        str(path), gpus, per_node, _environment(values.get("ENV_VARS"), where), _flags(values["MODEL_ARGS"], where)
    )


def _load(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; an entry that is there twice is an error, where YAML would keep the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise ValueError(f"{where} has {twice!r} twice; remove one")
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        values = yaml.load(text, Loader)
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(f"{where}: not YAML ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected the entries {', '.join(_KEYS)}")
    return values


def _environment(values: Any, where: str) -> dict[str, str]:
    if not isinstance(values, dict | None):
        raise ValueError(f"{where}: ENV_VARS must map names to values")
    out: dict[str, str] = {}
    for name, value in (values or {}).items():
        if not _NAME.fullmatch(str(name)) or isinstance(value, dict | list | None):
            raise ValueError(f"{where}: ENV_VARS must map names to values, got {name!r}: {value!r}")
        out[str(name)] = str(value)
    return out


def _flags(values: Any, where: str) -> dict[str, Value]:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: MODEL_ARGS must map flags to values")
    out: dict[str, Value] = {}
    for flag, value in values.items():
        if not isinstance(flag, str) or not _FLAG.fullmatch(flag):
            raise ValueError(f"{where}: {flag!r} is not a flag; write it as --name-of-the-flag")
        if value is None or value is False:
            raise ValueError(f"{where}: {flag} has no value; write true for a flag that takes none, or remove it")
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, int | float | str) for item in items):
            raise ValueError(f"{where}: {flag} must be true, a number, a text or a list of these, got {value!r}")
        out[flag] = tuple(items) if isinstance(value, list) else value
    return out
