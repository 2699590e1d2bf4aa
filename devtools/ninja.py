"""Writes ninja's build files. Standard library only."""

from collections.abc import Iterable, Mapping
from pathlib import Path


def _escaped(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class NinjaFile:
    """The text of one build file, put together statement by statement."""

    def __init__(self) -> None:
        """Starts an empty file."""
        self._lines: list[str] = ["ninja_required_version = 1.10"]

    def rule(self, name: str, command: str, **variables: str) -> None:
        """Adds a rule; `variables` are its other settings, such as `description`."""
        self._lines += ["", f"rule {name}", f"  command = {command}"]
        self._lines += [f"  {key} = {value}" for key, value in variables.items()]

    def build(
        self,
        output: Path,
        rule: str,
        inputs: Iterable[Path],
        *,
        implicit: Iterable[Path] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Adds one edge; a change of an implicit input runs it too, without being on its command line."""
        line = f"build {_escaped(output)}: {rule} {' '.join(map(_escaped, inputs))}"
        if implicit := list(implicit):
            line += f" | {' '.join(map(_escaped, implicit))}"
        self._lines += ["", line]
        self._lines += [f"  {key} = {value}" for key, value in (variables or {}).items()]

    def save(self, path: Path) -> None:
        """Writes the file, leaving it alone if it would not change."""
        text = "\n".join(self._lines) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
