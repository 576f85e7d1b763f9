"""Chapter 12: the Triton kernels against the definition, in the interpreter or on a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import make_batch

from book.tools.refresh import has_cuda
from tinyvllm.attention import PagedKVCache, reference_paged_attention
from tinyvllm.cpu_attention import PagedAttention
from tinyvllm.gpt2 import load_model
from tinyvllm.model_runner import step_arrays

pytest.importorskip("triton")

import tinyvllm.triton_attention as kernels
from tinyvllm.triton_attention import TritonPagedAttention, paged_attention, store_kv

DEVICE = "cuda" if has_cuda() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def triton_attention(cache, batch):
    """The class over a batch whose arrays are brought to the device one by one."""
    arrays = step_arrays(batch).items()
    tensors = {name: torch.from_numpy(array).to(DEVICE) for name, array in arrays}
    return TritonPagedAttention.of(cache, batch, tensors)


class Case:
    """A random step of sequences of some lengths, the last chunks[i] tokens of which are new.

    Everything that no sequence has written is NaN: the slots of this step, the rest of last
    blocks, and all blocks that nobody owns, the null block among them.
    """

    def __init__(
        self, lengths, chunks, shape=(2, 1, 16), block_size=16, dtype=torch.float32, seed=0
    ):
        kv_heads, group, head_size = shape
        rng = np.random.default_rng(seed)
        num_blocks = int(sum(-(-n // block_size) for n in lengths)) + 5
        self.batch = make_batch(lengths, chunks, block_size, num_blocks, rng)
        self.cache = PagedKVCache(2, num_blocks, block_size, kv_heads, head_size, dtype, DEVICE)
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        self.scale = 1.3 * head_size**-0.5
        for row, n, c in zip(self.batch.block_table, lengths, chunks, strict=True):
            old = np.arange(n - c)
            slots = row[old // block_size].astype(np.int64) * block_size + old % block_size
            key, value = (self.random(rng, n - c, kv_heads, head_size, dtype) for _ in range(2))
            self.cache.store(1, key, value, torch.from_numpy(slots).to(DEVICE))
        total = sum(chunks)
        # As the model makes them: three parts of one row.
        rows = self.random(rng, total, 1, (group + 2) * kv_heads * head_size, dtype)[:, 0]
        width = kv_heads * head_size
        parts = rows.split([group * width, width, width], dim=1)
        self.parts = [part.unflatten(1, (-1, head_size)) for part in parts]

    @staticmethod
    def random(rng, tokens, heads, size, dtype):
        array = rng.standard_normal((tokens, heads, size), dtype=np.float32)
        return torch.from_numpy(array).to(DEVICE, dtype)

    def run(self):
        """Through the class: decodes by one kernel, chunks by the other."""
        return triton_attention(self.cache, self.batch)(1, *self.parts, self.scale)

    def where(self):
        """query_start_loc, seq_lens, block_table on the device."""
        arrays = (self.batch.query_start_loc, self.batch.seq_lens, self.batch.block_table)
        return [torch.from_numpy(array).to(DEVICE) for array in arrays]

    def unified(self):
        """After `run`: all rows by the unified kernel, into poisoned output."""
        output = torch.full_like(self.parts[0].contiguous(), torch.nan)
        caches = self.cache.keys[1], self.cache.values[1]
        paged_attention(output, self.parts[0], *caches, *self.where(), self.scale)
        return output

    def reference(self):
        """After `run`, which stores the step's keys and values."""
        group = self.parts[0].shape[1] // self.parts[1].shape[1]
        caches = (t[1].repeat_interleave(group, 2) for t in (self.cache.keys, self.cache.values))
        return reference_paged_attention(self.parts[0], *caches, *self.where(), self.scale)

    def check(self, tolerance=None):
        tolerance = tolerance or TOLERANCE[self.cache.keys.dtype]
        got = self.run()
        expected = self.reference()
        assert (got - expected).abs().max() < tolerance
        assert (self.unified() - expected).abs().max() < tolerance
        assert self.cache.keys[0].isnan().all(), "another layer was written"


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 32 keys, so that short sequences have several."""
    monkeypatch.setattr(kernels, "SPLIT_SIZE", 32)


sequences = st.lists(
    st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n) | st.just(1))),
    min_size=1,
    max_size=4,
)
# KV heads, query heads for each, head size. Powers of two and others, the smallest and the widest.
shapes = [(1, 1, 1), (2, 1, 16), (1, 3, 5), (2, 2, 64), (1, 1, 80), (1, 4, 96), (1, 1, 256)]


@settings(max_examples=12, deadline=None)
@given(
    pairs=sequences,
    shape=st.sampled_from(shapes),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    split_size=st.sampled_from([32, 64, 256]),
    seed=st.integers(0, 2**32 - 1),
)
def test_ragged_batches(pairs, shape, block_size, dtype, split_size, seed):
    lengths, chunks = zip(*pairs, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SPLIT_SIZE", split_size)
        Case(lengths, chunks, shape, block_size, dtype, seed).check()


@pytest.mark.parametrize("border", [16, 32, 64])
def test_around_borders(border, short_splits):
    """Blocks of 16, tiles of 32 and 64, splits of 32: one key less, none, one more."""
    lengths = [border - 1, border, border + 1]
    Case([*lengths, *lengths], [1, 1, 1, *lengths], (1, 1, 16)).check()
    Case([border + 40] * 3, lengths, (1, 1, 16)).check()


def test_the_real_split_size():
    Case([255, 256, 257, 513], [1, 1, 1, 1], (1, 1, 16)).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_type(dtype):
    Case([70, 9], [1, 4], dtype=dtype).check()


def test_grouped_heads():
    """Three query heads share a KV head, in both kernels."""
    Case([40, 20, 33], [1, 20, 1], (2, 3, 16)).check()


def test_scores_of_any_size():
    """Large scores overflow exp2 unless the largest is subtracted; equal ones must average."""
    for factor in (0.0, 1e3, -1e3):
        case = Case([33, 5], [1, 5], (1, 1, 16))
        case.scale = factor
        case.check(1e-3)  # a score of 10,000 has no more digits than that behind the point


def test_a_row_is_the_same_bits_alone_and_in_any_batch(short_splits):
    """Decodes and chunks, with neighbours longer and shorter, before and behind."""
    lengths, chunks = [75, 1, 40, 70, 33], [1, 1, 7, 70, 1]
    case = Case(lengths, chunks, (1, 2, 16))
    together = case.run()
    starts, _, table = case.where()
    for seq in range(len(lengths)):
        rows = slice(starts[seq], starts[seq + 1])
        alone = Case.__new__(Case)
        alone.cache, alone.scale = case.cache, case.scale
        alone.parts = [part[rows] for part in case.parts]
        alone.batch = make_batch(lengths[seq : seq + 1], chunks[seq : seq + 1], 16, 99, np.random)
        alone.batch.block_table = table[seq : seq + 1].cpu().numpy()
        alone.batch.slot_mapping = case.batch.slot_mapping[rows]
        assert torch.equal(alone.run(), together[rows])


def test_more_splits_than_needed_change_nothing(short_splits):
    """What a captured CUDA graph does: the grid is for the longest sequence there may be."""
    case = Case([70, 20], [1, 1])
    attend = triton_attention(case.cache, case.batch)
    expected = attend(1, *case.parts, case.scale)
    attend.max_splits = 7
    assert torch.equal(attend(1, *case.parts, case.scale), expected)


def test_decodes_are_left_to_the_decode_kernel():
    case = Case([70, 20, 9], [1, 20, 1])
    case.run()
    output = torch.full_like(case.parts[0].contiguous(), torch.nan)
    caches = case.cache.keys[1], case.cache.values[1]
    paged_attention(output, case.parts[0], *caches, *case.where(), 1.0, skip_decodes=True)
    assert output.isnan().all(dim=(1, 2)).tolist() == [True] + 20 * [False] + [True]


def test_rows_beside_the_batch_are_not_written():
    """Padding as CUDA graphs need it: sequences without keys, tokens without slots."""
    case = Case([20, 5], [1, 1])
    batch = case.batch
    batch.seq_lens = np.append(batch.seq_lens, np.int32(0))
    batch.query_start_loc = np.append(batch.query_start_loc, np.int32(3))
    batch.block_table = np.pad(batch.block_table, ((0, 1), (0, 0)))
    batch.slot_mapping = np.append(batch.slot_mapping, -1)
    case.parts = [torch.cat([part, part[:1]]) for part in case.parts]
    got = case.run()[:2]
    batch.seq_lens, batch.query_start_loc = batch.seq_lens[:2], batch.query_start_loc[:3]
    batch.block_table, case.parts = batch.block_table[:2], [part[:2] for part in case.parts]
    assert (got - case.reference()).abs().max() < 1e-5
    assert case.cache.keys[1, 0].isnan().all(), "padding was written to the null block"


@pytest.mark.parametrize("heads, head_size", [(3, 5), (12, 64)])
def test_store_writes_the_slots_and_nothing_else(heads, head_size):
    cache = PagedKVCache(2, 5, 4, heads, head_size, device=DEVICE)
    rows = torch.randn(4, 3 * heads * head_size, device=DEVICE)
    _, key, value = (p.unflatten(1, (heads, head_size)) for p in rows.chunk(3, dim=1))
    slots = torch.tensor([7, 18, -1, 4], device=DEVICE)
    store_kv(key, value, cache.keys[1], cache.values[1], slots)
    stored, flat = slots[slots >= 0], cache.keys[1].flatten(0, 1)
    assert torch.equal(flat[stored], key[slots >= 0])
    assert torch.equal(cache.values[1].flatten(0, 1)[stored], value[slots >= 0])
    assert cache.keys.count_nonzero() == cache.values.count_nonzero() == 3 * heads * head_size


def test_grids_come_from_counts_alone():
    """Every query block is somebody's, whatever the chunks: the bound is never too small."""
    rng = np.random.default_rng(0)
    for block_q in (1, 2, 16, 64):
        for _ in range(200):
            chunks = rng.integers(1, 1 + rng.integers(1, 300), rng.integers(1, 9))
            assert sum(-(-chunks // block_q)) <= chunks.sum() // block_q + len(chunks)


def test_caches_that_kernels_cannot_read():
    batch = Case([5], [1]).batch
    with pytest.raises(ValueError, match=r"float64 and 16"):
        triton_attention(PagedKVCache(1, 9, 16, 1, 16, torch.float64), batch)
    with pytest.raises(ValueError, match=r"heads of 1 to 256 numbers, got torch.float32 and 257"):
        triton_attention(PagedKVCache(1, 9, 16, 1, 257), batch)


@torch.inference_mode()
def test_a_whole_forward_of_gpt2():
    """The shipped model, a prompt in two chunks with a neighbour that decodes, then a decode."""
    model = load_model(None, device="cpu", dtype="float32")
    shape = model.config
    sizes = (shape.n_layer, 12, 16, shape.n_head, shape.head_size)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, shape.vocab_size, (2, 40)))
    table = np.array([[3, 7, 5], [2, 9, 4]], np.int32)
    steps = [((8, 20), (8, 20)), ((18, 21), (10, 1)), ((19, 22), (1, 1))]  # lengths, chunks
    hidden = {}
    for attention in (PagedAttention, triton_attention):
        cache, hidden[attention] = PagedKVCache(*sizes), []
        for lengths, chunks in steps:
            batch = make_batch(lengths, chunks, 16, 12, rng)
            seqs = np.repeat([0, 1], chunks)
            batch.block_table = table
            blocks = table[seqs, batch.positions // 16].astype(np.int64)
            batch.slot_mapping = blocks * 16 + batch.positions % 16
            ids = tokens[seqs, batch.positions]
            positions = torch.from_numpy(batch.positions)
            hidden[attention].append(model.forward(ids, positions, attention(cache, batch)))
    for ours, cpu in zip(hidden[triton_attention], hidden[PagedAttention], strict=True):
        assert (ours - cpu).abs().max() < 1e-4
        assert torch.equal(*(model.compute_logits(h).argmax(-1) for h in (ours, cpu)))
