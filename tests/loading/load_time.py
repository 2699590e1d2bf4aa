"""Measures what loading a family costs: `.venv/bin/python tests/loading/load_time.py normalization`.

The Hub is on this machine, so the download takes no time on a network. Every load is in a process of its own, and timed
from the call of `get_kernel` to its return, after `import torch, kernels`.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Run as a program, it finds nothing by itself but its neighbours.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from local_hub import Hub, Server, serving

from devtools.families import Family, select

REPEATS = 7

CODE = """
import sys, time
import torch, kernels
start = time.perf_counter()
kernels.get_kernel(sys.argv[1], version=int(sys.argv[2]), trust_remote_code=True)
print(time.perf_counter() - start)
"""


def seconds(family: Family, server: Server, cache: str, **variables: str) -> float:
    """Returns how long one load takes."""
    online = {"HF_ENDPOINT": server.endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": cache}
    command = [sys.executable, "-c", CODE, family.repository, str(family.version)]
    done = subprocess.run(
        command, env={**os.environ, **online, **variables}, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout)


def measure(family: Family) -> None:
    """Prints sizes and times of a family's variants, of which the one that fits this system is loaded."""
    hub = Hub(family.repository)
    for variant in sorted((family.directory / "build").glob("torch*")):
        hub.add_variant(f"v{family.version}", variant)
        sizes = [path.stat().st_size for path in variant.iterdir() if path.is_file()]
        print(f"{variant.name}: {len(sizes)} files, {sum(sizes) / 1e3:,.0f} kB")
    times: dict[str, list[float]] = {"first load": [], "later load": [], "local build": []}
    with serving(hub) as server:
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as cache:
                times["first load"].append(seconds(family, server, cache))
                times["later load"].append(seconds(family, server, cache))
                local = f"{family.repository}={family.directory}"
                times["local build"].append(seconds(family, server, cache, LOCAL_KERNELS=local))
    for kind, values in times.items():
        print(f"{kind}: {statistics.median(values) * 1e3:.0f} ms ({min(values) * 1e3:.0f} to {max(values) * 1e3:.0f})")


if __name__ == "__main__":
    for family in select(sys.argv[1:]):
        measure(family)
