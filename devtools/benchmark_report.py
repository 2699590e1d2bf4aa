"""Shows benchmark results: a table on the terminal, and JSON, Markdown and a plot to keep."""

import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import kernels
import torch
import transformers
from rich.table import Table

from devtools.benchmarking import Result

COLUMNS = ("op", "shape", "dtype", "direction", "threads", "time", "spread", "rate", "of ceiling", "faster than")


def machine() -> dict[str, str]:
    """Returns what the numbers depend on."""
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "torch": torch.__version__,
        "kernels": kernels.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def cells(result: Result) -> list[str]:
    """Returns a result as the texts of one table row."""
    case = result.case
    head = [case.op, case.shape, _dtype(result), case.direction, str(case.threads)]
    if not result.correct:
        return [*head, "WRONG", *[""] * (len(COLUMNS) - len(head) - 1)]
    ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in result.ratios.items())
    return [*head, _time(result.median), f"{result.spread:.0%}", result.rate, f"{result.share:.0%}", ratios]


def table(title: str, results: Sequence[Result]) -> Table:
    """Returns the table for the terminal."""
    shown = Table(*COLUMNS, title=title)
    for result in results:
        shown.add_row(*cells(result), style="" if result.correct else "red")
    return shown


def save(directory: Path, results: Sequence[Result]) -> list[Path]:
    """Writes the results in files named after the CPU, replacing an earlier run's.

    Args:
        directory: The family's directory for results.
        results: What was measured.

    Returns:
        The files written.
    """
    facts = machine()
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / re.sub(r"[^a-z0-9]+", "-", facts["cpu"].lower()).strip("-")
    data, text, plot = (stem.with_name(stem.name + suffix) for suffix in (".json", ".md", ".png"))
    data.write_text(json.dumps({"machine": facts, "results": [_record(result) for result in results]}, indent=2) + "\n")
    text.write_text(_markdown(facts, results))
    _plot(plot, facts, [result for result in results if result.correct and result.ratios])
    return [data, text, plot]


def _record(result: Result) -> dict[str, object]:
    case = result.case
    record: dict[str, object] = {
        "op": case.op,
        "shape": case.shape,
        "dtype": _dtype(result),
        "direction": case.direction,
        "threads": case.threads,
        "bytes": case.bytes,
        "flops": case.flops,
        "correct": result.correct,
    }
    if result.correct:
        record |= {
            "median_seconds": {name: statistics.median(times) for name, times in result.seconds.items()},
            "spread": result.spread,
            "share_of_ceiling": result.share,
            "times_faster_than": result.ratios,
        }
    return record


def _markdown(facts: dict[str, str], results: Sequence[Result]) -> str:
    lines = [
        "Measured by `./dev bench --save`: " + ", ".join(f"{key} {value}" for key, value in facts.items()) + ".",
        "",
        "Median time of a call; the spread is the distance between the quartiles. The ceiling is this machine's copy "
        "bandwidth or matrix product, whichever bounds the case, measured in the same process.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(cells(result))} |" for result in results),
    ]
    return "\n".join(lines) + "\n"


def _plot(path: Path, facts: dict[str, str], results: Sequence[Result]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    peers = sorted({name for result in results for name in result.ratios})
    height = 0.8 / max(len(peers), 1)
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.35 * len(results)), layout="constrained")
    for index, peer in enumerate(peers):
        rows = [(row, result.ratios[peer]) for row, result in enumerate(results) if peer in result.ratios]
        positions = [row + index * height for row, _ in rows]
        axes.barh(positions, [ratio - 1 for _, ratio in rows], height, left=1, label=f"than {peer}")
    axes.set_yticks(
        [row + height * (len(peers) - 1) / 2 for row in range(len(results))],
        [" ".join(cells(result)[:5]) + " thr." for result in results],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:.2g}")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.set_xlabel("times faster (log scale)")
    axes.set_title(f"{facts['cpu']}, torch {facts['torch']}, {facts['date']}", fontsize=10)
    if peers:
        figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _dtype(result: Result) -> str:
    return str(result.case.dtype).removeprefix("torch.")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
