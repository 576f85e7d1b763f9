"""The text boundary: token ids in, and back out as text that never shows half a character.

Built, step by step, in notebooks/14_tokenizer.ipynb.
"""

import codecs
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tinyvllm.gpt2 import ModelLoadError, find_model, read_json
from tinyvllm.request import CompletionOutput, Logprob, SamplingParams


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

    Raises ModelLoadError naming the files that are missing, or those that do not parse.
    """
    names = ("tokenizer.json", "vocab.json", "merges.txt")
    full, vocab, merges = (folder / name for name in names)
    missing = [file.name for file in (full, vocab, merges) if not file.is_file()]
    files = full if full.is_file() else f"{vocab} or {merges.name}"
    try:
        if files == full:
            return tokenizers.Tokenizer.from_file(str(full))
        if missing == [full.name]:
            backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            return backend
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{files}: cannot be read as a tokenizer: {error}") from error
    raise ModelLoadError(
        f"{folder}: a tokenizer is tokenizer.json, or vocab.json and merges.txt; "
        f"missing: {', '.join(missing)}"
    )


def eos_token_of(folder: Path) -> str:
    """The text of the end-of-sequence token; `tokenizer_config.json` may name another."""
    path = folder / "tokenizer_config.json"
    eos_token = None
    if path.is_file():
        eos_token = read_json(path).get("eos_token")
    if isinstance(eos_token, dict):  # some versions save the token with its flags
        eos_token = eos_token.get("content")
    if eos_token is not None and not isinstance(eos_token, str):
        raise ModelLoadError(f"{path}: eos_token must be a string, got {eos_token!r}")
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
        try:
            return cls(load_backend(folder), eos_token_of(folder))
        except ModelLoadError:
            raise
        except ValueError as error:
            raise ModelLoadError(f"{folder}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`. Raises ValueError if it is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error}") from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def to_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """The bytes that the tokens stand for. Ids beyond the vocabulary stand for none."""
        skip = self.special_token_ids if skip_special_tokens else ()
        return b"".join(self.bytes_of.get(i, b"") for i in token_ids if i not in skip)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 come out as U+FFFD."""
        return self.to_bytes(token_ids, skip_special_tokens).decode("utf-8", "replace")

    def bad_words_token_ids(self, bad_words: list[str]) -> list[list[int]]:
        """The token sequences to forbid: each of `bad_words` as it begins a text, and as it
        follows a space. In other tokens the letters get through.

        vLLM (`SamplingParams.update_from_tokenizer`) takes the second only if it has as many
        tokens as the first. Raises ValueError, naming the word, if one has no tokens.
        """
        sequences = []
        for word in bad_words:
            for prefix in ("", " "):
                token_ids = self.encode(prefix + word.lstrip()) if word.strip() else []
                if not token_ids:
                    raise ValueError(
                        f"bad_words must be words with at least one token, got {word!r}"
                    )
                sequences.append(token_ids)
        return sequences


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

    def peek(self, token_id: int) -> str:
        """The text that this token would add if it came next; nothing changes."""
        state = self.decoder.getstate()
        text = self.decode([token_id])
        self.decoder.setstate(state)
        return text


class StopStrings:
    """Watches a text grow for the strings that end it, and holds back what may be part of one.

    It keeps only as many characters as a stop string can have before its last, so a token
    costs the same however long the text is. Follows `vllm/v1/engine/detokenizer.py`, which
    holds back that many characters always; here it is those that begin a stop string.

    Args:
        stop: the strings, none of them empty.
        include: whether the stop string that ends the text is part of it.

    Attributes:
        tail: the last characters of the text, as far back as a stop string may have begun.
        num_held: how many of them are not shown yet.
    """

    def __init__(self, stop: list[str], include: bool = False):
        self.stop = stop
        self.include = include
        self.beginnings = [string[:-1] for string in stop]
        self.reach = max(map(len, self.beginnings), default=0)
        self.tail = ""
        self.num_held = 0

    def first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Where the first stop string that the text after `num_old` completes ends, and which.

        The first is the one that is complete first; of several that end together, the first
        in the list. So it does not matter how the text is cut into tokens.
        """
        matches = []
        for stop in self.stop:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), stop))
        return min(matches, key=itemgetter(0), default=None)

    def num_possible(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        for start in range(len(self.tail)):
            rest = self.tail[start:]
            if any(beginning.startswith(rest) for beginning in self.beginnings):
                return len(rest)
        return 0

    def push(self, new_text: str, searching: bool = True) -> tuple[str, str | None]:
        """Add to the text; returns what can be shown by now, and the stop string that ends it.

        A stop string that is complete while not `searching` ends nothing.
        """
        text = self.tail + new_text
        num_shown = len(self.tail) - self.num_held
        match = self.first_match(text, len(self.tail)) if searching and new_text else None
        if match is not None:
            end, stop = match
            self.tail, self.num_held = "", 0
            return text[num_shown : end if self.include else end - len(stop)], stop
        self.tail = text[max(0, len(text) - self.reach) :]
        self.num_held = 0 if self.include else self.num_possible()
        return text[num_shown : len(text) - self.num_held], None

    def flush(self) -> str:
        """What was held back, for when no more text will come."""
        held = self.tail[len(self.tail) - self.num_held :]
        self.num_held = 0
        return held


class LogprobText:
    """Fills in the `decoded_token` of log-probabilities: what the token adds to the text there.

    A token that leaves a character unfinished adds nothing, one that completes it adds the
    character, so the decoded tokens of a sequence add up to its text, but for what a last token
    leaves unfinished (U+FFFD in the text) or a stop string cuts off. Special tokens show.
    vLLM's (`vllm/v1/engine/logprobs.py`) agree where no token ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self.num_done = 0

    def update(self, token_ids: list[int], logprobs: list[dict[int, Logprob] | None]):
        """Fill in what is new since the last call. `logprobs[i]` belongs to `token_ids[i]`."""
        for position in range(self.num_done, len(logprobs)):
            for token_id, logprob in (logprobs[position] or {}).items():
                logprob.decoded_token = self.detokenizer.peek(token_id)
            self.detokenizer.decode([token_ids[position]])
        self.num_done = len(logprobs)


def append_text(completion: CompletionOutput, new_text: str):
    """Append to `completion.text` without copying it: CPython extends a string in place that
    one local name alone refers to."""
    text, completion.text = completion.text, ""
    text += new_text
    completion.text = text


class CompletionText:
    """Keeps the text of one continuation up to date with its tokens, and ends it at a stop string.

    The token that ended a sequence, EOS or one of `stop_token_ids`, stays in `token_ids` and
    out of `text`, unless `include_stop_str_in_output`. A stop string counts if its last
    character comes with a token after the first `min_tokens`. Both as in vLLM.

    Attributes:
        num_tokens: how many tokens are in the text.
        ended: whether no more text will come.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self.detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self.stop_strings = StopStrings(params.stop, params.include_stop_str_in_output)
        self.logprobs = LogprobText(tokenizer)
        self.min_tokens = params.min_tokens
        self.num_tokens = 0
        self.ended = False

    def update(self, completion: CompletionOutput) -> str | None:
        """Add what new tokens let show to `completion.text`, and name the tokens in its `logprobs`.

        Returns the stop string that the new tokens complete, if any: it ends the text, and the
        caller ends the sequence.
        """
        if completion.logprobs is not None:
            self.logprobs.update(completion.token_ids, completion.logprobs)
        new_ids = completion.token_ids[self.num_tokens :]
        if self.ended or not (new_ids or completion.finished):
            return None
        if completion.finish_reason == "stop" and not self.stop_strings.include:
            new_ids = new_ids[:-1]  # a token that ended the sequence is no text
        stop = None
        for token_id in new_ids:
            self.num_tokens += 1
            stop = self._show(completion, self.detokenizer.decode([token_id]))
            if stop is not None:
                break
        if completion.finished and stop is None:
            stop = self._show(completion, self.detokenizer.decode([], final=True))
            append_text(completion, self.stop_strings.flush())
        self.ended = completion.finished or stop is not None
        return stop

    def _show(self, completion: CompletionOutput, new_text: str) -> str | None:
        searching = self.num_tokens > self.min_tokens
        shown, stop = self.stop_strings.push(new_text, searching)
        append_text(completion, shown)
        return stop
