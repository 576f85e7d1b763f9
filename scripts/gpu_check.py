"""Is the engine right on a GPU, and how fast is it there? One command, under 6 minutes on an H200.

python scripts/gpu_check.py [--out book/data/gpu.json]

Needs torch, triton, transformers, safetensors and tokenizers, no network and no other file than
those of this repository. The model that is timed is a random GPT-2 124M.

The exit status is 0 if every part ran and held, 1 if one did not, 2 without a CUDA device. An aim
that is missed is reported, and is no failure. A part that fails leaves the others running; the file
is written after every part, so a run that is cut short keeps what it had. (A fault of the device
itself, such as an illegal address, fails all parts after it too: read the first.)

The file holds one JSON object:

    circumstances   card, driver, versions, commit, date
    complete        whether the run came to its end
    failed          {part: why}, of the parts that did not hold
    seconds         {part: how long it took}
    kernels         {dtype: largest errors of both attention kernels and their tolerance; whether a
                    row is the same bits alone and in a batch; whether the store wrote its slots
                    and nothing else}
    tokens          {model: greedy tokens against transformers: how many, how many are not its best,
                    by how much at most, and the gap that is tolerated}
    modes           {model: {sampling: {mode: the same, and how many tokens equal plain eager's}}},
                    modes being with and without CUDA graphs and overlap; "engines" beside the
                    samplings says what was at work
    card            copy_bytes_per_second and matmul_operations_per_second, measured
    attention       {"KERNEL x SEQUENCES": microseconds a layer, bytes, operations, share_of_copy
                    (of the copy's bandwidth), share_of_floor}
    step            {"MODE x SEQUENCES": step_ms, from batch to tokens on the host; device_ms of
                    it, on the device alone; bytes, operations, floor_ms, times_floor (of step_ms);
                    random_step_ms and top_p_step_ms, where tokens are drawn from all, and with
                    top-p 0.9 from the many that a random model leaves}
    engine          {mode: tokens_per_second, seconds of every run}
    transformers    the same for `generate` with a static cache and SDPA
    aims            [{aim, value, met}], value and met null where nothing was measured
"""

import argparse
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs where the package is not installed

import numpy as np
import torch
import triton

import tinyvllm.triton_attention as kernels
from tinyvllm.attention import PagedKVCache, reference_paged_attention
from tinyvllm.config import EngineConfig
from tinyvllm.cuda_graphs import CudaModelRunner
from tinyvllm.execution_batch import (
    ExecutionBatch,
    SamplingBatch,
    pad_block_tables,
    token_positions,
    token_slots,
)
from tinyvllm.gpt2 import ASSETS, GPT2Config
from tinyvllm.llm import LLM
from tinyvllm.request import SamplingParams
from tinyvllm.sampler import gumbel_noise, row_keys, scale, token_keys

ROOT = Path(__file__).parents[1]
BLOCK_SIZE = 16
BATCHES = (1, 16, 64, 256)
CONTEXT = (64, 960)  # tokens of a sequence where speed is measured
TIMED_DTYPE = "bfloat16"


class CheckError(Exception):
    """Something that is claimed does not hold."""


# ------------------------------------------------------------------------------------ batches


def step_batch(lengths, chunks, seed: int = 0, vocab_size: int = 1) -> ExecutionBatch:
    """A step that computes the last chunks[i] of lengths[i] tokens of every sequence i, greedily.

    Blocks are dealt in random order; none is left over except the null block.
    """
    rng = np.random.default_rng(seed)
    lengths, chunks = np.asarray(lengths, np.int64), np.asarray(chunks, np.int64)
    counts = -(-lengths // BLOCK_SIZE)
    blocks = np.split(rng.permutation(counts.sum()) + 1, np.cumsum(counts)[:-1])
    table = pad_block_tables([ids.tolist() for ids in blocks])
    rows, positions = token_positions(lengths - chunks, chunks)
    starts = np.append(0, np.cumsum(chunks))
    return ExecutionBatch(
        input_ids=rng.integers(0, vocab_size, len(rows)),
        positions=positions,
        query_start_loc=starts.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        block_table=table,
        slot_mapping=token_slots(table, rows, positions, BLOCK_SIZE),
        logits_indices=starts[1:] - 1,
        sampling=greedy_rows(len(lengths)),
        prompt_logits_indices=np.empty(0, np.int64),
        prompt_targets=np.empty(0, np.int64),
        num_prompt_logprobs=0,
    )


def greedy_rows(count: int) -> SamplingBatch:
    """How `count` rows choose their best token, and report nothing."""
    zeros, none = np.zeros(count, np.int64), np.empty(0, np.int64)
    return SamplingBatch(
        temperatures=np.zeros(count, np.float32),
        top_ks=zeros,
        top_ps=np.ones(count, np.float32),
        min_ps=np.zeros(count, np.float32),
        seeds=zeros,
        output_indices=zeros,
        allowed=[],
        forbidden=none.reshape(0, 2),
        biased=none.reshape(0, 2),
        biases=np.empty(0, np.float32),
        penalized=none,
        penalties=np.empty((0, 3), np.float32),
        history=none.reshape(0, 3),
        logprob_rows=none,
        num_logprobs=0,
    )


def decode_lengths(sequences: int, seed: int = 0) -> np.ndarray:
    """Lengths of sequences in the middle of decoding, CONTEXT[0] to CONTEXT[1]."""
    return np.random.default_rng(seed).integers(*CONTEXT, sequences, endpoint=True)


def workload(requests: int = 256, vocab_size: int = 50257, shortest=64, longest=512, seed=0):
    """(prompt token ids, tokens wanted) of requests, both counts from shortest to longest."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest, (requests, 2), endpoint=True).tolist()
    return [(rng.integers(0, vocab_size, n).tolist(), wanted) for n, wanted in lengths]


# --------------------------------------------------------------------------- bytes and operations


def attention_bytes(batch: ExecutionBatch, heads: int, head_size: int, itemsize: int) -> int:
    """What one layer's attention must read and write: every key and value and the blocks' ids
    once, queries, answers."""
    numbers = 2 * int(batch.seq_lens.sum()) + 2 * len(batch.input_ids)
    blocks = int((-(-batch.seq_lens // BLOCK_SIZE)).sum())
    return numbers * heads * head_size * itemsize + 4 * blocks


def attention_operations(batch: ExecutionBatch, heads: int, head_size: int) -> int:
    """Of one layer: two for each number of a key, two for each of a value, that a query sees."""
    chunks, lengths = np.diff(batch.query_start_loc).astype(np.int64), batch.seq_lens
    pairs = int((chunks * lengths - chunks * (chunks - 1) // 2).sum())
    return 4 * pairs * heads * head_size


def store_bytes(batch: ExecutionBatch, heads: int, head_size: int, itemsize: int) -> int:
    """Keys and values are read and written, slots are read."""
    return len(batch.input_ids) * (4 * heads * head_size * itemsize + 8)


def split_bytes(
    batch: ExecutionBatch, heads: int, head_size: int, itemsize: int
) -> tuple[int, int]:
    """Of rows with several splits: the parts in float32, which the decode kernel writes and the
    merge reads, and the answers, which the merge writes."""
    splits = -(-batch.seq_lens // kernels.SPLIT_SIZE)
    splits = splits[splits > 1]
    parts = int(splits.sum()) * heads * (head_size + 1) * 4
    return parts, len(splits) * heads * head_size * itemsize


def step_bytes(batch: ExecutionBatch, model: GPT2Config, itemsize: int) -> int:
    """A whole step: weights once, embeddings of its tokens, attention's keys and values read and
    the new ones written, logits written and read."""
    rows = {"wpe.weight"} if model.tie_word_embeddings else {"wpe.weight", "wte.weight"}
    shapes = model.weight_shapes().items()
    numbers = sum(math.prod(shape) for name, shape in shapes if name not in rows)
    tokens, keys = len(batch.input_ids), int(batch.seq_lens.sum())
    numbers += 2 * tokens * model.n_embd
    numbers += 2 * (keys + tokens) * model.n_embd * model.n_layer
    numbers += 2 * len(batch.logits_indices) * model.vocab_size
    return numbers * itemsize


def step_operations(batch: ExecutionBatch, model: GPT2Config) -> int:
    """A whole step: two for each weight of a matrix and token, logits of the sampled rows only."""
    width = model.n_embd
    layer = 2 * len(batch.input_ids) * width * (4 * width + 2 * model.inner_size)
    layer += attention_operations(batch, model.n_head, model.head_size)
    return model.n_layer * layer + 2 * len(batch.logits_indices) * width * model.vocab_size


def floor_seconds(num_bytes: int, operations: int, card: dict) -> float:
    """No faster than its bytes by a copy, nor than its operations by a large matrix product."""
    return max(
        num_bytes / card["copy_bytes_per_second"],
        operations / card["matmul_operations_per_second"],
    )


# ------------------------------------------------------------------------- 1. kernels, by value

# One step of the type between 4 and 8, where the largest random values lie: rounding may go the
# other way once. float32 is never rounded again: there it is up to 1,024 terms in another order.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}

# (length, chunk). Decodes around borders of blocks, tiles and splits, then prompts and their parts.
REAL_STEP = (
    *[(n, 1) for n in (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 960, 1023, 1024)],
    *[(1024, 300), (700, 700), (257, 33), (130, 129), (64, 64), (17, 2)],
)


class KernelCase:
    """A random step over a cache in which everything that nobody has written is NaN: the slots of
    this step, the rest of last blocks, and blocks that nobody owns, the null block among them."""

    def __init__(self, device, dtype, step, heads, head_size):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        lengths, chunks = zip(*step, strict=True)
        self.batch = step_batch(lengths, chunks)
        num_blocks = int(self.batch.block_table.max()) + 5
        self.cache = PagedKVCache(1, num_blocks, BLOCK_SIZE, heads, head_size, dtype, device)
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        starts = np.array(lengths) - chunks
        rows, positions = token_positions(np.zeros_like(starts), starts)
        slots = token_slots(self.batch.block_table, rows, positions, BLOCK_SIZE)
        old = (random(len(slots), heads, head_size) for _ in range(2))
        self.cache.store(0, *old, torch.from_numpy(slots).to(device))
        # As the model makes them: three parts of one row.
        rows = random(sum(chunks), 3 * heads * head_size)
        self.parts = rows.unflatten(1, (3, heads, head_size)).unbind(1)
        self.scale = 1.3 * head_size**-0.5
        self.caches = self.cache.keys[0], self.cache.values[0]
        self.where = on_device(self.batch, device)

    def store(self) -> bool:
        """Store the step's keys and values; whether that changed its slots and nothing else."""
        expected = [cache.clone() for cache in self.caches]
        slots = torch.from_numpy(self.batch.slot_mapping).to(expected[0].device)
        for cache, part in zip(expected, self.parts[1:], strict=True):
            cache.flatten(0, 1)[slots] = part
        kernels.store_kv(*self.parts[1:], *self.caches, slots)
        return all(map(same_bits, expected, self.caches))

    def attend(self, seqs: slice, unified: bool) -> torch.Tensor:
        """The answers of some sequences: by the unified kernel, or as a step does, decodes by
        theirs. What no kernel writes stays NaN."""
        starts, lengths, table = self.where
        first, last = starts[seqs.start].item(), starts[seqs.stop].item()
        where = starts[seqs.start : seqs.stop + 1] - first, lengths[seqs], table[seqs]
        query = self.parts[0][first:last]
        output = torch.full(query.shape, torch.nan, dtype=query.dtype, device=query.device)
        arguments = (output, query, *self.caches, *where, self.scale)
        kernels.paged_attention(*arguments, skip_decodes=not unified)
        if not unified:
            kernels.decode_attention(*arguments, max_splits(lengths[seqs]))
        return output

    def check(self) -> dict:
        """Store, attend, and compare with the definition and with every sequence alone."""
        every = slice(0, len(self.batch.seq_lens))
        stored = self.store()
        expected = reference_paged_attention(
            self.parts[0], *self.caches, *self.where, self.scale
        ).float()
        found = {"stores_its_slots_only": stored, "same_bits_alone": True}
        for name, unified in (("step", False), ("unified", True)):
            together = self.attend(every, unified)
            found[f"{name}_error"] = (together.float() - expected).abs().max().item()
            alone = [self.attend(slice(i, i + 1), unified) for i in range(every.stop)]
            found["same_bits_alone"] &= same_bits(together, torch.cat(alone))
        return found


def on_device(batch: ExecutionBatch, device) -> list[torch.Tensor]:
    """query_start_loc, seq_lens and block_table."""
    arrays = (batch.query_start_loc, batch.seq_lens, batch.block_table)
    return [torch.from_numpy(array).to(device) for array in arrays]


def max_splits(lengths: torch.Tensor) -> int:
    """Splits of the longest of these sequences."""
    return -(-int(lengths.max()) // kernels.SPLIT_SIZE)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, where NaN equals itself."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


@torch.inference_mode()
def check_kernels(section: dict, device="cuda", step=REAL_STEP, heads=12, head_size=64):
    """Every kernel against `reference_paged_attention`, in every dtype."""
    wrong = []
    for dtype, tolerance in TOLERANCES.items():
        found = KernelCase(device, dtype, step, heads, head_size).check()
        found["tolerance"] = tolerance
        section[str(dtype).removeprefix("torch.")] = found
        print(f"  {dtype}: {found}", flush=True)
        small = all(found[f"{name}_error"] <= tolerance for name in ("step", "unified"))
        if not (small and found["same_bits_alone"] and found["stores_its_slots_only"]):
            wrong.append(f"{dtype}: {found}")
    if wrong:
        raise CheckError("; ".join(wrong))


# ------------------------------------------------------------- 2. and 3. tokens of whole engines

# Tokens are equal, or a tie: by transformers' logits, the token is at most this far below the best.
# In float32 two correct computations of these logits differ by some 1e-5, and a hundred times that
# is still far below the distance of the two best tokens, typically some tenths.
GAP_TOLERANCE = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
SEEDED = SamplingParams(temperature=0.8, seed=1, max_tokens=48, ignore_eos=True, detokenize=False)
TRUNCATED = replace(SEEDED, top_k=100, top_p=0.9)
PROMPT_LENGTHS = (1, 5, 16, 33, 120, 300, 700)
# Few sequences, so that some wait, and a budget that cuts the longest prompts into chunks.
SMALL_ENGINE = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 256}
MODES = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "eager, overlap": {"enforce_eager": True, "async_scheduling": True},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "graphs, overlap": {"enforce_eager": False, "async_scheduling": True},
}
TIMED_MODES = ("eager", "graphs", "graphs, overlap")


def random_checkpoint(folder: Path, **shape) -> Path:
    """A random GPT-2, 124M unless `shape` says otherwise, as transformers saves it.

    As transformers starts one, it answers every token with itself: biases are 0, norms are 1, and
    embeddings outweigh the layers. Noise on everything makes its tokens depend on all of them.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**shape))
    noise = 0.05 * (768 / model.config.n_embd) ** 0.5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def load_transformers(folder: Path, device, dtype: torch.dtype, attention: str):
    """The checkpoint as a model of transformers, which no token ends."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model.to(device, dtype).eval()


def random_prompts(folder: Path) -> list[list[int]]:
    """Prompts of random token ids of the model."""
    vocab_size, rng = GPT2Config.from_pretrained(folder).vocab_size, np.random.default_rng(1)
    return [rng.integers(0, vocab_size, n).tolist() for n in PROMPT_LENGTHS]


def generate(llm: LLM, prompts: list[list[int]], params) -> list[list[int]]:
    """The tokens of every prompt. Returns when they are on the host."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise CheckError(f"{len(errors)} prompts were refused: {errors[0]}")
    return [output.outputs[0].token_ids for output in outputs]


def bars(scaled: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """What a scaled logit `[N, V]` must reach to pass top-k and top-p, `[N, 1]`; not the sampler's
    own code, which is judged with it."""
    values = scaled.double().sort(dim=1, descending=True).values
    values = values[:, :top_k] if top_k > 0 else values
    probabilities = values.softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    kept = (before < top_p).sum(dim=1, keepdim=True).clamp(min=1)
    return values.gather(1, kept - 1)


@torch.inference_mode()
def token_gaps(model, prompt: list[int], token_ids: list[int], params: SamplingParams):
    """How far below the best token each one is, by the model's scores after all before it.

    Without a gap anywhere they are what the model generates. With a temperature the scores are the
    scaled logits with the noise of that seed added: the largest is the token drawn. Where top-k and
    top-p cut, a tie may be one with the bar: the token must pass the lowest bar within the
    tolerance, and beat what passes the highest one.
    """
    ids = torch.tensor([prompt + token_ids], device=model.device)
    chosen = ids[0, len(prompt) :, None]
    scores = model(ids).logits[0, len(prompt) - 1 : -1].float()
    if params.temperature:
        every = torch.arange(len(token_ids), device=scores.device)
        rows = row_keys(torch.full_like(every, params.seed), every)
        noise = gumbel_noise(rows, token_keys(torch.arange(scores.shape[1], device=scores.device)))
        temperatures = scores.new_full((len(scores),), params.temperature)
        scaled = scale(scores.clone(), temperatures)
        scores = scaled + noise
    own = scores.gather(1, chosen)
    if params.temperature and (params.top_k > 0 or params.top_p < 1):
        lowest = bars(scaled, params.top_k, params.top_p + GAP_TOLERANCE) - GAP_TOLERANCE
        highest = bars(scaled, params.top_k, params.top_p - GAP_TOLERANCE) + GAP_TOLERANCE
        rivals = scores.masked_fill(scaled < highest, -torch.inf).amax(dim=1, keepdim=True)
        gaps = torch.maximum(rivals - own, lowest - scaled.gather(1, chosen)).clamp(min=0)
    else:
        gaps = scores.amax(dim=1, keepdim=True) - own
    return gaps[:, 0].tolist()


def judge(gaps: list[float], tolerance: float = GAP_TOLERANCE) -> dict:
    """Tokens are right if each is the best, or a tie within the tolerance."""
    return {
        "tokens": len(gaps),
        "not_the_best": sum(gap != 0 for gap in gaps),
        "largest_gap": max(gaps),
        "tolerance": tolerance,
        "right": all(gap <= tolerance for gap in gaps),  # a NaN is not
    }


def judge_answers(model, prompts, answers, params: SamplingParams) -> dict:
    """`judge` over the answers to all prompts."""
    pairs = zip(prompts, answers, strict=True)
    return judge([gap for p, answer in pairs for gap in token_gaps(model, p, answer, params)])


def check_tokens(section: dict, models: dict[str, Path], device="cuda", params=GREEDY, **engine):
    """The engine's greedy tokens against transformers, its attention spelled out, in float32."""
    for name, folder in models.items():
        llm = LLM(folder, tokenizer=ASSETS, device=device, **SMALL_ENGINE | engine)
        prompts = random_prompts(folder)
        oracle = load_transformers(folder, device, torch.float32, "eager")
        found = judge_answers(oracle, prompts, generate(llm, prompts, params), params)
        section[name] = found
        print(f"  {name}: {found}", flush=True)
        del llm, oracle
        free_memory()
    wrong = [name for name, found in section.items() if not found["right"]]
    if wrong:
        raise CheckError(f"other tokens than transformers' for {', '.join(wrong)}")


def check_modes(section: dict, models: dict[str, Path], device="cuda", samplings=None, **engine):
    """With and without CUDA graphs and overlap: the same tokens, greedy and drawn.

    Overlap must not change a token: the batches are the same. A graph may, in a tie, since a
    padded batch can have its matrices multiplied in another order; so its tokens are judged by
    transformers as well.
    """
    samplings = samplings or {"greedy": GREEDY, "seeded": SEEDED, "truncated": TRUNCATED}
    wrong = []
    for model, folder in models.items():
        prompts = random_prompts(folder)
        found = section[model] = {sampling: {} for sampling in samplings} | {"engines": {}}
        answers = {}
        for mode, flags in MODES.items():
            llm = LLM(folder, tokenizer=ASSETS, device=device, **SMALL_ENGINE | flags | engine)
            for sampling, params in samplings.items():
                answers[sampling, mode] = generate(llm, prompts, params)
            at_work = found["engines"][mode] = engine_at_work(llm)
            if flags["async_scheduling"] and not at_work["steps_ahead"]:
                wrong.append(f"{model}, {mode}: no step was launched ahead")
            if device == "cuda" and at_work["graphs"] == flags["enforce_eager"]:
                wrong.append(f"{model}, {mode}: graphs: {at_work['graphs']}")
            del llm
            free_memory()
        oracle = load_transformers(folder, device, torch.float32, "eager")
        for (sampling, mode), answer in answers.items():
            verdict = judge_answers(oracle, prompts, answer, samplings[sampling])
            verdict["same_as_eager"] = num_equal(answer, answers[sampling, "eager"])
            found[sampling][mode] = verdict
            print(f"  {model}, {sampling}, {mode}: {verdict}", flush=True)
            waiting = answers[sampling, mode.removesuffix(", overlap")]
            if not verdict["right"]:
                wrong.append(f"{model}, {sampling}, {mode}: other tokens than transformers'")
            if answer != waiting:
                wrong.append(f"{model}, {sampling}, {mode}: other tokens than without overlap")
        del oracle
        free_memory()
    if wrong:
        raise CheckError("; ".join(wrong))


def engine_at_work(llm: LLM) -> dict:
    """What ran: classes, whether there were graphs, and how many steps were launched ahead."""
    runner = llm.engine.runner
    return {
        "engine": type(llm.engine).__name__,
        "runner": type(runner).__name__,
        "graphs": getattr(runner, "graphs", None) is not None,  # a CPU's runner has none
        "steps_ahead": getattr(llm.engine, "num_predicted", 0),
    }


def num_equal(answers: list[list[int]], others: list[list[int]]) -> int:
    """How many tokens are equal, place by place."""
    pairs = zip(answers, others, strict=True)
    return sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))


def free_memory():
    """Give back the device's memory that deleted models and engines held."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------- 4. speed


SPIN = 1_000_000  # cycles, about half a millisecond: for one launch
LONG_SPIN = 20_000_000  # for a step of hundreds of launches


def event_ms(run: Callable, finish: Callable = lambda result: None, repeats=30, spin=0):
    """Median milliseconds that `run` takes on the current stream, `finish(its result)` excluded.

    For `spin` cycles the device is kept busy while the host queues the work, so that the time of
    a launch does not lie between the two events.
    """
    times = []
    for repeat in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if spin:
            torch.cuda._sleep(spin)
        start.record()
        result = run()
        end.record()
        finish(result)
        end.synchronize()
        if repeat >= 5:  # before: compilation, first allocations, clocks that rise
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def captured(run: Callable) -> Callable:
    """`run` as a CUDA graph: what the host needs to launch it is not measured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles, and allocates what lasts
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@torch.inference_mode()
def measure_card(section: dict, device="cuda", num_bytes=1 << 30, side=8192):
    """What the card does at best: a copy far larger than its caches, a large matrix product."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = event_ms(lambda: target.copy_(source), spin=SPIN) / 1e3
    section["copy_bytes_per_second"] = 2 * num_bytes / seconds  # read and written
    a, b = torch.randn(2, side, side, device=device, dtype=getattr(torch, TIMED_DTYPE))
    seconds = event_ms(lambda: a @ b, spin=SPIN) / 1e3
    section["matmul_operations_per_second"] = 2 * side**3 / seconds
    section["matmul_dtype"], section["matmul_side"] = TIMED_DTYPE, side
    print(f"  {section}", flush=True)


@contextmanager
def without(kernel: str):
    """Launch everything but this kernel."""

    class Silent:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    original = getattr(kernels, kernel)
    setattr(kernels, kernel, Silent())
    try:
        yield
    finally:
        setattr(kernels, kernel, original)


LEAST_LAYERS = 12  # as GPT-2 124M has


class Arena:
    """One step's attention, ready to be launched, over the caches of many layers.

    As many layers as it takes for one to have left the device's own cache before it comes again:
    in a real step each layer reads other keys as well.
    """

    def __init__(self, lengths, chunks, device, dtype, cache_bytes, heads, head_size):
        self.batch = step_batch(lengths, chunks)
        num_blocks = int(self.batch.block_table.max()) + 1
        layer_bytes = 2 * num_blocks * BLOCK_SIZE * heads * head_size * dtype.itemsize
        self.num_layers = max(LEAST_LAYERS, math.ceil(4 * cache_bytes / layer_bytes))
        shape = (self.num_layers, num_blocks, BLOCK_SIZE, heads, head_size)
        self.cache = PagedKVCache(*shape, dtype, device)
        self.cache.keys.normal_()
        self.cache.values.normal_()
        rows = torch.randn(len(self.batch.input_ids), 3, heads, head_size, device=device)
        self.query, self.key, self.value = rows.to(dtype).unbind(1)
        self.slots = torch.from_numpy(self.batch.slot_mapping).to(device)
        self.where = on_device(self.batch, device)
        self.output = torch.empty_like(self.query, memory_format=torch.contiguous_format)
        self.scale, self.splits = head_size**-0.5, max_splits(self.where[1])

    def layers(self):
        """Keys and values of every layer."""
        return zip(self.cache.keys, self.cache.values, strict=True)

    def store(self):
        for caches in self.layers():
            kernels.store_kv(self.key, self.value, *caches, self.slots)

    def decode(self):
        for caches in self.layers():
            arguments = (self.output, self.query, *caches, *self.where, self.scale)
            kernels.decode_attention(*arguments, self.splits)

    def unified(self):
        for caches in self.layers():
            kernels.paged_attention(self.output, self.query, *caches, *self.where, self.scale)


def attention_runs(decodes: Arena, chunks: Arena, heads: int, head_size: int, itemsize: int):
    """(name, arena, run, bytes, operations) of everything that is timed at one batch size.

    The decode kernel alone is given the parts that it writes for the merge; "decode and merge",
    which is what a layer waits for, only what any attention needs.
    """
    shape = (heads, head_size, itemsize)
    needed, work = attention_bytes(decodes.batch, *shape), decodes.batch
    operations = attention_operations(work, heads, head_size)
    parts, answers = split_bytes(work, *shape)

    def alone(other):
        with without(other):
            decodes.decode()

    yield "store", decodes, decodes.store, store_bytes(work, *shape), 0
    decode, merge = partial(alone, "merge_splits_kernel"), partial(alone, "decode_attention_kernel")
    yield "decode", decodes, decode, needed + parts - answers, operations
    if decodes.splits > 1:
        yield "merge", decodes, merge, parts + answers, 0
    yield "decode and merge", decodes, decodes.decode, needed, operations
    yield "unified", decodes, decodes.unified, needed, operations
    operations = attention_operations(chunks.batch, heads, head_size)
    yield "chunks", chunks, chunks.unified, attention_bytes(chunks.batch, *shape), operations


def rate(seconds: float, num_bytes: int, operations: int, card: dict) -> dict:
    """A row of `attention`."""
    return {
        "microseconds": seconds * 1e6,
        "bytes": num_bytes,
        "operations": operations,
        "share_of_copy": num_bytes / seconds / card["copy_bytes_per_second"],
        "share_of_floor": floor_seconds(num_bytes, operations, card) / seconds,
    }


@torch.inference_mode()
def measure_attention(
    section: dict,
    card: dict,
    cache_bytes: int,
    device="cuda",
    batches=BATCHES,
    heads=12,
    head_size=64,
):
    """Every kernel at every batch size: decodes, and for "chunks" up to 2,048 tokens of prompts."""
    dtype = getattr(torch, TIMED_DTYPE)
    where = (device, dtype, cache_bytes, heads, head_size)
    for sequences in batches:
        lengths = decode_lengths(sequences)
        decodes = Arena(lengths, np.ones_like(lengths), *where)
        chunks = Arena(lengths, np.minimum(lengths, 2048 // sequences), *where)
        runs = attention_runs(decodes, chunks, heads, head_size, dtype.itemsize)
        for name, arena, run, num_bytes, operations in runs:
            seconds = event_ms(captured(run), spin=SPIN) / 1e3 / arena.num_layers
            found = section[f"{name} x {sequences}"] = rate(seconds, num_bytes, operations, card)
            print(f"  {name} x {sequences}: {found}", flush=True)
        del decodes, chunks, runs, arena, run
        free_memory()


def measure_step(section: dict, card: dict, folder: Path, device="cuda", batches=BATCHES):
    """A decode step of GPT-2 124M through the model runner, from the batch to tokens on the host."""
    model, itemsize = GPT2Config.from_pretrained(folder), getattr(torch, TIMED_DTYPE).itemsize
    num_blocks = max(batches) * -(-CONTEXT[1] // BLOCK_SIZE) + 1
    for mode in ("graphs", "eager"):
        config = EngineConfig(
            model=str(folder),
            device=device,
            dtype=TIMED_DTYPE,
            max_num_seqs=max(batches),
            num_gpu_blocks_override=num_blocks,
            **MODES[mode],
        )
        runner = CudaModelRunner(config)
        with torch.inference_mode():
            runner.cache.keys.normal_()
            runner.cache.values.normal_()
        for sequences in batches:
            lengths = decode_lengths(sequences)
            batch = step_batch(lengths, np.ones_like(lengths), vocab_size=model.vocab_size)
            found = time_step(runner, batch)
            num_bytes = step_bytes(batch, model, itemsize)
            operations = step_operations(batch, model)
            found |= {"bytes": num_bytes, "operations": operations}
            found["floor_ms"] = floor_seconds(num_bytes, operations, card) * 1e3
            found["times_floor"] = found["step_ms"] / found["floor_ms"]
            section[f"{mode} x {sequences}"] = found
            print(f"  {mode} x {sequences}: {found}", flush=True)
        del runner
        free_memory()


def time_step(runner, batch: ExecutionBatch) -> dict:
    """The step as an engine waits for it, and the part of it that the device works; the step where
    tokens are drawn, and where they are drawn with top-p."""
    ones = np.ones(len(batch.seq_lens), np.float32)
    random = replace(batch, sampling=replace(batch.sampling, temperatures=ones))
    truncated = replace(batch, sampling=replace(random.sampling, top_ps=0.9 * ones))
    return {
        "step_ms": event_ms(lambda: runner.execute(batch)),
        "random_step_ms": event_ms(lambda: runner.execute(random)),
        "top_p_step_ms": event_ms(lambda: runner.execute(truncated)),
        "device_ms": event_ms(
            lambda: runner.launch(batch), finish=lambda step: step.result(), spin=LONG_SPIN
        ),
    }


def repeated(run: Callable[[], list], wanted: int, repeats: int = 2) -> dict:
    """Tokens per second of runs that return their tokens, lists of ids; the first is not counted.

    By a wall clock: the host's work is part of it, and tokens on the host are a synchronisation.
    """
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        answers = run()
        seconds.append(time.perf_counter() - start)
        made = sum(map(len, answers))
        if made != wanted:
            raise CheckError(f"{made} tokens were made, {wanted} were wanted")
    return {
        "tokens_per_second": wanted / statistics.median(seconds[1:]),
        "seconds": seconds[1:],
        "first_run_seconds": seconds[0],
    }


def measure_engine(
    section: dict, folder: Path, requests, device="cuda", modes=TIMED_MODES, **engine
):
    """All requests at once through `LLM.generate`. Without prefix caching, since every run has the
    same prompts; everything else as it is by default."""
    prompts = [prompt for prompt, _ in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for _, n in requests
    ]
    wanted = sum(n for _, n in requests)
    settings = {"device": device, "dtype": TIMED_DTYPE, "enable_prefix_caching": False}
    for mode in modes:
        llm = LLM(folder, tokenizer=ASSETS, **settings | MODES[mode] | engine)
        section[mode] = repeated(partial(generate, llm, prompts, params), wanted)
        print(f"  {mode}: {section[mode]}", flush=True)
        del llm
        free_memory()


def measure_transformers(section: dict, folder: Path, requests, device="cuda"):
    """The same requests by `generate`, as one batch: it has one length for all, so prompts are
    padded on the left to the longest, and everybody runs until the last is done. Only tokens that
    somebody wanted count. First as it is by default, compiled, then without compilation."""
    model = load_transformers(folder, device, getattr(torch, TIMED_DTYPE), "sdpa")
    longest, most = (max(map(size, requests)) for size in (lambda r: len(r[0]), lambda r: r[1]))
    ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(requests):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    section["batched"] = f"one batch of {len(requests)}, {longest} tokens in, {most} out for all"

    def run(disable_compile: bool):
        tokens = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=disable_compile,
        )[:, longest:].tolist()
        return [answer[:n] for answer, (_, n) in zip(tokens, requests, strict=True)]

    wanted = sum(n for _, n in requests)
    for name, disable_compile in (("not compiled", True), ("compiled", False)):
        section[name] = repeated(partial(run, disable_compile), wanted, repeats=2)
        print(f"  {name}: {section[name]}", flush=True)


# ------------------------------------------------------------------------------------ the report


def circumstances() -> dict:
    """Card, driver, versions, commit and date."""
    import transformers

    card = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "card": card.name if card else "none",
        "card_memory_bytes": card.total_memory if card else 0,
        "card_cache_bytes": card.L2_cache_size if card else 0,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "dtype_of_timings": TIMED_DTYPE,
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "date": time.strftime("%Y-%m-%d"),
    }


def output_of(*command: str) -> str:
    """The first line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


AIMS = (  # part, row, field, limit, whether more is better, in words
    ("attention", "decode and merge x 256", "share_of_copy", 0.8, True, "of copy bandwidth"),
    ("step", "graphs x 256", "times_floor", 2.0, False, "times its floor"),
    ("step", "graphs x 1", "times_floor", 3.0, False, "times its floor"),
)


def judge_aims(report: dict) -> list[dict]:
    """Every aim with what was measured, and whether it is met; null where nothing was."""
    aims = []
    for part, row, field, limit, more, words in AIMS:
        value = report.get(part, {}).get(row, {}).get(field)
        met = None
        if value is not None:
            met = value >= limit if more else value <= limit
        aim = f"{part}, {row}: {'at least' if more else 'at most'} {limit} {words}"
        aims.append({"aim": aim, "value": value, "met": met})
    return aims


def table(report: dict) -> str:
    """The report as a table to read."""
    about = report["circumstances"]
    lines = [", ".join(f"{key} {about[key]}" for key in ("card", "driver", "torch", "triton"))]
    lines.append(f"{'part':16}{'seconds':>9}  result")
    for part, seconds in report["seconds"].items():
        lines.append(f"{part:16}{seconds:9.1f}  {report['failed'].get(part, 'ok')}")
    lines.append(f"{'all':16}{sum(report['seconds'].values()):9.1f}")
    if report.get("attention"):
        lines.append(f"\n{'one layer of':24}{'us':>10}{'of copy':>10}{'of floor':>10}")
    for name, row in report.get("attention", {}).items():
        shares = f"{row['share_of_copy']:10.0%}{row['share_of_floor']:10.0%}"
        lines.append(f"{name:24}{row['microseconds']:10.1f}{shares}")
    if report.get("step"):
        columns = ("ms", "device", "floor", "times", "random", "top-p")
        lines.append(f"\n{'decode step':24}" + "".join(f"{column:>10}" for column in columns))
    for name, row in report.get("step", {}).items():
        times = f"{row['step_ms']:10.3f}{row['device_ms']:10.3f}{row['floor_ms']:10.3f}"
        draws = f"{row['random_step_ms']:10.3f}{row['top_p_step_ms']:10.3f}"
        lines.append(f"{name:24}{times}{row['times_floor']:10.1f}{draws}")
    lines.append("")
    for part in ("engine", "transformers"):
        for name, row in report.get(part, {}).items():
            if isinstance(row, dict):
                lines.append(f"{part + ', ' + name:32}{row['tokens_per_second']:12.0f} tokens/s")
    for aim in report["aims"]:
        value = "not measured" if aim["value"] is None else f"{aim['value']:.2f}"
        met = {True: "met", False: "not met", None: ""}[aim["met"]]
        lines.append(f"{aim['aim']:64}{value:>13} {met}".rstrip())
    return "\n".join(lines)


def rounded(value):
    """The report with four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def save(report: dict, out: Path):
    """Write the file whole: it is replaced when the new one is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".part")
    unfinished.write_text(json.dumps(rounded(report), indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, out)


def run_parts(parts: dict[str, Callable], out: Path) -> dict:
    """Call every part with its section of the report, which it fills, and with the whole.

    Whatever happens in one, the others run.
    """
    report = {"circumstances": circumstances(), "complete": False, "failed": {}, "seconds": {}}
    for name, part in parts.items():
        print(f"{name} ...", flush=True)
        report[name], start = {}, time.perf_counter()
        try:
            part(report[name], report)
        except Exception as error:
            report["failed"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        free_memory()
        report["seconds"][name] = time.perf_counter() - start
        report["aims"] = judge_aims(report)
        save(report, out)
    report["complete"] = True
    save(report, out)
    return report


def rates(report: dict) -> dict:
    """What the card does at best, as an earlier part has measured it."""
    if "card" in report["failed"]:
        raise CheckError("nothing to compare with: the part 'card' failed")
    return report["card"]


def all_parts(folder: Path) -> dict[str, Callable]:
    """Name -> part(section, report), in order: what is right first, then how fast."""
    models = {"random GPT-2 124M": folder, "the shipped model": ASSETS}
    requests = workload()
    return {
        "kernels": lambda section, report: check_kernels(section),
        "tokens": lambda section, report: check_tokens(section, models),
        "modes": lambda section, report: check_modes(section, models),
        "card": lambda section, report: measure_card(section),
        "attention": lambda section, report: measure_attention(
            section, rates(report), report["circumstances"]["card_cache_bytes"]
        ),
        "step": lambda section, report: measure_step(section, rates(report), folder),
        "engine": lambda section, report: measure_engine(section, folder, requests),
        "transformers": lambda section, report: measure_transformers(section, folder, requests),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "book/data/gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: PyTorch finds no CUDA device; nothing was measured", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 is what is compared
    with tempfile.TemporaryDirectory() as folder:
        report = run_parts(all_parts(random_checkpoint(Path(folder))), options.out)
    print("\n" + table(report))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
