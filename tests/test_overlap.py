"""Chapter 13: the engine that prepares a step while the last one runs does what the plain one does."""

import threading
import time
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tinyvllm.cuda_graphs
from tinyvllm.config import EngineConfig
from tinyvllm.cuda_graphs import make_engine
from tinyvllm.engine import Engine, MockModelRunner
from tinyvllm.execution_batch import flatten
from tinyvllm.model_runner import step_arrays
from tinyvllm.overlap import OverlappedEngine
from tinyvllm.request import Request, SamplingParams

VOCAB_SIZE, EOS, MAX_MODEL_LEN = 30, 29, 40


class Checked(OverlappedEngine):
    """Also compares every array of a predicted batch with what flattening the plan gives."""

    def _plan_and_execute(self):
        predicted, before = self._prediction, self.num_predicted
        plan, out = super()._plan_and_execute()
        if self.num_predicted > before:
            for ours, theirs in (
                (predicted.batch, expected := flatten(plan, self.kv, EOS)),
                (predicted.batch.sampling, expected.sampling),
            ):
                assert_same_arrays(step_arrays(ours), step_arrays(theirs))
            assert predicted.batch.num_prompt_logprobs == expected.num_prompt_logprobs
        return plan, out


def assert_same_arrays(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert np.array_equal(ours[name], array), name
        assert ours[name].dtype == array.dtype, name


def run(engine_class, config, script, num_blocks):
    """The events, outputs and free blocks of an engine that follows a script.

    The script has one entry a step: requests to add, and which of the live ones to abort.
    """
    runner = MockModelRunner(VOCAB_SIZE, num_blocks, config.block_size, MAX_MODEL_LEN)
    engine = engine_class(config, runner, EOS)
    events, outputs, added = [], {}, 0
    engine.observers.append(events.append)
    script = list(script)
    while script or engine.has_unfinished_requests():
        arrivals, aborts = script.pop(0) if script else ([], [])
        for prompt, wish in arrivals:
            engine.add_request(Request(f"r{added}", prompt, SamplingParams(**wish)))
            added += 1
        for number in aborts:
            if added and (output := engine.abort(f"r{number % added}")):
                outputs[output.request_id] = asdict(output)
        for output in engine.step():
            outputs[output.request_id] = asdict(output)
        engine.check_invariants()
    events = [asdict(event) | {"time": 0} for event in events]
    return engine, events, outputs


prompts = st.lists(st.integers(0, VOCAB_SIZE), min_size=0, max_size=14) | st.just([1, 2, 3, 4] * 3)
wishes = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 18)},
    optional={
        "priority": st.integers(0, 2),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
        "logit_bias": st.just({3: 1.0}),
        "logprobs": st.just(0),
        "prompt_logprobs": st.just(0),
        "stop_token_ids": st.just([5, 6]),
    },
)
scripts = st.lists(
    st.tuples(
        st.lists(st.tuples(prompts, wishes), max_size=2) | st.just([]),  # most steps bring nobody
        st.lists(st.integers(0, 9), max_size=1) | st.just([]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=scripts,
    block_size=st.sampled_from([1, 2, 4, 8]),
    usable_slots=st.integers(40, 120),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
)
def test_same_plans_blocks_tokens_and_outputs(
    script, block_size, usable_slots, budget, max_num_seqs, policy, caching
):
    config = EngineConfig(
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
    )
    num_blocks = usable_slots // block_size + 1
    plain, events, outputs = run(Engine, config, script, num_blocks)
    overlapped, same_events, same_outputs = run(Checked, config, script, num_blocks)
    assert same_events == events
    assert same_outputs == outputs
    assert overlapped.kv.num_free_blocks == plain.kv.num_free_blocks


def many(num=6, max_tokens=20, **wish):
    wish = {"max_tokens": max_tokens, "ignore_eos": True} | wish
    return [([([i % VOCAB_SIZE, 2, 3], wish) for i in range(num)], [])]


def test_most_steps_of_a_steady_batch_are_predicted():
    config = EngineConfig(block_size=4, max_num_seqs=8)
    engine, events, _ = run(Checked, config, many(), 100)
    assert len(events) == 20 and engine.num_predicted == 19  # all but the first


def test_a_full_house_with_others_waiting_is_predicted_too():
    config = EngineConfig(block_size=4, max_num_seqs=2)
    engine, events, _ = run(Checked, config, many(), 100)
    assert len(events) == 60 and engine.num_predicted == 57


@pytest.mark.parametrize(
    ("wish", "num_blocks"), [({"logit_bias": {3: 1.0}}, 100), ({"max_tokens": 1}, 100)]
)
def test_what_is_not_arithmetic_is_not_predicted(wish, num_blocks):
    engine, _, _ = run(Checked, EngineConfig(block_size=4), many(**wish), num_blocks)
    assert engine.num_predicted == 0


def test_no_cached_prefix_is_forgotten_by_a_prediction():
    """When all free blocks hold old prefixes, steps that take one are planned as always."""
    config = EngineConfig(block_size=1, max_num_seqs=2)
    first, second = many(2, 16), many(2, 16)
    second[0][0][:] = [([9, 8, 7], first[0][0][0][1]), ([8, 8, 7], first[0][0][0][1])]
    alone = run(Checked, config, first, 40)[0].num_predicted
    script = first + [([], [])] * 20 + second
    both = run(Checked, config, script, 40)[0].num_predicted
    assert alone == 15 and both < 2 * alone


def test_an_arrival_and_an_abort_undo_a_prediction():
    config = EngineConfig(block_size=4)
    quiet = run(Checked, config, many(), 100)[0].num_predicted
    for disturbance in (([([1], {"max_tokens": 2})], []), ([], [0])):
        script = [*many(), ([], []), ([], []), disturbance]
        plain = run(Engine, config, script, 100)[1:]
        engine, *same = run(Checked, config, script, 100)
        assert tuple(same) == plain
        assert 0 < engine.num_predicted < quiet


# -------------------------------------------------------------------------------------- failures


class Failing(MockModelRunner):
    """Raises in one step."""

    def __init__(self, step, error):
        super().__init__(VOCAB_SIZE, 100, 4, MAX_MODEL_LEN)
        self.countdown, self.error = step, error

    def execute(self, batch):
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error
        return super().execute(batch)


class FailingLaunch(Failing):
    """Raises before anything has begun."""

    def launch(self, batch):
        out = self.execute(batch)
        return type("Done", (), {"result": lambda self: out})()


@pytest.mark.parametrize("runner_class", [Failing, FailingLaunch])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_model_that_fails_is_rolled_back_and_the_work_goes_on(runner_class, error, step):
    results = []
    for engine_class in (Engine, Checked):
        runner = runner_class(step, error)
        engine = engine_class(EngineConfig(block_size=4), runner, EOS)
        events, outputs = [], {}
        engine.observers.append(events.append)
        for prompt, wish in many()[0][0]:
            engine.add_request(Request(str(prompt), prompt, SamplingParams(**wish)))
        failures = 0
        while engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: asdict(output) for output in engine.step()}
            except (RuntimeError, KeyboardInterrupt) as caught:
                assert caught is error
                failures += 1
            engine.check_invariants()
        assert failures == 1
        results.append((outputs, [asdict(event) | {"time": 0} for event in events]))
    assert results[0] == results[1]


def test_a_plan_that_is_not_as_predicted_is_an_error(monkeypatch):
    """It cannot happen; if it does, it is named, and taken back."""
    runner = MockModelRunner(VOCAB_SIZE, 100, 4, MAX_MODEL_LEN)
    engine = OverlappedEngine(EngineConfig(block_size=4), runner, EOS)
    wish = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.add_request(Request("a", [1, 2], wish))
    engine.step()
    engine._prediction.batch.positions[0] += 1
    with pytest.raises(RuntimeError, match=r"predicted .*\(Sequence.*3, 1\).*planned"):
        engine.step()
    engine.check_invariants()
    for _ in range(3):
        engine.step()
    engine._prediction.new_blocks = {0: 77}
    with pytest.raises(RuntimeError, match=r"predicted block 77 for row 0, planned \d"):
        engine.step()
    engine.check_invariants()
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    token_ids = [1, 2]
    for token_id in outputs[0].outputs[0].token_ids:
        assert token_id == runner.next_token(token_ids)
        token_ids.append(token_id)


def test_an_observer_that_fails_loses_no_output():
    config = EngineConfig(block_size=4)
    results = []
    for engine_class in (Engine, Checked):
        engine = engine_class(config, MockModelRunner(VOCAB_SIZE, 100, 4, MAX_MODEL_LEN), EOS)
        steps, outputs, errors = [], {}, 0

        def observe(event, steps=steps):
            steps.append(event)
            if len(steps) % 3 == 0:
                raise RuntimeError("observer")

        engine.observers.append(observe)
        for prompt, wish in many()[0][0]:
            engine.add_request(Request(str(prompt), prompt, SamplingParams(**wish)))
        while engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: asdict(output) for output in engine.step()}
            except RuntimeError:
                errors += 1
        results.append((outputs, errors, len(steps)))
    assert results[0] == results[1] and results[0][1] > 3


def threads_become(count):
    """Whether so many of our threads are left, at once or soon: a thread takes time to end."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        names = [thread.name for thread in threading.enumerate()]
        if sum(name.startswith("tinyvllm-model") for name in names) == count:
            return True
        time.sleep(0.01)
    return False


def test_no_thread_is_left_when_no_request_is():
    config = EngineConfig(block_size=4)
    for script in (many(), [*many(), ([], []), ([], [0, 1, 2, 3, 4, 5])]):
        run(OverlappedEngine, config, script, 100)
        assert threads_become(0)
    runner = MockModelRunner(VOCAB_SIZE, 100, 4, MAX_MODEL_LEN)
    engine = OverlappedEngine(config, runner, EOS)
    engine.add_request(Request("a", [1, 2], SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    assert threads_become(1)
    engine.abort("a")
    assert threads_become(0)


class Impatient(OverlappedEngine):
    """Two interrupts: one ends the wait for a step, one the wait of the cleaning up."""

    def _launch(self, batch):
        def interrupt():
            raise KeyboardInterrupt

        super()._launch(batch)
        return type("Pending", (), {"result": lambda self: interrupt()})()


def test_no_two_threads_run_a_model_at_once():
    """The last request goes while a step still runs: its thread is waited for."""
    runner = MockModelRunner(VOCAB_SIZE, 100, 4, MAX_MODEL_LEN)
    started, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def execute(batch):
        started.set()
        assert go_on.wait(10)
        time.sleep(0.05)
        done.set()

    runner.execute = execute
    engine = Impatient(EngineConfig(block_size=4), runner, EOS)
    engine.add_request(Request("a", [1, 2], SamplingParams(max_tokens=9)))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert started.wait(10) and not done.is_set()
    engine.check_invariants()
    go_on.set()
    engine.abort("a")
    assert done.is_set() and threads_become(0)


# --------------------------------------------------------------------------------------- the door


@pytest.mark.parametrize("device, on_gpu", [("cpu", False), ("cuda", True), ("cuda:1", True)])
@pytest.mark.parametrize("overlapped", [False, True])
def test_the_config_picks_runner_and_engine(monkeypatch, device, on_gpu, overlapped):
    made = []

    def fake(name):
        def make(config):
            made.append(name)
            runner = MockModelRunner(max_model_len=64)
            runner.eos_token_id = 7
            return runner

        return make

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("ModelRunner", "CudaModelRunner"):
        monkeypatch.setattr(tinyvllm.cuda_graphs, name, fake(name))
    engine = make_engine(EngineConfig(device=device, async_scheduling=overlapped))
    assert made == ["CudaModelRunner" if on_gpu else "ModelRunner"]
    assert type(engine) is (OverlappedEngine if overlapped else Engine)
    assert engine.scheduler.eos_token_id == 7
