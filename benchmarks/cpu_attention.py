"""Attention on the CPU: the decode kernel against a loop over sequences, and where each wins.

    python benchmarks/cpu_attention.py [--json book/data/cpu_attention.json]

Heads and head size are GPT-2 124M's (12 x 64), blocks hold 16 tokens and lie in random order.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from evidence import interleaved_medians, save

from tinyvllm.attention import PagedKVCache, reference_paged_attention
from tinyvllm.cpu_attention import chunk_attention, paged_decode, paged_decode_kernel

HEADS, HEAD_SIZE, BLOCK_SIZE = 12, 64, 16
SCALE = HEAD_SIZE**-0.5


def random_cache(num_sequences: int, length: int):
    """A one-layer cache full of random numbers, and a shuffled block table."""
    rng = np.random.default_rng(0)
    blocks = -(-length // BLOCK_SIZE)
    cache = PagedKVCache(1, num_sequences * blocks + 1, BLOCK_SIZE, HEADS, HEAD_SIZE)
    cache.keys.normal_()
    cache.values.normal_()
    ids = rng.permutation(num_sequences * blocks) + 1
    table = ids.reshape(num_sequences, blocks).astype(np.int32)
    return cache, table, np.full(num_sequences, length, np.int32)


def decode(num_sequences: int, length: int, rounds: int) -> dict:
    """One query a sequence: a PyTorch loop, the kernel by heads, the kernel by sequences."""
    cache, table, lengths = random_cache(num_sequences, length)
    keys, values = cache.keys[0], cache.values[0]
    query = torch.randn(num_sequences, HEADS, HEAD_SIZE)
    block_ids = torch.from_numpy(table).long()

    def loop():
        rows = []
        for seq in range(num_sequences):
            k, v = cache.gather(0, block_ids[seq], length)
            rows.append(chunk_attention(query[seq : seq + 1], k, v, SCALE))
        return torch.cat(rows)

    def kernel(splits):
        output = torch.empty_like(query)
        arrays = (t.numpy() for t in (output, query, keys, values))
        paged_decode_kernel(*arrays, table, lengths, np.float32(SCALE), splits)
        return output

    candidates = {
        "loop over sequences": loop,
        "kernel, a program per head": lambda: kernel(HEADS),
        "kernel, a program per sequence": lambda: kernel(1),
    }
    starts = torch.arange(num_sequences + 1)
    expected = reference_paged_attention(
        query, keys, values, starts, torch.from_numpy(lengths), torch.from_numpy(table), SCALE
    )
    return {
        "sequences": num_sequences,
        "keys": length,
        "ms": interleaved_medians(candidates, rounds),
        "largest_error": {
            n: float((run() - expected).abs().max()) for n, run in candidates.items()
        },
    }


def prefill(length: int, rounds: int) -> dict:
    """A whole prompt: the fused kernel, the same without a batch dimension, the decode kernel."""
    cache, table, _ = random_cache(1, length)
    query = torch.randn(length, HEADS, HEAD_SIZE)
    tables, lengths = np.repeat(table, length, 0), np.arange(1, length + 1, dtype=np.int32)
    block_ids = torch.from_numpy(table[0]).long()
    mask = torch.ones(length, length, dtype=torch.bool).tril()

    def fused():
        return chunk_attention(query, *cache.gather(0, block_ids, length), SCALE)

    def three_dimensions():
        parts = (query, *cache.gather(0, block_ids, length))
        q, k, v = (t.transpose(0, 1) for t in parts)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)

    def as_decodes():
        return paged_decode(query, cache.keys[0], cache.values[0], tables, lengths, SCALE)

    candidates = {
        "fused": fused,
        "without batch dimension": three_dimensions,
        "decode kernel": as_decodes,
    }
    return {"tokens": length, "ms": interleaved_medians(candidates, rounds)}


def main():
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="save the figures to this file")
    parser.add_argument("--rounds", type=int, default=51)
    arguments = parser.parse_args()
    with torch.inference_mode():
        decodes = [
            decode(*shape, arguments.rounds) for shape in ((1, 200), (8, 200), (64, 200), (64, 800))
        ]
        prefills = [prefill(length, arguments.rounds) for length in (16, 64, 256, 1024)]
    for row in [*decodes, *prefills]:
        print(row)
    if arguments.json:
        save(arguments.json, {"decode": decodes, "prefill": prefills})


if __name__ == "__main__":
    main()
