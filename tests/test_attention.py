"""Chapter 09: attention over blocks equals attention over a straight array, whatever the batch."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import greedy_rows

from tinyvllm.attention import PagedKVCache, reference_paged_attention
from tinyvllm.cpu_attention import PagedAttention, paged_decode, paged_decode_kernel
from tinyvllm.execution_batch import ExecutionBatch


def make_batch(lengths, chunks, block_size, num_blocks, rng) -> ExecutionBatch:
    """The arrays of a step in which sequence i computes the last chunks[i] of lengths[i] tokens.

    Blocks are dealt at random; the fields that only the sampler reads are empty.
    """
    lengths, chunks = np.asarray(lengths), np.asarray(chunks)
    counts = -(-lengths // block_size)
    blocks = rng.permutation(np.arange(1, num_blocks))[: counts.sum()]
    table = np.zeros((len(lengths), counts.max()), np.int32)
    for row, ids in zip(table, np.split(blocks, counts.cumsum()[:-1]), strict=True):
        row[: len(ids)] = ids
    seqs = np.repeat(np.arange(len(lengths)), chunks)
    starts = np.append(0, chunks.cumsum())
    positions = np.arange(len(seqs)) - starts[seqs] + (lengths - chunks)[seqs]
    slots = table[seqs, positions // block_size].astype(np.int64) * block_size
    empty = np.empty(0, np.int64)
    return ExecutionBatch(
        input_ids=np.zeros(len(seqs), np.int64),
        positions=positions,
        query_start_loc=starts.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        block_table=table,
        slot_mapping=slots + positions % block_size,
        logits_indices=empty,
        sampling=greedy_rows(0),
        prompt_logits_indices=empty,
        prompt_targets=empty,
        num_prompt_logprobs=0,
    )


class Case:
    """A random step: straight arrays of every sequence, and a cache that holds their prefixes.

    Everything that no sequence has written yet is NaN: the slots of this step, the rest of last
    blocks, and all blocks that nobody owns, the null block among them.
    """

    def __init__(self, lengths, chunks, heads=3, head_size=8, block_size=4, seed=0):
        rng = np.random.default_rng(seed)
        num_blocks = int(sum(-(-n // block_size) for n in lengths)) + 5
        self.batch = make_batch(lengths, chunks, block_size, num_blocks, rng)
        self.scale = 1.3 / head_size
        self.cache = PagedKVCache(2, num_blocks, block_size, heads, head_size)
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        shape = (sum(lengths), heads, head_size)
        q, k, v = (torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for _ in range(3))
        self.sequences = list(zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True))
        for row, (_, k, v), n, c in zip(
            self.batch.block_table, self.sequences, lengths, chunks, strict=True
        ):
            old = np.arange(n - c)
            slots = torch.from_numpy(row[old // block_size].astype(np.int64) * block_size)
            slots = slots + torch.from_numpy(old % block_size)
            self.cache.store(1, k[: n - c], v[: n - c], slots)
        self.query, self.key, self.value = (
            torch.cat(
                [s[i][n - c :] for s, n, c in zip(self.sequences, lengths, chunks, strict=True)]
            )
            for i in range(3)
        )
        self.chunks = chunks

    def paged(self):
        attend = PagedAttention(self.cache, self.batch)
        return attend(1, self.query, self.key, self.value, self.scale)

    def reference(self):
        """After `paged`, which stores the step's keys and values."""
        return reference_paged_attention(
            self.query,
            self.cache.keys[1],
            self.cache.values[1],
            torch.from_numpy(self.batch.query_start_loc),
            torch.from_numpy(self.batch.seq_lens),
            torch.from_numpy(self.batch.block_table),
            self.scale,
        )

    def dense(self):
        """No blocks: every sequence as a whole with a triangle for a mask, in float64."""
        rows = []
        for (q, k, v), chunk in zip(self.sequences, self.chunks, strict=True):
            scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * self.scale
            future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, v.double())[-chunk:])
        return torch.cat(rows).float()


sequences = st.lists(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(
    sequences,
    st.sampled_from([(1, 1), (3, 5), (2, 64), (25, 4)]),
    st.sampled_from([1, 2, 3, 4, 16, 64]),
    st.integers(0, 2**32 - 1),
)
def test_ragged_batches_equal_dense_attention(pairs, shape, block_size, seed):
    lengths, chunks = zip(*pairs, strict=True)
    case = Case(lengths, chunks, *shape, block_size, seed)
    got, dense = case.paged(), case.dense()
    assert (got - dense).abs().max() < 1e-5
    assert (case.reference() - dense).abs().max() < 1e-5
    assert case.cache.keys[0].isnan().all(), "another layer was written"


def test_scores_of_any_size():
    """Large scores overflow exp unless the largest is subtracted; equal ones must average."""
    for factor in (0.0, 1e3, -1e3):
        case = Case([33, 20], [1, 1], seed=3)
        case.scale = factor
        assert (case.paged() - case.dense()).abs().max() < 1e-5


def test_store_writes_the_slots_and_nothing_else():
    cache = PagedKVCache(2, 5, 4, 3, 8)
    key, value = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    slots = torch.tensor([7, 18, 4])
    cache.store(1, key, value, slots)
    flat = cache.keys[1].flatten(0, 1)
    assert torch.equal(flat[slots], key)
    assert torch.equal(cache.values[1].flatten(0, 1)[slots], value)
    assert cache.keys.count_nonzero() == key.numel()
    assert cache.values.count_nonzero() == value.numel()
    assert PagedKVCache.bytes_per_block(2, 4, 3, 8, torch.float32) * 5 == (
        cache.keys.nbytes + cache.values.nbytes
    )


def test_a_decode_is_the_same_bits_alone_in_any_batch_and_however_heads_are_split():
    lengths = np.random.default_rng(1).integers(1, 90, 64)
    case = Case(lengths, np.ones(64, int), heads=5, head_size=16, block_size=8)
    together = case.paged()
    keys, values = case.cache.keys[1], case.cache.values[1]
    table, lens = case.batch.block_table, case.batch.seq_lens
    for seq in range(64):
        one = slice(seq, seq + 1)
        alone = paged_decode(case.query[one], keys, values, table[one], lens[one], case.scale)
        assert torch.equal(alone, together[one])
    for splits in range(1, 6):
        output = torch.empty_like(case.query)
        arrays = (t.numpy() for t in (output, case.query, keys, values))
        paged_decode_kernel(*arrays, table, lens, np.float32(case.scale), splits)
        assert torch.equal(output, together)


def test_sixteen_bit_caches():
    for dtype in (torch.bfloat16, torch.float16):
        case = Case([9, 30, 17], [1, 4, 17], seed=2)
        dense = case.dense()
        case.cache.keys, case.cache.values = case.cache.keys.to(dtype), case.cache.values.to(dtype)
        case.query, case.key, case.value = (t.to(dtype) for t in (case.query, case.key, case.value))
        got = case.paged()
        assert got.dtype == dtype
        assert (got.float() - dense).abs().max() < 0.05
        assert (case.reference().float() - dense).abs().max() < 0.05


TWO_THREADS = """
import threading
import numpy as np, torch
from tinyvllm.cpu_attention import paged_decode

q = torch.ones(4, 2, 8)
cache = torch.ones(5, 4, 2, 8)
table, lens = np.array([[1], [2], [3], [4]], np.int32), np.full(4, 3, np.int32)


def work():
    for _ in range(300):
        assert torch.equal(paged_decode(q, cache, cache, table, lens, 1.0), q)


threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


def test_engines_in_two_threads_take_turns():
    """numba's own thread pool, which some platforms have nothing better than, would abort."""
    result = subprocess.run(
        [sys.executable, "-c", TWO_THREADS],
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"},
        timeout=120,
    )
    assert result.stdout == "done\n", result.stderr


@pytest.mark.parametrize("chunk", range(1, 13))
def test_a_chunk_of_any_size_sees_the_same(chunk):
    """The last token of a 12-token prompt attends alike whichever chunk it comes in."""
    whole = Case([12, 5], [12, 1], seed=4)
    parts = Case([12, 5], [chunk, 1], seed=4)
    assert torch.allclose(whole.paged()[11], parts.paged()[chunk - 1], atol=1e-6)
