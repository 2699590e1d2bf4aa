"""Checks the GitHub workflows without network: with zizmor, and for what zizmor does not look at."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from devtools import affected, main
from devtools.project import ROOT, VENV

_FINDINGS = 10
"""The lowest exit status of zizmor that says that files were read and something was found."""

_USES = re.compile(r"\buses:\s*(?P<action>[\w.-]+/[\w./-]+)@(?P<pin>.*)")
_PIN = re.compile(r"[0-9a-f]{40} # v\d+(\.\d+)*")
_COMMAND = re.compile(r"(\./dev|python3? -m devtools\.\w+)\s+([^&|;\n)]*)")
_VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)")
_GIVEN = {"GITHUB_OUTPUT"}
"""Variables that GitHub sets and the workflows use."""
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
_REFERENCE = re.compile(r"\b(matrix|needs|steps)\.([\w-]+)(?:\.outputs\.([\w-]+))?")


def findings(root: Path = ROOT) -> list[str]:
    """Returns what is wrong with the workflows of a checkout, as messages.

    Args:
        root: The checkout.
    """
    readable, found = _audit(root)
    if not readable:
        return found
    texts = {path: path.read_text() for path in sorted((root / ".github").rglob("*.y*ml"))}
    found += _pins(root, texts)
    for path, text in texts.items():
        name, content = str(path.relative_to(root)), yaml.safe_load(text)
        found += [f"{name}: {message}" for message in _content(root, content)]
        for title, job in content.get("jobs", {}).items():
            found += [f"{name}: job {title}: {message}" for message in _job(job, content)]
    return found


def _content(root: Path, content: Any) -> Iterator[str]:
    """Yields what is wrong with a workflow or an action as a whole."""
    for title in _named_families(content):
        yield f"family {title} is named, where devtools.affected is to find the families, so that none is left out"
    group = content.get("concurrency")
    group = group.get("group") if isinstance(group, dict) else group
    if group is not None and "github.ref" not in group:
        yield f"the concurrency group {group} is that of every ref, whose runs would take each other's place"
    for used in _values(content, "uses"):
        if used.startswith("$/") and not (root / used.removeprefix("$/")).exists():
            yield f"uses {used}, which does not exist"
    yield from _commands(content)


def _audit(root: Path) -> tuple[bool, list[str]]:
    """Returns whether zizmor could read all files, and what it says about them."""
    options = ["--offline", "--quiet", "--no-config", "--no-progress", "--strict-collection", "--persona=auditor"]
    command = [str(VENV / "bin" / "zizmor"), *options, "--format=json", ".github"]
    environment = os.environ | {"RUST_BACKTRACE": "0", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    # What it could not understand in a file that it could read, such as an expression, is there as a warning.
    found = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode not in (0, *range(_FINDINGS, _FINDINGS + 10)):
        return False, found or [f"zizmor failed with status {done.returncode}"]
    for finding in json.loads(done.stdout):
        place = next(each for each in finding["locations"] if each["symbolic"]["kind"] == "Primary")
        path = place["symbolic"]["key"]["Local"]["verbatim_path"]
        line = place["concrete"]["location"]["start_point"]["row"] + 1
        found.append(f"{path}:{line}: {finding['desc']} ({finding['ident']})")
    return True, found


def _pins(root: Path, texts: dict[Path, str]) -> Iterator[str]:
    """Yields the actions that are not pinned by commit, lack their version, or are pinned in two ways."""
    pinned: dict[str, str] = {}
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if (match := _USES.search(line)) is None:
                continue
            action, pin = match["action"], match["pin"].strip()
            place = f"{path.relative_to(root)}:{number}"
            if not _PIN.fullmatch(pin):
                yield f"{place}: {action} is to be pinned by its commit, followed by # and the version"
            elif pinned.setdefault(action, pin) != pin:
                yield f"{place}: {action} is pinned as {pinned[action]} elsewhere"


def _named_families(content: Any) -> Iterator[str]:
    """Yields each name that stands under a key `family`, as in a matrix or an environment."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if str(key).lower() == "family":
            yield from (name for name in _listed(value) if "${{" not in name)
    for each in _parts(content):
        yield from _named_families(each)


def _parts(content: Any) -> Iterable[Any]:
    """Returns the values of a dictionary or list; none of anything else."""
    if isinstance(content, dict):
        return content.values()
    return content if isinstance(content, list) else ()


def _listed(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _commands(content: Any) -> Iterator[str]:
    """Yields the commands of this repository that it does not know."""
    parsers = {"./dev": main.parser(), "python3 -m devtools.affected": affected.parser()}
    for script in _values(content, "run"):
        for command, arguments in _COMMAND.findall(script):
            if command not in parsers:
                yield f"{command} is no command"
                continue
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    parsers[command].parse_args(shlex.split(arguments))
            except SystemExit:
                yield f"{command} {arguments.strip()} is no command"


def _values(content: Any, key: str) -> Iterator[str]:
    """Yields each text that stands under a key such as `run`."""
    if isinstance(content, dict) and isinstance(content.get(key), str):
        yield content[key]
    for each in _parts(content):
        yield from _values(each, key)


def _job(job: dict[str, Any], workflow: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with a job: no time limit, too few or many permissions, references to what there is not."""
    if "uses" not in job and "timeout-minutes" not in job:
        yield "has no timeout-minutes"
    if "permissions" not in job:
        yield "has no permissions"
    elif isinstance(job["permissions"], dict):
        yield from (f"may {level} {scope}" for scope, level in job["permissions"].items() if level == "write")
    jobs = workflow["jobs"]
    needs = _listed(job.get("needs", []))
    yield from (f"needs {name}, which is no job" for name in needs if name not in jobs)
    needed = {name: jobs[name] for name in needs if name in jobs}
    defined: dict[str, Iterable[str]] = {
        "matrix": _matrix_keys(job),
        "needs": needed,
        "steps": {step["id"] for step in job.get("steps", []) if "id" in step},
    }
    for context, name, output in sorted(set(_references(job))):
        if name not in defined[context]:
            yield f"{context}.{name} is not defined"
        elif context == "needs" and output and output not in needed[name].get("outputs", {}):
            yield f"{context}.{name} has no output {output}"
    for step in job.get("steps", []):
        environments = (part.get("env", {}) for part in (workflow, job, step))
        variables = {name for environment in environments for name in environment} | _GIVEN
        for name in sorted(set(_VARIABLE.findall(step.get("run", ""))) - variables):
            yield f"the variable {name} is not defined in {step.get('name')}"


def _matrix_keys(job: dict[str, Any]) -> set[str]:
    matrix = job.get("strategy", {}).get("matrix", {})
    return {*matrix, *(key for each in matrix.get("include", []) for key in each)} - {"include", "exclude"}


def _references(content: Any) -> Iterator[tuple[str, str, str]]:
    """Yields what expressions name of a matrix, of other jobs and of other steps."""
    if isinstance(content, str):
        for expression in _EXPRESSION.findall(content):
            yield from _REFERENCE.findall(expression)
    elif isinstance(content, dict) and isinstance(content.get("if"), str):
        # An expression even without braces.
        yield from _REFERENCE.findall(content["if"])
    for each in _parts(content):
        yield from _references(each)
