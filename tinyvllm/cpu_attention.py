"""Paged attention on the CPU: a kernel for decodes, PyTorch's fused attention for chunks.

Built, step by step, in notebooks/09_attention.ipynb.
"""

import threading

import numpy as np
import torch
import torch.nn.functional as F
from numba import get_num_threads, njit, prange
from torch import Tensor

from tinyvllm.execution_batch import ExecutionBatch


@njit(parallel=True, cache=True, fastmath={"reassoc", "contract"})
def paged_decode_kernel(
    output,  # float32 [S, H, D]
    query,  # float32 [S, H, D]
    key_cache,  # float32 [num_blocks, block_size, H, D]
    value_cache,
    block_table,  # int32 [S, max_blocks]
    seq_lens,  # int32 [S]
    scale,  # float32
    splits,  # programs per sequence; each takes a run of heads
):
    """Attention of one query token a sequence, over its blocks, with an online softmax.

    A program is one sequence and a run of its heads. It walks over the block table once and
    keeps, per head, the largest score so far, the sum of the weights and the weighted sum of
    the values; a larger score rescales the last two. Nothing of another sequence is read, and
    a head's arithmetic does not depend on `splits`: a row is the same bits in any batch.
    vLLM: `attention/ops/triton_unified_attention.py`.
    """
    block_size, num_heads, head_size = key_cache.shape[1], query.shape[1], query.shape[2]
    for program in prange(len(seq_lens) * splits):
        seq, split = program // splits, program % splits
        first, last = num_heads * split // splits, num_heads * (split + 1) // splits
        best = np.full(num_heads, -np.inf, np.float32)
        total = np.zeros(num_heads, np.float32)
        mixed = np.zeros((num_heads, head_size), np.float32)
        weights = np.empty((num_heads, block_size), np.float32)
        for start in range(0, seq_lens[seq], block_size):
            block = block_table[seq, start // block_size]
            filled = min(block_size, seq_lens[seq] - start)
            # Slot by slot, all heads of a slot: the order in which the keys lie in memory.
            for slot in range(filled):
                for head in range(first, last):
                    score = np.float32(0)
                    for d in range(head_size):
                        score += query[seq, head, d] * key_cache[block, slot, head, d]
                    weights[head, slot] = score * scale
            for head in range(first, last):
                largest = best[head]
                for slot in range(filled):
                    largest = max(largest, weights[head, slot])
                shrink = np.exp(best[head] - largest)
                best[head] = largest
                total[head] *= shrink
                for d in range(head_size):
                    mixed[head, d] *= shrink
                for slot in range(filled):
                    weights[head, slot] = np.exp(weights[head, slot] - largest)
                    total[head] += weights[head, slot]
            for slot in range(filled):
                for head in range(first, last):
                    for d in range(head_size):
                        mixed[head, d] += weights[head, slot] * value_cache[block, slot, head, d]
        for head in range(first, last):
            for d in range(head_size):
                output[seq, head, d] = mixed[head, d] / total[head]


# numba's plainest thread pool ends the process when two threads start kernels at once. One
# kernel uses all cores anyway, so two engines in one process take turns.
KERNEL_LOCK = threading.Lock()


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    scale: float,
) -> Tensor:
    """`paged_decode_kernel` for float32 CPU tensors: query `[S, H, D]`, one row a sequence."""
    output = torch.empty_like(query)
    # Whole sequences read memory in order. Heads are split when that would leave cores idle.
    threads = get_num_threads()
    splits = 1 if len(seq_lens) >= threads else min(threads, query.shape[1])
    arrays = (t.numpy() for t in (output, query, key_cache, value_cache))
    with KERNEL_LOCK:
        paged_decode_kernel(*arrays, block_table, seq_lens, np.float32(scale), splits)
    return output


def chunk_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence's chunk by PyTorch's fused kernel.

    query `[q, H, D]`, the last q tokens of the sequence; keys, values `[n, H, D]`, all of it.
    """
    num_queries, length = len(query), len(keys)
    # Query i stands at position length - num_queries + i. Without a prefix that is the plain
    # triangle, which the kernel knows by itself and does not even compute the other half of.
    mask = None
    if num_queries < length:
        ones = torch.ones(num_queries, length, dtype=torch.bool, device=query.device)
        mask = ones.tril(length - num_queries)
    # The fused kernel takes [batch, H, tokens, D]. Without the batch dimension PyTorch falls
    # back to separate products and a softmax, at a fraction of the speed.
    q, k, v = (t.transpose(0, 1)[None] for t in (query, keys, values))
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return mixed[0].transpose(0, 1)


class PagedAttention:
    """One step's attention: the `attend` that the model calls once per layer.

    Stores the step's keys and values, then answers from the cache: sequences with one query
    token by the decode kernel, longer chunks one by one with `chunk_attention`. Off the CPU, or
    in 16 bits, every sequence takes the second way.

    Args:
        cache: a `PagedKVCache`, which holds the keys and values of all steps so far.
        batch: the step.
    """

    def __init__(self, cache, batch: ExecutionBatch):
        self.cache = cache
        device, dtype = cache.keys.device, cache.keys.dtype
        self.slot_mapping = torch.from_numpy(batch.slot_mapping).to(device)
        has_kernel = device.type == "cpu" and dtype == torch.float32
        is_decode = (np.diff(batch.query_start_loc) == 1) & has_kernel
        self.decode_rows = torch.from_numpy(batch.query_start_loc[:-1][is_decode]).long()
        self.decode_table = batch.block_table[is_decode]
        self.decode_lens = batch.seq_lens[is_decode]
        self.chunks = [self.chunk(batch, seq) for seq in np.flatnonzero(~is_decode)]

    def chunk(self, batch: ExecutionBatch, seq: int) -> tuple[slice, Tensor, int]:
        """Where a sequence's rows, blocks and keys are: the same in every layer."""
        start, end = batch.query_start_loc[seq : seq + 2].tolist()
        length = int(batch.seq_lens[seq])
        num_blocks = -(-length // self.cache.block_size)
        block_ids = torch.from_numpy(batch.block_table[seq, :num_blocks]).long()
        return slice(start, end), block_ids.to(self.cache.keys.device), length

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """`[T, H, D]` query, key, value of one layer in, `[T, H, D]` out."""
        self.cache.store(layer, key, value, self.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for rows, block_ids, length in self.chunks:
            keys, values = self.cache.gather(layer, block_ids, length)
            output[rows] = chunk_attention(query[rows], keys, values, scale)
        if len(self.decode_lens):
            output[self.decode_rows] = paged_decode(
                query[self.decode_rows],
                self.cache.keys[layer],
                self.cache.values[layer],
                self.decode_table,
                self.decode_lens,
                scale,
            )
        return output
