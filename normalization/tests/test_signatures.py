"""The public names and their parameters, which do not change within version 1."""

import inspect

import pytest

pytestmark = [pytest.mark.isa_independent, pytest.mark.kernels_ci]

PUBLIC_NAMES = {
    "NormalizationError",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "layers",
    "reference",
    "rms_norm",
    "rms_norm_gated",
    "softmax_last_axis",
}

FUNCTIONS = {
    "fused_add_layer_norm": "(input, residual, gamma, beta=None, epsilon=1e-05)",
    "fused_add_rms_norm": "(input, residual, gamma, epsilon=1e-06)",
    "layer_norm": "(input, gamma, beta=None, epsilon=1e-05)",
    "rms_norm": "(input, gamma, epsilon=1e-06, *, zero_centered=False)",
    "rms_norm_gated": "(input, gate, gamma, epsilon=1e-06, *, activation='silu')",
    "softmax_last_axis": "(input)",
}

LAYERS = {
    "LayerNorm": "(self, input)",
    "RMSNorm": "(self, hidden_states)",
    "RMSNormGated": "(self, hidden_states, gate=None)",
    "RMSNormZeroCentered": "(self, x)",
}


def signature(function) -> inspect.Signature:
    """Without annotations."""
    found = inspect.signature(function)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def test_public_names(kernel):
    assert set(kernel.__all__) == PUBLIC_NAMES
    assert len(kernel.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(kernel, name):
    function = getattr(kernel, name)
    assert str(signature(function)) == FUNCTIONS[name]
    assert inspect.getdoc(function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_references_take_the_same_and_a_dtype(kernel, name):
    parameters = dict(signature(getattr(kernel.reference, name)).parameters)
    assert parameters.pop("compute_dtype").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(parameters.values()) == list(signature(getattr(kernel, name)).parameters.values())


def test_layers(kernel):
    classes = {
        name for name, member in vars(kernel.layers).items() if inspect.isclass(member) and not name.startswith("_")
    }
    assert LAYERS.keys() == {
        name for name in classes if getattr(kernel.layers, name).__module__ == kernel.layers.__name__
    }
    for name, expected in LAYERS.items():
        assert str(signature(getattr(kernel.layers, name).forward)) == expected
