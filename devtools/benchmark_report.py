"""Shows benchmark results: a table on the terminal, and JSON, Markdown and a plot to keep."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table

from devtools.benchmarking import OURS, Result

COLUMNS = ("op", "shape", "dtype", "direction", "threads", "time", "spread", "rate", "of ceiling", "faster than")
HEAD = 5
"""How many columns say what was measured; the others are empty for a wrong kernel."""

Record = Mapping[str, Any]
"""A result as the JSON files hold it."""

_PACKAGES = ("torch", "kernels", "transformers")


def machine(device: str) -> dict[str, str]:
    """Returns what the numbers depend on."""
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **(_gpu() if device == "cuda" else {}),
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        **{package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
    }


def _gpu() -> dict[str, str]:
    properties = torch.cuda.get_device_properties()
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "cuda": str(torch.version.cuda),
    }


def _version(package: str) -> str:
    # What PyTorch says of itself names its build, too.
    if package == "torch":
        return str(torch.__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def record(result: Result) -> dict[str, Any]:
    """Returns a result as the JSON files hold it."""
    case = result.case
    told: dict[str, Any] = {
        "op": case.op,
        "shape": case.shape,
        "dtype": str(case.dtype).removeprefix("torch."),
        "direction": case.direction,
        "device": case.device,
        "threads": case.threads,
        "bytes": case.bytes,
        "flops": case.flops,
        "correct": result.correct,
    }
    if result.failure:
        told["failure"] = result.failure
    if result.correct:
        told |= {
            "median_seconds": {name: statistics.median(times) for name, times in result.seconds.items()},
            "spread": result.spread,
            "rate": result.rate,
            "share_of_ceiling": result.share,
            "times_faster_than": result.ratios,
        }
    if result.left_out:
        told["left_out"] = dict(result.left_out)
    return told


def cells(record: Record) -> list[str]:
    """Returns a record as the texts of one table row."""
    threads = str(record["threads"]) if record["device"] == "cpu" else ""
    head = [record["op"], record["shape"], record["dtype"], record["direction"], threads]
    if not record["correct"]:
        return [*head, "WRONG", *[""] * (len(COLUMNS) - HEAD - 2), record.get("failure", "")]
    ratios = [f"{name} {ratio:.2f}x" for name, ratio in record["times_faster_than"].items()]
    ratios += [f"{name}: could not run" for name in record.get("left_out", ())]
    return [
        *head,
        _time(record["median_seconds"][OURS]),
        f"{record['spread']:.0%}",
        record["rate"],
        f"{record['share_of_ceiling']:.0%}",
        ", ".join(ratios),
    ]


def empty_table(title: str) -> Table:
    """Returns a table for the terminal, which folds what is too long rather than cutting it."""
    return Table(*(Column(name, overflow="fold") for name in COLUMNS), title=title)


def table(title: str, records: Sequence[Record]) -> Table:
    """Returns the table for the terminal."""
    shown = empty_table(title)
    for each in records:
        shown.add_row(*cells(each), style="" if each["correct"] else "red")
    return shown


def reasons(records: Iterable[Record]) -> list[str]:
    """Returns why peers could not run, each reason once."""
    found = (f"{name}: {reason}" for each in records for name, reason in each.get("left_out", {}).items())
    return list(dict.fromkeys(found))


def stem(facts: Mapping[str, str]) -> str:
    """Returns the name of a machine's files: that of its GPU where one was measured, else of its CPU."""
    return re.sub(r"[^a-z0-9]+", "-", facts.get("gpu", facts["cpu"]).lower()).strip("-")


def save(directory: Path, facts: Mapping[str, str], records: Sequence[Record]) -> list[Path]:
    """Writes the results in files named after the machine, replacing an earlier run's.

    Args:
        directory: The family's directory for results.
        facts: What `machine` returned.
        records: What was measured.

    Returns:
        The files written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data, text, plot = (directory / f"{stem(facts)}{suffix}" for suffix in (".json", ".md", ".png"))
    data.write_text(json.dumps({"machine": facts, "results": records}, indent=1) + "\n")
    text.write_text(markdown("./dev bench --save", facts, [cells(each) for each in records]))
    draw(plot, facts, records)
    return [data, text, plot]


def markdown(command: str, facts: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown document of one table."""
    lines = [
        f"Measured by `{command}`: " + ", ".join(f"{key} {value}" for key, value in facts.items()) + ".",
        "",
        "Median time of a call; the spread is the distance between the quartiles. The ceiling is this machine's copy "
        "bandwidth or matrix product, whichever bounds the case, measured in the same process.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def draw(path: Path, facts: Mapping[str, str], records: Sequence[Record]) -> None:
    """Draws how many times faster each operator is than PyTorch, a panel for each operator and direction.

    Where PyTorch is no peer of an operator, it is compared with its fastest one. What a shape says after a colon is
    left to the table.

    Args:
        path: The picture to write.
        facts: What `machine` returned.
        records: The results as the JSON file holds them; those of the most threads are drawn.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    threads = max((record["threads"] for record in records), default=1)
    place = facts["gpu"] if "gpu" in facts else f"{threads} threads, {facts['cpu']}"
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for record in records:
        ratios = record.get("times_faster_than")
        if ratios and record["threads"] == threads:
            peer = "" if "PyTorch" in ratios else ", than the fastest peer"
            bars = panels.setdefault(f"{record['op']}, {record['direction']}{peer}", {})
            shape = record["shape"].partition(":")[0]
            bars.setdefault(record["dtype"], {})[shape] = ratios.get("PyTorch", min(ratios.values()))
    columns = 2
    rows = max(1, math.ceil(len(panels) / columns))
    figure, grid = pyplot.subplots(rows, columns, figsize=(13, 2.6 * rows), squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, bars) in zip(grid.flat, panels.items(), strict=False):
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
        tilt = {"rotation": 30, "ha": "right"} if sum(map(len, shapes)) > 80 else {}
        axes.set_xticks(range(len(shapes)), shapes, fontsize=7, **tilt)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7)
    figure.suptitle(f"Times faster than PyTorch {facts['torch']}, {place}, {facts['date']}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
