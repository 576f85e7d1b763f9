"""Chapter 11: a batch in, tokens out; memory is counted before it is taken."""

import threading

import numpy as np
import psutil
import pytest
import torch
from checkpoints import make_hf, save
from sampling import greedy_rows
from test_attention import make_batch
from transformers import GPT2Config, GPT2LMHeadModel

import tinyvllm.model_runner
from tinyvllm.attention import PagedKVCache
from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine
from tinyvllm.gpt2 import ModelLoadError, load_model
from tinyvllm.model_runner import ModelRunner
from tinyvllm.request import Request, SamplingParams

SMALL = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 61, "n_positions": 64}


@pytest.fixture(scope="module")
def hf():
    return make_hf(**SMALL)


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory):
    return str(save(hf, tmp_path_factory.mktemp("model")))


def make_runner(folder, **settings):
    return ModelRunner(EngineConfig(model=folder, device="cpu", **settings))


def step_arrays(runner, ids, start, batch_seed=0, sampled=True):
    """A batch of one sequence whose tokens `start..` are computed now, in shuffled blocks."""
    rng = np.random.default_rng(batch_seed)
    block_size = runner.cache.block_size
    batch = make_batch([len(ids)], [len(ids) - start], block_size, runner.num_blocks, rng)
    batch.input_ids = np.array(ids[start:], np.int64)
    if sampled:
        batch.logits_indices = np.array([len(ids) - start - 1])
        batch.sampling = greedy_rows(1)
    return batch


@pytest.fixture
def seen_logits(monkeypatch):
    """The logits of every call of the sampler, which the runner itself does not give away."""
    seen = []
    real = tinyvllm.model_runner.sample

    def watch(logits, *rest):
        seen.append(logits.clone())
        return real(logits, *rest)

    monkeypatch.setattr(tinyvllm.model_runner, "sample", watch)
    return seen


def generate(runner, prompts, max_tokens=10, **params):
    """Greedy token ids of every prompt from an engine around the runner."""
    engine = Engine(runner.config, runner)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), list(prompt), params))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[str(number)].outputs[0].token_ids for number in range(len(prompts))]


def hf_greedy(hf, prompt, max_tokens):
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            ids.append(int(hf(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_logits_and_slots_do_not_depend_on_the_chunk_size(hf, folder, seen_logits):
    """For every chunk size 1..prompt length: the same logits, and the same slots are written."""
    ids = torch.randint(0, 61, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0, -1]
    written = set()
    for chunk in range(1, 14):
        runner = make_runner(folder, block_size=4, num_gpu_blocks_override=9)
        runner.cache.keys.fill_(torch.nan)
        runner.cache.values.fill_(torch.nan)
        for end in range(chunk, 13 + chunk, chunk):
            part, start = ids[:end], end - chunk
            out = runner.execute(step_arrays(runner, part, start, sampled=end >= 13))
            assert len(out.sampled_token_ids) == (end >= 13)
        assert (seen_logits[-1][0] - expected).abs().max() < 1e-4
        slots = ~runner.cache.keys.flatten(1, 2).isnan().all(dim=(0, 2, 3))
        written.add(tuple(slots.nonzero().flatten().tolist()))
        assert slots.sum() == 13
    assert len(written) == 1
    assert len(seen_logits) == 13


def test_only_the_rows_asked_for_meet_the_vocabulary(folder, seen_logits):
    runner = make_runner(folder, num_gpu_blocks_override=9)
    runner.execute(step_arrays(runner, list(range(20)), 0))
    assert seen_logits[0].shape == (1, 61)
    out = runner.execute(step_arrays(runner, list(range(20)), 0, sampled=False))
    assert out.sampled_token_ids == []
    assert len(seen_logits) == 1


def test_a_request_alone_and_among_63_others(hf, folder, seen_logits):
    """Identical tokens; on a CPU with oneDNN the very same logits, once it decodes."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 61, rng.integers(1, 30)).tolist() for _ in range(64)]
    settings = {"max_num_seqs": 64, "block_size": 4}
    together = generate(make_runner(folder, **settings), prompts)
    last = seen_logits[-1]
    for number in range(0, 64, 9):
        alone = generate(make_runner(folder, **settings), [prompts[number]])
        assert alone == [together[number]]
        assert alone == [hf_greedy(hf, prompts[number], 10)]
        if torch.backends.mkldnn.is_available():
            assert torch.equal(seen_logits[-1][0], last[number])


def with_logprobs(folder, prompts, params, **settings):
    """The outputs of an engine, by position of the prompt."""
    runner = make_runner(folder, block_size=4, num_gpu_blocks_override=60, **settings)
    engine = Engine(runner.config, runner)
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), list(prompt), params))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[str(number)] for number in range(len(prompts))]


def test_prompt_logprobs_at_every_chunk_size(hf, folder):
    """Those of transformers, with ranks, although rows are scored chunk by chunk."""
    ids = torch.randint(0, 61, (11,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        want = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for budget in (1, 2, 3, 5, 10, 11, 100):
        (output,) = with_logprobs(folder, [ids], params, max_num_batched_tokens=budget)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == 11
        for position, entries in enumerate(output.prompt_logprobs[1:], start=1):
            row = want[position - 1]
            assert set(row.topk(3).indices.tolist()) | {ids[position]} == set(entries)
            for token_id, entry in entries.items():
                assert abs(entry.logprob - row[token_id]) < 1e-4
                assert entry.rank == 1 + (row > row[token_id]).sum()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_mode_reaches_the_sampler(hf, folder, mode):
    params = SamplingParams(temperature=0.5, top_k=2, seed=1, max_tokens=3, logprobs=-1)
    (output,) = with_logprobs(folder, [[5, 6, 7]], params, logprobs_mode=mode)
    (completion,) = output.outputs
    ids = [5, 6, 7]
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        with torch.inference_mode():
            want = hf(torch.tensor([ids])).logits[0, -1]
        if mode == "processed_logprobs":
            kept = want.topk(2).indices
            cut = torch.full_like(want, -torch.inf)
            cut[kept] = want[kept] / 0.5
            want = cut
        want = want.log_softmax(-1)
        got = torch.tensor([entries[i].logprob for i in range(61)])
        assert torch.equal(got.isneginf(), want.isneginf())
        assert (got - want)[~want.isneginf()].abs().max() < 1e-4
        assert entries[token_id].rank in (1, 2)
        ids.append(token_id)


def test_two_runners_share_nothing(folder):
    """Two engines in one process, stepping in two threads, answer as if they were alone."""
    prompts = [[1, 2, 3], [4] * 9]
    expected = generate(make_runner(folder), prompts)
    results = {}

    def work(name):
        results[name] = generate(make_runner(folder, block_size=1 + len(name)), prompts)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "bb", "ccc")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": expected, "bb": expected, "ccc": expected}


def test_attributes(folder):
    runner = make_runner(folder, max_model_len=48)
    assert (runner.vocab_size, runner.max_model_len, runner.eos_token_id) == (61, 48, 0)
    assert make_runner(folder).max_model_len == 64
    model = load_model(folder, device="cpu")
    assert ModelRunner(EngineConfig(), model).model is model


# Memory


def block_bytes(folder, block_size=16):
    runner = make_runner(folder, num_gpu_blocks_override=2, block_size=block_size)
    return (runner.cache.keys.nbytes + runner.cache.values.nbytes) // 2


def test_sizing(folder):
    assert block_bytes(folder) == PagedKVCache.bytes_per_block(2, 16, 3, 8, torch.float32)
    assert make_runner(folder, num_gpu_blocks_override=7).num_blocks == 7
    size = block_bytes(folder)
    assert make_runner(folder, kv_cache_memory_bytes=11 * size + size - 1).num_blocks == 11
    # By itself never more than what all sequences at full length use, and the null block.
    assert make_runner(folder, max_num_seqs=3).num_blocks == 3 * 4 + 1
    assert make_runner(folder, max_num_seqs=3, max_model_len=17).num_blocks == 3 * 2 + 1


def test_sizing_from_available_memory(folder, monkeypatch):
    """A quarter of what is available, at most 4 GiB."""
    size = block_bytes(folder)

    def with_available(available):
        memory = psutil.virtual_memory()._replace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        return make_runner(folder, max_num_seqs=10**6)

    assert with_available(400 * size).num_blocks == 100
    runner = make_runner(folder, num_gpu_blocks_override=2)
    with_available(400 * size)
    monkeypatch.setattr(runner, "free_memory", lambda: 1 << 40)
    assert runner.kv_memory()[0] == 4 << 30
    with pytest.raises(ValueError, match=r"holds 4 KV blocks .* needs 5 .* smaller max_model_len"):
        with_available(19 * size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_memory_bytes": 1000}, r"kv_cache_memory_bytes=1000 holds 0 KV blocks"),
        ({"num_gpu_blocks_override": 10**12}, r"num_gpu_blocks_override=1000000000000 asks for"),
        ({"kv_cache_memory_bytes": 10**15}, r"kv_cache_memory_bytes=1000000000000000 asks for"),
        ({"max_model_len": 65}, "max_model_len must be an integer from 1 to 64, got 65"),
    ],
)
def test_impossible_configs(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        make_runner(folder, **settings)


def test_a_model_that_is_not_there():
    with pytest.raises(ModelLoadError, match="no such folder"):
        make_runner("./nowhere")


# Real sizes


def test_gpt2_124m_equals_transformers(tmp_path):
    """The published shape with random weights: loading, layout and tokens at full size."""
    torch.manual_seed(0)
    hf = GPT2LMHeadModel(GPT2Config()).eval()
    hf.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50257, n).tolist() for n in (1, 7, 40)]
    runner = make_runner(str(tmp_path), num_gpu_blocks_override=40, max_num_batched_tokens=16)
    assert generate(runner, prompts, max_tokens=6) == [hf_greedy(hf, p, 6) for p in prompts]
