"""Chapter 10: greedy is the argmax, a draw follows its distribution and depends on nothing else."""

import numpy as np
import pytest
import torch

from tinyvllm.sampler import gumbel_noise, mix, random_bits, sample

MASK = 0xFFFFFFFF


def draw(logits, temperature, seeds, indices):
    """Many draws from one distribution: one row per (seed, index)."""
    seeds, indices = torch.broadcast_tensors(torch.as_tensor(seeds), torch.as_tensor(indices))
    rows = torch.as_tensor(logits).expand(seeds.numel(), -1)
    temperatures = torch.full((seeds.numel(),), float(temperature))
    return sample(rows, temperatures, seeds.flatten(), indices.flatten())


def chi_square(counts, expected):
    """The statistic, in standard deviations above what chance gives."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def plain_bits(seed, index, token):
    """The hash once more, in Python's own integers."""

    def mix(h):
        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
        h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
        return h ^ (h >> 15)

    row = 0x9E3779B9
    for word in (seed & MASK, (seed >> 32) & MASK, index & MASK):
        row = mix(row ^ word)
    return mix(row ^ mix(token + 1))


def test_greedy_is_argmax():
    logits = torch.randn(50, 301)
    zeros = torch.zeros(50, dtype=torch.int64)
    for temperature in (0.0, 9e-6):
        temperatures = torch.full((50,), temperature)
        assert torch.equal(sample(logits, temperatures, zeros, zeros), logits.argmax(-1))
    assert (
        sample(torch.tensor([[1.0, 5, 5, 2]]), *(t[:1] for t in (temperatures, zeros, zeros))) == 1
    )
    none = torch.empty(0)
    assert len(sample(torch.empty(0, 7), none, none.long(), none.long())) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    """100,000 draws each: over output indices of one seed, and over seeds at one index."""
    logits = torch.linspace(-2, 2, 30)
    expected = (logits.double() / temperature).softmax(-1) * 100_000
    for seeds, indices in ((7, torch.arange(100_000)), (torch.arange(100_000), 7)):
        drawn = draw(logits, temperature, seeds, indices)
        assert abs(chi_square(drawn.bincount(minlength=30), expected)) < 4


def test_consecutive_draws_are_independent():
    """Pairs (draw i, draw i + 1), and pairs of neighbouring seeds, fill their table evenly."""
    logits = torch.tensor([0.0, 0.5, 1.0, -0.5])
    p = logits.double().softmax(-1)
    for seeds, indices in ((11, torch.arange(200_001)), (torch.arange(200_001), 0)):
        drawn = draw(logits, 1.0, seeds, indices)
        pairs = (drawn[:-1] * 4 + drawn[1:]).bincount(minlength=16)
        assert abs(chi_square(pairs, torch.outer(p, p).flatten() * 200_000)) < 4


def test_noise_is_uncorrelated_between_rows_and_between_tokens():
    noise = gumbel_noise(torch.arange(64), torch.zeros(64, dtype=torch.int64), 20_000)
    assert abs(noise.mean() - 0.5772) < 0.005  # Gumbel: mean 0.5772, variance pi**2 / 6
    assert abs(noise.var() - np.pi**2 / 6) < 0.01
    rows = torch.corrcoef(noise) - torch.eye(64)
    assert rows.abs().max() < 5 / 20_000**0.5
    tokens = torch.corrcoef(noise.T[:300]) - torch.eye(300)
    assert tokens.abs().max() < 5.5 / 64**0.5
    neighbours = torch.corrcoef(torch.stack([noise[:, 1:].flatten(), noise[:, :-1].flatten()]))
    assert neighbours[0, 1].abs() < 5 / noise.numel() ** 0.5


def test_every_input_bit_flips_every_output_bit_half_of_the_time():
    torch.manual_seed(0)
    x = torch.randint(0, 2**32, (20_000,))
    flips = mix(x)[None] ^ mix(x[None] ^ (1 << torch.arange(32))[:, None])
    share = ((flips[:, None] >> torch.arange(32)[:, None]) & 1).double().mean(-1)
    assert (share - 0.5).abs().max() < 0.03
    assert len(mix(torch.arange(1 << 20)).unique()) == 1 << 20  # nothing collides


def test_the_bits_are_these_for_all_time():
    """A seeded text must not change with a version or a device: computed here in plain Python."""
    seeds = [0, 1, -1, 42, 2**32, 2**63 - 1, -(2**63)]
    indices = [0, 1, 2, 1000, 7, 2**31, 3]
    bits = random_bits(torch.tensor(seeds), torch.tensor(indices), 50)
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        assert bits[row].tolist() == [plain_bits(seed, index, token) for token in range(50)]
    assert bits.min() >= 0
    assert bits.max() <= MASK
    assert random_bits(torch.tensor([0]), torch.tensor([0]), 2).tolist() == [
        [300396032, 3558765072]
    ]


def test_all_64_bits_of_a_seed_count():
    seeds = torch.tensor([1 << bit for bit in range(63)] + [0, -1, -(2**63)])
    bits = random_bits(seeds, torch.zeros_like(seeds), 64)
    assert len(bits.unique(dim=0)) == len(seeds)
    assert len(bits.unique()) > 0.999 * bits.numel()


def test_noise_is_finite_at_both_ends():
    uniform = (torch.tensor([0, MASK]).double() + 0.5) * 2.0**-32
    assert torch.isfinite(-torch.log(-torch.log(uniform))).all()


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(1)
    logits = torch.randn(64, 500)
    temperatures = torch.rand(64) * 2
    temperatures[::3] = 0
    seeds, indices = torch.randint(-(2**62), 2**62, (64,)), torch.randint(0, 1000, (64,))
    together = sample(logits, temperatures, seeds, indices)
    order = torch.randperm(64)
    shuffled = sample(*(t[order] for t in (logits, temperatures, seeds, indices)))
    assert torch.equal(shuffled, together[order])
    for row in range(64):
        one = slice(row, row + 1)
        alone = sample(logits[one], temperatures[one], seeds[one], indices[one])
        assert alone == together[row]
    assert torch.equal(together[::3], logits[::3].argmax(-1))  # greedy rows among random ones


def test_a_token_that_is_ruled_out_is_never_drawn():
    logits = torch.full((30,), -torch.inf)
    logits[17] = -3.0
    assert (draw(logits, 1.0, 5, torch.arange(100_000)) == 17).all()


def test_sixteen_bit_logits():
    logits = torch.randn(8, 100).to(torch.bfloat16)
    zeros = torch.zeros(8, dtype=torch.int64)
    ones = torch.ones(8)
    assert torch.equal(
        sample(logits, ones, zeros, zeros), sample(logits.float(), ones, zeros, zeros)
    )
