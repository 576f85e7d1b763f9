"""The text boundary: token ids in, and back out as text that never shows half a character.

Built, step by step, in notebooks/14_tokenizer.ipynb.
"""

import codecs
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tinyvllm.gpt2 import ModelLoadError, find_model


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table of bytes: 256 printable characters, each standing for one byte.

    A byte with a visible Latin-1 character stands for itself. The other 68 (control
    characters, the space, ...) take the characters from U+0100 on, in order, which is why a
    space is written "Ġ". From the GPT-2 release (Radford et al., 2019).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def token_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes that a vocabulary entry stands for.

    Only an added token can hold a character outside the alphabet; it stands for itself.
    """
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Read `tokenizer.json`, or else GPT-2's older pair of `vocab.json` and `merges.txt`.

    Raises ModelLoadError naming the files that are missing, or the one that does not parse.
    """
    names = ("tokenizer.json", "vocab.json", "merges.txt")
    full, vocab, merges = (folder / name for name in names)
    missing = [file.name for file in (full, vocab, merges) if not file.is_file()]
    file = full if full.is_file() else vocab
    try:
        if file == full:
            return tokenizers.Tokenizer.from_file(str(full))
        if missing == [full.name]:
            backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            return backend
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{file}: cannot be read as a tokenizer: {error}") from error
    raise ModelLoadError(
        f"{folder}: a tokenizer is tokenizer.json, or vocab.json and merges.txt; "
        f"missing: {', '.join(missing)}"
    )


def eos_token_of(folder: Path) -> str:
    """The text of the end-of-sequence token; `tokenizer_config.json` may name another."""
    path = folder / "tokenizer_config.json"
    eos_token = None
    if path.is_file():
        try:
            eos_token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if isinstance(eos_token, dict):  # some versions save the token with its flags
        eos_token = eos_token.get("content")
    return eos_token or "<|endoftext|>"


class Tokenizer:
    """Text to token ids and back, for the byte-level BPE vocabularies of GPT-2's family.

    Splitting text is the work of the `tokenizers` library. The way back is ours: a token is
    a run of bytes, so a table of bytes and a UTF-8 decoder are all it takes, and both can be
    fed one token at a time (`IncrementalDetokenizer`).

    Attributes:
        backend: the library's tokenizer.
        bytes_of: the bytes of every token id.
        vocab_size: one more than the largest token id.
        eos_token_id: the end-of-sequence token; None if the vocabulary lacks it.
        special_token_ids: ids that stand for no text and are skipped on request.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str = "<|endoftext|>"):
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise ValueError(
                "tokenizer: the decoder must be ByteLevel (the byte-level BPE of GPT-2), "
                f"got {type(backend.decoder).__name__}"
            )
        backend.no_truncation()  # a saved limit would cut prompts without a word
        backend.no_padding()
        if backend.token_to_id(eos_token) is not None:
            backend.add_special_tokens([eos_token])
        self.backend = backend

        vocab = backend.get_vocab(with_added_tokens=True)
        alphabet = byte_alphabet()
        self.bytes_of = {i: token_bytes(token, alphabet) for token, i in vocab.items()}
        self.vocab_size = max(self.bytes_of, default=-1) + 1
        self.eos_token_id = vocab.get(eos_token)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, entry in added.items() if entry.special)

    @classmethod
    def from_pretrained(cls, path: str | Path | None = None) -> "Tokenizer":
        """Load the tokenizer of a model: a folder, a hub id, or None for the shipped model.

        Raises ModelLoadError naming the folder or file that is missing or not valid.
        """
        folder = find_model(path)
        return cls(load_backend(folder), eos_token_of(folder))

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`. Raises ValueError if it is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt is not valid Unicode: {error}") from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def to_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """The bytes that the tokens stand for. Ids beyond the vocabulary stand for none."""
        skip = self.special_token_ids if skip_special_tokens else ()
        return b"".join(self.bytes_of.get(i, b"") for i in token_ids if i not in skip)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 come out as U+FFFD."""
        return self.to_bytes(token_ids, skip_special_tokens).decode("utf-8", "replace")


class IncrementalDetokenizer:
    """Decodes the tokens of one sequence as they come.

    What it has returned never changes: a character is held back until its last byte is
    there, and U+FFFD appears only once no further byte could complete the character. The
    pieces add up to `Tokenizer.decode` of all tokens, at a constant cost per token. vLLM,
    which serves every kind of vocabulary, decodes a short window of tokens anew in each step
    instead (`vllm/v1/engine/detokenizer.py`).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token_ids: Iterable[int], final: bool = False) -> str:
        """The text that `token_ids` add; `final` also gives out an unfinished character."""
        new_bytes = self.tokenizer.to_bytes(token_ids, self.skip_special_tokens)
        return self.decoder.decode(new_bytes, final)
