"""Transformers' models with this attention, by the kernel's name and by the attention interface.

Logits, left padding, packed sequences, greedy tokens and a training step, against the models' own attention.
"""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from conftest import REPOSITORY, assert_close_to_exact
from operations import BF16, F32

pytestmark = [
    pytest.mark.isa_independent,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="Transformers is not installed"),
]

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 4}
MODELS = {
    "llama": ("Llama", COMMON),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 8}),
    "mistral": ("Mistral", COMMON | WINDOW),
    "gemma2": (
        "Gemma2",
        COMMON | WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 1.5},
    ),
    "gpt_oss": (
        "GptOss",
        COMMON
        | WINDOW
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 131072},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        COMMON
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
by_model = pytest.mark.parametrize("name", MODELS)
by_way = pytest.mark.parametrize("way", [REPOSITORY, "rudnn"], ids=["by_the_kernels_name", "by_the_interface"])


def make_model(name, dtype, device):
    import transformers

    prefix, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        elif parameter_name.endswith("sinks"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        # Those that serve float64 too.
        model.set_experts_implementation("eager")
    return model.to(device, dtype).eval()


def with_attention(model, implementation):
    model.set_attn_implementation(implementation)
    return model


@pytest.fixture(autouse=True)
def registered(request):
    """The interfaces are the process's, so the names are taken back."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    kernel = request.getfixturevalue("kernel")

    def exact(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
        options = kernel.AttentionOptions(scaling, softcap, attention_mask is None)
        output, _ = kernel.reference.attention(
            query, key, value, attention_mask, None, options, sinks=s_aux, compute_dtype=torch.float64
        )
        return output.transpose(1, 2).contiguous(), None

    for name, function in (("rudnn", kernel.sdpa_attention_forward), ("exact", exact)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    yield
    for name in ("rudnn", "exact"):
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def prompt(device, length=12):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator).to(device)


def left_padded(device):
    tokens = prompt(device)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    return tokens.where(mask.bool(), 0), mask


def logits_of(model, implementation, tokens, **arguments):
    with torch.inference_mode():
        return with_attention(model, implementation)(tokens, **arguments).logits.clone()


def all_logits(model, way, tokens, **arguments):
    """Ours, the exact ones and those of the model's own attention, which must be near the exact ones."""
    on_cpu = {name: value.cpu() for name, value in arguments.items()}
    exact = logits_of(copy.deepcopy(model).cpu().double(), "exact", tokens.cpu(), **on_cpu)
    eager, ours = (logits_of(model, implementation, tokens, **arguments) for implementation in ("eager", way))
    return ours, exact, eager


@by_model
@by_way
def test_logits_in_float32(kernel, device, name, way):
    ours, exact, eager = all_logits(make_model(name, F32, device), way, prompt(device))
    torch.testing.assert_close(eager.cpu().double(), exact, rtol=1e-4, atol=1e-4)
    assert_close_to_exact(ours, exact, eager)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
@by_way
def test_logits_in_bfloat16(kernel, device, name, way):
    """Of the models without experts, whose choice rounding could change."""
    assert_close_to_exact(*all_logits(make_model(name, BF16, device), way, prompt(device)))


@by_model
@by_way
def test_left_padding(kernel, device, name, way):
    """The logits of tokens that are no padding."""
    tokens, mask = left_padded(device)
    results = all_logits(make_model(name, F32, device), way, tokens, attention_mask=mask)
    there = mask.bool().cpu()
    ours, exact, eager = (logits.cpu()[there] for logits in results)
    torch.testing.assert_close(eager.double(), exact, rtol=1e-4, atol=1e-4)
    assert_close_to_exact(ours, exact, eager)


@by_model
@by_way
def test_packed_sequences(kernel, device, name, way):
    """Two sequences in one row, told apart by their positions, give the logits that each gives by itself."""
    if name == "gpt_oss" and way == "rudnn":
        pytest.skip("Transformers makes no mask of the positions for this model, for its eager attention neither")
    model, tokens = make_model(name, F32, device), prompt(device)
    parts = tokens[:1, :7], tokens[1:, :9]
    positions = torch.cat([torch.arange(part.shape[1], device=device) for part in parts]).unsqueeze(0)
    # With a cache, Transformers makes no mask of the positions.
    together = logits_of(model, way, torch.cat(parts, 1), position_ids=positions, use_cache=False)
    exact_model = copy.deepcopy(model).cpu().double()
    exact = torch.cat([logits_of(exact_model, "exact", part.cpu()) for part in parts], 1)
    eager = torch.cat([logits_of(model, "eager", part) for part in parts], 1)
    assert_close_to_exact(together, exact, eager)


def generate(model, implementation, tokens, mask, **options):
    return with_attention(model, implementation).generate(
        tokens, attention_mask=mask, do_sample=False, max_new_tokens=16, **options
    )


@by_model
@by_way
@pytest.mark.parametrize("padded", [False, True], ids=["", "left_padding"])
def test_greedy_tokens(kernel, device, name, way, padded):
    model = make_model(name, F32, device)
    tokens, mask = left_padded(device) if padded else (prompt(device), torch.ones_like(prompt(device)))
    eager, ours = (generate(model, implementation, tokens, mask) for implementation in ("eager", way))
    assert eager.shape[1] == 12 + 16
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_greedy_tokens_with_a_static_cache(kernel, device, name):
    """Longer than the prompt, with nothing behind it yet."""
    model, tokens = make_model(name, F32, device), prompt(device)
    options = {"cache_implementation": "static", "disable_compile": True}
    eager, ours = (
        generate(model, implementation, tokens, torch.ones_like(tokens), **options)
        for implementation in ("eager", "rudnn")
    )
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_continuous_batching(kernel, device, name):
    """It takes implementations whose name holds "flash", as that of a function of the kernel does."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = make_model(name, F32, device)
    prompts = [prompt(device)[0, :4].tolist(), prompt(device)[1, :3].tolist(), prompt(device)[0, 2:].tolist()]
    eager = [
        generate(model, "eager", torch.tensor([each], device=device), torch.ones(1, len(each), device=device))[0]
        for each in prompts
    ]
    results = with_attention(model, f"{REPOSITORY}:flash_attn_func").generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=16, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
        progress_bar=False,
    )
    ours = {tuple(each.prompt_ids): each.generated_tokens for each in results.values()}
    assert [ours[tuple(each)] for each in prompts] == [
        tokens[len(each) :].tolist() for tokens, each in zip(eager, prompts, strict=True)
    ]


def training_step(model, implementation, tokens):
    model = with_attention(copy.deepcopy(model).train(), implementation)
    # Not the model's own loss, which is computed in float32 even for a model in float64.
    loss = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@by_model
@by_way
def test_training_step(kernel, device, name, way):
    model, tokens = make_model(name, F32, device), prompt(device)
    exact_loss, exact = training_step(copy.deepcopy(model).cpu().double(), "exact", tokens.cpu())
    eager_loss, eager = training_step(model, "eager", tokens)
    loss, found = training_step(model, way, tokens)
    assert_close_to_exact(loss, exact_loss, eager_loss)
    assert {name for name, each in found.items() if each is None} == {n for n, each in exact.items() if each is None}
    assert_close_to_exact(*(relative_to(exact, each) for each in (found, exact, eager)))


def relative_to(exact, gradients):
    """All gradients in one vector, each relative to the largest exact element of its parameter.

    The few elements of a norm's weight alone would make a yardstick that is exact by luck.
    """
    known = [name for name, each in exact.items() if each is not None]
    return torch.cat([(gradients[name].cpu() / exact[name].abs().max().item()).flatten() for name in known])


def test_a_float_mask_and_a_position_bias(kernel, device):
    """As encoders with relative positions hand them over."""
    tensors = [torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(seed)).to(device) for seed in range(3)]
    module = torch.nn.Identity()
    module.is_causal = False
    bias = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(3)).to(device)
    seen = torch.ones(2, 1, 1, 5, dtype=torch.bool, device=device)
    seen[1, ..., :2] = False
    additive = torch.zeros(2, 1, 1, 5, device=device).masked_fill(~seen, torch.finfo(F32).min)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=bias + additive).transpose(1, 2)
    for mask in (seen, additive):
        output, weights = kernel.sdpa_attention_forward(module, *tensors, mask, position_bias=bias)
        assert weights is None
        torch.testing.assert_close(output, expected)
