"""The public functions and classes: each is described, and each operator has a definition.

What they take is kept in `signatures/`, which `./dev release` and the tests of loading compare with a build.
"""

import inspect
from types import FunctionType

import pytest

pytestmark = [pytest.mark.isa_independent, pytest.mark.kernels_ci]

WITHOUT_DEFINITION = {"experts_forward", "experts_plan"}
"""The one is `mixture` in the words of Transformers; the other computes nothing."""


def public(kernel, is_kind) -> dict:
    found = {name: getattr(kernel, name) for name in kernel.__all__}
    return {name: value for name, value in found.items() if is_kind(value)}


def signature(function) -> inspect.Signature:
    """Without annotations."""
    found = inspect.signature(function)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def test_everything_is_described(kernel):
    functions, classes = public(kernel, inspect.isfunction), public(kernel, inspect.isclass)
    assert functions
    assert classes
    described = {**functions, **classes}
    for name, cls in classes.items():
        methods = {key: member for key, member in vars(cls).items() if isinstance(member, FunctionType)}
        described |= {f"{name}.{key}": member for key, member in methods.items() if not key.startswith("_")}
    assert [name for name, each in described.items() if not inspect.getdoc(each)] == []


def test_definitions_take_the_same_and_a_dtype(kernel):
    functions = public(kernel, inspect.isfunction)
    for name in functions.keys() - WITHOUT_DEFINITION:
        parameters = dict(signature(getattr(kernel.reference, name)).parameters)
        assert parameters.pop("compute_dtype").kind is inspect.Parameter.KEYWORD_ONLY
        assert list(parameters.values()) == list(signature(functions[name]).parameters.values())


def test_the_definitions_are_described(kernel):
    for name in kernel.reference.__all__:
        assert inspect.getdoc(getattr(kernel.reference, name)), name
