"""Checks the flakes where nothing can be fetched or built: their syntax, what they provide, and their lock.

`devtools/stubs/nix` stands in for kernel-builder and for nixpkgs. Nix itself evaluates, in a store that is thrown away,
so it needs no daemon, no /nix and no network.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.families import Family, load
from devtools.project import ROOT

SYSTEMS = ("x86_64-linux", "aarch64-linux", "aarch64-darwin")

_STUBS = ROOT / "devtools" / "stubs" / "nix"
_LOCKED = ("", "common/")
"""The directories whose locks are edited; those of the families are copies."""

# What the stubs' derivations are compared by.
_DESCRIBE = """
  value:
  if value ? entries then builtins.attrNames value.entries
  else if value ? packages then value.packages
  else value.name
"""


# Of an error message: lines of source, and advice.
_NOT_SAID = re.compile(r"\s*(\d*\||\(use )")
_SAID = 2
_STORE_PATH = re.compile(r"\S*/[0-9a-z]{32}-source/+")


class NixError(Exception):
    """What Nix says is wrong."""


@dataclass(frozen=True)
class Nix:
    """Nix with its store, settings and caches in a directory of its own."""

    directory: Path

    def run(self, *command: str) -> str:
        """Returns what a command prints.

        Raises:
            NixError: It failed.
        """
        settings = {
            "HOME": str(self.directory),
            "NIX_REMOTE": str(self.directory / "store"),
            "NIX_CONF_DIR": str(self.directory),
            "NIX_USER_CONF_FILES": "",
            "NIX_CONFIG": "experimental-features = nix-command flakes\nbuild-users-group =\ndownload-attempts = 1\n",
            # --offline still lets Nix try to fetch an input that the lock does not hold.
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        }
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("NIX_", "XDG_"))}
        done = subprocess.run(command, env=inherited | settings, capture_output=True, text=True)
        if done.returncode != 0:
            raise NixError(_error(done.stderr))
        return done.stdout

    def flake(self, *arguments: str) -> Any:
        """Returns the JSON that a sub-command of `nix` prints."""
        return json.loads(self.run("nix", *arguments, "--json", "--offline"))

    def lock(self, directory: Path) -> Any:
        """Returns the lock that Nix would use for a flake; a NixError if that is not the one that is there."""
        return self.flake("flake", "metadata", "--no-update-lock-file", f"path:{directory}")["locks"]

    def outputs(self, directory: Path, output: str, *, depth: int = 2) -> Any:
        """Returns what one of a flake's outputs holds, with the stubs as its inputs.

        Args:
            directory: The flake's.
            output: Such as packages.
            depth: How many levels of names there are above a derivation.
        """
        describe = _DESCRIBE
        for _ in range(depth):
            describe = f"builtins.mapAttrs (_: {describe})"
        inputs = {"kernel-builder": "kernel-builder", "kernel-builder/nixpkgs": "nixpkgs"}
        overrides = [
            part for name, stub in inputs.items() for part in ("--override-input", name, f"path:{_STUBS / stub}")
        ]
        options = ["--no-write-lock-file", "--no-eval-cache", "--apply", describe]
        return self.flake("eval", *options, *overrides, f"path:{directory}#{output}")


def available() -> bool:
    """Returns whether Nix is installed."""
    return shutil.which("nix") is not None and shutil.which("nix-instantiate") is not None


def findings(root: Path = ROOT) -> list[str]:
    """Returns what is wrong with the flakes of a checkout, as messages; Nix must be there.

    Args:
        root: The checkout.
    """
    families = [load(path.parent) for path in sorted(root.glob("*/build.toml"))]
    places = [*_LOCKED, *(family.title for family in families)]
    wanted = [Path(place) / name for place in places for name in ("flake.nix", "flake.lock")]
    if missing := [f"{path} does not exist" for path in wanted if not (root / path).is_file()]:
        return missing
    with tempfile.TemporaryDirectory() as scratch:
        nix = Nix(Path(scratch).resolve())
        sources = [root / path for path in wanted if path.suffix == ".nix"]
        if errors := [message for source in sources for message in _syntax(nix, source)]:
            return errors
        staged = stage(root, places, nix.directory / "flakes")
        found = [message for place in _LOCKED for message in _lock(nix, staged / place, f"{place}flake.lock")]
        if (root / "flake.lock").read_bytes() != (root / "common/flake.lock").read_bytes():
            found.append("flake.lock differs from common/flake.lock")
        found += _outputs(nix, staged, "flake.nix", _expected(families))
        for family in families:
            directory = staged / family.title
            found += _outputs(nix, directory, f"{family.title}/flake.nix", _expected_alone(family))
        return found


def stage(root: Path, places: Iterable[str], target: Path) -> Path:
    """Copies what an evaluation reads, since Nix copies the whole directory of a flake into its store.

    Args:
        root: The checkout.
        places: The directories of flakes in it.
        target: Where the copies go.
    """
    for place in places:
        (target / place).mkdir(parents=True, exist_ok=True)
        for name in ("build.toml", "flake.nix", "flake.lock"):
            if (root / place / name).is_file():
                shutil.copy(root / place / name, target / place / name)
    return target


def _syntax(nix: Nix, source: Path) -> Iterator[str]:
    try:
        nix.run("nix-instantiate", "--parse", str(source))
    except NixError as error:
        yield str(error)


def _lock(nix: Nix, directory: Path, name: str) -> Iterator[str]:
    """Yields a message if Nix would change a lock, or if it has another revision than flake.nix asks for."""
    try:
        used = nix.lock(directory)
    except NixError as error:
        yield f"{name} is not a lock of the flake.nix beside it: {error}"
        return
    if json.dumps(used, indent=2, sort_keys=True) + "\n" != (directory / "flake.lock").read_text():
        yield f"{name} is not as Nix would write it; run nix flake lock"
    for title, node in used["nodes"].items():
        asked, locked = (node.get(part, {}).get("rev") for part in ("original", "locked"))
        if asked is not None and asked != locked:
            yield f"{name} has revision {locked} of {title}, where {asked} is asked for"


def _expected(families: Iterable[Family]) -> dict[str, Any]:
    """Returns what the flake at the top must provide, as `_DESCRIBE` describes it."""
    names = {family.title: family.name for family in families}

    def of_families(part: str, system: str) -> dict[str, Any]:
        return {title: f"{name}-{part}-{system}" for title, name in names.items()}

    every = sorted(names)
    return {
        "packages": {system: of_families("bundle", system) | {"all": every, "default": every} for system in SYSTEMS},
        "devShells": {
            system: of_families("shell", system) | {"default": [f"kernel-builder-{system}"]} for system in SYSTEMS
        },
        "checks": {system: of_families("ci", system) for system in SYSTEMS},
        "formatter": {system: f"nixfmt-tree-{system}" for system in SYSTEMS},
    }


def _expected_alone(family: Family) -> dict[str, Any]:
    """Returns what a family's own flake must provide: what kernel-builder makes of its directory."""
    parts = {"bundle": "bundle", "ci": "ci", "default": "bundle"}
    return {
        "packages": {
            system: {title: f"{family.name}-{part}-{system}" for title, part in parts.items()} for system in SYSTEMS
        }
    }


def _outputs(nix: Nix, directory: Path, name: str, expected: Mapping[str, Any]) -> Iterator[str]:
    for output, wanted in expected.items():
        try:
            provided = nix.outputs(directory, output, depth=1 if output == "formatter" else 2)
        except NixError as error:
            yield f"{name}: {output}: {error}"
        else:
            yield from (f"{name}: {message}" for message in _differences(output, wanted, provided))


def _differences(path: str, wanted: Any, provided: Any) -> Iterator[str]:
    """Yields where two nested dictionaries differ."""
    if not isinstance(wanted, dict) or not isinstance(provided, dict):
        if wanted != provided:
            yield f"{path} is {provided}, not {wanted}"
        return
    for name in sorted(wanted.keys() | provided.keys()):
        if name not in provided:
            yield f"{path} lacks {name}"
        elif name not in wanted:
            yield f"{path} has {name}, which there should not be"
        else:
            yield from _differences(f"{path}.{name}", wanted[name], provided[name])


def _error(text: str) -> str:
    """Returns Nix's message on one line: what is wrong and where, without the source and its path in the store."""
    lines = text[text.rfind("error:") :].removeprefix("error:").splitlines()
    said = [line.strip() for line in lines if line.strip() and not _NOT_SAID.match(line)]
    return _STORE_PATH.sub("", " ".join(said[:_SAID])) or "no message"
