"""A random GPT-2 with a tokenizer of its own: it babbles bytes, most of them no valid text."""

from pathlib import Path

import tokenizers
from checkpoints import make_hf, save
from tokenizers import decoders, models, pre_tokenizers, trainers

EOS = 0  # <|endoftext|>
TEXTS = [
    "Once upon a time there was a fox named Pip.",
    "The family 👨‍👩‍👧 waved 👋🏽 at the boat 🇳🇴.",
    "สวัสดีครับ ผมชื่อทิม",
    "नमस्ते दुनिया, क्षत्रिय",
    "naïve café — 你好，世界",
    " \n\ttabs, spaces   and\r\nnew lines\x00",
]


def train_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE whose merges split and join the characters of TEXTS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    return backend


def make_babbler(folder: Path) -> Path:
    """Write the model and its tokenizer; returns the folder."""
    backend = train_backend()
    vocab_size = backend.get_vocab_size()
    model = make_hf(n_embd=24, n_head=3, n_layer=2, n_positions=128, vocab_size=vocab_size)
    save(model, folder)
    backend.save(str(folder / "tokenizer.json"))
    return folder
