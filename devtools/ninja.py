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
        self._edges: dict[Path, list[str]] = {}

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
        also: Iterable[Path] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Adds one edge, unless it is there already, word for word.

        Args:
            output: The file that the edge makes.
            rule: The name of the rule.
            inputs: What `$in` stands for.
            implicit: Files whose change runs the edge too, without being on its command line.
            also: Files that the command writes beside the output.
            variables: Settings of the rule's own variables.
        """
        outputs = _escaped(output)
        if also := list(also):
            outputs += f" | {' '.join(map(_escaped, also))}"
        line = f"build {outputs}: {rule} {' '.join(map(_escaped, inputs))}"
        if implicit := list(implicit):
            line += f" | {' '.join(map(_escaped, implicit))}"
        edge = ["", line, *(f"  {key} = {value}" for key, value in (variables or {}).items())]
        if self._edges.get(output) != edge:
            self._lines += edge
            self._edges[output] = edge

    def save(self, path: Path) -> None:
        """Writes the file, leaving it alone if it would not change."""
        text = "\n".join(self._lines) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
