"""From a plan to arrays: what a row's sampling needs, and which rows score the prompt."""

import numpy as np
import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.execution_batch import SamplingBatch, flatten, forbidden_now, sampling_batch
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.request import Request, SamplingParams
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence

EOS = 0


def sequence(prompt=(1, 2, 3), output=(), bad_words=None, seed=0, index=0, **wish) -> Sequence:
    params = SamplingParams(bad_words=["bad"] if bad_words else None, **wish)
    request = Request("r", list(prompt), params, bad_words_token_ids=bad_words)
    seq = Sequence("r", request, index=index, seed=seed)
    for token_id in output:
        seq.append(token_id)
    return seq


def plain(sequences) -> SamplingBatch:
    return sampling_batch(sequences, EOS)


def test_numbers_of_every_row():
    rows = [
        sequence(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=7),
        sequence(temperature=0, top_k=5, output=[4, 5], seed=-(2**63)),
    ]
    batch = plain(rows)
    assert batch.temperatures.tolist() == [0.5, 0.0]
    assert batch.top_ks.tolist() == [0, 5]  # -1 is another way to say all
    np.testing.assert_allclose(batch.top_ps, [0.9, 1.0])
    np.testing.assert_allclose(batch.min_ps, [0.1, 0.0])
    assert batch.seeds.tolist() == [7, -(2**63)] and batch.output_indices.tolist() == [0, 2]
    dtypes = [getattr(batch, name).dtype for name in ("temperatures", "top_ps", "top_ks", "seeds")]
    assert dtypes == [np.float32, np.float32, np.int64, np.int64]


def test_a_batch_without_wishes_is_empty_where_it_can_be():
    batch = plain([sequence(temperature=0.7), sequence(stop="so", stop_token_ids=[4])])
    assert batch.allowed == [] and batch.num_logprobs == 0
    for name in ("forbidden", "biased", "biases", "penalized", "penalties", "history"):
        assert len(getattr(batch, name)) == 0, name
    assert batch.forbidden.shape == (0, 2) and batch.history.shape == (0, 3)
    assert len(batch.logprob_rows) == 0


def test_wishes_are_written_down_with_their_rows():
    rows = [
        sequence(),
        sequence(logit_bias={5: 1.5, 6: -2.0}, allowed_token_ids=[5, 6]),
        sequence(prompt=[1, 2], output=[2, 2], presence_penalty=0.5, repetition_penalty=1.2),
        sequence(prompt=[9], frequency_penalty=0.1, min_tokens=2, stop_token_ids=[8]),
    ]
    batch = plain(rows)
    [(row, ids)] = batch.allowed
    assert (row, ids.tolist()) == (1, [5, 6])
    assert batch.biased.tolist() == [[1, 5], [1, 6]] and batch.biases.tolist() == [1.5, -2.0]
    assert batch.penalized.tolist() == [2, 3]
    np.testing.assert_allclose(batch.penalties, [[1.2, 0, 0.5], [1, 0.1, 0]], rtol=1e-6)
    of_prompt, generated = 0, 1
    assert batch.history.tolist() == [
        [0, 1, of_prompt],
        [0, 2, of_prompt],
        [0, 2, generated],
        [0, 2, generated],
        [1, 9, of_prompt],
    ]
    assert sorted(batch.forbidden.tolist()) == [[3, EOS], [3, 8]]


@pytest.mark.parametrize(
    ("asked", "rows", "most"),
    [
        ([None, None], [], 0),
        ([0, None], [0], 0),
        ([None, 3, 5], [1, 2], 5),
        ([2, -1], [0, 1], -1),
    ],
)
def test_rows_that_report_logprobs(asked, rows, most):
    batch = plain([sequence(logprobs=count) for count in asked])
    assert batch.logprob_rows.tolist() == rows and batch.num_logprobs == most


def test_nothing_ends_a_sequence_before_min_tokens():
    for generated in range(4):
        seq = sequence(output=[7] * generated, min_tokens=2, stop_token_ids=[4, 5])
        assert forbidden_now(seq, EOS) == ({EOS, 4, 5} if generated < 2 else set())
    assert forbidden_now(sequence(min_tokens=1), None) == set()


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [
        ([], {9}),
        ([5], {6, 9}),
        ([5, 6], {7, 9}),
        ([6], {9}),
        ([5, 5], {6, 9}),
        ([4, 5, 6], {7, 9}),
        ([5, 6, 1], {9}),
    ],
)
def test_a_bad_word_is_stopped_at_its_last_token(output, forbidden):
    """The prompt ends with the beginning of a bad word: only what was generated counts."""
    seq = sequence([5], output, bad_words=[[5, 6], [5, 6, 7], [9]])
    assert forbidden_now(seq, EOS) == forbidden


def run(prompts: dict, budget: int, **wish):
    """Schedule the prompts with a small budget; yields each step's batch and plan."""
    config = EngineConfig(max_model_len=64, max_num_batched_tokens=budget, block_size=4)
    kv = KVCacheManager(64, config.block_size)
    scheduler = Scheduler(config, kv)
    for arrival, (name, prompt) in enumerate(prompts.items()):
        request = Request(name, prompt, SamplingParams(max_tokens=2, **wish))
        scheduler.add(Sequence(name, request, arrival=arrival))
    while scheduler.sequences:
        plan = scheduler.schedule()
        yield flatten(plan, kv, EOS), plan
        scheduler.update(plan, [50] * len(plan.sampling))


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 9, 100])
def test_every_prompt_token_but_the_first_is_scored_once(budget):
    prompts = {"a": list(range(10, 18)), "b": list(range(20, 23)), "c": [30]}
    scored = []
    for batch, _ in run(prompts, budget, prompt_logprobs=2):
        positions = batch.positions[batch.prompt_logits_indices]
        before = batch.input_ids[batch.prompt_logits_indices]
        scored += zip(
            positions.tolist(), before.tolist(), batch.prompt_targets.tolist(), strict=True
        )
        assert batch.num_prompt_logprobs == 2 or not len(positions)
    expected = [
        (i, prompt[i], prompt[i + 1]) for prompt in prompts.values() for i in range(len(prompt) - 1)
    ]
    assert sorted(scored) == sorted(expected)


def test_a_prompt_that_nobody_asks_about_is_not_scored():
    for batch, _ in run({"a": list(range(10)), "b": list(range(9))}, 100):
        assert len(batch.prompt_logits_indices) == len(batch.prompt_targets) == 0


def test_the_first_continuation_scores_for_all_and_reads_no_cache():
    first = sequence(prompt_logprobs=0)
    second = sequence(prompt_logprobs=0, index=1)
    assert (first.skip_reading_prefix_cache, second.skip_reading_prefix_cache) == (True, False)
    assert not sequence().skip_reading_prefix_cache
    kv = KVCacheManager(16, 2)
    prompt = list(range(8))
    kv.allocate_slots(sequence(prompt), 8, [])
    assert len(kv.get_computed_blocks(sequence(prompt, prompt_logprobs=1))[0]) == 0
    assert len(kv.get_computed_blocks(sequence(prompt))[0]) == 3


def test_bad_words_give_way_where_they_would_ban_all_that_is_allowed():
    wish = {"allowed_token_ids": [5, EOS], "min_tokens": 3, "bad_words": [[5, 5]]}
    assert forbidden_now(sequence(output=[], **wish), EOS) == {EOS}
    assert forbidden_now(sequence(output=[5], **wish), EOS) == {EOS}  # 5 is all there is
    assert forbidden_now(sequence(output=[5, 5, 5], **wish), EOS) == {5}
