"""The public signatures of a family, which the releases of one version have in common.

`<family>/signatures/v<version>.json` keeps them: each public name with its parameters. A change that breaks a caller
changes that file, so it shows in a review, and a release whose file differs from that of the release before is refused.
"""

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType

from devtools.errors import Failure
from devtools.families import Family
from devtools.project import ROOT

Signatures = dict[str, str]
"""What each public name is, by dotted names such as `layers.RMSNorm.forward`."""


def file_of(family: Family, version: int | None = None) -> Path:
    """Returns where the signatures of a version lie, by default of the version in build.toml."""
    return family.directory / "signatures" / f"v{family.version if version is None else version}.json"


def read(text: str) -> Signatures:
    """Returns what `written` was given.

    Raises:
        ValueError: It was given nothing, or what it wrote was changed to something else.
    """
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return {str(name): str(value) for name, value in content.items()}


def written(signatures: Signatures) -> str:
    """Returns the content of a file of signatures."""
    return json.dumps(signatures, indent=2, sort_keys=True) + "\n"


def of_build(variant: Path) -> Signatures:
    """Returns the signatures of a built variant, which is loaded in a process of its own.

    Raises:
        Failure: It cannot be loaded.
    """
    command = [sys.executable, "-m", "devtools.signatures", str(variant)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"{variant} cannot be loaded: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return read(done.stdout)


def differences(expected: Signatures, found: Signatures) -> Iterator[str]:
    """Yields a message for each name that is missing, new or not as it was."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is new"
        elif found[name] != expected[name]:
            yield f"{name} was {expected[name]} and is {found[name]}"


def describe(module: ModuleType) -> Signatures:
    """Returns the signatures of a loaded kernel: what `__all__` names, and the public members of that."""
    return dict(_described({name: getattr(module, name) for name in module.__all__}))


def _described(members: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in members.items():
        if name.startswith("_"):
            continue
        if isinstance(value, ModuleType):
            yield prefix + name, "module"
            own = {key: member for key, member in vars(value).items() if _is_defined_in(value, member)}
            yield from _described(own, f"{prefix}{name}.")
        elif isinstance(value, type):
            yield prefix + name, f"class({', '.join(base.__name__ for base in value.__bases__)})"
            if constructor := _constructor(value):
                yield f"{prefix}{name}.__init__", _parameters(constructor)
            yield from _described(vars(value), f"{prefix}{name}.")
        elif isinstance(value, FunctionType):
            yield prefix + name, _parameters(value)
        elif inspect.isdatadescriptor(value):
            yield prefix + name, "attribute"
        else:
            yield prefix + name, repr(value)


def _constructor(cls: type) -> FunctionType | None:
    """Returns what a class was given to make its objects with; the members of an enumeration are made already."""
    if issubclass(cls, Enum):
        return None
    found = (vars(cls).get(name) for name in ("__init__", "__new__"))
    return next((function for function in found if isinstance(function, FunctionType)), None)


def _is_defined_in(module: ModuleType, member: object) -> bool:
    return getattr(member, "__module__", None) == module.__name__


def _parameters(function: FunctionType) -> str:
    """Returns the parameters without annotations, which may become wider."""
    found = inspect.signature(function)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


if __name__ == "__main__":
    import kernels

    print(written(describe(kernels.get_local_kernel(Path(sys.argv[1])))), end="")
