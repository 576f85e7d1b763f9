"""`LLM`: whatever form the prompts have, the same answers; and a stream that can be left."""

import gc
import itertools
import json
import random
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from babbler import EOS, make_babbler, train_backend

from tinyvllm import LLM, MockModelRunner, Request, SamplingParams
from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine
from tinyvllm.gpt2 import ModelLoadError
from tinyvllm.llm import DeltaStream, OutputProcessor, make_request, uninterrupted
from tinyvllm.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12)
DRAWN = SamplingParams(temperature=1.5, max_tokens=40, seed=3)
PROMPTS = ["Once upon a time", "a fox", "สวัสดี", "Once upon a boat"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_babbler(tmp_path_factory.mktemp("babbler"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, device="cpu", num_gpu_blocks_override=200)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm):
    """After every test the engine is idle, its rules hold and every block is free."""
    yield
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.kv.num_free_blocks == llm.engine.kv.num_usable_blocks
    assert not llm.output_processor.inboxes
    llm.engine.check_invariants()


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


class TestPrompts:
    def test_every_form_gives_the_same_answer(self, llm):
        text = PROMPTS[0]
        ids = llm.tokenizer.encode(text)
        forms = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
        forms.append({"prompt": "the words that go with it", "prompt_token_ids": ids})
        expected = generate(llm, text)[0].outputs
        for form in forms:
            assert [output.outputs for output in generate(llm, form)] == [expected]
        assert [output.outputs for output in generate(llm, forms)] == [expected] * len(forms)

    def test_outputs_say_what_was_asked(self, llm):
        one, two, three = generate(llm, ["a fox", [5, 6], {"prompt_token_ids": [7], "prompt": "x"}])
        assert (one.prompt, one.prompt_token_ids) == ("a fox", llm.tokenizer.encode("a fox"))
        assert (two.prompt, two.prompt_token_ids) == (None, [5, 6])
        assert (three.prompt, three.prompt_token_ids) == ("x", [7])
        assert len({one.request_id, two.request_id, three.request_id}) == 3
        assert one.finished and one.error is None and one.outputs[0].index == 0

    def test_order_is_that_of_the_prompts(self, llm):
        """The first asks for the most tokens and finishes last."""
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 9, 1)]
        outputs = generate(llm, PROMPTS[:3], params)
        assert [output.prompt for output in outputs] == PROMPTS[:3]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 9, 1]
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}

    def test_no_prompts(self, llm):
        assert generate(llm, []) == []
        assert list(llm.stream([])) == []

    def test_default_params(self, llm):
        (output,) = llm.generate("a fox", use_tqdm=False)
        assert 1 <= len(output.outputs[0].token_ids) <= SamplingParams().max_tokens == 16

    @pytest.mark.parametrize("bad", [None, 3, 2.5, ["a", 1], [1, None], {"text": "a"}, {}, [[1]]])
    def test_something_that_is_no_prompt(self, llm, bad):
        with pytest.raises(TypeError, match=r"prompts\[1\] must be a string"):
            generate(llm, ["fine", bad])

    def test_text_that_is_not_unicode(self, llm):
        with pytest.raises(ValueError, match=r"prompts\[1\].*not valid Unicode"):
            generate(llm, ["fine", "\ud800"])

    def test_params_must_match_the_prompts(self, llm):
        with pytest.raises(ValueError, match=r"got 1 for 2 prompts"):
            generate(llm, PROMPTS[:2], [GREEDY])
        with pytest.raises(ValueError, match=r"got 3 for 2 prompts"):
            llm.stream(PROMPTS[:2], [GREEDY] * 3)  # before the first piece is asked for
        with pytest.raises(ValueError, match=r"must be a SamplingParams"):
            generate(llm, PROMPTS[:2], [GREEDY, {"temperature": 0}])

    def test_bad_prompts_harm_nobody(self, llm):
        """Case 24: an empty prompt, among others, is an error of its own."""
        alone = [output.outputs for output in generate(llm, PROMPTS)]
        bad = ["", [], [9999], [-1], [1] * 128]
        mixed = [
            prompt for pair in zip(bad, [*PROMPTS, PROMPTS[0]], strict=True) for prompt in pair
        ]
        outputs = generate(llm, mixed)
        assert [output.outputs for output in outputs[1::2]] == [*alone, alone[0]]
        for output in outputs[0::2]:
            assert output.finished and output.outputs == []
        errors = [output.error for output in outputs[0::2]]
        assert "at least one token" in errors[0] and errors[0] == errors[1]
        assert "9999" in errors[2] and "-1" in errors[3] and "127" in errors[4]
        assert [o.error for o in llm.stream("", GREEDY)] == errors[:1]


class TestText:
    def test_text_is_the_decoded_ids(self, llm):
        for output in generate(llm, PROMPTS, DRAWN):
            ids = output.outputs[0].token_ids
            assert output.outputs[0].text == llm.tokenizer.backend.decode(ids)

    def test_eos_stays_in_the_ids_and_out_of_the_text(self, llm):
        params = SamplingParams(temperature=2.0, max_tokens=120, skip_special_tokens=False)
        params = [replace(params, seed=seed) for seed in range(20)]
        ended = [o.outputs[0] for o in generate(llm, ["a fox"] * 20, params)]
        ended = [completion for completion in ended if completion.finish_reason == "stop"]
        assert ended, "no draw ended with the EOS"
        for completion in ended:
            assert completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1]
            assert completion.stop_reason is None
            assert completion.text == llm.tokenizer.backend.decode(completion.token_ids)

    def test_stop_token_stays_in_the_ids_and_out_of_the_text(self, llm):
        ids = generate(llm, "a fox", SamplingParams(temperature=0, ignore_eos=True))[0]
        stop = ids.outputs[0].token_ids[5]
        params = SamplingParams(temperature=0, stop_token_ids=[stop])
        completion = generate(llm, "a fox", params)[0].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids[-1] == stop
        assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])

    def test_special_tokens_are_shown_on_request(self, llm):
        ids = [EOS]  # an EOS in the output needs ignore_eos; draw until there is one
        for seed in range(100):
            params = SamplingParams(
                temperature=2.0,
                max_tokens=60,
                ignore_eos=True,
                seed=seed,
                skip_special_tokens=False,
            )
            completion = generate(llm, ids, params)[0].outputs[0]
            if EOS in completion.token_ids:
                break
        assert "<|endoftext|>" in completion.text
        hidden = generate(llm, ids, replace(params, skip_special_tokens=True))[0].outputs[0]
        assert hidden.token_ids == completion.token_ids
        assert hidden.text == completion.text.replace("<|endoftext|>", "")

    def test_without_detokenizing(self, llm):
        params = SamplingParams(temperature=0, max_tokens=5, detokenize=False)
        assert generate(llm, "a fox", params)[0].outputs[0].text == ""
        assert "".join(o.outputs[0].text for o in llm.stream("a fox", params)) == ""

    def test_several_continuations(self, llm):
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8)
        (output,) = generate(llm, "a fox", params)
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        for i, completion in enumerate(output.outputs):
            alone = SamplingParams(temperature=1.0, seed=5 + i, max_tokens=8)
            assert generate(llm, "a fox", alone)[0].outputs[0].token_ids == completion.token_ids


class TestStream:
    @pytest.mark.parametrize("n", [1, 3])
    def test_pieces_add_up_to_generate(self, llm, n):
        """The babbler's bytes are mostly not UTF-8, so this holds for half characters too."""
        params = SamplingParams(temperature=1.5, max_tokens=40, seed=3, n=n)
        texts, ids, last = {}, {}, {}
        for piece in llm.stream(PROMPTS, params):
            for completion in piece.outputs:
                key = piece.prompt, completion.index
                assert completion.token_ids, "a piece without news"
                texts[key] = texts.get(key, "") + completion.text
                ids[key] = ids.get(key, []) + completion.token_ids
                last[key] = completion.finish_reason, completion.stop_reason
        whole = generate(llm, PROMPTS, params)
        assert len(texts) == len(PROMPTS) * n
        for output in whole:
            for completion in output.outputs:
                key = output.prompt, completion.index
                assert texts[key] == completion.text
                assert ids[key] == completion.token_ids
                assert last[key] == (completion.finish_reason, completion.stop_reason)

    def test_pieces_do_not_change_afterwards(self, llm):
        seen = []
        for piece in llm.stream(PROMPTS, GREEDY):
            seen.append((piece, [list(completion.token_ids) for completion in piece.outputs]))
        assert all([c.token_ids for c in piece.outputs] == ids for piece, ids in seen)
        assert sum(piece.finished for piece, _ in seen) == len(PROMPTS)

    def test_prompt_text_never_shows(self, llm):
        """A prompt that ends inside a character: its bytes belong to the prompt."""
        prompt = llm.tokenizer.encode("👋")[:-1]
        (whole,) = generate(llm, prompt)
        pieces = "".join(piece.outputs[0].text for piece in llm.stream(prompt, GREEDY))
        assert pieces == whole.outputs[0].text == llm.tokenizer.decode(whole.outputs[0].token_ids)

    def test_interleaved_streams(self, llm):
        """Each step serves everybody; each stream still gets all of its own and nothing else."""
        expected = {o.prompt: o.outputs[0].token_ids for o in generate(llm, PROMPTS)}
        first, second = llm.stream(PROMPTS[:2], GREEDY), llm.stream(PROMPTS[2:], GREEDY)
        got = {prompt: [] for prompt in PROMPTS}
        streams = {0: (first, PROMPTS[:2]), 1: (second, PROMPTS[2:])}
        rng = random.Random(0)
        while streams:
            key = rng.choice(list(streams))
            stream, prompts = streams[key]
            piece = next(stream, None)
            if piece is None:
                del streams[key]
                continue
            assert piece.prompt in prompts
            got[piece.prompt] += piece.outputs[0].token_ids
        assert got == expected

    def test_generate_inside_a_stream(self, llm):
        expected = [output.outputs for output in generate(llm, PROMPTS)]
        for _ in llm.stream("a fox", GREEDY):
            assert [output.outputs for output in generate(llm, PROMPTS)] == expected


TOKENIZER = Tokenizer(train_backend())


class Reciter(MockModelRunner):
    """A model that says what it was told to say, whatever it is asked."""

    def __init__(self, token_ids, max_model_len=100):
        super().__init__(TOKENIZER.vocab_size, max_model_len=max_model_len)
        self.token_ids = token_ids

    def next_token(self, token_ids):
        return self.token_ids[len(token_ids) - 1]  # the prompt has one token

    def _answer(self, context):
        return self.next_token(context[:, 0].tolist())


def recite(token_ids, params, abort_after=None, max_model_len=100):
    """Each piece of a stream of the text, and the output at its end."""
    engine = Engine(
        EngineConfig(max_model_len=max_model_len), Reciter(token_ids, max_model_len), EOS
    )
    processor, stream = OutputProcessor(engine, TOKENIZER), DeltaStream(params.n)
    processor.add_request(make_request(TOKENIZER, [1], params, "one"), "inbox")
    pieces, output = [], None
    while engine.has_unfinished_requests():
        news = processor.step()
        if engine.num_steps == abort_after:
            news = [processor.abort("one")]
        for inbox, output in news:
            assert inbox == "inbox"
            pieces.append(stream.delta(output))
    assert processor.step() == [] and not processor.inboxes and not processor.texts
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    engine.check_invariants()
    for completion in output.outputs:
        parts = [c for piece in pieces for c in piece.outputs if c.index == completion.index]
        assert "".join(part.text for part in parts) == completion.text
        ids = [token_id for part in parts for token_id in part.token_ids]
        assert ids == completion.token_ids
        reasons = [(part.finish_reason, part.stop_reason) for part in parts]
        assert reasons == [(None, None)] * (len(parts) - 1) + [
            (completion.finish_reason, completion.stop_reason)
        ]
    return pieces, output


FOX = TOKENIZER.encode("Pip the fox waved.")
DOT = TOKENIZER.encode(".")[0]
assert FOX[-1] == DOT and len(FOX) > 5
ENDED, CUT = [*FOX, EOS, *FOX], FOX + FOX

# what ends it: (tokens, parameters, settings) -> (finish reason, stop reason, text)
ENDS = {
    "EOS": (ENDED, {}, {}, ("stop", None, "Pip the fox waved.")),
    "stop token": (CUT, {"stop_token_ids": [DOT]}, {}, ("stop", DOT, "Pip the fox waved")),
    "stop string": (CUT, {"stop": " fox"}, {}, ("stop", " fox", "Pip the")),
    "max_tokens": (CUT, {"max_tokens": len(FOX)}, {}, ("length", None, "Pip the fox waved.")),
    "max_model_len": (
        CUT,
        {"max_tokens": None},
        {"max_model_len": len(FOX) + 1},
        ("length", None, "Pip the fox waved."),
    ),
    "abort": (CUT, {}, {"abort_after": len(FOX)}, ("abort", None, "Pip the fox waved.")),
    # two at once
    "stop string with the last token that is allowed": (
        CUT,
        {"stop": ".", "max_tokens": len(FOX)},
        {},
        ("stop", ".", "Pip the fox waved"),
    ),
    "stop string with the last position of the model": (
        CUT,
        {"stop": "d.", "max_tokens": None},
        {"max_model_len": len(FOX) + 1},
        ("stop", "d.", "Pip the fox wave"),
    ),
    "EOS as the last token that is allowed": (
        ENDED,
        {"max_tokens": len(FOX) + 1},
        {},
        ("stop", None, "Pip the fox waved."),
    ),
    "stop token as the last token that is allowed": (
        CUT,
        {"stop_token_ids": [DOT], "max_tokens": len(FOX)},
        {},
        ("stop", DOT, "Pip the fox waved"),
    ),
    "EOS while a stop string may be coming": (
        ENDED,
        {"stop": ". The end"},
        {},
        ("stop", None, "Pip the fox waved."),
    ),
    "length while a stop string may be coming": (
        CUT,
        {"stop": ". The end", "max_tokens": len(FOX)},
        {},
        ("length", None, "Pip the fox waved."),
    ),
    "abort while a stop string may be coming": (
        CUT,
        {"stop": ". The end"},
        {"abort_after": len(FOX)},
        ("abort", None, "Pip the fox waved."),
    ),
    "stop token that completes a stop string": (
        CUT,
        {"stop": "d.", "stop_token_ids": [DOT]},
        {},
        ("stop", DOT, "Pip the fox waved"),
    ),
    "the same, included in the text": (
        CUT,
        {"stop": "d.", "stop_token_ids": [DOT], "include_stop_str_in_output": True},
        {},
        ("stop", "d.", "Pip the fox waved."),
    ),
    "EOS among the stop tokens": (
        ENDED,
        {"stop_token_ids": [EOS]},
        {},
        ("stop", None, "Pip the fox waved."),
    ),
    "EOS among the stop tokens, but ignored as EOS": (
        ENDED,
        {"stop_token_ids": [EOS], "ignore_eos": True},
        {},
        ("stop", EOS, "Pip the fox waved."),
    ),
    "stop string in the first token": (CUT, {"stop": "P"}, {}, ("stop", "P", "")),
    "first of two stop strings": (CUT, {"stop": ["fox", "the"]}, {}, ("stop", "the", "Pip ")),
    "stop string after min_tokens": (
        CUT,
        {"stop": ".", "min_tokens": len(FOX)},
        {},
        ("stop", ".", "Pip the fox waved.Pip the fox waved"),
    ),
    "stop string that begins before min_tokens": (
        CUT,
        {"stop": "d.", "min_tokens": len(FOX) - 1},
        {},
        ("stop", "d.", "Pip the fox wave"),
    ),
}


class TestEnds:
    @pytest.mark.parametrize("name", ENDS)
    def test_finish_reason_and_stop_reason(self, name):
        token_ids, params, settings, expected = ENDS[name]
        params = SamplingParams(**{"max_tokens": 60, **params})
        _, output = recite(token_ids, params, **settings)
        (completion,) = output.outputs
        reasons = completion.finish_reason, completion.stop_reason
        assert output.finished and (*reasons, completion.text) == expected

    @pytest.mark.parametrize("name", [name for name in ENDS if "stop" in ENDS[name][1]])
    def test_no_piece_shows_a_stop_string_or_its_beginning(self, name):
        token_ids, params, settings, (_, _, text) = ENDS[name]
        pieces, _ = recite(token_ids, SamplingParams(**{"max_tokens": 60, **params}), **settings)
        shown = ""
        for piece in pieces:
            shown += piece.outputs[0].text
            assert text.startswith(shown)

    def test_steps_end_with_the_stop_string(self):
        """The engine makes no step more, and the tokens stay as they were sampled."""
        _, output = recite(CUT, SamplingParams(stop="fox", max_tokens=60))
        text = TOKENIZER.decode(output.outputs[0].token_ids)
        assert "fox" in text and "fox" not in TOKENIZER.decode(output.outputs[0].token_ids[:-1])

    def test_one_continuation_of_several_is_ended(self, llm):
        """Its neighbours go on, and the request is finished with the last of them."""
        free = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
        texts = [completion.text for completion in generate(llm, "a fox", free)[0].outputs]
        stop = texts[1][8]
        (output,) = generate(llm, "a fox", replace(free, stop=stop))
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        for text, completion in zip(texts, output.outputs, strict=True):
            ended = stop in text
            assert completion.text == text.split(stop)[0]
            assert completion.stop_reason == (stop if ended else None)
            assert completion.finish_reason == ("stop" if ended else "length")
        assert len({len(completion.token_ids) for completion in output.outputs}) > 1

    @pytest.mark.parametrize("n", [1, 3])
    def test_streams_with_stop_strings_add_up(self, llm, n):
        params = SamplingParams(temperature=1.5, max_tokens=40, seed=3, n=n, ignore_eos=True)
        for output in generate(llm, PROMPTS, params):
            text = output.outputs[0].text
            stops = [text[12:14], text[9:17], "\ufffd\ufffd\ufffd\ufffd"]
            ending = replace(params, stop=[stop for stop in stops if stop])
            shown = [""] * n
            for piece in llm.stream(output.prompt, ending):
                for completion in piece.outputs:
                    shown[completion.index] += completion.text
            (whole,) = generate(llm, output.prompt, ending)
            assert shown == [completion.text for completion in whole.outputs]
            assert whole.outputs[0].finish_reason == "stop"

    def test_min_tokens_with_eos_and_stop_tokens(self, llm):
        """They are not generated before; the sampler sees to it."""
        (free,) = generate(llm, "a fox", SamplingParams(temperature=0, max_tokens=30))
        stop = free.outputs[0].token_ids[2]
        params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop], min_tokens=8)
        (output,) = generate(llm, "a fox", params)
        ids = output.outputs[0].token_ids
        assert len(ids) >= 8 and not {stop, EOS} & set(ids[:8])
        (short,) = generate(llm, "a fox", replace(params, min_tokens=0))
        assert short.outputs[0].token_ids == free.outputs[0].token_ids[:3]


class TestBadWords:
    def test_never_generated(self, llm):
        (free,) = generate(llm, "Once upon", DRAWN)
        words = [llm.tokenizer.decode([i]) for i in free.outputs[0].token_ids[:6]]
        words = [word for word in words if word.strip() and "\ufffd" not in word]
        params = replace(DRAWN, bad_words=words)
        (output,) = generate(llm, "Once upon", params)
        assert words and not any(word in output.outputs[0].text for word in words)
        assert output.outputs[0].token_ids != free.outputs[0].token_ids

    def test_a_word_without_tokens_is_an_error_of_the_call(self, llm):
        with pytest.raises(ValueError, match=r"bad_words must be .* got ' '"):
            generate(llm, "a fox", SamplingParams(bad_words=["fine", " "]))


@pytest.fixture(scope="module")
def reference(folder):
    """Log-probabilities `[T, V]` of what follows each token, by transformers."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()

    def logprobs(token_ids):
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return logprobs


class TestLogprobs:
    def check(self, entries, scores, token_id, k):
        """One place: the token itself and the k likeliest, with their ranks; ties either way."""
        likeliest = scores.topk(k).values[-1].item() if k else 0.0
        assert token_id in entries and k <= len(entries) <= k + 1
        for i, entry in entries.items():
            score = scores[i].item()
            assert i == token_id or score >= likeliest - 1e-4
            assert entry.logprob == pytest.approx(score, abs=1e-4)
            assert (scores > score + 1e-4).sum() < entry.rank <= (scores > score - 1e-4).sum()

    @pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 2}])
    def test_equal_to_transformers(self, folder, reference, settings):
        """Cold, then warm with the prompts' blocks in the cache; whole, and in chunks."""
        llm = LLM(folder, device="cpu", num_gpu_blocks_override=60, block_size=4, **settings)
        drawn = SamplingParams(n=2, temperature=1.2, seed=1, max_tokens=9, ignore_eos=True)
        for k, num_prompt in [(3, 2), (0, 0), (-1, None), (None, 1), (2, -1)]:
            params = replace(drawn, logprobs=k, prompt_logprobs=num_prompt)
            for output in generate(llm, PROMPTS, params):
                prompt_ids = output.prompt_token_ids
                if num_prompt is None:
                    assert output.prompt_logprobs is None
                else:
                    scores = reference(prompt_ids)
                    many = len(scores[0]) if num_prompt == -1 else num_prompt
                    assert output.prompt_logprobs[0] is None
                    assert len(output.prompt_logprobs) == len(prompt_ids)
                    for i, token_id in enumerate(prompt_ids[1:], start=1):
                        self.check(output.prompt_logprobs[i], scores[i - 1], token_id, many)
                for completion in output.outputs:
                    if k is None:
                        assert completion.logprobs is completion.cumulative_logprob is None
                        continue
                    ids = completion.token_ids
                    scores = reference(prompt_ids + ids)[len(prompt_ids) - 1 :]
                    assert len(completion.logprobs) == len(ids)
                    for entries, row, token_id in zip(
                        completion.logprobs, scores, ids, strict=False
                    ):
                        self.check(entries, row, token_id, len(row) if k == -1 else k)
                    total = sum(row[i].item() for row, i in zip(scores, ids, strict=False))
                    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)

    def test_decoded_tokens_add_up_to_the_text(self, llm):
        params = replace(DRAWN, logprobs=2, prompt_logprobs=1)
        for output in generate(llm, PROMPTS, params):
            joined = [
                entries[i].decoded_token
                for entries, i in zip(
                    output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
                )
            ]
            assert output.prompt.endswith("".join(joined))
            (completion,) = output.outputs
            joined = "".join(
                entries[i].decoded_token
                for entries, i in zip(completion.logprobs, completion.token_ids, strict=True)
            )
            assert completion.text.startswith(joined.replace("<|endoftext|>", ""))

    def test_pieces_hold_the_new_entries_only(self, llm):
        params = SamplingParams(
            n=2, temperature=0.9, seed=1, max_tokens=8, logprobs=1, prompt_logprobs=0
        )
        (whole,) = generate(llm, "Once upon a time", params)
        logprobs, prompt_logprobs = [[], []], []
        for piece in llm.stream("Once upon a time", params):
            prompt_logprobs += piece.prompt_logprobs
            for completion in piece.outputs:
                assert len(completion.logprobs) == len(completion.token_ids)
                logprobs[completion.index] += completion.logprobs
                last = completion.cumulative_logprob
        assert logprobs == [completion.logprobs for completion in whole.outputs]
        assert prompt_logprobs == whole.prompt_logprobs
        assert last == whole.outputs[-1].cumulative_logprob

    def test_without_detokenizing_there_is_no_text(self, llm):
        params = SamplingParams(max_tokens=3, logprobs=1, detokenize=False, ignore_eos=True)
        (output,) = generate(llm, "a fox", params)
        decoded = [e.decoded_token for d in output.outputs[0].logprobs for e in d.values()]
        assert len(output.outputs[0].logprobs) == 3 and set(decoded) == {None}


class TestSeveralContinuations:
    def test_share_the_blocks_of_the_prompt(self, folder):
        """The first computes the prompt, the others find its whole blocks in the cache."""
        llm = LLM(folder, device="cpu", num_gpu_blocks_override=60, block_size=4)
        prompt = llm.tokenizer.encode("Once upon a time there was a fox named Pip.")
        events = []
        llm.engine.observers.append(events.append)
        params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)
        (output,) = generate(llm, prompt, params)
        shared = (len(prompt) - 1) // 4 * 4
        assert events[0].hits == {f"{i}_0": 0 if i == 0 else shared for i in range(4)}
        assert llm.engine.scheduler.prefix_cache_stats.num_hit == 3 * shared > 0
        tables = list(events[0].block_ids.values())
        assert len({tuple(table[: shared // 4]) for table in tables}) == 1
        assert output.num_cached_tokens == 0  # the request as a whole found nothing

    def test_abort_ends_them_all(self, llm):
        params = SamplingParams(n=4, temperature=1.0, max_tokens=50, ignore_eos=True)
        for piece in llm.stream("a fox", params):
            if len(piece.outputs) == 4:
                break


class TestLeaving:
    """A stream that is left early gives its blocks back, and the others go on."""

    def test_break(self, llm):
        for count, _ in enumerate(llm.stream(PROMPTS, DRAWN)):
            assert llm.engine.has_unfinished_requests()
            if count == 7:
                break

    def test_close(self, llm):
        stream = llm.stream(PROMPTS, DRAWN)
        next(stream)
        stream.close()
        assert next(stream, None) is None

    def test_never_started(self, llm):
        llm.stream(PROMPTS, DRAWN)
        assert not llm.engine.has_unfinished_requests()

    def test_exception_in_the_loop(self, llm):
        with pytest.raises(ZeroDivisionError):
            for _ in llm.stream(PROMPTS, DRAWN):
                raise ZeroDivisionError

    def test_exception_in_the_step(self, llm, monkeypatch):
        def broken(batch):
            raise RuntimeError("out of memory")

        stream = llm.stream(PROMPTS, DRAWN)
        next(stream)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
            patch.setattr(llm.engine.runner, "execute", broken)
            list(stream)
        assert generate(llm, PROMPTS)

    def test_others_go_on(self, llm):
        expected = generate(llm, "Once upon a time", DRAWN)[0].outputs[0].token_ids
        staying = llm.stream("Once upon a time", DRAWN)
        got = list(next(staying).outputs[0].token_ids)
        for _ in llm.stream(["Once upon a time", "Once upon"], DRAWN):
            break
        for piece in staying:
            got += piece.outputs[0].token_ids
        assert got == expected

    def test_aborted_at_the_engine(self, llm):
        """A request that is aborted from outside ends its part of the stream, and says so."""
        pieces = {prompt: [] for prompt in PROMPTS[:2]}
        for piece in llm.stream(PROMPTS[:2], GREEDY):
            pieces[piece.prompt].append(piece.outputs[0].finish_reason)
            if piece.prompt == PROMPTS[0]:
                llm.engine.abort(piece.request_id)
        assert pieces[PROMPTS[0]] == [None, "abort"] and len(pieces[PROMPTS[1]]) > 1

    @pytest.mark.parametrize("seed", range(10))
    def test_ctrl_c(self, llm, seed):
        """A real SIGINT at some moment; the next call finds everything as if nothing had been."""
        expected = [output.outputs for output in generate(llm, PROMPTS)]
        delay = random.Random(seed).uniform(0.001, 0.05)
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                generate(llm, PROMPTS, DRAWN)
        assert not llm.engine.has_unfinished_requests()
        llm.engine.check_invariants()
        assert [output.outputs for output in generate(llm, PROMPTS)] == expected

    @pytest.mark.parametrize("guard", [uninterrupted, nullcontext])
    def test_ctrl_c_at_every_line_of_a_step(self, guard):
        """With the guard no line of the bookkeeping can be cut; without it some would be."""
        in_order = []
        while (result := survives_interrupt(len(in_order), guard)) is not None:
            in_order.append(result)
        assert len(in_order) > 100
        assert all(in_order) is (guard is uninterrupted)


def survives_interrupt(line, guard):
    """Whether the engine is in order after a signal at this line of a step; None if there is none."""
    lines = itertools.count()

    def trace(frame, event, argument):
        ours = event == "line" and frame.f_globals["__name__"].startswith("tinyvllm")
        if ours and next(lines) == line:
            signal.raise_signal(signal.SIGINT)
        return trace

    engine = Engine(EngineConfig(block_size=4), MockModelRunner(num_blocks=20, block_size=4))
    for name, length in [("a", 9), ("b", 3), ("c", 6)]:
        engine.add_request(Request(name, [7] * length, SamplingParams(max_tokens=2)))
    engine.step()
    interrupted, before = False, sys.gettrace()
    try:
        with guard():
            sys.settrace(trace)
            engine.step()  # all three finish in this step and give their blocks back
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(before)
    if not interrupted:
        return None
    try:
        for name in "abc":
            engine.abort(name)
        engine.check_invariants()
        return engine.kv.num_free_blocks == 19
    except Exception:
        return False


class TestConstruction:
    def test_unknown_engine_argument(self):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_seqs'"):
            LLM(max_seqs=3)

    def test_engine_argument_out_of_range(self, folder):
        with pytest.raises(ValueError, match=r"block_size must be .*got 0"):
            LLM(folder, block_size=0)

    def test_folder_that_is_not_there(self):
        with pytest.raises(ModelLoadError, match=r"\./nowhere: no such folder"):
            LLM("./nowhere")

    def test_tokenizer_that_is_no_folder(self, folder):
        with pytest.raises(ModelLoadError, match=r"a folder or a hub id is a string .*, got 5"):
            LLM(folder, tokenizer=5)

    def test_end_token_outside_the_vocabulary_is_none(self, folder, tmp_path):
        """As in a config that kept the default 50256 beside a smaller vocabulary."""
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 50256}
        (tmp_path / "config.json").write_text(json.dumps(config))
        llm = LLM(tmp_path, device="cpu", num_gpu_blocks_override=20)
        assert llm.engine.scheduler.eos_token_id is None
        params = [GREEDY, replace(GREEDY, min_tokens=5), GREEDY]
        outputs = generate(llm, ["a fox", "a hen", "a fox"], params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 12, 12]

    def test_a_huge_token_id_harms_nobody(self, llm):
        bad, good = generate(llm, [[10**5000], "a fox"])
        assert "got an integer of thousands of digits" in bad.error
        assert good.outputs[0].token_ids == generate(llm, "a fox")[0].outputs[0].token_ids

    def test_folder_without_tokenizer(self, folder, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        with pytest.raises(ModelLoadError, match=r"missing: tokenizer.json"):
            LLM(tmp_path)
        llm = LLM(tmp_path, tokenizer=folder, device="cpu", num_gpu_blocks_override=20)
        assert generate(llm, "a fox")[0].error is None

    def test_two_in_one_process(self, llm, folder):
        other = LLM(folder, device="cpu", num_gpu_blocks_override=30, block_size=4)
        expected = [output.outputs for output in generate(llm, PROMPTS)]
        both = zip(llm.stream(PROMPTS, GREEDY), other.stream(PROMPTS, GREEDY), strict=True)
        for one, two in both:
            assert one.outputs == two.outputs
        assert [output.outputs for output in generate(other, PROMPTS)] == expected
        assert other.engine.kv.num_free_blocks == other.engine.kv.num_usable_blocks == 29

    def test_progress_bar(self, llm, capsys):
        llm.generate(PROMPTS, GREEDY)
        assert "4/4" in capsys.readouterr().err
        generate(llm, PROMPTS)
        assert capsys.readouterr().err == ""


def test_shipped_model_by_default():
    """Offline and without arguments: text that is made of words."""
    llm = LLM()
    (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert output.error is None
    assert output.outputs[0].text.isascii() and " " in output.outputs[0].text.strip()


def test_a_request_aborted_by_an_observer_is_an_output_like_any_other():
    llm = LLM(num_gpu_blocks_override=200, max_num_seqs=1)

    def abort_the_one_that_waits(event):
        if event.step == 0:
            llm.engine.abort(waiting)

    llm.engine.observers.append(abort_the_one_that_waits)
    first = next(llm.request_counter) + 1  # the numbers that the next two requests will have
    waiting = str(first + 1)
    params = SamplingParams(max_tokens=4, temperature=0)
    done, aborted = llm.generate(["Once", "In a"], params, use_tqdm=False)
    assert done.outputs[0].finish_reason == "length" and len(done.outputs[0].token_ids) == 4
    assert aborted.outputs[0].finish_reason == "abort" and aborted.outputs[0].text == ""
    assert not llm.output_processor.inboxes and not llm.engine.has_unfinished_requests()


def test_an_observer_that_fails_moves_no_other_stream_past_its_stop_string(llm):
    """The step that completes the string is cut short; its text comes before another token."""
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = generate(llm, "a fox", long)[0].outputs[0].text
    stopping = replace(long, stop=text[9:14])
    expected = generate(llm, "a fox", stopping)[0].outputs[0]
    assert expected.finish_reason == "stop" and 2 < len(expected.token_ids) < 30

    def observer(event):
        if event.step == last:
            raise OSError("disk full")

    last = llm.engine.num_steps + len(expected.token_ids) - 1
    mine, other = llm.stream("a fox", stopping), llm.stream("Once", long)
    pieces = [next(mine)]
    llm.engine.observers.append(observer)
    with pytest.raises(OSError, match="disk full"):
        list(other)
    llm.engine.observers.clear()
    pieces += mine
    assert [i for piece in pieces for i in piece.outputs[0].token_ids] == expected.token_ids
    assert pieces[-1].outputs[0].stop_reason == expected.stop_reason


def abandon(llm):
    """Leave a stream in such a way that only the garbage collector closes it."""
    stream = llm.stream(["One", "Two"], replace(GREEDY, logprobs=0))
    next(stream)
    circle = [stream]
    circle.append(circle)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    "where",
    [
        "scheduler.schedule",
        "scheduler.update",
        "scheduler.abort",
        "kv.allocate_slots",
        "kv.free",
        "add_request",
        "_execute",
        "_record_logprobs",
        "_record",
        "_notify",
    ],
)
def test_a_stream_that_the_garbage_collector_closes_within_a_step(
    llm, where, logprobs, monkeypatch
):
    """It is aborted after the step, and nobody else's tokens or blocks suffer."""
    params = replace(GREEDY, logprobs=logprobs)
    expected = [output.outputs for output in generate(llm, PROMPTS, params)]
    *path, name = where.split(".")
    owner = getattr(llm.engine, path[0]) if path else llm.engine
    wrapped, calls = getattr(owner, name), itertools.count()

    def collecting(*args, **kwargs):
        if next(calls) == 3:
            gc.collect()
        return wrapped(*args, **kwargs)

    gc.disable()
    try:
        abandon(llm)
        assert len(llm.output_processor.inboxes) == 2
        monkeypatch.setattr(owner, name, collecting)
        if where == "scheduler.abort":
            params = replace(params, stop=["qqq"])
            list(itertools.islice(llm.stream(PROMPTS * 2, GREEDY), 3))  # left: eight aborts
        outputs = [output.outputs for output in generate(llm, PROMPTS, params)]
    finally:
        gc.enable()
    assert next(calls) > 3
    assert outputs == expected


def test_an_observer_that_fails_costs_no_other_stream_its_last_text(llm):
    """The step that ends a stream is cut short while an older piece lies in its inbox."""
    text = generate(llm, "Once", replace(GREEDY, max_tokens=3))[0].outputs[0].text
    for stop in (None, [text[-1]]):
        short = replace(GREEDY, max_tokens=3, stop=stop)
        (expected,) = generate(llm, "Once", short)[0].outputs
        mine, other = llm.stream("Once", short), llm.stream("a fox", GREEDY)
        pieces = [next(mine)]
        next(other)

        def fail(event):
            raise OSError("disk full")

        llm.engine.observers.append(fail)
        with pytest.raises(OSError, match="disk full"):
            next(other)
        llm.engine.observers.clear()
        pieces += mine
        assert "".join(piece.outputs[0].text for piece in pieces) == expected.text
        last = pieces[-1].outputs[0]
        assert (last.finish_reason, last.stop_reason) == (
            "stop" if stop else "length",
            stop and stop[0],
        )
        assert not llm.engine.has_unfinished_requests()


def test_a_request_aborted_between_two_looks_shows_what_was_held_back(llm):
    text = generate(llm, "Once", replace(GREEDY, max_tokens=3))[0].outputs[0].text
    mine = llm.stream("Once", replace(GREEDY, stop=[text + "and no further"]))
    other = llm.stream("a fox", GREEDY)
    pieces = [next(mine)]
    for _ in range(3):
        next(other)
    llm.engine.abort(pieces[0].request_id)
    pieces += mine
    assert "".join(piece.outputs[0].text for piece in pieces).startswith(text)
    assert pieces[-1].outputs[0].finish_reason == "abort"
    other.close()


def test_a_request_that_is_taken_away_does_not_keep_its_reader_waiting(llm):
    stream = llm.stream("Once", GREEDY)
    piece = next(stream)
    llm.output_processor.abort(piece.request_id)
    with pytest.raises(RuntimeError, match="ended, and were not delivered"):
        list(stream)


@pytest.mark.parametrize("prompts", [None, 5, np.array([1, 2, 3]), {1, 2}])
def test_what_is_no_list_of_prompts_is_named(llm, prompts):
    with pytest.raises(TypeError, match="prompts must be a string, a list of token ids, a dict"):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize(
    "prompt",
    [
        [True, 5],
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": [np.bool_(True)]},
        {"prompt": 5, "prompt_token_ids": [3]},
        {"prompt": "a fox", "cache_salt": "mine"},
        {"prompt": None},
        {},
    ],
)
def test_what_is_no_prompt_is_named(llm, prompt):
    with pytest.raises(TypeError, match=r"prompts\[\d\] must be a string, a list of token ids"):
        llm.generate([prompt, "a fox"], use_tqdm=False)


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0}])
def test_what_are_no_sampling_params_is_named(llm, params):
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams or a list"):
        llm.generate(["Once"], params, use_tqdm=False)
