"""Shows benchmark results: a table on the terminal, and JSON, Markdown and a plot to keep."""

import datetime
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    records = [_record(result) for result in results]
    data.write_text(json.dumps({"machine": facts, "results": records}, indent=1) + "\n")
    text.write_text(_markdown(facts, results))
    draw(plot, facts, records)
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


def draw(path: Path, facts: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> None:
    """Draws how many times faster each operator is than PyTorch, a panel for each operator and direction.

    Args:
        path: The picture to write.
        facts: What `machine` returned.
        records: The results as the JSON file holds them; those of the most threads are drawn.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    threads = max((record["threads"] for record in records), default=1)
    panels: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for record in records:
        ratio = record.get("times_faster_than", {}).get("PyTorch")
        if ratio is not None and record["threads"] == threads:
            bars = panels.setdefault((record["op"], record["direction"]), {})
            bars.setdefault(record["dtype"], {})[record["shape"]] = ratio
    columns = 2
    rows = max(1, math.ceil(len(panels) / columns))
    figure, grid = pyplot.subplots(rows, columns, figsize=(13, 2.6 * rows), squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, ((op, direction), bars) in zip(grid.flat, panels.items(), strict=False):
        shapes = list(dict.fromkeys(shape for ratios in bars.values() for shape in ratios))
        width = 0.8 / len(bars)
        for index, (dtype, ratios) in enumerate(bars.items()):
            positions = [shapes.index(shape) + (index - (len(bars) - 1) / 2) * width for shape in ratios]
            axes.bar(positions, [ratio - 1 for ratio in ratios.values()], width, bottom=1, label=dtype)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:.2g}")
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(shapes)), shapes, fontsize=7, rotation=30 if len(shapes) > 6 else 0)
        axes.set_title(f"{op}, {direction}", fontsize=9)
        axes.legend(fontsize=7)
    figure.suptitle(
        f"Times faster than PyTorch {facts['torch']}, {threads} threads, {facts['cpu']}, {facts['date']}", fontsize=10
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _dtype(result: Result) -> str:
    return str(result.case.dtype).removeprefix("torch.")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
