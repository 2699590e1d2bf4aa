"""Where things are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""

CACHE = ROOT / ".cache"
"""Everything that can be made again: objects, locks, tool caches. Not tracked."""

VENV = ROOT / ".venv"
"""The virtual environment that `./dev` makes and runs in. Not tracked."""


def relative(path: Path) -> str:
    """Returns the path as messages show it: from the repository where it lies inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
