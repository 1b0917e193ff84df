"""What Megatron and FCP would say to a command line, before there is a job: no GPU, no process group, nothing built.

    echo '{"argv": [...], "world_size": 64, "environment": {}}' | python -m megatron_fcp.integration.preflight

answers with ``{"problems": [{"by": "parser", "text": "..."}]}`` in the last line of its output. Megatron's own
``parse_args`` and ``validate_args`` decide; it stops at its first complaint, FCP lists all of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from megatron_fcp.config import FcpConfig
from megatron_fcp.integration import register
from megatron_fcp.integration.hooks import is_registered
from megatron_fcp.integration.refusals import REFUSALS
from megatron_fcp.integration.settings import settings_from_args

By = Literal["parser", "megatron", "fcp"]
Problem = tuple[By, str]


def check_command_line(
    argv: Sequence[str], world_size: int, environment: Mapping[str, str] | None = None
) -> tuple[Namespace | None, list[Problem]]:
    """Parse and validate a training command line as one of ``world_size`` ranks would.

    Changes ``os.environ`` and ``sys.argv``, as launching does, and registers FCP; call it in a process of its own.
    Which kernel would serve is not asked: that depends on the GPUs that the job will have.

    Returns
    -------
    args : argparse.Namespace or None
        As Megatron leaves them; None if they do not parse.
    problems : list of (str, str)
        Who complains ("parser", "megatron" or "fcp"), and the text.
    """
    from megatron.training import arguments

    if not is_registered():
        register(launcher=True)
    os.environ.update({"WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0", **(environment or {})})
    sys.argv = ["pretrain", *argv]
    said = io.StringIO()
    problems: list[Problem] = []

    def quietly(call: Callable[[], Namespace]) -> Namespace:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return call()

    try:
        args = quietly(arguments.parse_args)
    except (Exception, SystemExit) as error:  # whatever a checker raises is its verdict
        problems.append(("parser", _said(error, said)))
        try:  # what it does not know may hide more
            args = quietly(lambda: arguments.parse_args(ignore_unknown_args=True))
        except (Exception, SystemExit):
            return None, problems
    try:
        validate = inspect.unwrap(arguments.validate_args)  # without what begins a session
        args = quietly(lambda: validate(args))
    except (Exception, SystemExit) as error:
        problems.append(("megatron", _said(error, said)))
    if args.context_parallel_backend == "fcp":
        problems.extend(("fcp", text) for text in _fcp_problems(args))
    return args, problems


def _said(error: BaseException, output: io.StringIO) -> str:
    """An error's text; for one that only ends the process, what was printed last."""
    if not isinstance(error, SystemExit):
        return str(error).strip() or type(error).__name__
    lines = output.getvalue().strip().splitlines() or ["it ended without a word"]
    return lines[-1].partition("error: ")[2] or lines[-1]


def _fcp_problems(args: Namespace) -> Iterator[str]:
    """All of FCP's own, also where Megatron stopped half-way and left some arguments unset."""
    try:
        args.fcp_layout = settings_from_args(args).config.layout
    except ValueError as error:
        yield str(error)
    except (TypeError, AttributeError):
        pass
    args.fcp_layout = args.fcp_layout or FcpConfig().layout
    for refusal in REFUSALS:
        with contextlib.suppress(TypeError, AttributeError):
            value = refusal.value(args)
            if value is not None:
                yield refusal.message(value)


def main() -> None:
    """Check what standard input asks for."""
    request: dict[str, Any] = json.load(sys.stdin)
    from megatron_fcp.testing import cpu_platform

    cpu_platform.install()  # where there is no GPU, so that questions about one are answered
    _, problems = check_command_line(request["argv"], request["world_size"], request["environment"])
    print(json.dumps({"problems": [{"by": by, "text": text} for by, text in problems]}))


if __name__ == "__main__":
    main()
