"""The command line of `./dev`."""

import argparse
import sys

from devtools import environment
from devtools.commands import bench, build, demo, gpu, lint, perf_static, release, test, vendor
from devtools.errors import Failure

COMMANDS = {
    "build": build,
    "test": test,
    "demo": demo,
    "bench": bench,
    "gpu": gpu,
    "perf-static": perf_static,
    "lint": lint,
    "vendor": vendor,
    "release": release,
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="./dev",
        description="Builds, tests, measures and checks the ruDNN kernels. The first start makes the virtual "
        "environment .venv with pinned packages, which takes a few minutes; later starts are instant.",
        epilog="./dev COMMAND --help tells more about a command.",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(command)
        command.set_defaults(command=module)
    return top


def main(argv: list[str]) -> int:
    """Runs one command.

    Args:
        argv: The arguments after `./dev`. What follows a `--` is handed on, as `./dev test` does to pytest.

    Returns:
        The exit status.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = parser().parse_args(argv[:end])
    arguments.rest = argv[end + 1 :]
    try:
        if arguments.command.NEEDS_ENVIRONMENT:
            environment.ensure(argv, cuda=needs_cuda(arguments))
        return int(arguments.command.run(arguments))
    except Failure as failure:
        print(f"dev: error: {failure}", file=sys.stderr)
        return 1
    except PermissionError as error:
        print(f"dev: error: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dev: interrupted", file=sys.stderr)
        return 130


def needs_cuda(arguments: argparse.Namespace) -> bool:
    """Returns whether a command needs a CUDA compiler."""
    asked = getattr(arguments.command, "needs_cuda", None)
    return asked is not None and bool(asked(arguments))
