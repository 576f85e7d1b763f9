"""From logits to tokens: greedy or random, and a random draw that depends on nothing else.

Built, step by step, in notebooks/10_sampler.ipynb.
"""

import torch
from torch import Tensor

from tinyvllm.request import GREEDY_BELOW

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: an arbitrary start that is not zero


def mix(h: Tensor) -> Tensor:
    """Scramble 32-bit numbers held in int64: one changed input bit changes half of the output's.

    Shifts and odd multipliers in the manner of MurmurHash3's finaliser. Both multipliers are
    below 2**31, so no product leaves int64 and every device gives the same bits.
    """
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
    h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
    return h ^ (h >> 15)


def random_bits(seeds: Tensor, output_indices: Tensor, vocab_size: int) -> Tensor:
    """32 random bits for every (seed, output index, token id): int64 `[R, V]` in [0, 2**32).

    A pure function. No generator is advanced, so it does not matter which other rows there
    are, in which order they are drawn, or how often.
    """
    row = torch.full_like(seeds, GOLDEN)
    for word in (seeds & MASK, (seeds >> 32) & MASK, output_indices & MASK):
        row = mix(row ^ word)
    token = mix(torch.arange(1, vocab_size + 1, device=seeds.device))
    return mix(row[:, None] ^ token)


def gumbel_noise(seeds: Tensor, output_indices: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise float64 `[R, V]`: `-log(-log(u))` with u uniform in (0, 1).

    u is the middle of one of 2**32 equal cells, so it is never 0 or 1 and the noise is finite.
    """
    bits = random_bits(seeds, output_indices, vocab_size)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, output_indices: Tensor) -> Tensor:
    """Draw one token per row.

    Args:
        logits: `[R, V]`, any float dtype.
        temperatures: float32 `[R]`; below 1e-5 the row is greedy: its argmax.
        seeds: int64 `[R]`.
        output_indices: int64 `[R]`, the index of the output token that is drawn.

    Returns:
        int64 `[R]` token ids. A random row draws from softmax(logits / temperature) as the
        argmax of logits / temperature + Gumbel noise. vLLM: `v1/sample/sampler.py`.
    """
    token_ids = logits.argmax(dim=-1)
    random = torch.nonzero(temperatures >= GREEDY_BELOW).flatten()
    if len(random):
        scaled = logits[random].double() / temperatures[random, None].double()
        noise = gumbel_noise(seeds[random], output_indices[random], logits.shape[-1])
        token_ids[random] = (scaled + noise).argmax(dim=-1)
    return token_ids
