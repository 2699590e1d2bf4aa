"""The public functions and classes: each is described, and attention has a definition.

What they take is kept in `signatures/`, which `./dev release` and the tests of loading compare with a build.
"""

import inspect

import pytest

pytestmark = [pytest.mark.isa_independent, pytest.mark.kernels_ci]


def signature(function) -> dict:
    """The parameters without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.replace(annotation=parameter.empty) for parameter in parameters}


def test_everything_is_described(kernel):
    public = {name: getattr(kernel, name) for name in kernel.__all__}
    described = [name for name, each in public.items() if inspect.isfunction(each) or inspect.isclass(each)]
    assert described
    assert [name for name in described if not inspect.getdoc(public[name])] == []
    for name in described:
        if inspect.isfunction(public[name]):
            text = inspect.getdoc(public[name])
            assert all(f"{section}:" in text for section in ("Args", "Returns", "Raises")), name


def test_the_definition_takes_the_same_and_a_dtype(kernel):
    """It has no strategies, and always returns the log-sum-exp."""
    taken = signature(kernel.attention)
    of_reference = signature(kernel.reference.attention)
    assert of_reference.pop("compute_dtype").kind is inspect.Parameter.KEYWORD_ONLY
    for name in ("strategy", "return_lse"):
        taken.pop(name)
    assert list(of_reference.values()) == list(taken.values())


def test_the_definitions_are_described(kernel):
    for name in kernel.reference.__all__:
        assert inspect.getdoc(getattr(kernel.reference, name)), name


FLASH = {
    "flash_attn_func": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False, s_aux=None",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False, block_table=None, "
    "s_aux=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0",
}


@pytest.mark.parametrize("name", FLASH)
def test_the_functions_that_transformers_calls(kernel, name):
    """It looks at the names of their parameters, and leaves out what is not there without a word."""
    assert ", ".join(map(str, signature(getattr(kernel, name)).values())) == FLASH[name]
