"""How commands speak: headings on a terminal and in a log alike."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def console() -> "Console":
    """Returns the console that everything is printed on; without a terminal it prints plain text, wide enough."""
    import rich.console

    plain = rich.console.Console(highlight=False)
    return plain if plain.is_terminal else rich.console.Console(highlight=False, width=140)


def heading(text: str) -> None:
    """Prints a line that begins a part of a long run."""
    console().rule(f"[bold]{text}", align="left")


def notice(text: str) -> None:
    """Prints a line that a reader of a long log should not miss."""
    console().print(f"[yellow]note:[/] {text}", soft_wrap=True)
