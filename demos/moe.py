"""A mixture of experts answers with Transformers' experts and with ours.

A Qwen3-MoE of random weights, since no package carries trained ones. In float32 the tokens must be the same; the exit
status says whether they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from _shared import load_kernel, median_seconds, peak_growth
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface

REPOSITORY = "rudnn/rudnn-moe"
IMPLEMENTATIONS = ("eager", "grouped_mm", "rudnn")
PROMPT_TOKENS = 256
NEW_TOKENS = 32


def make_model() -> PreTrainedModel:
    """Returns two layers as wide as Qwen3-30B-A3B's, with a fourth of its experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=2048,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        initializer_range=0.05,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).eval()


def with_experts(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """Switches a model to other experts and returns it."""
    model.set_experts_implementation(implementation)
    return model


def answer(model: PreTrainedModel, implementation: str, prompt: torch.Tensor) -> torch.Tensor:
    """Returns the greedy continuation of the prompt."""
    mask = torch.ones_like(prompt)
    model = with_experts(model, implementation)
    output = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
    return output[0, prompt.shape[1] :]


def logits(model: PreTrainedModel, implementation: str, prompt: torch.Tensor) -> torch.Tensor:
    """Returns the logits of the whole prompt, as a prefill computes them."""
    return with_experts(model, implementation)(prompt).logits


def seconds(call: Callable[..., torch.Tensor], model: PreTrainedModel, prompt: torch.Tensor) -> dict[str, float]:
    """Times a call with each implementation."""
    return median_seconds({name: partial(call, model, name) for name in IMPLEMENTATIONS}, prompt, rounds=5)


@torch.inference_mode()
def main() -> int:
    """Runs the demo and returns the exit status."""
    kernel = load_kernel(REPOSITORY)
    ExpertsInterface.register("rudnn", kernel.experts_forward)
    model = make_model()
    config = model.config
    prompt = torch.randint(1, config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    print(f"model      Qwen3-MoE of random weights, {config.num_hidden_layers} layers, {threads} threads")
    print(f"experts    {config.num_experts_per_tok} of {config.num_experts}, float32 and bfloat16")

    # Before anything else, so that no implementation has memory left from an earlier call.
    for name in IMPLEMENTATIONS:
        grown = peak_growth(partial(logits, model, name, prompt))
        if grown is not None:
            print(f"memory     {name}: {grown / 2**20:.0f} MiB beside the model for the prompt in float32")

    answers = {name: answer(model, name, prompt) for name in IMPLEMENTATIONS}
    same = torch.equal(answers["eager"], answers["rudnn"])
    difference = (logits(model, "eager", prompt) - logits(model, "rudnn", prompt)).abs().max().item()
    print(f"\nanswer     {answers['rudnn'].tolist()}")
    print(f"tokens     {'the same' if same else 'DIFFERENT'}, {NEW_TOKENS} compared")
    print(f"logits     largest difference {difference:.2g}\n")

    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        decoding, prefill = (seconds(call, model, prompt) for call in (answer, logits))
        kind = str(dtype).removeprefix("torch.")
        for name in IMPLEMENTATIONS:
            token_ms, prefill_ms = decoding[name] / NEW_TOKENS * 1e3, prefill[name] * 1e3
            print(f"{kind:9} {name:11} {token_ms:.1f} ms per token, {prefill_ms:.1f} ms for the prompt alone")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
