"""`./dev lint`."""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from devtools import vendoring
from devtools.errors import Failure
from devtools.families import discover
from devtools.project import ROOT, VENV, relative

HELP = "check format, types, build files and copies"
DESCRIPTION = """\
Runs ruff, mypy and clang-format, checks Metal shaders and their host code with clang-19 where it is installed and the
flakes with Nix where that is, and the GitHub workflows with zizmor, compares the copies of common/, validates each
build.toml as kernel-builder does, and refuses package registry settings in tracked files.
Every check runs, and all findings are shown.
"""
NEEDS_ENVIRONMENT = True

_CXX = (".h", ".cuh", ".cpp", ".cc", ".cu", ".mm", ".metal")
# Where packages come from is the business of each machine's own configuration.
_REGISTRY = re.compile(r"pypi[.]org|pythonhosted[.]org|npmjs[.]org|index[-_]url|find[-_]links", re.IGNORECASE)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--fix", action="store_true", help="let ruff and clang-format rewrite what they can first")


def run(arguments: argparse.Namespace) -> int:
    """Runs all checks and fails if any found something."""
    from devtools.console import console

    files = _files()
    if arguments.fix:
        _tool("ruff", "check", "--fix-only", "--quiet", ".")
        _tool("ruff", "format", "--quiet", ".")
        _clang_format(files, "-i")
    checks: dict[str, Callable[[], bool]] = {
        "ruff check": lambda: _tool("ruff", "check", "--quiet", "."),
        "ruff format": lambda: _tool("ruff", "format", "--check", "--quiet", "."),
        "mypy": _mypy,
        "clang-format": lambda: _clang_format(files, "--dry-run", "-Werror"),
        "Metal shaders": lambda: _report(_metal(files)),
        "Metal host code": lambda: _report(_metal_host()),
        "copies of common/": lambda: _report(
            problem for family in discover() for problem in vendoring.problems(family)
        ),
        "build.toml": _build_files,
        "Nix flakes": lambda: _report(_flakes()),
        "GitHub workflows": lambda: _report(_workflows()),
        "registry settings": lambda: _report(_registry_settings(files)),
    }
    failed = []
    for name, check in checks.items():
        sys.stdout.flush()
        passed = check()
        console().print(f"[green]ok[/]      {name}" if passed else f"[red]FAILED[/]  {name}")
        if not passed:
            failed.append(name)
    if failed:
        raise Failure(f"lint failed: {', '.join(failed)}")
    return 0


def _tool(name: str, *options: str) -> bool:
    return subprocess.run([VENV / "bin" / name, *options], cwd=ROOT).returncode == 0


def _report(findings: Iterable[str]) -> bool:
    lines = list(findings)
    print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    return not lines


def _files() -> list[Path]:
    """Returns the files that are tracked or would be, in the order of their names."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in sorted(filter(None, listed.split("\0"))) if (path := ROOT / name).is_file()]


def _mypy() -> bool:
    packages = [family.package for family in discover() if family.package.is_dir()]
    bench = [path for folder in ("simt", "simt/metal") for path in sorted((ROOT / folder).glob("*.py"))]
    targets = [ROOT / "devtools", *packages, *bench, *sorted((ROOT / "demos").glob("*.py"))]
    return _tool("mypy", "--no-error-summary", *map(str, targets))


def _clang_format(files: list[Path], *options: str) -> bool:
    copies = {copy.target for family in discover() for copy in vendoring.manifest(family)}
    sources = [str(path) for path in files if path.suffix in _CXX and path not in copies]
    return not sources or _tool("clang-format", *options, *sources)


def _metal(files: list[Path]) -> Iterator[str]:
    """Yields what the Metal lint says about the shaders outside tests, whose headers are found from their family."""
    from devtools.console import notice
    from simt.metal import lint

    shaders = [path for path in files if path.suffix == ".metal" and "tests" not in path.parts]
    if lint.compiler() is None:
        notice("clang-19 was not found, so Metal shaders are not checked here")
        return
    for path in shaders:
        yield from lint.lint(path, include=[ROOT / path.relative_to(ROOT).parts[0]])


def _metal_host() -> Iterator[str]:
    from devtools import metal_host
    from devtools.console import notice
    from simt.metal import lint

    if lint.compiler() is None:
        notice("clang-19 was not found, so the host code of Metal kernels is not checked here")
        return
    yield from metal_host.findings(discover())


def _build_files() -> bool:
    from devtools import configuration

    failures = []
    for family in discover():
        try:
            configuration.validate(family)
            configuration.check_sources(family)
        except Failure as failure:
            failures.append(str(failure))
    return _report(failures)


def _flakes() -> Iterator[str]:
    from devtools import nix
    from devtools.console import notice

    if not nix.available():
        notice("Nix was not found, so the flakes are not checked here")
        return
    yield from nix.findings()


def _workflows() -> Iterator[str]:
    from devtools import workflows

    yield from workflows.findings()


def _registry_settings(files: list[Path]) -> Iterator[str]:
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if _REGISTRY.search(line):
                yield f"{relative(path)}:{number}: names a package registry: {line.strip()}"
