"""The layers, put by kernels' kernelize into the classes of real models."""

import ast
import copy
import importlib
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

import kernels
import numpy
import pytest
import torch
from conftest import REPOSITORY, assert_bits_equal, assert_close_to_exact
from operations import BF16, F16, F32, gradients, random_gradients
from torch import nn

pytestmark = pytest.mark.isa_independent

WIDTH = 48

# (layer, module of transformers.models, class, options of the reference)
MODEL_CLASSES = [
    ("RMSNorm", "llama", "LlamaRMSNorm", {}),
    ("RMSNorm", "qwen3_moe", "Qwen3MoeRMSNorm", {}),
    ("RMSNorm", "mixtral", "MixtralRMSNorm", {}),
    ("RMSNorm", "deepseek_v3", "DeepseekV3RMSNorm", {}),
    ("RMSNorm", "gpt_oss", "GptOssRMSNorm", {}),
    ("RMSNorm", "olmo2", "Olmo2RMSNorm", {}),
    ("RMSNorm", "nemotron_h", "NemotronHRMSNorm", {}),
    ("RMSNormZeroCentered", "qwen3_5", "Qwen3_5RMSNorm", {"zero_centered": True}),
    ("RMSNormGated", "qwen3_next", "Qwen3NextRMSNormGated", {}),
    ("RMSNormGated", "qwen3_5", "Qwen3_5RMSNormGated", {}),
    ("RMSNormGated", "olmo_hybrid", "OlmoHybridRMSNormGated", {}),
    ("RMSNormGated", "kimi_linear", "KimiLinearRMSNormGated", {"activation": "sigmoid"}),
]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="Transformers, whose models these are, is not installed"
)
by_model_class = pytest.mark.parametrize(
    "layer, family, name, options",
    [pytest.param(*case, id=f"{case[0]}-{case[2]}", marks=needs_transformers) for case in MODEL_CLASSES],
)
by_dtype = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])


class HubLayerNorm(nn.LayerNorm):
    """PyTorch's class carries no layer name; this one has it without changing PyTorch's for the whole process."""


kernels.replace_kernel_forward_from_hub(HubLayerNorm, "LayerNorm")

LAYERS = ("RMSNorm", "RMSNormZeroCentered", "RMSNormGated", "LayerNorm")


def kernelized(module, device):
    """A copy of the module that runs the kernel, or an error."""
    mapping = {
        layer: {device: kernels.LayerRepository(REPOSITORY, layer_name=layer, revision="main", trust_remote_code=True)}
        for layer in LAYERS
    }
    module = copy.deepcopy(module)
    original = module.forward.__func__
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        kernels.kernelize(module, mode=mode, device=device, use_fallback=False)
    assert module.forward.__func__ is not original
    return module


def randomised(module, dtype, device):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module.to(device, dtype)


def tensors(count, shape, dtype, device):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_() for _ in range(count)]


def run(module, inputs):
    """The output, and the gradients by name."""
    leaves = {f"input_{i}": tensor for i, tensor in enumerate(inputs)} | dict(module.named_parameters())
    output = module(*inputs)
    return output, gradients([output], leaves, random_gradients([output]))


def assert_close_to_model(module, inputs, exact_function, device):
    """Output and all gradients, against those of the class itself."""
    plain_output, plain_gradients = run(module, inputs)
    output, found = run(kernelized(module, device), inputs)
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in (*inputs, *module.parameters())]
    exact_output = exact_function(*leaves)
    grads = [grad.cpu().double() for grad in random_gradients([output])]
    exact_gradients = torch.autograd.grad([exact_output], leaves, grads)
    assert output.dtype == plain_output.dtype
    assert_close_to_exact(output, exact_output, plain_output)
    for (name, grad), exact_gradient in zip(found.items(), exact_gradients, strict=True):
        assert grad.dtype == plain_gradients[name].dtype, name
        assert_close_to_exact(grad, exact_gradient, plain_gradients[name])


def model_class(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


@by_model_class
@by_dtype
def test_model_classes(kernel, device, layer, family, name, options, dtype):
    cls = model_class(family, name)
    assert cls.kernel_layer_name == layer
    module = randomised(cls(WIDTH, eps=1e-5), dtype, device)
    inputs = tensors(2 if layer == "RMSNormGated" else 1, (3, 5, WIDTH), dtype, device)
    reference = kernel.reference.rms_norm_gated if layer == "RMSNormGated" else kernel.reference.rms_norm
    assert_close_to_model(
        module,
        inputs,
        lambda *leaves: reference(*leaves, 1e-5, **options, compute_dtype=torch.float64),
        device,
    )


@needs_transformers
@by_dtype
def test_float32_weights_in_a_half_precision_model(kernel, device, dtype):
    module = randomised(model_class("olmo2", "Olmo2RMSNorm")(WIDTH, eps=1e-5), F32, device)
    assert_close_to_model(
        module,
        tensors(1, (3, 5, WIDTH), dtype, device),
        lambda *leaves: kernel.reference.rms_norm(*leaves, 1e-5, compute_dtype=torch.float64),
        device,
    )


@pytest.mark.parametrize(
    "shape, options",
    [
        pytest.param((WIDTH,), {}, id="one_axis"),
        pytest.param((4, 6), {}, id="two_axes"),
        pytest.param((2, 3, 4), {"eps": 0.1}, id="three_axes"),
        pytest.param((WIDTH,), {"bias": False}, id="without_bias"),
        pytest.param((4, 6), {"bias": False}, id="two_axes_without_bias"),
        pytest.param((WIDTH,), {"elementwise_affine": False}, id="without_parameters"),
        pytest.param((4, 6), {"elementwise_affine": False}, id="two_axes_without_parameters"),
    ],
)
@by_dtype
def test_layer_norm(kernel, device, shape, options, dtype):
    module = randomised(HubLayerNorm(shape, **options), dtype, device)
    inputs = tensors(1, (3, 5, *shape), dtype, device)

    def exact(input, weight=None, bias=None):
        ones = torch.ones(shape, dtype=torch.float64)
        rows = input.flatten(-len(shape))
        parameters = [(ones if weight is None else weight).flatten(), None if bias is None else bias.flatten()]
        return kernel.reference.layer_norm(rows, *parameters, module.eps, compute_dtype=torch.float64).view(input.shape)

    assert_close_to_model(module, inputs, exact, device)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("shape, wrong", [((8,), (3, 9)), ((4, 6), (3, 6, 4)), ((4, 6), (3, 24)), ((4, 6), (6,))])
def test_layer_norm_of_another_shape_raises(kernel, device, shape, wrong, affine):
    """Also where the number of elements is right."""
    module = kernelized(HubLayerNorm(shape, elementwise_affine=affine).to(device), device)
    with pytest.raises(kernel.NormalizationError, match=r"layer_norm: (input|gamma) must have"):
        module(torch.ones(wrong, device=device))


NOT_ROWS = {"none": None, "list": [[1.0] * 6] * 4, "number": 1.0, "numpy": numpy.ones((4, 6), numpy.float32)}


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("shape", [(6,), (4, 6)], ids=["one_axis", "two_axes"])
@pytest.mark.parametrize("value", [*NOT_ROWS.values(), torch.ones(4, 6, dtype=torch.int32)], ids=[*NOT_ROWS, "int32"])
def test_layer_norm_of_what_is_no_float_tensor_raises(kernel, device, shape, affine, value):
    module = kernelized(HubLayerNorm(shape, elementwise_affine=affine).to(device), device)
    with pytest.raises(kernel.NormalizationError, match="layer_norm: input must"):
        module(value)


@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
@pytest.mark.parametrize("name, argument", [("weight", "gamma"), ("bias", "beta")])
def test_parameters_of_layer_norm_that_have_been_freed(kernel, device, name, argument, strides):
    """As sharding and offloading leave them behind, whatever their strides."""
    module = kernelized(randomised(HubLayerNorm((4, 6)), F32, device), device)
    parameter = getattr(module, name)
    if strides == "transposed":
        parameter.data = parameter.data.T.contiguous().T
    parameter.untyped_storage().resize_(0)
    with pytest.raises(kernel.NormalizationError, match=f"layer_norm: {argument} must have memory for all its elem"):
        module(torch.ones(3, 4, 6, device=device))


def test_strided_and_empty_inputs(kernel, device):
    module = kernelized(randomised(HubLayerNorm((4, 6)), F32, device), device)
    input = torch.randn(5, 6, 4, device=device).mT
    assert_bits_equal(module(input), module(input.contiguous()))
    assert module(torch.ones(0, 4, 6, device=device)).shape == (0, 4, 6)


@by_model_class
def test_compile(kernel, device, layer, family, name, options):
    module = kernelized(randomised(model_class(family, name)(WIDTH), BF16, device), device)
    assert_compiles(module, 2 if layer == "RMSNormGated" else 1, (WIDTH,), BF16, device)


@pytest.mark.parametrize("shape", [(WIDTH,), (4, 6)], ids=["one_axis", "two_axes"])
@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}], ids=["affine", "plain"])
def test_compile_layer_norm(kernel, device, shape, options):
    module = kernelized(randomised(HubLayerNorm(shape, **options), F32, device), device)
    assert_compiles(module, 1, shape, F32, device)


def assert_compiles(module, count, shape, dtype, device):
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        inputs = tensors(count, (rows, *shape), dtype, device)
        output, found = run(compiled, inputs)
        expected, expected_gradients = run(module, inputs)
        assert_bits_equal(output.detach(), expected.detach())
        for one, other in zip(found.values(), expected_gradients.values(), strict=True):
            assert_bits_equal(one, other)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_have_a_forward_and_no_state(kernel, layer):
    cls = getattr(kernel.layers, layer)
    members = {name for name in vars(cls) if not name.startswith("__")}
    assert members == {"forward", "has_backward", "can_torch_compile"}
    assert cls.__init__ is nn.Module.__init__
    assert cls.has_backward is True
    assert cls.can_torch_compile is True
    assert cls.__bases__ == (nn.Module,)


# Every class of Transformers that carries one of the names, read from the source without importing it.

DECORATED = re.compile(
    r'^@use_kernel_forward_from_hub\("(RMSNorm\w*)"\)\n(?:@.*\n)*(class \w+.*\n(?:[ \t].*\n|\n)*)', re.M
)


def decorated_classes():
    """(layer, class definition) of each; modular_*.py are templates for modeling_*.py and are not imported."""
    (package,) = importlib.util.find_spec("transformers").submodule_search_locations
    models = Path(package) / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        for layer, source in DECORATED.findall(path.read_text()):
            yield layer, ast.parse(source).body[0]


def attributes_read(layer):
    """The attributes of self that the layer's forward reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(layer.forward)))
    return {node.attr for node in ast.walk(tree) if is_attribute_of_self(node, ast.Load)}


def attributes_set(definition):
    """The attributes of self that the class sets, with their values as source."""
    return {
        target.attr: ast.unparse(node.value)
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if is_attribute_of_self(target, ast.Store)
    }


def is_attribute_of_self(node, context):
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


@needs_transformers
@pytest.mark.parametrize("layer, least", [("RMSNorm", 100), ("RMSNormZeroCentered", 2), ("RMSNormGated", 8)])
def test_every_class_of_transformers_has_what_the_layer_reads(kernel, layer, least):
    ours = getattr(kernel.layers, layer)
    definitions = [definition for name, definition in decorated_classes() if name == layer]
    assert len(definitions) >= least
    read = attributes_read(ours)
    assert read
    for definition in definitions:
        assert read <= attributes_set(definition).keys(), definition.name
        (forward,) = (item for item in definition.body if isinstance(item, ast.FunctionDef) and item.name == "forward")
        assert len(forward.args.args) == len(inspect.signature(ours.forward).parameters), definition.name


@needs_transformers
def test_every_activation_of_a_gated_class_is_one_of_ours(kernel):
    used = {
        attributes_set(definition)["activation"] for layer, definition in decorated_classes() if layer == "RMSNormGated"
    }
    # Qwen4-Exp hands it over from its configuration, which allows these two.
    assert used == {"'silu'", "'sigmoid'", "activation"}
