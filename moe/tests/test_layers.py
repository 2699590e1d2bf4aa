"""The layers, put by kernels' kernelize into the classes of models."""

import copy
import importlib.util
import inspect

import kernels
import pytest
import torch
import torch.nn.functional as F
from conftest import REPOSITORY, assert_bits_equal, assert_close_to_exact
from operations import BF16, F16, F32, normal, random_gradient, spread_logits
from torch import nn

pytestmark = pytest.mark.isa_independent

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="Transformers, whose models these are, is not installed"
)
by_dtype = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])

LAYERS = ("SiluAndMul", "GeluAndMul", "GeluTanhAndMul", "SoftmaxTopKRouter", "Llama4TextMoe")
EXACT = {"compute_dtype": torch.float64}


def gated(activation):
    class Gated(nn.Module):
        def forward(self, x):
            first, second = x.chunk(2, -1)
            return activation(first) * second

    return Gated


PLAIN_ACTIVATIONS = {
    "SiluAndMul": (gated(F.silu), "silu_and_mul"),
    "GeluAndMul": (gated(F.gelu), "gelu_and_mul"),
    "GeluTanhAndMul": (gated(lambda x: F.gelu(x, approximate="tanh")), "gelu_tanh_and_mul"),
}
for _name, (_cls, _) in PLAIN_ACTIVATIONS.items():
    kernels.replace_kernel_forward_from_hub(_cls, _name)


def kernelized(module, device):
    """A copy of the module that runs the kernel; what is inside it and has other names stays as it was."""
    mapping = {
        layer: {device: kernels.LayerRepository(REPOSITORY, layer_name=layer, revision="main", trust_remote_code=True)}
        for layer in LAYERS
    }
    module = copy.deepcopy(module)
    original = module.forward.__func__
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        kernels.kernelize(module, mode=mode, device=device)
    assert module.forward.__func__ is not original
    return module


@pytest.mark.parametrize("layer", PLAIN_ACTIVATIONS)
@by_dtype
def test_activations(kernel, device, layer, dtype):
    cls, name = PLAIN_ACTIVATIONS[layer]
    plain, module = cls().to(device), kernelized(cls().to(device), device)
    input = normal((2, 3, 20), dtype, device=device).requires_grad_()
    leaf = input.detach().cpu().double().requires_grad_()
    output, plain_output = module(input), plain(input)
    exact = getattr(kernel.reference, name)(leaf, **EXACT)
    assert_close_to_exact(output, exact, plain_output)
    grad = random_gradient(output)
    (found,) = torch.autograd.grad(output, input, grad)
    (plain_found,) = torch.autograd.grad(plain_output, input, grad)
    (exact_found,) = torch.autograd.grad(exact, leaf, grad.cpu().double())
    assert_close_to_exact(found, exact_found, plain_found)


def qwen_router(dtype, device, *, experts=8, hidden=32, top_k=3):
    """Qwen3.5-MoE's router, with weights for which the logits of unit vectors are apart."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen

    config = type("Config", (), {"num_experts_per_tok": top_k, "num_experts": experts, "hidden_size": hidden})()
    router = qwen.Qwen3_5MoeTopKRouter(config)
    router.weight.data = spread_logits(hidden, experts, F32).T.contiguous()
    return router.to(device, dtype)


def unit_tokens(count, hidden, dtype, device):
    """Tokens that each pick out one column of the router's weights."""
    return torch.eye(hidden, dtype=dtype, device=device)[:count]


@needs_transformers
@by_dtype
def test_router(kernel, device, dtype):
    plain = qwen_router(dtype, device)
    assert plain.kernel_layer_name == "SoftmaxTopKRouter"
    module = kernelized(plain, device)
    tokens = unit_tokens(7, 32, dtype, device).view(1, 7, 32).requires_grad_()
    logits, weights, indices = module(tokens)
    plain_logits, plain_weights, plain_indices = plain(tokens)
    assert_bits_equal(logits.detach(), plain_logits.detach())
    assert indices.dtype == torch.int64
    assert torch.equal(indices, plain_indices)
    assert F.one_hot(indices, 8).shape == (7, 3, 8)
    exact_tokens = tokens.detach().cpu().double().requires_grad_()
    exact_weight = plain.weight.detach().cpu().double().requires_grad_()
    exact_logits = exact_tokens.view(-1, 32) @ exact_weight.T
    _, exact = kernel.reference.route(exact_logits, kernel.RoutingOptions(3, True), **EXACT)
    assert weights.dtype == dtype
    assert_close_to_exact(weights, exact, plain_weights)
    grad = random_gradient(weights)
    found = torch.autograd.grad(weights, (tokens, module.weight), grad)
    plain_found = torch.autograd.grad(plain_weights, (tokens, plain.weight), grad)
    exact_found = torch.autograd.grad(exact, (exact_tokens, exact_weight), grad.cpu().double())
    for one, exact_one, plain_one in zip(found, exact_found, plain_found):
        assert_close_to_exact(one, exact_one, plain_one)


def llama4_moe(dtype, device, *, top_k=1):
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    if not hasattr(Llama4TextMoe, "kernel_layer_name"):
        kernels.replace_kernel_forward_from_hub(Llama4TextMoe, "Llama4TextMoe")
    config = Llama4TextConfig(
        hidden_size=32,
        intermediate_size=24,
        intermediate_size_mlp=24,
        num_local_experts=4,
        num_experts_per_tok=top_k,
        num_attention_heads=2,
    )
    module = Llama4TextMoe(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 32**-0.5
    module.router.weight.data = spread_logits(32, 4, F32).T.contiguous() / 4
    return module.to(device, dtype)


def run_moe(module, tokens):
    """The output, the logits, and the gradients of all that has one."""
    leaves = [tokens, *module.parameters()]
    output, logits = module(tokens)
    return output, logits, torch.autograd.grad(output, leaves, random_gradient(output))


@needs_transformers
@by_dtype
@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4(kernel, device, dtype, top_k):
    plain = llama4_moe(dtype, device, top_k=top_k)
    module = kernelized(plain, device)
    tokens = unit_tokens(9, 32, dtype, device).view(3, 3, 32).requires_grad_()
    output, logits, found = run_moe(module, tokens)
    plain_output, plain_logits, plain_found = run_moe(plain, tokens)
    exact_module = copy.deepcopy(plain).cpu().double()
    exact_tokens = tokens.detach().cpu().double().requires_grad_()
    exact_leaves = [exact_tokens, *exact_module.parameters()]
    exact_output, _ = exact_module(exact_tokens)
    exact_found = torch.autograd.grad(exact_output, exact_leaves, random_gradient(output).cpu().double())
    assert_bits_equal(logits.detach(), plain_logits.detach())
    assert output.shape == plain_output.shape
    assert_close_to_exact(output, exact_output, plain_output)
    for one, exact_one, plain_one in zip(found, exact_found, plain_found, strict=True):
        assert_close_to_exact(one, exact_one, plain_one)


@needs_transformers
def test_llama4_with_another_activation_raises(kernel, device):
    module = llama4_moe(F32, device)
    module.experts.act_fn = nn.GELU()
    with pytest.raises(kernel.MoeError, match="Llama4TextMoe: act_fn must be SiLU, got "):
        kernelized(module, device)(unit_tokens(2, 32, F32, device))


def modules_to_compile():
    yield from (
        pytest.param(lambda dtype, device, cls=cls: cls().to(device), id=layer)
        for layer, (cls, _) in PLAIN_ACTIVATIONS.items()
    )
    yield pytest.param(qwen_router, id="SoftmaxTopKRouter", marks=needs_transformers)
    yield pytest.param(llama4_moe, id="Llama4TextMoe", marks=needs_transformers)


@pytest.mark.parametrize("make", list(modules_to_compile()))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_compile(kernel, device, make, dtype):
    torch._dynamo.reset()
    module = kernelized(make(dtype, device), device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (5, 9):
        tokens = unit_tokens(count, 32, dtype, device).requires_grad_()
        leaves = [tokens, *module.parameters()]
        outputs, expected = (as_tuple(call(tokens)) for call in (compiled, module))
        for one, other in zip(outputs, expected, strict=True):
            assert torch.equal(one, other)
        # A router's second result, the weights, or the only one of the others.
        position = 1 if len(outputs) == 3 else 0
        grad = random_gradient(expected[position])
        found = torch.autograd.grad(outputs[position], leaves, grad)
        for one, other in zip(found, torch.autograd.grad(expected[position], leaves, grad), strict=True):
            assert_bits_equal(one, other)


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_have_a_forward_and_no_state(kernel, layer):
    cls = getattr(kernel.layers, layer)
    members = {name for name in vars(cls) if not name.startswith("__")}
    assert members == {"forward", "has_backward", "can_torch_compile"}
    assert cls.__init__ is nn.Module.__init__
    assert cls.has_backward is True
    assert cls.can_torch_compile is True
    assert cls.__bases__ == (nn.Module,)
    assert len(inspect.signature(cls.forward).parameters) == 2
