"""The equivalence ladder: whatever the engine does to be fast, the tokens stay the same.

Rung 0 is `transformers`. Rung 1 is the naive loop over our own model: a full forward pass over all
tokens for every new one, attention without a cache, then the argmax or one draw. Rung 2 is the
engine, in every setting that changes how the work is cut up. On a CPU in float32 all three give the
same tokens.
"""

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SHAPES, make_hf, save
from sampling import make_sampling

from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine, MockModelRunner
from tinyvllm.gpt2 import ASSETS, GPT2, load_model
from tinyvllm.model_runner import ModelRunner
from tinyvllm.request import Request, SamplingParams
from tinyvllm.sampler import sample

MODELS = [*SHAPES, "shipped"]
MAX_MODEL_LEN = 64
CPU = {"device": "cpu", "dtype": "float32"}

# Each cuts the same work up in another way.
SETTINGS = {
    "defaults": {},
    "budget-1": {"max_num_batched_tokens": 1},
    "budget-7-blocks-of-3": {"max_num_batched_tokens": 7, "block_size": 3},
    "blocks-of-1": {"block_size": 1, "num_gpu_blocks_override": 500},
    "no-caching": {"enable_prefix_caching": False},
    "one-at-a-time": {"max_num_seqs": 1},
    "no-chunks": {"enable_chunked_prefill": False, "max_num_seqs": 2},
    "priority": {"scheduling_policy": "priority", "max_num_seqs": 3},
    "long-prefill-threshold": {
        "long_prefill_token_threshold": 3,
        "block_size": 2,
        "num_gpu_blocks_override": 200,
    },
    "tight": {"block_size": 4, "num_gpu_blocks_override": 18},
    "tight-no-caching": {
        "block_size": 4,
        "num_gpu_blocks_override": 18,
        "enable_prefix_caching": False,
    },
    "tight-budget-9": {
        "block_size": 4,
        "num_gpu_blocks_override": 18,
        "max_num_batched_tokens": 9,
        "max_num_seqs": 8,
    },
    "tight-no-gate": {
        "block_size": 2,
        "num_gpu_blocks_override": 36,
        "scheduler_reserve_full_isl": False,
    },
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """The folder of a model; those of odd shapes are made when they are first asked for."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder_of(name: str):
        return ASSETS if name == "shipped" else save(make_hf(**SHAPES[name]), root / name)

    return folder_of


@pytest.fixture(scope="session")
def model_of(folder_of):
    """Our model of that name, loaded once."""
    return cache(lambda name: load_model(folder_of(name), **CPU))


def dense_attention(layer, query, key, value, scale):
    """Causal attention over one whole sequence: `[T, H, D]` three times, no cache anywhere."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@torch.inference_mode()
def naive_loop(model: GPT2, prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    """Rung 1: for every new token, the whole sequence from the start."""
    token_ids = list(prompt)
    end = min(MAX_MODEL_LEN, len(prompt) + (params.max_tokens or MAX_MODEL_LEN))
    while len(token_ids) < end:
        hidden = model.forward(
            torch.tensor(token_ids), torch.arange(len(token_ids)), dense_attention
        )
        output, seed = token_ids[len(prompt) :], (params.seed or 0) + index
        forbidden = [(0, model.config.eos_token_id)] if len(output) < params.min_tokens else []
        batch = make_sampling(
            [params], texts=[(prompt, output)], seeds=np.array([seed]), forbidden=forbidden
        )
        token_ids += sample(model.compute_logits(hidden[-1:]), batch)[0].tolist()
        if token_ids[-1] == model.config.eos_token_id and not params.ignore_eos:
            break
    return token_ids[len(prompt) :]


def make_engine(model: GPT2, **settings) -> Engine:
    """An engine around a loaded model; 100 blocks unless the settings say otherwise."""
    defaults = {"num_gpu_blocks_override": 100, "max_model_len": MAX_MODEL_LEN}
    config = EngineConfig(**CPU | defaults | settings)
    return Engine(config, ModelRunner(config, model), eos_token_id=model.config.eos_token_id)


class Watcher:
    """An observer that holds every step to the rules of bookkeeping, and counts what happened."""

    def __init__(self):
        self.computed: dict[str, int] = {}  # by sequence: tokens whose keys and values are stored
        self.num_chunks = self.num_preemptions = self.num_hit_tokens = 0

    def __call__(self, event):
        """Positions go on where they stopped; only an admission may start at what the cache has."""
        self.num_preemptions += len(event.preempted)
        self.num_hit_tokens += sum(event.hits.values())
        for seq_id, start, num_tokens in event.scheduled:
            if seq_id in event.hits:
                self.computed[seq_id] = event.hits[seq_id]
            assert start == self.computed[seq_id], f"{seq_id} jumps"
            assert num_tokens >= 1, f"{seq_id} has nothing to compute"
            self.computed[seq_id] += num_tokens
            self.num_chunks += seq_id not in event.sampled


def run(engine: Engine, requests: list[Request], aborts: dict[str, int] | None = None) -> dict:
    """Rung 2: step to the end, checking every invariant; `aborts` says who leaves at which step.

    Returns the token ids of every continuation by request id, of those that were not aborted.
    """
    aborts = dict(aborts or {})
    engine.observers.append(Watcher())
    outputs = {}
    for request in requests:
        engine.add_request(request)
    for step in itertools.count():
        for request_id in [i for i, when in aborts.items() if when == step]:
            assert engine.abort(request_id).finished
            assert engine.abort(request_id) is None, "a second abort does nothing"
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            assert output.error is None
            assert aborts.get(output.request_id, step + 1) > step, "an output after the abort"
            if output.finished:
                outputs[output.request_id] = [c.token_ids for c in output.outputs]
        engine.check_invariants()
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    return outputs


def workload(vocab_size: int) -> list[Request]:
    """Prompts that share, repeat and fill blocks exactly; greedy and drawn, one and several."""
    rng = random.Random(vocab_size)

    def ids(count):
        return [rng.randrange(vocab_size) for _ in range(count)]

    shared = ids(16)
    until_eos = SamplingParams(temperature=0, max_tokens=12)
    greedy = replace(until_eos, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, max_tokens=10, seed=1, ignore_eos=True)
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}
    wishes = {"top_k": 5, "top_p": 0.9, "min_p": 0.02, "logit_bias": {1: 0.5}, "min_tokens": 8}
    return [
        Request("aligned", shared, greedy),
        Request("twin", shared, greedy),
        Request("longer", shared + ids(5), replace(drawn, priority=1)),
        Request("single token", ids(1), replace(greedy, max_tokens=7)),
        Request("three drawn", ids(30), replace(drawn, n=3, temperature=1.3, seed=7)),
        Request("two greedy", shared[:8] + ids(1), replace(greedy, n=2, priority=-1)),
        Request("until the EOS", ids(9), until_eos),
        Request("drawn until the EOS", ids(11), replace(drawn, ignore_eos=False)),
        Request("greedy, penalized", shared + ids(3), replace(greedy, **penalties)),
        Request(
            "every wish", ids(20), replace(drawn, n=2, ignore_eos=False, **wishes, **penalties)
        ),
        Request("to the limit", ids(59), replace(drawn, max_tokens=None, seed=-(2**63))),
    ]


def neighbours(vocab_size: int) -> list[Request]:
    """Requests that take part in the batch and in the cache, and leave before they finish."""
    rng = random.Random(-vocab_size)
    shared = workload(vocab_size)[0].prompt_token_ids
    params = SamplingParams(max_tokens=30, n=2, ignore_eos=True)
    return [
        Request(f"neighbour {i}", [*shared[: 4 * i], rng.randrange(vocab_size)], params)
        for i in range(4)
    ]


@pytest.fixture(scope="session")
def expected_of(model_of):
    """What the naive loop makes of a model's workload, computed once."""

    @cache
    def expected_of(name: str) -> dict[str, list[list[int]]]:
        model = model_of(name)
        return {
            request.request_id: [
                naive_loop(model, request.prompt_token_ids, request.sampling_params, index)
                for index in range(request.sampling_params.n)
            ]
            for request in workload(model.config.vocab_size)
        }

    return expected_of


@pytest.mark.parametrize("name", MODELS)
def test_naive_loop_equals_transformers(name, folder_of, model_of, expected_of):
    """Rung 1 stands on rung 0: greedy tokens, and logits to float32 precision."""
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder_of(name)).eval()
    ours = model_of(name)
    for request in workload(ours.config.vocab_size):
        prompt = torch.tensor(request.prompt_token_ids)
        with torch.inference_mode():
            expected = theirs(prompt[None]).logits[0]
            hidden = ours.forward(prompt, torch.arange(len(prompt)), dense_attention)
            torch.testing.assert_close(ours.compute_logits(hidden), expected, atol=1e-4, rtol=1e-4)
        params = request.sampling_params
        if not params.greedy or params.edits_logits:
            continue
        eos_token_id = None if params.ignore_eos else ours.config.eos_token_id
        theirs.generation_config.eos_token_id = eos_token_id
        generated = theirs.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            do_sample=False,
            max_new_tokens=params.max_tokens,
            pad_token_id=0,
        )
        assert expected_of(name)[request.request_id][0] == generated[0, len(prompt) :].tolist()


ORDERS = ["in-order", "reversed", "neighbours-aborted"]
# Every setting in every order on two models, and two settings that do it all on the others.
MATRIX = [
    *itertools.product(["three_heads_of_five", "shipped"], SETTINGS, ORDERS),
    *itertools.product(MODELS[:-1], ["tight-budget-9", "tight-no-caching"], ORDERS[2:]),
]


@pytest.mark.parametrize("name, setting, order", MATRIX)
def test_engine_equals_naive_loop(name, setting, order, model_of, expected_of):
    """Rung 2 stands on rung 1: every token of every request, whatever the setting."""
    model = model_of(name)
    engine = make_engine(model, **SETTINGS[setting])
    requests, aborts = workload(model.config.vocab_size), {}
    if order == "reversed":
        requests.reverse()
    if order == "neighbours-aborted":
        others = neighbours(model.config.vocab_size)
        aborts = {request.request_id: 2 * i for i, request in enumerate(others)}
        requests = [r for pair in zip(others, requests, strict=False) for r in pair] + requests[4:]
    assert run(engine, requests, aborts) == expected_of(name)
    # The setting did what it is here for.
    (watcher,) = engine.observers
    assert bool(watcher.num_preemptions) == setting.startswith("tight")
    assert bool(watcher.num_chunks) == ("budget" in setting or "threshold" in setting)
    assert bool(watcher.num_hit_tokens) == (setting not in ("no-caching", "tight-no-caching"))


# What users of other engines ran into, as statements about ours.


@pytest.fixture
def model(model_of):
    return model_of("three_heads_of_five")


def ids(count: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return [random.Random(seed).randrange(100) for _ in range(count)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("count", [16, 32])
def test_a_block_aligned_prompt_twice(model, block_size, count):
    """A prompt that is wholly cached still has a token to compute: its last block is recomputed."""
    engine = make_engine(model, block_size=block_size)
    request = Request("r", ids(count), SamplingParams(temperature=0, max_tokens=5))
    cold = run(engine, [request])
    assert run(engine, [request]) == cold
    assert engine.observers[-1].num_hit_tokens == count - block_size


@pytest.mark.parametrize("leaver", range(3))
def test_identical_prompts_admitted_together(model, leaver):
    """They share their blocks, and any of them may go without taking the prefix along."""
    engine = make_engine(model, block_size=4)
    prompt, params = ids(16), SamplingParams(temperature=0, max_tokens=8)
    expected = [naive_loop(model, prompt, params)]
    requests = [Request(str(i), prompt, params) for i in range(3)]
    outputs = run(engine, requests, aborts={str(leaver): 2})
    assert outputs == {str(i): expected for i in range(3) if i != leaver}
    assert engine.observers[-1].num_hit_tokens == 2 * 12  # the first computes, two find
    assert run(engine, [Request("late", prompt, params)]) == {"late": expected}
    assert engine.observers[-1].num_hit_tokens == 12


def test_greedy_and_drawn_rows_leave_each_other_alone(model):
    """Temperature 0 is the argmax, and so is any below 1e-5, whatever the neighbours do."""
    prompt = ids(10)
    greedy = [SamplingParams(temperature=t, max_tokens=12, seed=3) for t in (0, 1e-6, 9e-6)]
    drawn = [SamplingParams(temperature=t, max_tokens=12, seed=3) for t in (0.5, 1.0, 2.0)]
    requests = [Request(str(i), prompt, params) for i, params in enumerate(greedy + drawn)]
    outputs = run(make_engine(model), requests)
    assert outputs["0"] == outputs["1"] == outputs["2"] == [naive_loop(model, prompt, greedy[0])]
    for i, params in enumerate(drawn, start=3):
        assert outputs[str(i)] == [naive_loop(model, prompt, params)]
        assert outputs[str(i)] != outputs["0"]


def test_an_unseeded_neighbour_changes_no_seeded_request(model):
    seeded = Request("seeded", ids(9), SamplingParams(seed=1, max_tokens=15))
    unseeded = [Request(str(i), ids(9), SamplingParams(max_tokens=15)) for i in range(5)]
    alone = run(make_engine(model), [seeded])["seeded"]
    assert run(make_engine(model), [*unseeded, seeded])["seeded"] == alone
    assert run(make_engine(model), [seeded, *unseeded])["seeded"] == alone
    # Unseeded requests follow from the engine's seed: the same again, another with another.
    same, other = (run(make_engine(model, seed=seed), unseeded) for seed in (0, 1))
    assert run(make_engine(model), unseeded) == same != other
    assert len({tuple(outputs[0]) for outputs in same.values()}) == 5


@pytest.mark.parametrize("name", ["three_heads_of_five", "shipped"])
def test_one_request_alone_or_among_64(model_of, name):
    model = model_of(name)
    params = SamplingParams(temperature=0, max_tokens=10)
    requests = [Request(str(i), ids(1 + i % 40, seed=i), params) for i in range(64)]
    together = run(make_engine(model, num_gpu_blocks_override=300), requests)
    for request in requests[::16]:
        alone = run(make_engine(model), [request])
        assert alone[request.request_id] == together[request.request_id]


@pytest.mark.parametrize("name", ["waiting", "running", "preempted"])
def test_abort_in_every_state_at_every_step(name):
    """No block leaks, no output follows, nobody else is harmed; no model is needed for that."""
    config = EngineConfig(block_size=2, max_num_batched_tokens=7, max_num_seqs=3)
    prompts = {str(i): ids(5, seed=i) for i in range(4)}
    params = SamplingParams(max_tokens=6)
    seen = set()
    for step in range(60):
        runner = MockModelRunner(vocab_size=50, num_blocks=13, block_size=2)
        engine = Engine(config, runner)
        for request_id, prompt in prompts.items():
            engine.add_request(Request(request_id, [token % 50 for token in prompt], params))
        for _ in range(step):
            engine.step()
        states = {s.seq_id: s.status.value for s in engine.scheduler.sequences.values()}
        victims = [request_id for request_id, state in states.items() if state == name]
        if not victims:
            continue
        seen.add(step)
        engine.abort(victims[-1])
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.request_id != victims[-1]
                if output.finished:
                    known = list(output.prompt_token_ids)
                    for token_id in output.outputs[0].token_ids:
                        assert token_id == runner.next_token(known)
                        known.append(token_id)
            engine.check_invariants()
        assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    assert seen, f"nobody was ever {name}"
