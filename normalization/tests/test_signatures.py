"""The public functions: each is described, and has a definition that takes the same and a dtype.

What they take is kept in `signatures/`, which `./dev release` and the tests of loading compare with a build.
"""

import inspect
from types import FunctionType

import pytest

pytestmark = [pytest.mark.isa_independent, pytest.mark.kernels_ci]


def public_functions(kernel) -> dict[str, FunctionType]:
    found = {name: getattr(kernel, name) for name in kernel.__all__}
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def signature(function) -> inspect.Signature:
    """Without annotations."""
    found = inspect.signature(function)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def test_functions_are_described(kernel):
    functions = public_functions(kernel)
    assert functions
    assert [name for name, function in functions.items() if not inspect.getdoc(function)] == []


def test_references_take_the_same_and_a_dtype(kernel):
    for name, function in public_functions(kernel).items():
        parameters = dict(signature(getattr(kernel.reference, name)).parameters)
        assert parameters.pop("compute_dtype").kind is inspect.Parameter.KEYWORD_ONLY
        assert list(parameters.values()) == list(signature(function).parameters.values())
