"""Tiny random GPT-2 checkpoints, written by transformers, for tests to load."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

# Odd shapes that a kernel or a loader gets wrong first (DESIGN, the equivalence ladder).
SHAPES = {
    "one_head_of_one": {"n_embd": 1, "n_head": 1, "n_layer": 2, "vocab_size": 11},
    "three_heads_of_five": {"n_embd": 15, "n_head": 3, "n_layer": 2, "vocab_size": 101},
    "25_heads": {"n_embd": 100, "n_head": 25, "n_layer": 1, "vocab_size": 64},
    "n_inner": {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 97, "n_inner": 50},
    "vocab_7": {"n_embd": 16, "n_head": 2, "n_layer": 3, "vocab_size": 7},
    "inverse_layer_scale": {
        "n_embd": 24,
        "n_head": 2,
        "n_layer": 3,
        "vocab_size": 50,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "unscaled": {
        "n_embd": 16,
        "n_head": 4,
        "n_layer": 2,
        "vocab_size": 50,
        "scale_attn_weights": False,
    },
    "upcast": {
        "n_embd": 24,
        "n_head": 2,
        "n_layer": 2,
        "vocab_size": 50,
        "reorder_and_upcast_attn": True,
    },
    "untied": {
        "n_embd": 24,
        "n_head": 3,
        "n_layer": 2,
        "vocab_size": 83,
        "tie_word_embeddings": False,
    },
    "erf_gelu": {
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 2,
        "vocab_size": 40,
        "activation_function": "gelu",
    },
    "relu": {
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 2,
        "vocab_size": 40,
        "activation_function": "relu",
    },
}


def make_hf(seed: int = 0, **config) -> GPT2LMHeadModel:
    """A random GPT-2 in eval mode, its weights large enough that logits differ clearly."""
    settings = {"n_positions": 64, "bos_token_id": 0, "eos_token_id": 0} | config
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # HF starts biases at 0, norms at 1 and the rest near 0: too tame to show an error.
            parameter.add_(torch.randn_like(parameter) * (0.1 if "ln_" in name else 0.2))
    return model


def save(model: GPT2LMHeadModel, folder: Path) -> Path:
    """Write `config.json` and `model.safetensors`; returns the folder."""
    model.save_pretrained(folder)
    return Path(folder)


def save_bin(model: GPT2LMHeadModel, folder: Path, prefix: bool = True, masks: bool = False):
    """Write `config.json` and `pytorch_model.bin`, as older checkpoints have them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    tensors = dict(model.state_dict())
    if masks:
        side = model.config.n_positions
        for layer in range(model.config.n_layer):
            name = f"transformer.h.{layer}.attn"
            tensors[f"{name}.bias"] = torch.ones(1, 1, side, side).tril()
            tensors[f"{name}.masked_bias"] = torch.tensor(-1e4)
    if not prefix:
        tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder
