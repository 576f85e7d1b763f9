"""Text to tokens and back: exact, incremental, and clear about files that are not there."""

import json
import random
import re
import shutil
import time

import pytest
import tokenizers
from babbler import TEXTS, train_backend
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from tinyvllm.gpt2 import ASSETS, ModelLoadError
from tinyvllm.request import CompletionOutput, Logprob, SamplingParams
from tinyvllm.tokenizer import (
    CompletionText,
    IncrementalDetokenizer,
    LogprobText,
    StopStrings,
    Tokenizer,
    byte_alphabet,
)

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


def reference(text: str, stop: list[str], include: bool, num_exempt: int = 0):
    """The text as it ends, and what ended it: look at every character, one after the other.

    A stop string counts that ends after the first `num_exempt` characters.
    """
    for end in range(num_exempt + 1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return text[: end if include else end - len(string)], string
    return text, None


TEXT = st.text("ab.", max_size=30)
STOP = st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4)


@st.composite
def pieces_of_text(draw):
    """A text, cut anywhere."""
    return draw(st.lists(st.text("ab.", max_size=6), max_size=12))


class TestStopStrings:
    @given(pieces_of_text(), STOP, st.booleans(), st.integers(0, 4))
    def test_any_text_cut_anywhere(self, pieces, stop, include, num_exempt_pieces):
        exempt = "".join(pieces[:num_exempt_pieces])
        expected, ended_by = reference("".join(pieces), stop, include, len(exempt))
        watcher, shown, match = StopStrings(stop, include), "", None
        for count, piece in enumerate(pieces):
            piece, match = watcher.push(piece, searching=count >= num_exempt_pieces)
            shown += piece
            assert expected.startswith(shown), "something was shown that is not in the text"
            if match is not None:
                break
        assert (shown + watcher.flush(), match) == (expected, ended_by)

    @given(pieces_of_text(), STOP)
    def test_no_more_is_held_back_than_must_be(self, pieces, stop):
        """What is held back is the longest end that begins a stop string; vLLM holds more."""
        watcher, text = StopStrings(stop), ""
        for piece in pieces:
            text += piece
            _, match = watcher.push(piece)
            if match is not None:
                break
            starts = [
                k
                for k in range(len(text) + 1)
                if any(s.startswith(text[k:]) and len(s) > len(text) - k for s in stop)
            ] or [len(text)]
            assert watcher.num_held == len(text) - starts[0]
            assert watcher.num_held <= max(map(len, stop), default=1) - 1

    @pytest.mark.parametrize(
        "stop, text, shown",
        [
            (["the end", "end"], "this is the end", ("this is ", "the end")),
            (["end", "the end"], "this is the end", ("this is the ", "end")),
            (["is a", "is"], "this is a", ("th", "is")),  # complete first
            (["s is", "is"], "this is", ("th", "is")),
            (["this"], "this", ("", "this")),
            (["."], "...", ("", ".")),
            ([], "a.b", ("a.b", None)),
        ],
    )
    def test_which_one_wins(self, stop, text, shown):
        """However the text comes: in one piece, or character by character."""
        assert StopStrings(stop).push(text) == shown
        watcher, seen, match = StopStrings(stop), "", None
        for char in text:
            piece, match = watcher.push(char)
            seen += piece
            if match:
                break
        assert (seen, match) == shown

    def test_search_looks_at_new_text_only(self, monkeypatch):
        """100,000 tokens: what is looked at is the text once and, each time, a stop string's length."""
        looked = 0
        first_match = StopStrings.first_match

        def counting(self, text, num_old):
            nonlocal looked
            looked += len(text)
            return first_match(self, text, num_old)

        monkeypatch.setattr(StopStrings, "first_match", counting)
        rng = random.Random(0)
        ids = [rng.randrange(1, 200) for _ in range(100_000)]
        completion = CompletionOutput(0)
        follower = CompletionText(TOKENIZER, SamplingParams(stop=["never said", "nor this"]))
        for token_id in ids:
            completion.token_ids.append(token_id)
            assert follower.update(completion) is None
        assert looked <= len(completion.text) + len("never said") * len(ids)


def follow(token_ids, params, finish_reason=None, at_once=1):
    """The texts that a reader sees, and the stop string; tokens come `at_once` at a time."""
    completion, follower = CompletionOutput(0), CompletionText(TOKENIZER, params)
    texts, stop = [], None
    for start in range(0, len(token_ids), at_once):
        completion.token_ids += token_ids[start : start + at_once]
        if len(completion.token_ids) == len(token_ids):
            completion.finish_reason = finish_reason
        stop = follower.update(completion)
        texts.append(completion.text)
        if stop is not None:
            break
    return texts, stop


class TestCompletionText:
    @given(
        st.lists(st.integers(0, 120), max_size=25),
        st.lists(st.text('ab \ufffd!"', min_size=1, max_size=3), max_size=3),
        st.booleans(),
        st.integers(0, 10),
        st.sampled_from([None, "length", "abort", "stop"]),
        st.integers(1, 4),
    )
    def test_any_tokens(self, ids, stop, include, min_tokens, reason, at_once):
        """Against the text of all tokens at once: half characters, stop strings, min_tokens."""
        params = SamplingParams(
            stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=100
        )
        silent = reason == "stop" and not include
        visible = ids[:-1] if silent else ids
        detokenizer = IncrementalDetokenizer(TOKENIZER)
        exempt = detokenizer.decode(visible[:min_tokens])
        text = exempt + detokenizer.decode(visible[min_tokens:], final=reason is not None)
        if len(visible) <= min_tokens:
            exempt = text  # the rest of an unfinished character counts with its first bytes
        expected, ended_by = reference(text, stop, include, len(exempt))
        texts, match = follow(ids, params, reason, at_once)
        assert match == ended_by
        for seen in texts:
            assert expected.startswith(seen)
        if ids and (match is not None or reason is not None):
            assert texts[-1] == expected

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_of_every_script_ends_anywhere(self, text):
        """Every part of up to four characters ends the text where it is complete first."""
        ids = TOKENIZER.encode(text)
        for length in range(1, 5):
            for start in range(len(text) - length + 1):
                stop = text[start : start + length]
                texts, match = follow(ids, SamplingParams(stop=stop), "length")
                assert match == stop and texts[-1] == text[: text.index(stop)]
                assert all(text[: text.index(stop)].startswith(seen) for seen in texts)

    def test_stop_inside_the_first_token(self):
        ids = TOKENIZER.encode("Once upon")
        assert TOKENIZER.decode(ids[:1]).startswith("On")
        assert follow(ids, SamplingParams(stop="n")) == (["O"], "n")
        assert follow(ids, SamplingParams(stop="O")) == ([""], "O")
        include = SamplingParams(stop="n", include_stop_str_in_output=True)
        assert follow(ids, include) == (["On"], "n")

    def test_what_is_held_back_comes_out_at_the_end(self):
        ids = TOKENIZER.encode("a fo")
        for reason in ("length", "abort"):
            texts, stop = follow(ids, SamplingParams(stop="fox"), reason)
            assert (texts[-2], texts[-1], stop) == ("a ", "a fo", None)

    def test_after_the_end_nothing_changes(self):
        completion, follower = CompletionOutput(0), CompletionText(TOKENIZER, SamplingParams())
        completion.token_ids, completion.finish_reason = TOKENIZER.encode("fox"), "length"
        follower.update(completion)
        completion.token_ids += TOKENIZER.encode(" and more")
        assert follower.update(completion) is None and completion.text == "fox"

    @pytest.mark.parametrize("include, text", [(False, "a fox"), (True, "a fox.")])
    def test_stop_token_is_text_only_if_included(self, include, text):
        ids = TOKENIZER.encode("a fox.")
        params = SamplingParams(include_stop_str_in_output=include)
        assert follow(ids, params, "stop")[0][-1] == text


class TestLogprobText:
    @given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.data())
    def test_decoded_tokens_add_up(self, ids, data):
        """Whatever other candidates there were, and in whatever portions the entries come."""
        other = st.integers(0, TOKENIZER.vocab_size - 1)
        entries = [
            {token_id: Logprob(-1.0, 1), data.draw(other): Logprob(-2.0, 2)} for token_id in ids
        ]
        text = LogprobText(TOKENIZER)
        cut = data.draw(st.integers(0, len(ids)))
        text.update(ids, entries[:cut])
        text.update(ids, entries)
        joined = "".join(entry[i].decoded_token for entry, i in zip(entries, ids, strict=True))
        whole = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False)
        assert joined == whole.decode(ids)

    def test_candidates_are_decoded_in_their_place(self):
        alphabet = {byte: char for char, byte in byte_alphabet().items()}
        first, second, other = (BACKEND.token_to_id(alphabet[b]) for b in (0xC3, 0xA9, 0xA8))
        entries = [{first: Logprob(0, 1)}, {second: Logprob(0, 1), other: Logprob(0, 2)}, None]
        LogprobText(TOKENIZER).update([first, second, 5], entries)
        shown = [[e.decoded_token for e in (entry or {}).values()] for entry in entries]
        assert shown == [[""], ["é", "è"], []]

    def test_special_tokens_show(self):
        entries = [{TOKENIZER.eos_token_id: Logprob(0, 1)}]
        LogprobText(TOKENIZER).update([TOKENIZER.eos_token_id], entries)
        assert entries[0][TOKENIZER.eos_token_id].decoded_token == "<|endoftext|>"


class TestBadWords:
    def test_a_word_with_and_without_a_space_before_it(self, tokenizer):
        for word in ("fox", " fox", "Pip the fox", "น้ำ"):
            bare, spaced = tokenizer.bad_words_token_ids([word])
            assert tokenizer.decode(bare) == word.lstrip()
            assert tokenizer.decode(spaced) == " " + word.lstrip()
        assert len(tokenizer.bad_words_token_ids(["fox", "boat"])) == 4
        assert tokenizer.bad_words_token_ids([]) == []

    @pytest.mark.parametrize("word", [" ", "\n\t", ""])
    def test_a_word_without_tokens(self, word):
        with pytest.raises(ValueError, match=re.escape(f"at least one token, got {word!r}")):
            TOKENIZER.bad_words_token_ids(["fine", word])


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

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            *(("tokenizer.json", text, "cannot be read") for text in ("", "{", "[]", "[" * 10**5)),
            *(("tokenizer_config.json", text, "cannot be read") for text in ("", "{", "[" * 10**5)),
            ("tokenizer_config.json", "[]", "must hold a JSON object, got a list"),
        ],
    )
    def test_broken_files_are_named(self, tmp_path, name, content, words):
        BACKEND.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelLoadError, match=rf"{name}: {words}"):
            Tokenizer.from_pretrained(tmp_path)

    def test_both_files_of_a_broken_pair_are_named(self, tmp_path):
        BACKEND.model.save(str(tmp_path))
        (tmp_path / "merges.txt").write_text("#version: 0.2\nno such pair\n")
        with pytest.raises(ModelLoadError, match=r"vocab\.json or merges\.txt: cannot be read"):
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


@pytest.mark.parametrize("config", ['{"eos_token": 5}', '{"eos_token": {"content": 5}}'])
def test_an_eos_token_that_is_no_string_is_named(tmp_path, config):
    shutil.copytree(ASSETS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: eos_token must be a string"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_tokenizer_of_another_kind_is_named_with_its_folder(tmp_path):
    shutil.copytree(ASSETS, tmp_path, dirs_exist_ok=True)
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match=rf"{tmp_path.name}: .*ByteLevel"):
        Tokenizer.from_pretrained(tmp_path)
