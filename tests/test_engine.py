"""The engine around the scheduler: refusals, several continuations, log-probabilities, stops."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine, MockModelRunner, logprob_dict
from tinyvllm.execution_batch import TokenLogprobs
from tinyvllm.request import Logprob, Request, SamplingParams

PROMPT = list(range(1, 41))


class NumberedLogprobs(MockModelRunner):
    """Reports what can be told apart: place i of the prompt scores -i, sample i scores -i/8."""

    def execute(self, batch):
        out = super().execute(batch)
        sampling, k = batch.sampling, 3
        for name, places in (
            ("prompt_logprobs", batch.positions[batch.prompt_logits_indices] + 1.0),
            ("logprobs", sampling.output_indices[sampling.logprob_rows] / 8),
        ):
            scores = getattr(out, name)
            ids = np.concatenate(
                [scores.token_ids, np.tile(np.arange(k), (len(places), 1))], axis=1
            )
            logprobs = np.tile(-places[:, None], 1 + k).astype(np.float32)
            setattr(out, name, TokenLogprobs(ids, logprobs, np.full(len(places), 9)))
        return out


def make_engine(runner=None, **config) -> Engine:
    config = {"block_size": 4, "max_model_len": 256} | config
    runner = runner or NumberedLogprobs(block_size=config["block_size"], num_blocks=256)
    return Engine(EngineConfig(**config), runner, eos_token_id=0)


def request(name="r", prompt=PROMPT, bad_words_token_ids=None, **wish) -> Request:
    return Request(name, list(prompt), SamplingParams(**wish), None, 0.0, bad_words_token_ids)


def finish(engine: Engine) -> dict:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_invariants()
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    return outputs


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"logit_bias": {5: 1, 1000: 1}}, "logit_bias must hold token ids from 0 to 999, got 1000"),
        ({"stop_token_ids": [1000]}, "stop_token_ids must hold token ids from 0 to 999, got 1000"),
        (
            {"allowed_token_ids": [5, 4000]},
            "allowed_token_ids must hold token ids from 0 to 999, got 4000",
        ),
        (
            {"bad_words": ["x"], "bad_words_token_ids": [[5, 1000]]},
            "bad_words must hold token ids from 0 to 999, got 1000",
        ),
        ({"bad_words": ["x"]}, "bad_words need a tokenizer, which the engine has not, got ['x']"),
        (
            {"allowed_token_ids": [0, 7], "min_tokens": 1, "stop_token_ids": [7]},
            "allowed_token_ids, bad_words and min_tokens leave no token to generate",
        ),
        (
            {"allowed_token_ids": [7], "bad_words": ["x"], "bad_words_token_ids": [[7]]},
            "allowed_token_ids, bad_words and min_tokens leave no token to generate",
        ),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused_alone(wish, error):
    engine = make_engine()
    engine.add_request(request("odd", **wish))
    engine.add_request(request("good", max_tokens=3))
    outputs = finish(engine)
    assert outputs["odd"].error == error and outputs["odd"].finished
    assert len(outputs["good"].outputs[0].token_ids) == 3


def test_a_wish_that_leaves_one_token_is_granted():
    engine = make_engine()
    words = {"bad_words": ["x"], "bad_words_token_ids": [[7], [8, 9]]}
    engine.add_request(request(allowed_token_ids=[0, 7, 8], min_tokens=1, **words))
    assert finish(engine)["r"].error is None


# ----------------------------------------------------------------------------- log-probabilities


def test_logprobs_of_one_place():
    scores = TokenLogprobs(
        np.array([[7, 3, 7, 5]]), np.log(np.float32([[0.3, 0.4, 0.3, 0.2]])), np.array([2])
    )
    sampled = {7: Logprob(math.log(np.float32(0.3)), 2)}
    best = {3: Logprob(math.log(np.float32(0.4)), 1)}
    for count, ids in ((0, [7]), (1, [7, 3]), (2, [7, 3]), (3, [7, 3, 5]), (9, [7, 3, 5])):
        entries = logprob_dict(scores, 0, count)
        assert list(entries) == ids
        assert {i: e.rank for i, e in entries.items()} == {i: {7: 2, 3: 1, 5: 3}[i] for i in ids}
    assert logprob_dict(scores, 0, -1) == logprob_dict(scores, 0, 3)
    for token_id, entry in (sampled | best).items():
        assert entries[token_id].logprob == pytest.approx(entry.logprob)


def test_each_request_gets_as_many_logprobs_as_it_asked_for():
    engine = make_engine()
    for name, count in (("none", None), ("own", 0), ("two", 2), ("all", -1)):
        engine.add_request(request(name, logprobs=count, max_tokens=4))
    outputs = finish(engine)
    assert outputs["none"].outputs[0].logprobs is None
    assert outputs["none"].outputs[0].cumulative_logprob is None
    for name, count in (("own", 1), ("two", 3), ("all", 4)):
        [completion] = outputs[name].outputs
        assert len(completion.logprobs) == 4
        for i, (token_id, entries) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)
        ):
            assert len(entries) == len({token_id, *range(count - 1)})
            assert entries[token_id].logprob == -i / 8
        assert completion.cumulative_logprob == -(0 + 1 + 2 + 3) / 8


@pytest.mark.parametrize("budget", [1, 3, 16, 39, 40, 2048])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_are_whole_however_the_prompt_is_computed(budget, warm):
    engine = make_engine(max_num_batched_tokens=budget)
    if warm:
        engine.add_request(request("before", max_tokens=1))
        finish(engine)
    engine.add_request(request("twin", max_tokens=2))
    engine.add_request(request(prompt_logprobs=0, n=3, max_tokens=2))
    outputs = finish(engine)
    first, *others = outputs["r"].prompt_logprobs
    assert first is None and outputs["twin"].prompt_logprobs is None
    assert others == [{PROMPT[i]: Logprob(-float(i), 9)} for i in range(1, len(PROMPT))]
    assert outputs["r"].num_cached_tokens == 0  # to score the prompt is to compute it


def test_a_preempted_request_scores_its_prompt_once():
    runner = NumberedLogprobs(block_size=4, num_blocks=24)
    engine, events = make_engine(runner, max_num_batched_tokens=7), []
    engine.observers.append(events.append)
    for name in "abc":
        wish = {"prompt_logprobs": 1, "logprobs": 0, "max_tokens": 30}
        engine.add_request(request(name, PROMPT[:20], **wish))
    outputs = finish(engine)
    assert any(event.preempted for event in events)
    for output in outputs.values():
        scored = [
            entries[i].logprob
            for i, entries in zip(PROMPT[1:20], output.prompt_logprobs[1:], strict=True)
        ]
        assert scored == [-float(i) for i in range(1, 20)]
        assert [
            entries[i].logprob
            for i, entries in zip(
                output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
            )
        ] == [-i / 8 for i in range(30)]


def test_an_abort_while_the_model_runs_drops_its_logprobs():
    class AbortsMeanwhile(NumberedLogprobs):
        def execute(self, batch):
            out = super().execute(batch)
            if engine.num_steps == 1:
                self.aborted = engine.abort("a")
            return out

    runner = AbortsMeanwhile(block_size=4, num_blocks=256)
    engine = make_engine(runner, max_num_batched_tokens=30)
    for name in "ab":
        engine.add_request(request(name, logprobs=0, prompt_logprobs=0, max_tokens=5))
    outputs = finish(engine)
    assert len(runner.aborted.prompt_logprobs) == 31 and runner.aborted.outputs[0].logprobs == []
    assert len(outputs["b"].prompt_logprobs) == 40 and len(outputs["b"].outputs[0].logprobs) == 5


# ---------------------------------------------------------------------- several continuations


def test_continuations_share_the_prompt_and_come_in_order():
    engine, events = make_engine(), []
    engine.observers.append(events.append)
    engine.add_request(request(n=4, max_tokens=5, seed=3))
    output = finish(engine)["r"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    hits = {name: count for event in events for name, count in event.hits.items()}
    assert hits == {"0_r": 0, "1_r": 36, "2_r": 36, "3_r": 36}  # all but the block that is sampled
    prompt_tokens = sum(num for event in events for _, _, num in event.scheduled) - 4 * 4
    assert prompt_tokens == 40 + 3 * 4


@pytest.mark.parametrize("steps", range(8))
def test_all_continuations_go_with_their_parent(steps):
    engine = make_engine(max_num_batched_tokens=30)
    engine.add_request(request(n=3, max_tokens=5))
    for _ in range(steps):
        engine.step()
    output = engine.abort("r")
    if output is not None:
        assert [completion.finished for completion in output.outputs] == [True] * 3
        assert "abort" in {completion.finish_reason for completion in output.outputs}
    assert engine.step() == [] and engine.kv.num_free_blocks == engine.kv.num_usable_blocks


# ---------------------------------------------------------------------------------------- stops


def test_a_stop_string_ends_one_continuation():
    engine = make_engine()
    engine.add_request(request(n=2, max_tokens=5))
    [output] = engine.step()
    engine.stop(output, 1, "so")
    engine.check_invariants()
    assert not output.finished
    finish(engine)
    assert [completion.finish_reason for completion in output.outputs] == ["length", "stop"]
    assert [completion.stop_reason for completion in output.outputs] == [None, "so"]
    assert [len(completion.token_ids) for completion in output.outputs] == [5, 1]


def test_a_stop_string_in_the_last_token_is_the_reason():
    engine = make_engine()
    engine.add_request(request(max_tokens=1))
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "length"
    engine.stop(output, 0, "so")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "so")
    assert output.finished and not engine.has_unfinished_requests()


def test_a_stop_of_a_forgotten_output_harms_no_request_of_the_same_name():
    engine = make_engine()
    engine.add_request(request(max_tokens=1))
    [old] = engine.step()
    engine.add_request(request(max_tokens=3))
    engine.stop(old, 0, "so")
    assert len(finish(engine)["r"].outputs[0].token_ids) == 3


def test_min_tokens_reach_the_sampler_with_the_engines_eos():
    class Recorder(MockModelRunner):
        def execute(self, batch):
            forbidden.append(batch.sampling.forbidden.tolist())
            return super().execute(batch)

    forbidden = []
    runner = Recorder(block_size=4, num_blocks=64)
    engine = make_engine(runner)
    engine.add_request(request(min_tokens=2, max_tokens=4))
    finish(engine)
    assert forbidden == [[[0, 0]], [[0, 0]], [], []]


def test_outputs_are_made_for_what_was_asked():
    params = SamplingParams(n=2, logprobs=0, prompt_logprobs=0, max_tokens=1)
    engine = make_engine()
    engine.add_request(replace(request(), sampling_params=params))
    [output] = engine.step()
    assert output.prompt_logprobs[0] is None
    assert [len(completion.logprobs) for completion in output.outputs] == [1, 1]


# ------------------------------------------------------------------- what a tester broke once


class Scripted(MockModelRunner):
    """Its first answers are given, and something may happen while it runs."""

    def __init__(self, *args, script=(), during=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.script, self.during = list(script), during

    def execute(self, batch):
        if self.during:
            self.during()
        out = super().execute(batch)
        if self.script:
            out.sampled_token_ids = self.script.pop(0)
        return out


def test_an_abort_leaves_a_stranger_with_the_name_of_a_finished_sequence_alone():
    engine = make_engine(Scripted(50, 64, 4, 256, script=[[0, 7]]))
    engine.add_request(request("x", [1, 2, 3], n=2, max_tokens=8))
    [x] = engine.step()  # continuation 0 ends at once
    engine.add_request(request("0_x", [4, 5, 6], max_tokens=8))
    engine.step()
    assert engine.abort("x") is x
    assert [completion.finish_reason for completion in x.outputs] == ["stop", "abort"]
    assert len(finish(engine)["0_x"].outputs[0].token_ids) == 8


def test_an_output_without_a_sequence_breaks_an_invariant():
    engine = make_engine()
    engine.add_request(request(max_tokens=8))
    engine.step()
    engine.scheduler.abort("r")
    with pytest.raises(AssertionError, match=r"\['r'\] are alive, \[\] are served"):
        engine.check_invariants()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("victims", ["a", "ab", "b"])
def test_an_abort_and_an_error_in_one_step_leave_no_unwritten_block(error, victims):
    """`a` computes the shared prefix, `b` finds it in the same step; then all goes wrong."""
    prompt = list(range(1, 13))

    def interrupt():
        for name in victims:
            engine.abort(name)
        raise error

    runner = Scripted(50, 64, 4, 256, during=interrupt)
    engine = make_engine(runner)
    for name in "ab":
        engine.add_request(request(name, prompt, max_tokens=3))
    with pytest.raises(error):
        engine.step()
    runner.during = None
    engine.check_invariants()
    engine.add_request(request("c", [*prompt, 7], max_tokens=1))
    assert finish(engine)["c"].outputs[0].token_ids == [runner.next_token([*prompt, 7])]


def test_memory_of_an_aborted_request_is_free_once_the_model_is_done_with_it():
    runner = Scripted(50, 64, 4, 256)
    engine = make_engine(runner)
    engine.add_request(request(max_tokens=8))

    def abort():
        free = engine.kv.num_free_blocks
        engine.abort("r")
        assert engine.kv.num_free_blocks == free  # the model may still write

    runner.during = abort
    engine.step()
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    engine.check_invariants()


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64])
def test_numbers_of_numpy_are_as_good_as_pythons(kind):
    engine = make_engine(Scripted(50, 20, 4, 256), seed=kind(3), block_size=kind(4))
    engine.add_request(request("a", [1] * 60, max_tokens=kind(100), seed=kind(5)))
    engine.add_request(request("b", np.array([2] * 5, kind).tolist(), max_tokens=kind(10)))
    engine.add_request(request("c", list(np.array([2] * 5, kind)), max_tokens=kind(10), n=kind(2)))
    outputs = finish(engine)
    assert "may need 40 KV blocks, the cache has 19" in outputs["a"].error
    assert outputs["b"].error is None and outputs["c"].error is None


def test_a_bool_is_no_token():
    engine = make_engine()
    engine.add_request(request("r", [True, 5]))
    assert "prompt_token_ids must be integers from 0 to 999, got True" in finish(engine)["r"].error


def test_an_observer_that_fails_loses_nothing():
    engine, steps = make_engine(), []

    def observer(event):
        steps.append(event.step)
        if len(steps) == 3:
            raise OSError("disk full")

    engine.observers.append(observer)
    engine.add_request(request(max_tokens=3))
    engine.step()
    engine.step()
    with pytest.raises(OSError, match="disk full"):
        engine.step()
    [output] = engine.step()
    assert output.finished and len(output.outputs[0].token_ids) == 3 and steps == [0, 1, 2]


@pytest.mark.parametrize("name", ["", None, 7, ["r"], {}])
def test_what_is_no_id_is_named(name):
    engine = make_engine()
    for call in (engine.abort, engine.explain):
        with pytest.raises(ValueError, match="request_id must be a non-empty string"):
            call(name)


def test_the_name_of_a_refused_request_is_free_once_it_was_told():
    engine = make_engine()
    engine.add_request(request("r", []))
    with pytest.raises(ValueError, match="request_id 'r' is in use"):
        engine.add_request(request("r"))
    [output] = engine.step()
    assert output.error
    engine.add_request(request("r"))


def test_to_abort_many_that_wait_costs_little_each():
    """Counted in comparisons of ranks: searching the queue for each would need n * n."""

    def comparisons(count):
        engine = make_engine(max_num_seqs=1)
        engine.add_request(request(n=count, max_tokens=3))
        engine.step()
        waiting = engine.scheduler.waiting
        waiting.heap = [(Rank(rank), seq) for rank, seq in waiting.heap]
        Rank.comparisons = 0
        engine.abort("r")
        assert len(waiting) == 0 and not waiting.removed
        return Rank.comparisons

    class Rank(tuple):
        comparisons = 0

        def __lt__(self, other):
            Rank.comparisons += 1
            return tuple.__lt__(self, other)

        def __eq__(self, other):
            Rank.comparisons += 1
            return tuple.__eq__(self, other)

        __hash__ = tuple.__hash__

    assert comparisons(1024) < 40 * comparisons(64)  # n log n; searching would be 256


def test_engine_and_runner_agree_on_the_block_size():
    with pytest.raises(ValueError, match="block_size must be an integer from 16 to 16, got 4"):
        Engine(EngineConfig(block_size=4), MockModelRunner())


@pytest.mark.parametrize("eos_token_id", [-1, 1000, 1.0])
def test_an_end_token_outside_the_vocabulary_is_refused(eos_token_id):
    with pytest.raises(ValueError, match=r"eos_token_id must be an integer from 0 to 999, got"):
        Engine(EngineConfig(), MockModelRunner(vocab_size=1000), eos_token_id)


def test_a_prefix_cache_that_was_reset_finds_nothing():
    engine = make_engine()

    def cached(name):
        engine.add_request(request(name, range(10), max_tokens=3))
        return finish(engine)[name].num_cached_tokens

    assert [cached("first"), cached("second")] == [0, 8]
    engine.kv.reset_prefix_cache()
    engine.check_invariants()
    assert [cached("third"), cached("fourth")] == [0, 8]


def test_a_prefix_cache_in_use_is_not_reset():
    engine = make_engine()
    engine.add_request(request("r", range(10), max_tokens=3))
    engine.step()
    with pytest.raises(RuntimeError, match="cannot reset: 1 sequences hold blocks"):
        engine.kv.reset_prefix_cache()
    engine.check_invariants()


def test_an_abort_takes_a_refusal_back():
    engine = make_engine()
    engine.add_request(request("r", []))
    engine.add_request(request("good", max_tokens=2))
    assert "at least one token" in engine.abort("r").error
    assert engine.abort("r") is None
    engine.add_request(request("r", max_tokens=2))
    outputs = finish(engine)
    assert outputs["r"].error is None and len(outputs["r"].outputs[0].token_ids) == 2
