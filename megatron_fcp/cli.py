"""The command ``megatron-fcp``: finds the sub-command's module, and turns errors into one line and exit status 2."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_fcp import __version__
from megatron_fcp.commands import COMMANDS

USAGE_ERROR = 2
INTERRUPTED = 130  # as shells have it
EXTRAS = {"rich": "tools", "yaml": "tools", "matplotlib": "tools", "torch": "megatron"}  # by what brings them


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit status; bad arguments exit with status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = OneLineParser(
        prog="megatron-fcp",
        description="Plans of flexible context parallelism, without a GPU or a training job.",
        epilog="\n".join(["commands:", *(f"  {name:<10} {what}" for name, what in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"megatron-fcp {__version__}")
    top.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below; each has its own --help")
    name = top.parse_args(arguments[:1]).command
    parser = OneLineParser(prog=f"megatron-fcp {name}", description=COMMANDS[name], allow_abbrev=False)
    try:
        module = importlib.import_module(f"megatron_fcp.commands.{name}")
        module.add_arguments(parser)
        parsed = parser.parse_args(arguments[1:])
        status: int = module.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRAS:
            raise
        remedy = f"`pip install 'megatron-fcp[{EXTRAS[package]}]'`"
        print(f"{parser.prog}: error: needs the package {package}, which is not installed; {remedy}", file=sys.stderr)
        return USAGE_ERROR
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    return status


if __name__ == "__main__":
    sys.exit(main())
