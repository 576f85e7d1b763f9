"""Text to tokens and back: exact, incremental, and clear about files that are not there."""

import json
import random
import time

import pytest
import tokenizers
from babbler import TEXTS, train_backend
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from tinyvllm.gpt2 import ModelLoadError
from tinyvllm.tokenizer import IncrementalDetokenizer, Tokenizer, byte_alphabet

BACKEND = train_backend()
TOKENIZER = Tokenizer(BACKEND)


def stream(tokenizer: Tokenizer, token_ids: list[int], **kwargs) -> list[str]:
    """The pieces of text, one a token and one for the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)
    pieces = [detokenizer.decode([token_id]) for token_id in token_ids]
    return [*pieces, detokenizer.decode([], final=True)]


@pytest.fixture(scope="module", params=["trained", "shipped"])
def tokenizer(request):
    return TOKENIZER if request.param == "trained" else Tokenizer.from_pretrained()


class TestRoundTrip:
    @pytest.mark.parametrize("text", TEXTS)
    def test_text_comes_back(self, tokenizer, text):
        token_ids = tokenizer.encode(text)
        assert token_ids == tokenizer.backend.encode(text).ids
        assert tokenizer.decode(token_ids) == text
        assert "".join(stream(tokenizer, token_ids)) == text

    @pytest.mark.parametrize("text", TEXTS)
    def test_no_piece_shows_half_a_character(self, tokenizer, text):
        assert "\ufffd" not in "".join(stream(tokenizer, tokenizer.encode(text)))

    @given(st.text())
    def test_any_text_comes_back(self, tokenizer, text):
        token_ids = tokenizer.encode(text)
        pieces = stream(tokenizer, token_ids, skip_special_tokens=False)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=False) == text

    @given(st.data(), st.booleans())
    def test_any_tokens_decode_as_the_library_does(self, tokenizer, data, skip):
        """Random ids are mostly invalid UTF-8, so this is the test of U+FFFD as well."""
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
        expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
        assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == expected

    @given(st.data())
    def test_what_was_shown_never_changes(self, tokenizer, data):
        """After every token the text shown is a prefix of the final text, whatever follows."""
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
        shown, final = "", tokenizer.decode(ids)
        for piece in stream(tokenizer, ids):
            shown += piece
            assert final.startswith(shown)

    @given(st.data())
    def test_several_tokens_at_once_are_the_same_text(self, tokenizer, data):
        chunks = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size - 1))))
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = "".join(detokenizer.decode(chunk) for chunk in chunks)
        text += detokenizer.decode([], final=True)
        assert text == tokenizer.decode([token for chunk in chunks for token in chunk])


def test_one_byte_a_token_holds_the_character_back():
    """Without merges every token is a byte: the emoji appears with its fourth, and only then."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    ids = [BACKEND.token_to_id(alphabet[byte]) for byte in "a👋b".encode()]
    assert stream(TOKENIZER, ids) == ["a", "", "", "", "👋", "b", ""]


def test_replacement_only_once_it_is_certain():
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    lead, letter = (BACKEND.token_to_id(alphabet[byte]) for byte in (0xF0, ord("x")))
    assert stream(TOKENIZER, [lead, letter]) == ["", "\ufffdx", ""]
    assert stream(TOKENIZER, [lead]) == ["", "\ufffd"]


def test_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_special_tokens_are_skipped_on_request():
    eos = TOKENIZER.eos_token_id
    ids = [*TOKENIZER.encode("end"), eos]
    assert TOKENIZER.decode(ids) == "end"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "end<|endoftext|>"
    assert stream(TOKENIZER, ids, skip_special_tokens=False)[-2] == "<|endoftext|>"


def test_added_token_outside_the_byte_alphabet():
    backend = train_backend()
    backend.add_tokens(["<new token>", "→"])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a<new token>→b")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == backend.decode(ids) == "a<new token>→b"


def test_ids_beyond_the_vocabulary_stand_for_nothing():
    """A model's embedding may have more rows than the tokenizer has tokens."""
    ids = [*TOKENIZER.encode("fox"), TOKENIZER.vocab_size, 10**6]
    assert TOKENIZER.decode(ids) == BACKEND.decode(ids) == "fox"


def test_lone_surrogate_is_an_error():
    with pytest.raises(ValueError, match="not valid Unicode"):
        TOKENIZER.encode("bad \ud800 text")


def test_saved_truncation_and_padding_are_switched_off():
    backend = train_backend()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=300)
    text = "Once upon a time " * 8
    assert Tokenizer(backend).encode(text) == TOKENIZER.encode(text)


def test_cost_is_linear_in_tokens():
    """Ten times the tokens take about ten times as long; a quadratic cost would take a hundred."""
    rng = random.Random(0)
    ids = [rng.randrange(TOKENIZER.vocab_size) for _ in range(100_000)]

    def seconds(count):
        start = time.process_time()
        stream(TOKENIZER, ids[:count])
        return time.process_time() - start

    assert min(seconds(100_000) for _ in range(3)) < 30 * min(seconds(10_000) for _ in range(3))


class TestFiles:
    def test_tokenizer_json(self, tmp_path):
        BACKEND.save(str(tmp_path / "tokenizer.json"))
        loaded = Tokenizer.from_pretrained(tmp_path)
        assert loaded.encode(TEXTS[1]) == TOKENIZER.encode(TEXTS[1])
        assert loaded.eos_token_id == TOKENIZER.eos_token_id == 0
        assert loaded.vocab_size == TOKENIZER.vocab_size == BACKEND.get_vocab_size()

    def test_vocab_and_merges(self, tmp_path):
        BACKEND.model.save(str(tmp_path))
        assert sorted(file.name for file in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
        loaded = Tokenizer.from_pretrained(str(tmp_path))
        text = "".join(TEXTS) + "<|endoftext|>"
        assert loaded.encode(text) == TOKENIZER.encode(text)
        assert loaded.decode(loaded.encode(text)) == "".join(TEXTS)
        assert loaded.eos_token_id == 0

    @pytest.mark.parametrize("eos_token", ["fox", {"content": "fox", "special": True}])
    def test_eos_from_the_tokenizer_config(self, tmp_path, eos_token):
        backend = train_backend()
        backend.add_tokens(["fox"])
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
        assert Tokenizer.from_pretrained(tmp_path).eos_token_id == backend.token_to_id("fox")

    def test_vocabulary_without_an_eos(self, tmp_path):
        alphabet = {char: i for i, char in enumerate(byte_alphabet())}
        (tmp_path / "vocab.json").write_text(json.dumps(alphabet))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        loaded = Tokenizer.from_pretrained(tmp_path)
        assert loaded.eos_token_id is None
        assert loaded.decode(loaded.encode(TEXTS[2])) == TEXTS[2]

    def test_missing_files_are_named(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"missing: tokenizer.json, vocab.json, merges"):
            Tokenizer.from_pretrained(tmp_path)
        BACKEND.model.save(str(tmp_path))
        (tmp_path / "merges.txt").unlink()
        with pytest.raises(ModelLoadError, match=r"missing: tokenizer.json, merges.txt"):
            Tokenizer.from_pretrained(tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("content", ["", "{", "[]"])
    def test_broken_files_are_named(self, tmp_path, name, content):
        BACKEND.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelLoadError, match=rf"{name}: cannot be read"):
            Tokenizer.from_pretrained(tmp_path)

    def test_another_kind_of_vocabulary_is_refused(self):
        backend = tokenizers.Tokenizer(models.WordLevel({"fox": 0}))
        with pytest.raises(ValueError, match="decoder must be ByteLevel"):
            Tokenizer(backend)

    def test_neither_folder_nor_hub_id(self):
        with pytest.raises(ModelLoadError, match=r"\./nowhere: no such folder"):
            Tokenizer.from_pretrained("./nowhere")


def test_same_tokens_as_transformers(tmp_path):
    """The old file pair gives what transformers makes of it, special token in the text included."""
    from transformers import GPT2Tokenizer

    BACKEND.model.save(str(tmp_path))
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    theirs = GPT2Tokenizer.from_pretrained(str(tmp_path))
    for text in [*TEXTS, "one<|endoftext|> two"]:
        ids = TOKENIZER.encode(text)
        assert ids == theirs.encode(text)
        assert TOKENIZER.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
