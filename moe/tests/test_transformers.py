"""`experts_forward` in Transformers' models: logits, greedy tokens and a training step against the eager experts."""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_bits_equal, assert_close_to_exact
from operations import BF16, F32, eager_experts, make_indices, normal
from operations import Shape as Sizes
from torch import nn

pytestmark = [
    pytest.mark.isa_independent,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="Transformers is not installed"),
]

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = {
    "mixtral": ("Mixtral", COMMON | {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        COMMON
        | {
            "intermediate_size": 24,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "head_dim": 8,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        COMMON
        | {
            "intermediate_size": 24,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
by_model = pytest.mark.parametrize("name", MODELS)


def make_model(name, dtype, device):
    import transformers

    prefix, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**options)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    return model.to(device, dtype).eval()


def with_experts(model, implementation):
    model.set_experts_implementation(implementation)
    return model


@pytest.fixture(autouse=True)
def registered(request):
    """The interface is the process's, so the name is taken back."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register("rudnn", request.getfixturevalue("kernel").experts_forward)
    yield
    ExpertsInterface._global_mapping.pop("rudnn")


def prompt(device, length=12):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator).to(device)


def logits_of(model, implementation, tokens):
    with torch.inference_mode():
        return with_experts(model, implementation)(tokens).logits.clone()


@by_model
def test_logits_in_float32(kernel, device, name):
    model, tokens = make_model(name, F32, device), prompt(device)
    exact = logits_of(copy.deepcopy(model).cpu().double(), "eager", tokens.cpu())
    eager, ours = (logits_of(model, implementation, tokens) for implementation in ("eager", "rudnn"))
    assert_close_to_exact(ours, exact, eager)


@by_model
def test_logits_in_bfloat16(kernel, device, name):
    """As far from the float32 model as the eager experts are, where both choose the same experts everywhere."""
    model, tokens = make_model(name, BF16, device), prompt(device)
    exact = logits_of(copy.deepcopy(model).cpu().double(), "eager", tokens.cpu())
    chosen = {}

    def record(implementation):
        def hook(module, arguments, kwargs):
            chosen.setdefault(implementation, []).append((*arguments, *kwargs.values())[1].sort(-1).values)

        return hook

    results = {}
    for implementation in ("eager", "rudnn"):
        hooks = [
            module.register_forward_pre_hook(record(implementation), with_kwargs=True)
            for module in model.modules()
            if type(module).__name__.endswith("Experts")
        ]
        results[implementation] = logits_of(model, implementation, tokens)
        for each in hooks:
            each.remove()
    same = torch.ones(tokens.numel(), dtype=torch.bool, device=device)
    for eager, ours in zip(*chosen.values(), strict=True):
        same &= (eager == ours).all(-1)
    # A token for which rounding made another choice changes those that attend to it, so only what precedes counts.
    before = same.view(tokens.shape).long().cumprod(-1).bool().cpu()
    assert before.float().mean() > 0.5
    assert_close_to_exact(results["rudnn"][before], exact[before], results["eager"][before])


@by_model
def test_greedy_tokens(kernel, device, name):
    model, tokens = make_model(name, F32, device), prompt(device)
    answers = [
        with_experts(model, implementation).generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=16
        )
        for implementation in ("eager", "rudnn")
    ]
    assert torch.equal(*answers)


def training_step(model, implementation, tokens):
    model = with_experts(copy.deepcopy(model).train(), implementation)
    # Not the model's own loss, which is computed in float32 even for a model in float64.
    loss = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@by_model
def test_training_step(kernel, device, name):
    model, tokens = make_model(name, F32, device), prompt(device)
    exact_loss, exact = training_step(copy.deepcopy(model).cpu().double(), "eager", tokens.cpu())
    eager_loss, eager = training_step(model, "eager", tokens)
    loss, found = training_step(model, "rudnn", tokens)
    assert_close_to_exact(loss, exact_loss, eager_loss)
    assert found.keys() == exact.keys()
    assert {name for name, each in found.items() if each is None} == {n for n, each in exact.items() if each is None}
    assert_close_to_exact(*(relative_to(exact, each) for each in (found, exact, eager)))


def relative_to(exact, gradients):
    """All gradients in one vector, each relative to the largest exact element of its parameter.

    The few elements of a norm's weight alone would make a yardstick that is exact by luck.
    """
    known = [name for name, each in exact.items() if each is not None]
    return torch.cat([(gradients[name].cpu() / exact[name].abs().max().item()).flatten() for name in known])


@by_model
def test_compiled_model(kernel, device, name):
    """One graph for each layer's mixture."""
    torch._dynamo.reset()
    model, tokens = with_experts(make_model(name, F32, device), "rudnn"), prompt(device)
    block = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    experts = block.gate_up_proj.shape[0]
    for count in (5, 9):
        indices = make_indices(Sizes(count, experts, 2, 1, 1), device=device).long()
        arguments = normal((count, 32), F32, device=device), indices, normal((count, 2), F32, device=device)
        assert_bits_equal(compiled(*arguments).detach(), block(*arguments).detach())
    assert model(tokens).logits.isfinite().all()


class Experts(nn.Module):
    """The weights of experts as some model lays them out."""

    def __init__(self, gate_up, down, *, transposed=False, concatenated=True):
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up.mT.contiguous() if transposed else gate_up)
        self.down_proj = nn.Parameter(down.mT.contiguous() if transposed else down)
        self.act_fn = nn.SiLU()
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.is_transposed, self.is_concatenated = transposed, concatenated
        self.num_experts = gate_up.shape[0]


SIZES = Sizes(7, 4, 2, 24, 12)


def layout_inputs(device, dtype=F32):
    gate_up = normal((4, 24, 24), dtype, device=device) / 5
    down = normal((4, 24, 12), dtype, device=device, seed=1) / 4
    tokens = normal((7, 24), dtype, device=device, seed=2)
    indices = make_indices(SIZES, device=device).long()
    weights = normal((7, 2), dtype, device=device, seed=3)
    return gate_up, down, tokens, indices, weights


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("concatenated", [True, False], ids=["concatenated", "interleaved"])
def test_layouts_of_weights(kernel, device, transposed, concatenated):
    gate_up, down, tokens, indices, weights = layout_inputs(device)
    stored = gate_up if concatenated else torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
    module = Experts(stored, down, transposed=transposed, concatenated=concatenated)
    output = kernel.experts_forward(module, tokens, indices, weights)
    expected = eager_experts(tokens, indices, weights, gate_up, None, down)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(output.sum(), module.down_proj)
    assert grad.shape == module.down_proj.shape


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_expert_parallelism(kernel, device, dtype):
    """An index of num_experts or more is skipped, and its weight's gradient is 0."""
    gate_up, down, tokens, indices, weights = layout_inputs(device, dtype)
    indices[1, 0] = indices[3] = 4
    weights.requires_grad_()
    module = Experts(gate_up, down)
    output = kernel.experts_forward(module, tokens, indices, weights)
    assert not output[3].any()
    exact = eager_experts(tokens.double(), indices, weights.double(), gate_up.double(), None, down.double())
    plain = eager_experts(tokens, indices, weights, gate_up, None, down)
    assert_close_to_exact(output, exact, plain)
    (grad,) = torch.autograd.grad(output, weights, torch.ones_like(output))
    assert not grad[3].any()
    assert grad[1, 0] == 0
    with torch.no_grad():
        assert not kernel.experts_forward(module, tokens, indices, weights)[3].any()


def test_states_of_another_dtype(kernel, device):
    """Computed in the weights' dtype, as Transformers' grouped_mm experts do."""
    gate_up, down, tokens, indices, weights = layout_inputs(device)
    module = Experts(gate_up.to(BF16), down.to(BF16))
    output = kernel.experts_forward(module, tokens, indices, weights)
    assert output.dtype == F32
    assert_bits_equal(output, kernel.experts_forward(module, tokens.to(BF16), indices, weights).float())
