"""Paged attention on a GPU: four Triton kernels that store, decode, merge and attend to chunks.

Built, step by step, in notebooks/12_triton_attention.ipynb.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyvllm.attention import PagedKVCache
from tinyvllm.execution_batch import ExecutionBatch


@triton.jit
def store_kv_kernel(
    key, value,  # [T, H, D], tokens KEY_STRIDE and VALUE_STRIDE numbers apart
    key_cache, value_cache,  # [num_blocks, block_size, H, D]
    slot_mapping,  # int64 [T], below 0: this token is not stored
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    SLOT: tl.constexpr, SLOT_PAD: tl.constexpr,  # H * D, and the next power of two
):  # fmt: skip
    """Copy one token's keys and values, all heads, to its slot. Program: (token).

    vLLM: v1/attention/ops/triton_reshape_and_cache_flash.py.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    lane = tl.arange(0, SLOT_PAD)
    k = tl.load(key + token * KEY_STRIDE + lane, mask=lane < SLOT)
    v = tl.load(value + token * VALUE_STRIDE + lane, mask=lane < SLOT)
    tl.store(key_cache + slot * SLOT + lane, k, mask=lane < SLOT)
    tl.store(value_cache + slot * SLOT + lane, v, mask=lane < SLOT)


# Fused multiply-adds are the default of some Triton versions only, and they change the last bits.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write `[T, H, D]` keys and values to the slots int64 `[T]`; a slot below 0 is skipped."""
    slot = key.shape[1] * key.shape[2]
    pad = triton.next_power_of_2(slot)
    strides = (key.stride(0), value.stride(0))
    arguments = (key, value, key_cache, value_cache, slot_mapping, *strides, slot, pad)
    store_kv_kernel[(len(key),)](*arguments, **OPTIONS)


@triton.jit
def load_tile(
    keys, values,  # the cache, moved on to the program's head
    table,  # the sequence's row of the block table
    key, end,  # int32 [TILE], positions; those from `end` on are not read, if MASKED
    SLOT: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values `[TILE, HEAD_PAD]` of one head, found through the block table."""
    inside = key < end if MASKED else None
    # 64 bits: a large cache has more numbers than an int32 can count.
    block = tl.load(table + key // BLOCK_SIZE, mask=inside).to(tl.int64)
    slot = block * BLOCK_SIZE + key % BLOCK_SIZE
    d = tl.arange(0, HEAD_PAD)
    mask = d[None, :] < HEAD_SIZE
    if MASKED:
        mask = mask & inside[:, None]
    at = slot[:, None] * SLOT + d[None, :]
    return tl.load(keys + at, mask=mask, other=0.0), tl.load(values + at, mask=mask, other=0.0)


@triton.jit
def decode_tile(
    best, total, mixed,  # float32 [TILE], [TILE], [TILE, HEAD_PAD]: what each lane keeps
    q, start, end,  # float32 [HEAD_PAD]; the tile's first key; one past the last key
    keys, values, table, scale,
    SLOT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A step of TILE online softmaxes: each lane takes one key, and asks no other lane."""
    key = start + tl.arange(0, TILE)
    k, v = load_tile(keys, values, table, key, end, SLOT, HEAD_SIZE, q.shape[0], BLOCK_SIZE, MASKED)
    score = tl.sum(q[None, :] * k.to(tl.float32), 1) * scale
    if MASKED:
        score = tl.where(key < end, score, float("-inf"))
    largest = tl.maximum(best, score)
    shrink, weight = tl.exp2(best - largest), tl.exp2(score - largest)
    mixed = mixed * shrink[:, None] + weight[:, None] * v.to(tl.float32)
    return largest, total * shrink + weight, mixed


@triton.jit
def walk(
    q, first, end, keys, values, table, scale,
    SLOT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One query over the keys first..end-1: float32 answer `[HEAD_PAD]`, logsumexp in base 2."""
    # Not -inf: a lane that never gets a key would compute -inf minus -inf.
    best = tl.full([TILE], -3.4e38, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, q.shape[0]], tl.float32)
    full = first + (end - first) // TILE * TILE
    for start in range(first, full, TILE):
        best, total, mixed = decode_tile(
            best, total, mixed, q, start, end, keys, values, table, scale,
            SLOT, HEAD_SIZE, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
    if full < end:
        best, total, mixed = decode_tile(
            best, total, mixed, q, full, end, keys, values, table, scale,
            SLOT, HEAD_SIZE, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
    largest = tl.max(best, 0)
    shrink = tl.exp2(best - largest)
    weight = tl.sum(total * shrink, 0)
    return tl.sum(mixed * shrink[:, None], 0) / weight, largest + tl.log2(weight)


LOG2_E = 1.4426950408889634
# Keys that one program of the decode kernel reads. The same for every batch: how a row is split,
# and so in which order it is summed, depends on nothing but its own length.
SPLIT_SIZE = 256


@triton.jit(do_not_specialize=["table_stride"])
def decode_attention_kernel(
    output, partial, logsumexp,  # [T, H, D]; float32 [S, H, splits, D]; float32 [S, H, splits]
    query,  # [T, H, D], tokens QUERY_STRIDE numbers apart
    key_cache, value_cache,  # [num_blocks, block_size, KV heads, D]
    query_start_loc, seq_lens,  # int32 [S + 1], int32 [S]
    block_table, table_stride,  # int32 [S, table_stride]
    scale,  # times log2(e)
    QUERY_STRIDE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,  # heads per KV head
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLIT_SIZE: tl.constexpr,
):  # fmt: skip
    """Attention of sequences with one query token. Program: (query head, sequence, split).

    A row of one split gets its answer here; of more, `merge_splits_kernel` puts them together.
    vLLM: v1/attention/ops/triton_unified_attention.py, its three-dimensional grid.
    """
    head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_loc + seq).to(tl.int64)
    length = tl.load(seq_lens + seq)
    first = split * SPLIT_SIZE
    if first >= length or tl.load(query_start_loc + seq + 1) - token != 1:
        return
    d = tl.arange(0, HEAD_PAD)
    at = query + token * QUERY_STRIDE + head * HEAD_SIZE + d
    q = tl.load(at, mask=d < HEAD_SIZE, other=0.0).to(tl.float32)
    table = block_table + seq.to(tl.int64) * table_stride
    kv = head // GROUP * HEAD_SIZE
    answer, weight = walk(
        q, first, min(length, first + SPLIT_SIZE), key_cache + kv, value_cache + kv, table, scale,
        HEADS // GROUP * HEAD_SIZE, HEAD_SIZE, BLOCK_SIZE, TILE,
    )  # fmt: skip
    if length <= SPLIT_SIZE:
        row = (token * HEADS + head) * HEAD_SIZE + d
        tl.store(output + row, answer.to(output.dtype.element_ty), mask=d < HEAD_SIZE)
    else:
        place = (seq.to(tl.int64) * HEADS + head) * tl.num_programs(2) + split
        tl.store(logsumexp + place, weight)
        tl.store(partial + place * HEAD_SIZE + d, answer, mask=d < HEAD_SIZE)


@triton.jit(do_not_specialize=["max_splits"])
def merge_splits_kernel(
    output, partial, logsumexp,  # [T, H, D]; float32 [S, H, max_splits, D], [S, H, max_splits]
    query_start_loc, seq_lens, max_splits,  # int32 [S + 1], int32 [S]
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, SPLIT_SIZE: tl.constexpr,
):  # fmt: skip
    """Put the splits of a row together, in order. Program: (query head, sequence)."""
    head, seq = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc + seq).to(tl.int64)
    length = tl.load(seq_lens + seq)
    if length <= SPLIT_SIZE or tl.load(query_start_loc + seq + 1) - token != 1:
        return
    d = tl.arange(0, HEAD_PAD)
    place = (seq.to(tl.int64) * HEADS + head) * max_splits
    best, total, mixed = float("-inf"), 0.0, tl.zeros([HEAD_PAD], tl.float32)
    for split in range(tl.cdiv(length, SPLIT_SIZE)):
        score = tl.load(logsumexp + place + split)
        answer = tl.load(partial + (place + split) * HEAD_SIZE + d, mask=d < HEAD_SIZE, other=0.0)
        largest = tl.maximum(best, score)
        shrink, weight = tl.exp2(best - largest), tl.exp2(score - largest)
        best, total = largest, total * shrink + weight
        mixed = mixed * shrink + weight * answer
    row = (token * HEADS + head) * HEAD_SIZE + d
    tl.store(output + row, (mixed / total).to(output.dtype.element_ty), mask=d < HEAD_SIZE)


def head_pad(head_size: int) -> int:
    """The width in which kernels hold a head: a power of two that matrix units can multiply."""
    return max(16, triton.next_power_of_2(head_size))


def decode_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    max_splits: int,
) -> None:
    """`reference_paged_attention` for the sequences with one query token; other rows are left.

    max_splits is at least ceil(length / SPLIT_SIZE) of the longest of them. A larger number costs
    programs that return at once, and changes nothing.
    """
    _, heads, head_size = query.shape
    num_seqs, pad, kv_heads = len(seq_lens), head_pad(head_size), key_cache.shape[2]
    splits = (num_seqs, heads, max_splits)
    partial = torch.empty((*splits, head_size), dtype=torch.float32, device=query.device)
    logsumexp = torch.empty(splits, dtype=torch.float32, device=query.device)
    where = (query_start_loc, seq_lens, block_table, block_table.stride(0))
    shape = (query.stride(0), heads, heads // kv_heads, head_size, pad, key_cache.shape[1])
    decode_attention_kernel[(heads, num_seqs, max_splits)](
        output, partial, logsumexp, query, key_cache, value_cache, *where, scale * LOG2_E,
        *shape, min(64, 2048 // pad), SPLIT_SIZE, **OPTIONS,
    )  # fmt: skip
    if max_splits > 1:
        arguments = (query_start_loc, seq_lens, max_splits, heads, head_size, pad, SPLIT_SIZE)
        merge_splits_kernel[(heads, num_seqs)](output, partial, logsumexp, *arguments, **OPTIONS)


@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The sequence of query block `block`: the last s with start[s] // BLOCK_Q + s <= block.

    vLLM: `find_seq_idx`, of the unified attention kernel.
    """
    low, high = num_seqs * 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend_tile(
    best, total, mixed,  # float32 [ROWS], [ROWS], [ROWS, HEAD_PAD]: kept so far
    q, position,  # [ROWS, HEAD_PAD]; int32 [ROWS], of the queries in their sequence
    start, end,  # the tile's first key; one past the last key that any row sees
    keys, values, table, scale,
    SLOT: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A step of the online softmax: TILE keys for all rows."""
    key = start + tl.arange(0, TILE)
    k, v = load_tile(keys, values, table, key, end, SLOT, HEAD_SIZE, q.shape[1], BLOCK_SIZE, MASKED)
    scores = tl.dot(q, k.to(q.dtype).T, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    largest = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - largest)
    weights = tl.exp2(scores - largest[:, None])
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype).to(q.dtype)
    mixed = tl.dot(weights, v.to(q.dtype), mixed * shrink[:, None], input_precision="ieee")
    return largest, total, mixed


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def paged_attention_kernel(
    output, query,  # [T, H, D], [T, H, D] with tokens QUERY_STRIDE numbers apart
    key_cache, value_cache,  # [num_blocks, block_size, KV heads, D]
    query_start_loc, seq_lens,  # int32 [S + 1], int32 [S]
    block_table, num_seqs, table_stride,  # int32 [S, table_stride]
    scale,  # times log2(e)
    QUERY_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,  # heads per KV head
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,  # rows are BLOCK_Q queries x GROUP heads
    DOT: tl.constexpr,  # the type in which matrices are multiplied
    SKIP_DECODES: tl.constexpr,
):  # fmt: skip
    """Causal attention of any mix of chunks and decodes. Program: (KV head, query block).

    vLLM: v1/attention/ops/triton_unified_attention.py. The walk is FlashAttention's.
    """
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    SLOT: tl.constexpr = KV_HEADS * HEAD_SIZE
    head, block = tl.program_id(0), tl.program_id(1)
    seq = find_sequence(query_start_loc, num_seqs, block, BLOCK_Q)
    start = tl.load(query_start_loc + seq)
    num_queries = tl.load(query_start_loc + seq + 1) - start
    first = (block - start // BLOCK_Q - seq) * BLOCK_Q  # this program's first query of the chunk
    if first >= num_queries or (SKIP_DECODES and num_queries == 1):
        return
    row, d = tl.arange(0, ROWS), tl.arange(0, HEAD_PAD)
    index = first + row // GROUP
    exists = (row < BLOCK_Q * GROUP) & (index < num_queries)
    mask = exists[:, None] & (d[None, :] < HEAD_SIZE)
    token = (start + index).to(tl.int64)[:, None]
    column = ((head * GROUP + row % GROUP) * HEAD_SIZE)[:, None] + d[None, :]
    q = tl.load(query + token * QUERY_STRIDE + column, mask=mask, other=0.0).to(DOT)

    prefix = tl.load(seq_lens + seq) - num_queries  # keys that were there before this chunk
    position = prefix + index
    end = prefix + min(first + BLOCK_Q, num_queries)
    full = (prefix + first + 1) // TILE * TILE
    keys, values = key_cache + head * HEAD_SIZE, value_cache + head * HEAD_SIZE
    table = block_table + seq.to(tl.int64) * table_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for tile in range(0, full, TILE):
        best, total, mixed = attend_tile(
            best, total, mixed, q, position, tile, end, keys, values, table, scale,
            SLOT, HEAD_SIZE, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
    for tile in range(full, end, TILE):
        best, total, mixed = attend_tile(
            best, total, mixed, q, position, tile, end, keys, values, table, scale,
            SLOT, HEAD_SIZE, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
    at = output + token * (SLOT * GROUP) + column
    tl.store(at, (mixed / total[:, None]).to(output.dtype.element_ty), mask=mask)


DOT_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def tile_shape(pad: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and keys of a step of `paged_attention_kernel`, so that registers hold them.

    pad is the padded head size; scripts/compile_kernels.py counts registers and spills.
    """
    if dtype == torch.float32:
        return (16, 32) if pad <= 64 else (16, 16)
    return (64, 32) if pad <= 128 else (32, 32)


def paged_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    skip_decodes: bool = False,
) -> None:
    """`reference_paged_attention` into `output` `[T, H, D]`, for any mix of chunks and decodes.

    With `skip_decodes`, the rows of sequences with one query token are left as they are.
    """
    num_tokens, heads, head_size = query.shape
    kv_heads, num_seqs, pad = key_cache.shape[2], len(seq_lens), head_pad(head_size)
    rows, tile = tile_shape(pad, query.dtype)
    rows = max(rows, triton.next_power_of_2(heads // kv_heads))
    # A sequence has at most one block that is not full, so counts alone bound the grid.
    num_blocks = num_tokens // (rows // (heads // kv_heads)) + num_seqs
    interpreted = not isinstance(paged_attention_kernel, triton.JITFunction)
    # The interpreter is numpy, and numpy has no bfloat16 to multiply matrices in.
    dot = tl.float32 if interpreted else DOT_TYPES[query.dtype]
    where = (query_start_loc, seq_lens, block_table, num_seqs, block_table.stride(0))
    shape = (query.stride(0), kv_heads, heads // kv_heads, head_size, pad, key_cache.shape[1])
    paged_attention_kernel[(kv_heads, num_blocks)](
        output, query, key_cache, value_cache, *where, scale * LOG2_E,
        *shape, rows, tile, dot, skip_decodes, **OPTIONS,
    )  # fmt: skip


class TritonPagedAttention:
    """One step's attention on a GPU, called as `cpu_attention.PagedAttention` is.

    Three launches a layer at most, four when a decode has more than SPLIT_SIZE keys.

    Args:
        cache: keys and values, where the model is, as all tensors here.
        slot_mapping: int64 `[T]`.
        where: query_start_loc int32 `[S + 1]`, seq_lens int32 `[S]`, block_table int32 `[S, B]`.
        has_chunks: whether a sequence may have more than one query token.
        max_splits: at least those of the longest decode; 0 if there is none.

    Raises:
        ValueError: a cache that the kernels cannot read: a dtype other than float16, bfloat16
            and float32, or heads wider than 256.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        where: tuple[Tensor, Tensor, Tensor],
        has_chunks: bool,
        max_splits: int,
    ):
        if cache.keys.dtype not in DOT_TYPES or cache.keys.shape[-1] > 256:
            raise ValueError(
                "cache must be float16, bfloat16 or float32 with heads of 1 to 256 numbers, "
                f"got {cache.keys.dtype} and {cache.keys.shape[-1]}"
            )
        self.cache, self.slot_mapping, self.where = cache, slot_mapping, where
        self.has_chunks, self.max_splits = has_chunks, max_splits

    @classmethod
    def of(
        cls, cache: PagedKVCache, batch: ExecutionBatch, tensors: dict[str, Tensor]
    ) -> "TritonPagedAttention":
        """The attention of a batch; `tensors` holds its arrays by name, where the cache is."""
        where = tuple(tensors[name] for name in ("query_start_loc", "seq_lens", "block_table"))
        is_decode = np.diff(batch.query_start_loc) == 1
        max_splits = -(-int(batch.seq_lens[is_decode].max(initial=0)) // SPLIT_SIZE)
        return cls(cache, tensors["slot_mapping"], where, not is_decode.all(), max_splits)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """`[T, H, D]` query, key, value of one layer in, `[T, H, D]` out."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        store_kv(key, value, keys, values, self.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self.has_chunks:
            paged_attention(output, query, keys, values, *self.where, scale, skip_decodes=True)
        if self.max_splits:
            decode_attention(output, query, keys, values, *self.where, scale, self.max_splits)
        return output
