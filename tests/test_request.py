"""Requests: what is wrong is refused where it is written, and says field, value and range."""

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from tinyvllm.request import (
    CompletionOutput,
    GenerationOutput,
    Request,
    SamplingParams,
    check_integer,
    check_real,
)

INFINITE = [math.inf, -math.inf, math.nan]
NOT_A_NUMBER = [None, True, False, 10**400, "0.7", [1.0], 1j, *INFINITE]
NOT_AN_INTEGER = [True, False, 1.0, 1.5, "1", b"1", [1], (), {}, 1j, *INFINITE]
INTEGER = "must be an integer"
FLAG = "must be True or False"
IDS = "integers >= 0"
TEXTS = "must be None or a list of non-empty strings of valid Unicode"
NO_IDS = [0, 50, False, "", "ab", b"ab", {}, {5: 6}, [-1], [5, "6"], [True], [1.0], [None]]
BAD = {
    "n": [
        (v, f"{INTEGER} from 1 to 16384") for v in (None, 0, -1, 16385, 10**400, *NOT_AN_INTEGER)
    ],
    "temperature": [
        (v, "must be a number from 0.0 to 2.0") for v in (*NOT_A_NUMBER, -1e-9, 2.0001)
    ],
    "top_p": [
        (v, "must be a number above 0.0 and at most 1.0")
        for v in (*NOT_A_NUMBER, 0, 0.0, -0.1, 1.0001)
    ],
    "top_k": [(v, f"{INTEGER} from -1 to {2**31 - 1}") for v in (None, -2, 2**31, *NOT_AN_INTEGER)],
    "min_p": [(v, "must be a number from 0.0 to 1.0") for v in (*NOT_A_NUMBER, -1e-9, 1.0001)],
    "presence_penalty": [
        (v, "must be a number from -2.0 to 2.0") for v in (*NOT_A_NUMBER, -2.0001, 2.0001)
    ],
    "frequency_penalty": [
        (v, "must be a number from -2.0 to 2.0") for v in (*NOT_A_NUMBER, -2.0001, 2.0001)
    ],
    "repetition_penalty": [
        (v, "must be a number from 1.2e-38 to 3.4e+38")
        for v in (*NOT_A_NUMBER, 0, 0.0, -1.0, 1e-39, 1e39)
    ],
    "seed": [
        (v, f"{INTEGER} from {-(2**63)} to {2**63 - 1}")
        for v in (2**63, -(2**63) - 1, *NOT_AN_INTEGER)
    ],
    "max_tokens": [(v, f"{INTEGER} >= 1") for v in (0, -1, *NOT_AN_INTEGER)],
    "min_tokens": [(v, f"{INTEGER} from 0 to 16") for v in (None, -1, 17, *NOT_AN_INTEGER)],
    "logprobs": [(v, f"{INTEGER} >= -1") for v in (-2, *NOT_AN_INTEGER)],
    "prompt_logprobs": [(v, f"{INTEGER} >= -1") for v in (-2, *NOT_AN_INTEGER)],
    "ignore_eos": [(v, FLAG) for v in (None, 0, 1, "no", np.True_, [])],
    "stop_token_ids": [(v, f"must be None or a list of {IDS}") for v in NO_IDS],
    "allowed_token_ids": [
        *[(v, f"must be None or a list of {IDS}") for v in NO_IDS],
        *[(v, "must be None or hold at least one id") for v in ([], (), set())],
    ],
    "stop": [
        (v, TEXTS)
        for v in (0, True, b"ab", {}, {"a": 1}, [""], ["\udfff"], [5], ["a", None], [b"a"])
    ],
    "bad_words": [(v, TEXTS) for v in (0, True, "ab", b"ab", {}, [""], [5], ["a", None])],
    "logit_bias": [
        (v, "must be None or a dict by token id")
        for v in (0, True, "ab", [5], {-1: 1.0}, {"5": 1.0}, {1.0: 1.0}, {True: 1.0})
    ],
    "detokenize": [(v, FLAG) for v in (None, 0, 1, "yes")],
    "skip_special_tokens": [(v, FLAG) for v in (None, 0, 1, "yes")],
    "include_stop_str_in_output": [(v, FLAG) for v in (None, 0, 1, "yes")],
    "cache_salt": [
        (v, "must be None or a non-empty string of valid Unicode")
        for v in ("", "\ud800", 0, 7, b"s", True, ["s"])
    ],
    "priority": [
        (v, f"{INTEGER} from {-(2**31)} to {2**31 - 1}")
        for v in (None, 2**31, -(2**31) - 1, *NOT_AN_INTEGER)
    ],
}
GOOD = {
    "n": [1, 2, 16384, np.int64(3)],
    "temperature": [0, 0.0, 1e-9, 1, 2, 2.0, Fraction(1, 2), np.float32(0.5)],
    "top_p": [1e-9, 0.5, 1, 1.0, np.float32(0.5)],
    "top_k": [-1, 0, 1, 2**31 - 1, np.int64(5)],
    "min_p": [0, 0.0, 0.5, 1],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "repetition_penalty": [1e-30, 0.5, 1, 2, 1e30],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63), np.int32(7)],
    "max_tokens": [None, 1, 10**9, np.int64(5)],
    "min_tokens": [0, 16, np.int64(5)],
    "logprobs": [None, -1, 0, 5, 10**6],
    "prompt_logprobs": [None, -1, 0, 5],
    "allowed_token_ids": [None, [0], [5, 6]],
    "stop": [[], ["a"], ["a", "b"]],
    "bad_words": [[], ["a", " b"]],
    "logit_bias": [{}, {0: -100, 5: 100.0}],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "detokenize": [True, False],
    "skip_special_tokens": [True, False],
    "cache_salt": [None, "a", " "],
    "priority": [0, 2**31 - 1, -(2**31)],
}


def test_every_field_is_tested():
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [(n, v, text) for n, values in BAD.items() for v, text in values]
)
def test_bad_value_is_refused_with_field_value_and_range(name, value, allowed):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name} {allowed}, got {value!r}"


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in GOOD.items() for v in values])
def test_good_value_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, 16)
    assert (params.top_p, params.top_k, params.min_p, params.min_tokens) == (1.0, 0, 0.0, 0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert params.seed is None and params.stop_token_ids == [] and params.stop == []
    assert params.logprobs is None and params.prompt_logprobs is None
    assert params.logit_bias == {} and params.allowed_token_ids is None and params.bad_words == []
    assert not params.ignore_eos and params.detokenize and params.skip_special_tokens
    assert not params.include_stop_str_in_output


def test_a_stop_string_may_stand_alone_and_needs_text():
    assert SamplingParams(stop="so").stop == ["so"]
    assert SamplingParams(stop=("b", "a", "b")).stop == ["b", "a"]
    for bad in ("", b"so"):
        with pytest.raises(
            ValueError, match="stop must be None or a list of non-empty strings of valid Unicode"
        ):
            SamplingParams(stop=bad)
    with pytest.raises(ValueError, match=r"stop must be None with detokenize=False, got \['so'\]"):
        SamplingParams(stop="so", detokenize=False)


def test_min_tokens_is_at_most_max_tokens():
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6
    with pytest.raises(ValueError, match="min_tokens must be an integer from 0 to 3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize("bias", [100.1, -100.1, math.nan, math.inf, "1", None, True])
def test_a_bad_bias_names_its_token(bias):
    with pytest.raises(ValueError) as error:
        SamplingParams(logit_bias={3: 0.5, 7: bias})
    allowed = "logit_bias[7] must be a number from -100.0 to 100.0"
    assert str(error.value) == f"{allowed}, got {bias!r}"


def test_collections_are_copies():
    bias, words = {3: 1.0}, ["so"]
    params = SamplingParams(logit_bias=bias, bad_words=words, allowed_token_ids=(5, 5, 6))
    bias[4], words[0] = 2.0, "no"
    assert (params.logit_bias, params.bad_words) == ({3: 1.0}, ["so"])
    assert params.allowed_token_ids == [5, 6]


@pytest.mark.parametrize(
    "wish",
    [
        {"min_tokens": 1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"bad_words": ["so"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
    ],
)
def test_wishes_that_edit_the_logits_are_known(wish):
    assert SamplingParams(**wish).edits_logits
    assert SamplingParams(**wish).penalizes is any("penalty" in name for name in wish)


def test_most_requests_edit_nothing():
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop="so", logprobs=3)
    assert not params.edits_logits and not params.penalizes


def test_stop_token_ids_become_a_list_of_their_own():
    ids = [5, 6]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(7)
    assert params.stop_token_ids == [5, 6]
    assert SamplingParams(stop_token_ids=(5, 6)).stop_token_ids == [5, 6]
    assert SamplingParams(stop_token_ids={5}).stop_token_ids == [5]
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == []


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (1.0, False)]
)
def test_greedy_begins_below_vllms_threshold(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_numbers_of_numpy_become_pythons():
    """np.int8(100) + 60 is -96: such a number must not reach the engine's sums."""
    numbers = {"n": 2, "seed": 5, "max_tokens": 100, "min_tokens": 1, "top_k": 3, "priority": -1}
    numbers |= {"logprobs": 2, "prompt_logprobs": 0}
    params = SamplingParams(**{name: np.int8(value) for name, value in numbers.items()})
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert {type(getattr(params, name)) for name in numbers} == {int}
    lists = {"stop_token_ids": [np.int64(5)], "allowed_token_ids": (np.uint8(6),)}
    params = SamplingParams(**lists, logit_bias={np.int32(7): np.float32(0.5)})
    assert {type(i) for i in params.stop_token_ids + params.allowed_token_ids} == {int}
    assert [*map(type, params.logit_bias)] == [int] and params.logit_bias == {7: 0.5}
    request = Request("r", [np.int64(3), np.uint8(4), True], SamplingParams())
    assert [*map(type, request.prompt_token_ids)] == [int, int, bool]  # the engine refuses a bool


def test_params_are_frozen_and_a_changed_copy_is_checked():
    params = SamplingParams(max_tokens=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 4
    assert dataclasses.replace(params, max_tokens=4).max_tokens == 4
    assert params.max_tokens == 8
    with pytest.raises(ValueError, match="max_tokens must be an integer >= 1, got 0"):
        dataclasses.replace(params, max_tokens=0)


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=5)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("request_id", ["", None, 7, b"r"], "request_id must be a non-empty string"),
        (
            "prompt_token_ids",
            ["text", b"text", None, 5, iter([1]), {1}],
            "prompt_token_ids must be a list of integers",
        ),
        ("sampling_params", [None, {}, 16], "sampling_params must be a SamplingParams"),
        ("prompt", [5, b"text", ["text"]], "prompt must be None or a string"),
        (
            "arrival_time",
            [None, "now", -1.0, float("nan"), True],
            "arrival_time must be a number from 0.0 to inf",
        ),
        (
            "bad_words_token_ids",
            ["hot", [5], [[]], [[5], [-1]], [["a"]], {}],
            "bad_words_token_ids must be None or a list of lists of token ids",
        ),
        ("bad_words_token_ids", [[[5]]], "bad_words_token_ids need bad_words"),
    ],
)
def test_a_request_of_the_wrong_types_is_refused(field, values, message):
    good = {"request_id": "r0", "prompt_token_ids": [1], "sampling_params": SamplingParams()}
    for value in values:
        with pytest.raises(ValueError) as error:
            Request(**{**good, field: value})
        assert str(error.value) == f"{message}, got {value!r}"


def test_a_request_is_data():
    ids, params = [1, 2], SamplingParams(seed=3)
    request = Request("r0", ids, params, prompt="a b")
    ids.append(3)
    assert request.prompt_token_ids == [1, 2]
    assert Request("r0", (1, 2), params, prompt="a b") == request
    assert copy.deepcopy(request) == request == pickle.loads(pickle.dumps(request))
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.request_id = "r1"


def test_the_words_to_ban_are_the_requests_own():
    words, params = [[4]], SamplingParams(bad_words=["a"])
    request = Request("r0", [1], params, bad_words_token_ids=words)
    words[0].append("boom")
    assert request.bad_words_token_ids == [[4]]


@pytest.mark.parametrize(
    "field", ["n", "temperature", "stop_token_ids", "detokenize", "cache_salt"]
)
def test_an_integer_that_python_does_not_print_is_refused_in_words(field):
    with pytest.raises(
        ValueError, match=f"{field} must be .*got an integer of thousands of digits"
    ):
        SamplingParams(**{field: [10**5000] if field == "stop_token_ids" else 10**5000})


def test_the_engine_judges_token_ids_not_the_request():
    assert Request("r0", [], SamplingParams()).prompt_token_ids == []
    assert Request("r0", [-1, 10**9], SamplingParams()).prompt_token_ids == [-1, 10**9]


def test_outputs_start_empty_and_share_nothing():
    first, second = CompletionOutput(0), CompletionOutput(1)
    first.token_ids.append(7)
    assert second.token_ids == [] and not second.finished
    for reason in ("stop", "length", "abort"):
        assert CompletionOutput(0, finish_reason=reason).finished
    output = GenerationOutput("r0", None, [1])
    output.outputs.append(first)
    assert GenerationOutput("r1", None, [1]).outputs == []
    assert not output.finished and output.error is None


def test_checks_take_numpy_scalars_and_name_what_they_refuse():
    check_integer("size", np.int64(3), 1, 3)
    check_real("share", np.float32(0.5), 0.0, 1.0)
    with pytest.raises(ValueError, match=r"size must be an integer from 1 to 3, got "):
        check_integer("size", np.int64(4), 1, 3)
    with pytest.raises(ValueError, match=r"share must be a number from 0.0 to 1.0, got "):
        check_real("share", np.float32("nan"), 0.0, 1.0)
