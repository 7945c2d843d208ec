"""The `forkkv` command: `forkkv serve [flags]` and `forkkv version`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: forkkv serve [flags]    start the server; `forkkv serve --help` lists the flags
       forkkv version          print the version"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; 2 for an unknown command."""
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case ["serve", *flags]:
            from forkkv.entrypoints.openai.api_server import main as serve

            return serve(flags)
        case ["version" | "--version"]:
            from importlib.metadata import version

            print(version("forkkv"))
            return 0
        case ["--help" | "-h" | "help"]:
            print(USAGE)
            return 0
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
