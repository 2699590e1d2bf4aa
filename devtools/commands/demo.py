"""`./dev demo`."""

import argparse
import os
import subprocess
import sys

from devtools import local_kernels
from devtools.commands.build import build
from devtools.errors import Failure
from devtools.families import select
from devtools.project import ROOT

HELP = "run a real model with the kernels"
DESCRIPTION = """\
Builds the kernels, then runs demos/<name>.py with get_kernel finding the local builds and without any network.
What follows a -- goes to the demo.
"""
NEEDS_ENVIRONMENT = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", nargs="?", default="smollm2", help="which demo (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Builds all families and runs the demo."""
    script = ROOT / "demos" / f"{arguments.name}.py"
    if not script.is_file():
        names = ", ".join(sorted(path.stem for path in script.parent.glob("[!_]*.py"))) or "none yet"
        raise Failure(f"there is no demo {arguments.name}; the demos are: {names}")
    families = select([])
    build(families)
    environment = os.environ | local_kernels.setting(families) | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, str(script), *arguments.rest], env=environment).returncode
