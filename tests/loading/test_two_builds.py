"""Two builds of one kernel in one process, as two versions or a CPU and a GPU build would be."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from fresh_process import ROOT, by_family, check_call, run_python, variant_of
from kernels._rust import Metadata


def build_with_another_id(family: Path, directory: Path) -> Path:
    """A variant whose id differs, made as the build makes it after an edit of a Python file.

    Only the files that know the id are compiled again, by the build's own commands.
    """
    variant = variant_of(family)
    metadata = Metadata.read_from_file(variant / "metadata.json")
    new_id = f"{metadata.id[:-7]}0000000"
    library = ROOT / ".cache" / "objects" / "cpu" / family.name / f"{metadata.name.python_name}.abi3.so"
    ninja = [Path(sys.executable).with_name("ninja"), "-f", ROOT / ".cache" / "build.ninja"]
    listing = subprocess.run([*ninja, "-t", "commands", library], capture_output=True, text=True, check=True).stdout
    *compilations, link = listing.splitlines()
    new_variant = directory / variant.name
    shutil.copytree(variant, new_variant, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    moved = {str(library): str(new_variant / f"{new_id}.abi3.so")}
    for command in compilations:
        if "-DTORCH_EXTENSION_NAME=" in command:
            output = command.rsplit(" -o ", 1)[1]
            moved[output] = str(directory / f"{len(moved)}.o")
            moved[f"{output}.d"] = str(directory / f"{len(moved)}.d")
            command = re.sub(r"(?<=-DTORCH_EXTENSION_NAME=)\S+", new_id, command)
            subprocess.run(with_paths(command, moved), check=True)
    subprocess.run(with_paths(link, moved), check=True)
    for name in ("_ops.py", "metadata.json"):
        path = new_variant / name
        path.write_text(path.read_text().replace(metadata.id, new_id))
    return new_variant


def with_paths(command: str, moved: dict[str, str]) -> list[str]:
    return [moved.get(word, word) for word in shlex.split(command)]


@by_family
def test_l2_two_builds(tmp_path, family):
    """huggingface/kernels#20, #267: both are usable, and their operators live in namespaces of their own."""
    other = build_with_another_id(family, tmp_path)
    code = ""
    for path in (variant_of(family), other):
        code += f"kernel = kernels.get_local_kernel(Path({str(path)!r}))\n{check_call(family)}"
    code += (
        "first, second = kernels.get_loaded_kernels()\n"
        "assert first.metadata.id != second.metadata.id\n"
        "assert first.module._ops.ops.name != second.module._ops.ops.name\n"
        f"for kernel in (first.module, second.module):\n    {check_call(family)}"
    )
    run_python(tmp_path, code)
