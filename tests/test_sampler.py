"""Chapter 10: the order of operations, the distribution, draws that depend on nothing else."""

import numpy as np
import pytest
import torch
from sampling import greedy_rows, make_sampling, repeat_row
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import tinyvllm.sampler as sampler
from tinyvllm.request import SamplingParams
from tinyvllm.sampler import (
    edit_logits,
    gumbel_noise,
    mix,
    random_bits,
    row_keys,
    sample,
    score,
    score_prompt,
    token_keys,
)

MASK = 0xFFFFFFFF
PLAIN = SamplingParams()


def draw(logits, params, seeds, indices):
    """Many draws from one distribution: one row per (seed, index)."""
    batch = repeat_row(params, seeds, indices)
    rows = torch.as_tensor(logits).expand(len(batch.seeds), -1)
    return sample(rows.clone(), batch)[0]


def chi_square(counts, expected):
    """The statistic, in standard deviations above what chance gives."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def as_int32(number):
    return (number + 2**31) % 2**32 - 2**31


def plain_bits(seed, index, token):
    """The hash once more, in Python's own integers."""

    def mix(h):
        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
        h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
        return h ^ (h >> 15)

    row = 0x9E3779B9
    for word in (seed & MASK, (seed >> 32) & MASK, index & MASK):
        row = mix(row ^ word)
    return as_int32(mix(row ^ mix(token + 1)))


def bits_of(seeds, indices, vocab_size):
    return random_bits(row_keys(seeds, indices), token_keys(torch.arange(vocab_size)))


def noise_of(seeds, indices, vocab_size):
    return gumbel_noise(row_keys(seeds, indices), token_keys(torch.arange(vocab_size)))


# ---------------------------------------------------------------------------------------------
# Randomness


def test_the_bits_are_these_for_all_time():
    """A seeded text must not change with a version or a device: computed here in plain Python."""
    seeds = [0, 1, -1, 42, 2**32, 2**63 - 1, -(2**63)]
    indices = [0, 1, 2, 1000, 7, 2**31, 3]
    bits = bits_of(torch.tensor(seeds), torch.tensor(indices), 50)
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        assert bits[row].tolist() == [plain_bits(seed, index, token) for token in range(50)]
    assert (bits_of(torch.tensor([0]), torch.tensor([0]), 2) & MASK).dtype == torch.int32
    assert [b & MASK for b in bits[0, :2].tolist()] == [300396032, 3558765072]


def test_a_token_has_its_bits_wherever_it_stands():
    """Among candidates in any order, the noise is that of the whole vocabulary, bit for bit."""
    rows = row_keys(torch.arange(9), torch.arange(9) * 3)
    whole = gumbel_noise(rows, token_keys(torch.arange(5003)))
    for count in (1, 2, 7, 8, 9, 33, 1024):
        ids = torch.stack([torch.randperm(5003)[:count] for _ in range(9)])
        assert torch.equal(gumbel_noise(rows, token_keys(ids)), whole.gather(1, ids))
    for row in range(9):  # and a row its noise, alone or among others
        assert torch.equal(
            gumbel_noise(rows[row : row + 1], token_keys(torch.arange(5003)))[0], whole[row]
        )


def test_every_input_bit_flips_every_output_bit_half_of_the_time():
    torch.manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (20_000,), dtype=torch.int32)
    one = torch.tensor([as_int32(1 << bit) for bit in range(32)], dtype=torch.int32)[:, None]
    flips = mix(x.clone())[None] ^ mix(x[None] ^ one)
    share = ((flips[:, None] >> torch.arange(32)[:, None]) & 1).double().mean(-1)
    assert (share - 0.5).abs().max() < 0.03
    assert len(mix(torch.arange(1 << 20, dtype=torch.int32)).unique()) == 1 << 20


def test_all_64_bits_of_a_seed_count():
    seeds = torch.tensor([1 << bit for bit in range(63)] + [0, -1, -(2**63)])
    bits = bits_of(seeds, torch.zeros_like(seeds), 64)
    assert len(bits.unique(dim=0)) == len(seeds)
    assert len(bits.unique()) > 0.999 * bits.numel()


def test_noise_is_uncorrelated_between_rows_and_between_tokens():
    noise = noise_of(torch.arange(64), torch.zeros(64, dtype=torch.int64), 20_000).double()
    assert abs(noise.mean() - 0.5772) < 0.005  # Gumbel: mean 0.5772, variance pi**2 / 6
    assert abs(noise.var() - np.pi**2 / 6) < 0.01
    rows = torch.corrcoef(noise) - torch.eye(64)
    assert rows.abs().max() < 5 / 20_000**0.5
    tokens = torch.corrcoef(noise.T[:300]) - torch.eye(300)
    assert tokens.abs().max() < 5.5 / 64**0.5
    neighbours = torch.corrcoef(torch.stack([noise[:, 1:].flatten(), noise[:, :-1].flatten()]))
    assert neighbours[0, 1].abs() < 5 / noise.numel() ** 0.5


def test_noise_is_the_formula_and_finite_at_both_ends(monkeypatch):
    """For chosen bits: against float64; fine steps at the top, where draws are decided."""
    chosen = torch.tensor([0, 1, 2, 3, 1000, 2**30, 2**31 - 2, 2**31 - 1, -1, -(2**31)])
    chosen = torch.cat([chosen, torch.randint(-(2**31), 2**31, (100_000,))]).to(torch.int32)
    monkeypatch.setattr(sampler, "random_bits", lambda rows, tokens: chosen.clone())
    noise = gumbel_noise(None, None)
    exact = -torch.log(-torch.log1p(-((chosen & 0x7FFFFFFF).double() + 0.5) * 2.0**-31))
    assert torch.isfinite(noise).all()
    assert noise.max() == noise[0] > 22
    # Above the noise that half of all draws exceed, float32 is as good as its own last digits.
    high = exact > -np.log(np.log(2))
    assert ((noise - exact).abs()[high] < 4e-7 * exact.abs()[high].clamp(min=1)).all()
    assert (noise - exact).abs().max() < 0.4  # the rare lowest values are cut off at -2.8
    assert (noise.diff()[:3] < 0).all()


def test_consecutive_draws_are_independent():
    """Pairs (draw i, draw i + 1), and pairs of neighbouring seeds, fill their table evenly."""
    logits = torch.tensor([0.0, 0.5, 1.0, -0.5])
    p = logits.double().softmax(-1)
    for seeds, indices in ((11, np.arange(200_001)), (np.arange(200_001), 0)):
        drawn = draw(logits, PLAIN, seeds, indices)
        pairs = (drawn[:-1] * 4 + drawn[1:]).bincount(minlength=16)
        assert abs(chi_square(pairs, torch.outer(p, p).flatten() * 200_000)) < 4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=7),
        SamplingParams(temperature=1.5, top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=0.8, min_p=0.05, top_k=12, top_p=0.9),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    """100,000 draws each: over output indices of one seed, and over seeds at one index."""
    logits = torch.linspace(-2, 2, 30)
    expected = hf_scores(logits, params).double().softmax(-1) * 100_000
    for seeds, indices in ((7, np.arange(100_000)), (np.arange(100_000), 7)):
        drawn = draw(logits, params, seeds, indices)
        assert abs(chi_square(drawn.bincount(minlength=30), expected)) < 4


# ---------------------------------------------------------------------------------------------
# The distribution, against transformers


def hf_scores(logits, params, prompt=(), output=(), forbidden=()):
    """One row through the processors of transformers, in our order; -inf where cut off."""
    scores = logits[None].clone()
    past = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    before, after = LogitsProcessorList(), LogitsProcessorList()
    if params.allowed_token_ids is not None:
        banned = sorted(set(range(len(logits))) - set(params.allowed_token_ids))
        if banned:
            before.append(SuppressTokensLogitsProcessor(banned))
    if forbidden:
        before.append(SuppressTokensLogitsProcessor(sorted(forbidden)))
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias.items()}
        before.append(SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1 and past.numel():
        before.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = before(past, scores)
    for token in set(output):  # transformers has no such penalties
        count = output.count(token)
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if params.greedy:
        return scores[0]
    if params.temperature != 1:
        after.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0:
        after.append(MinPLogitsWarper(params.min_p))
    if 0 < params.top_k < len(logits):
        after.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        after.append(TopPLogitsWarper(params.top_p))
    return after(past, scores)[0]


def ours(logits, batch):
    """The log of the distribution that each row is drawn from, `[R, V]`, by token id."""
    batch.logprob_rows, batch.num_logprobs = np.arange(len(logits)), -1
    scores = sample(logits.clone(), batch, "processed_logprobs")[1]
    result = torch.empty(logits.shape)
    ids, values = torch.from_numpy(scores.token_ids), torch.from_numpy(scores.logprobs)
    return result.scatter_(1, ids[:, 1:], values[:, 1:])


def random_params(rng, vocab_size):
    """Everything at random; each feature is off half of the time."""

    def maybe(value, neutral):
        return value if rng.random() < 0.5 else neutral

    some = rng.permutation(vocab_size)
    return SamplingParams(
        temperature=maybe(float(rng.uniform(0.05, 2)), float(rng.choice([0.0, 1.0]))),
        top_k=maybe(int(rng.integers(1, vocab_size + 5)), 0),
        top_p=maybe(float(rng.uniform(0.01, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe({int(i): float(rng.uniform(-5, 5)) for i in some[:3]}, None),
        allowed_token_ids=maybe(some[: rng.integers(3, vocab_size + 1)].tolist(), None),
    )


@pytest.mark.parametrize("vocab_size", [7, 60, 1500])
def test_distribution_is_that_of_transformers(vocab_size, monkeypatch):
    """1,200 random parameter sets in random batches, in a vocabulary below and above CANDIDATES."""
    monkeypatch.setattr(sampler, "CANDIDATES", 40)
    rng = np.random.default_rng(vocab_size)
    kept = 0
    for _ in range(20):
        params = [random_params(rng, vocab_size) for _ in range(20)]
        logits = torch.from_numpy(rng.normal(0, rng.uniform(0.3, 5), (20, vocab_size))).float()
        texts = [
            (rng.integers(0, vocab_size, n).tolist(), rng.integers(0, vocab_size, m).tolist())
            for n, m in rng.integers(0, 20, (20, 2))
        ]
        # One id a row is forbidden, if that leaves an allowed one.
        forbidden = [
            (row, int(rng.integers(vocab_size)))
            for row, p in enumerate(params)
            if rng.random() < 0.5 and len(p.allowed_token_ids or range(9)) > 1
        ]
        got = ours(logits, make_sampling(params, texts=texts, forbidden=forbidden))
        for row, p in enumerate(params):
            banned = {token for r, token in forbidden if r == row}
            # In float64: a sum of float32 probabilities may fall on either side of top_p.
            want = hf_scores(logits[row].double(), p, *texts[row], banned).log_softmax(-1)
            assert torch.equal(got[row].isneginf(), want.isneginf()), p
            finite = ~want.isneginf()
            assert (got[row] - want)[finite].abs().max() < 2e-4, p
            kept += int(finite.sum()) < vocab_size
    assert kept > 200


NEUTRAL = [
    SamplingParams(),
    SamplingParams(top_k=-1),
    SamplingParams(top_k=50),
    SamplingParams(top_k=1000),
    SamplingParams(logit_bias={}, stop_token_ids=[3], min_p=0.0, top_p=1.0),
]


@pytest.mark.parametrize("params", NEUTRAL)
def test_neutral_values_change_nothing(params):
    logits = torch.randn(9, 50)
    got = ours(logits, make_sampling([params] * 9))
    assert (got - logits.log_softmax(-1)).abs().max() < 1e-5


def one_row(values, params, **fields):
    """Probabilities of one row."""
    return ours(torch.tensor([values]), make_sampling([params], **fields))[0].exp()


def test_ties_at_the_kth_value_are_kept():
    values = [3.0, 1.0, 2.0, 2.0, 0.0, 2.0]
    for k in (2, 3, 4):
        want = hf_scores(torch.tensor(values), SamplingParams(top_k=k)).softmax(-1)
        assert torch.allclose(one_row(values, SamplingParams(top_k=k)), want)
        assert (want > 0).sum() == 4
    assert (one_row([1.0] * 500, SamplingParams(top_k=3)) > 0).all()
    # Their probability counts when top-p comes: the likeliest has 0.475, so 0.5 needs the ties.
    assert (one_row(values, SamplingParams(top_k=2, top_p=0.47)) > 0).sum() == 1
    assert (one_row(values, SamplingParams(top_k=2, top_p=0.48)) > 0).sum() == 4


def test_the_best_token_always_survives():
    values = [0.1, 0.2, 0.15, 0.12]
    for params in (
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0, top_p=1e-30, top_k=1, temperature=1e-5),
    ):
        assert one_row(values, params).tolist() == [0, 1, 0, 0]
    assert (one_row([0.5, 0.5, 0.1], SamplingParams(min_p=1.0)) > 0).tolist() == [True, True, False]


def test_everything_masked_but_one():
    allowed = SamplingParams(allowed_token_ids=[17], top_k=5, top_p=0.9, min_p=0.1)
    for params in (allowed, SamplingParams(allowed_token_ids=[17]), allowed):
        logits = torch.randn(1, 3000).expand(5000, -1).clone()
        batch = repeat_row(params, 5, np.arange(5000))
        batch.allowed = [(row, np.array([17])) for row in range(5000)]
        assert (sample(logits, batch)[0] == 17).all()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_row_without_any_token_harms_no_other(mode):
    """Bad words may ban, together, the last allowed token. What comes then is a valid id."""
    cases = [
        SamplingParams(top_p=0.5),
        PLAIN,
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
    ]
    cases += [SamplingParams(min_p=0.4, top_k=4, repetition_penalty=1.3, logprobs=3)]
    for hopeless in cases:
        params = [PLAIN, hopeless, SamplingParams(top_p=0.9, logprobs=2)]
        forbidden = [(1, token) for token in range(40)]
        logits = torch.randn(3, 40)
        batch = make_sampling(params, forbidden=forbidden, texts=[([1], [2])] * 3)
        ids, scores = sample(logits.clone(), batch, mode)
        alone, alone_scores = sample(
            logits[2:].clone(), make_sampling(params[2:], texts=[([1], [2])]), mode
        )
        assert ids[2] == alone
        assert 0 <= ids[1] < 40
        assert np.array_equal(scores.logprobs[-1][:3], alone_scores.logprobs[0])


def test_extreme_values_stay_finite():
    """The smallest temperature and repetition penalty that are allowed, together."""
    params = SamplingParams(temperature=1e-5, repetition_penalty=1.2e-38, top_p=0.9)
    probabilities = one_row([5.0, 80.0, -3.0], params, texts=[([0, 2], [0])])
    assert probabilities.isfinite().all()
    assert probabilities.tolist() == [1, 0, 0]


# ---------------------------------------------------------------------------------------------
# Edits


def reference_penalties(logits, params, prompt, output):
    """Ten lines that say what each penalty sees."""
    logits = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in output:
            if logits[token] > 0:
                logits[token] /= params.repetition_penalty
            else:
                logits[token] *= params.repetition_penalty
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    return logits


def test_penalties_against_the_reference():
    rng = np.random.default_rng(3)
    for _ in range(100):
        params, texts = [], []
        for _ in range(rng.integers(1, 6)):
            r, f, p = rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2)
            r, f, p = (float(x) for x in np.array([r, f, p]) * (rng.random(3) < 0.7))
            params.append(
                SamplingParams(repetition_penalty=r or 1.0, frequency_penalty=f, presence_penalty=p)
            )
            texts.append(tuple(rng.integers(0, 12, n).tolist() for n in rng.integers(0, 15, 2)))
        logits = torch.from_numpy(rng.normal(0, 2, (len(params), 12))).float()
        edited = logits.clone()
        edit_logits(edited, make_sampling(params, texts=texts))
        for row, p in enumerate(params):
            want = reference_penalties(logits[row].tolist(), p, *texts[row])
            assert np.allclose(edited[row].numpy(), want, atol=1e-5)


def test_edits_come_in_their_order():
    """A bias lifts no forbidden token, and a penalty sees the biased logit."""
    params = SamplingParams(
        temperature=0,
        logit_bias={0: 100.0, 1: 5.0, 2: -3.0},
        repetition_penalty=2.0,
        allowed_token_ids=[0, 1, 2],
    )
    logits = torch.tensor([[1.0, -1.0, 2.0, 50.0]])
    edit_logits(logits, make_sampling([params], forbidden=[(0, 0)], texts=[([1, 2], [])]))
    assert logits.tolist() == [[-np.inf, 2.0, -2.0, -np.inf]]


def test_rows_without_edits_are_not_written():
    params = [PLAIN, SamplingParams(logit_bias={1: 2.0}), PLAIN]
    logits = torch.randn(3, 9)
    before = logits.clone()
    sample(logits, make_sampling(params))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert not torch.equal(logits[1], before[1])


# ---------------------------------------------------------------------------------------------
# Rows


def test_greedy_is_argmax():
    logits = torch.randn(50, 301)
    for temperature in (0.0, 9e-6):
        batch = repeat_row(SamplingParams(temperature=temperature), np.arange(50), 0)
        assert torch.equal(sample(logits.clone(), batch)[0], logits.argmax(-1))
    assert sample(torch.tensor([[1.0, 5, 5, 2]]), greedy_rows(1))[0] == 1
    assert len(sample(torch.empty(0, 7), greedy_rows(0))[0]) == 0


def test_greedy_is_top_k_1_when_the_maximum_is_unique():
    logits = torch.randn(200, 3000)
    for params in (SamplingParams(top_k=1), SamplingParams(top_k=1, temperature=2.0, top_p=0.3)):
        got = sample(logits.clone(), repeat_row(params, np.arange(200), 0))[0]
        assert torch.equal(got, logits.argmax(-1))


def test_a_row_does_not_depend_on_its_batch():
    rng = np.random.default_rng(1)
    params = [random_params(rng, 3000) for _ in range(64)]
    params = [SamplingParams(temperature=0) if row % 3 == 0 else p for row, p in enumerate(params)]
    logits = torch.from_numpy(rng.normal(0, 2, (64, 3000))).float()
    texts = [
        tuple(rng.integers(0, 3000, n).tolist() for n in rng.integers(0, 9, 2)) for _ in params
    ]
    seeds = rng.integers(-(2**62), 2**62, 64)

    def run(rows):
        batch = make_sampling([params[i] for i in rows], texts=[texts[i] for i in rows])
        batch.seeds = seeds[rows]
        return sample(logits[rows].clone(), batch)[0]

    together = run(np.arange(64))
    order = rng.permutation(64)
    assert torch.equal(run(order), together[order])
    for row in range(64):
        assert run(np.array([row])) == together[row]
    assert torch.equal(together[::3], logits[::3].argmax(-1))  # greedy rows among random ones


def test_candidates_and_the_whole_vocabulary_draw_the_same(monkeypatch):
    """However many candidates are looked at first."""
    logits = torch.randn(300, 2000) * 4
    for params in (SamplingParams(top_p=0.7), SamplingParams(top_p=0.99, min_p=1e-3)):
        drawn = []
        for count in (1, 30, 1024, 2000, 99999):
            monkeypatch.setattr(sampler, "CANDIDATES", count)
            drawn.append(sample(logits.clone(), repeat_row(params, 3, np.arange(300)))[0])
        assert all(torch.equal(other, drawn[0]) for other in drawn)
    everything = sample(logits.clone(), repeat_row(PLAIN, 3, np.arange(300)))[0]
    nearly = sample(logits.clone(), repeat_row(SamplingParams(top_k=1999), 3, np.arange(300)))[0]
    assert torch.equal(everything, nearly)


def test_sixteen_bit_logits():
    logits = torch.randn(8, 100).to(torch.bfloat16)
    batch = repeat_row(SamplingParams(top_p=0.8, logprobs=2), np.arange(8), 0)
    before = logits.clone()
    ids, scores = sample(logits, batch)
    assert torch.equal(logits, before)
    ids32, scores32 = sample(logits.float(), batch)
    assert torch.equal(ids, ids32)
    assert np.array_equal(scores.logprobs, scores32.logprobs)


# ---------------------------------------------------------------------------------------------
# Log-probabilities


def test_raw_logprobs_do_not_depend_on_sampling_parameters():
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(0, 2, (30, 200))).float()
    want = logits.double().log_softmax(-1)
    params = [random_params(rng, 200) for _ in range(30)]
    batch = make_sampling(params, texts=[([1, 2], [3])] * 30)
    batch.logprob_rows, batch.num_logprobs = np.arange(0, 30, 2), 4
    ids, scores = sample(logits.clone(), batch)
    assert scores.token_ids.shape == scores.logprobs.shape == (15, 5)
    assert scores.token_ids.dtype == scores.ranks.dtype == np.int64
    assert scores.logprobs.dtype == np.float32
    assert scores.token_ids[:, 0].tolist() == ids[::2].tolist()
    for place, row in enumerate(range(0, 30, 2)):
        assert np.allclose(scores.logprobs[place], want[row, scores.token_ids[place]], atol=1e-5)
        assert scores.token_ids[place, 1:].tolist() == want[row].topk(4).indices.tolist()
        order = want[row].argsort(descending=True).tolist()
        assert scores.ranks[place] == 1 + order.index(ids[row])


def test_processed_logprobs_of_greedy_rows_are_edited_and_not_scaled():
    params = SamplingParams(temperature=0, logit_bias={2: 1.5}, top_k=1, min_p=0.9, top_p=0.1)
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    got = ours(logits, make_sampling([params]))[0]
    assert torch.allclose(got, torch.tensor([1.0, 2.0, 2.0]).log_softmax(-1))


def test_processed_logprobs_are_of_what_is_drawn():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(temperature=0.5, top_k=2, logprobs=-1)
    scores = sample(logits.clone(), make_sampling([params]), "processed_logprobs")[1]
    kept = torch.tensor([4.0, 2.0]).log_softmax(-1)
    assert np.allclose(scores.logprobs[0, 1:3], kept)
    assert np.isneginf(scores.logprobs[0, 3:]).all()


def test_no_rows_report_nothing_is_scored():
    assert sample(torch.randn(3, 9), make_sampling([PLAIN] * 3))[1] is None


def test_score():
    logprobs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.3, 0.2]]).log()
    scores = score(logprobs, torch.tensor([3, 0]), 2)
    assert scores.token_ids[0].tolist() == [3, 1, 2]
    assert scores.ranks.tolist() == [3, 2]
    assert np.allclose(np.exp(scores.logprobs[0]), [0.2, 0.4, 0.3])
    assert score(logprobs, torch.tensor([3, 0]), 0).token_ids.tolist() == [[3], [0]]
    assert score(logprobs, torch.tensor([3, 0]), -1).token_ids.shape == (2, 5)
    assert score(logprobs, torch.tensor([3, 0]), 99).token_ids.shape == (2, 5)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_score_prompt_is_chunked(count):
    hidden, weight, targets = torch.randn(count, 8), torch.randn(30, 8), torch.randint(30, (count,))
    seen = []

    def compute_logits(rows):
        seen.append(len(rows))
        return rows @ weight.T

    got = score_prompt(compute_logits, hidden, targets, 3)
    assert sum(seen) == count
    assert max(seen) <= 64
    want = (hidden @ weight.T).log_softmax(-1)
    assert np.allclose(got.logprobs[:, 0], want[torch.arange(count), targets], atol=1e-5)
    assert got.token_ids.shape == (count, 4)


# ---------------------------------------------------------------------------------------------
# Work


class CountCalls(TorchDispatchMode):
    """Counts the operators that run, and the numbers in what they return."""

    def __init__(self):
        super().__init__()
        self.calls, self.numbers = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        first = out[0] if isinstance(out, tuple | list) else out
        self.calls[name] = self.calls.get(name, 0) + 1
        if isinstance(first, torch.Tensor):
            self.numbers[name] = self.numbers.get(name, 0) + first.numel()
        return out


@pytest.fixture
def sorted_rows(monkeypatch):
    """How many rows were sorted whole, call by call."""
    seen, real = [], sampler.sort_descending
    monkeypatch.setattr(
        sampler, "sort_descending", lambda scaled: seen.append(len(scaled)) or real(scaled)
    )
    return seen


def counted(params, num_rows=16, vocab_size=5000, spread=4.0):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * spread
    batch = make_sampling([params] * num_rows, seeds=np.arange(num_rows))
    with CountCalls() as count:
        sample(logits, batch)
    return count


def test_greedy_rows_pay_for_an_argmax():
    count = counted(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5))
    assert count.calls == {"argmax": 1, "new_full": 1}
    mixed = [SamplingParams(temperature=0)] * 15 + [PLAIN]
    logits = torch.randn(16, 5000)
    with CountCalls() as count:
        sample(logits, make_sampling(mixed))
    assert count.numbers["log1p_"] == 5000  # noise for one row only


def test_rows_without_truncation_are_not_ranked(sorted_rows):
    for params in (PLAIN, SamplingParams(temperature=0.3, min_p=0.1), SamplingParams(top_k=5000)):
        count = counted(params)
        assert not {"topk", "sort", "cumsum"} & set(count.calls)
    assert sorted_rows == []


def test_top_k_never_sorts_a_row(sorted_rows):
    for params in (
        SamplingParams(top_k=50),
        SamplingParams(top_k=1000, top_p=0.9),
        SamplingParams(top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(top_k=50, allowed_token_ids=[1, 2, 3]),
    ):
        count = counted(params)
        assert "sort" not in count.calls
        assert sorted_rows == []
        assert count.numbers["topk"] == 16 * (params.top_k + 1)
        assert count.numbers["log1p_"] == 16 * (params.top_k + 1)  # noise for candidates only


def test_a_large_top_k_is_its_own_row_s_burden(sorted_rows):
    """Its row is sorted; the others look at no more candidates than they need."""
    params = [SamplingParams(top_k=50)] * 7 + [SamplingParams(top_k=4000)]
    with CountCalls() as count:
        sample(torch.randn(8, 5000), make_sampling(params))
    assert sorted_rows == [1]
    assert count.numbers["topk"] == 7 * 51


def test_top_p_sorts_only_rows_whose_nucleus_is_large(sorted_rows):
    counted(SamplingParams(top_p=0.9))
    assert sorted_rows == []
    counted(SamplingParams(top_p=0.9), spread=0.1)
    assert sum(sorted_rows) == 16
    sorted_rows.clear()
    logits = torch.randn(4, 5000) * torch.tensor([4.0, 0.1, 4.0, 4.0])[:, None]
    sample(logits, make_sampling([SamplingParams(top_p=0.9)] * 4))
    assert sorted_rows == [1]


def test_sort_descending():
    values = torch.tensor([[1.0, -torch.inf, 3.0, 3.0], [0.0, -1.0, 2.0, -0.5]])
    assert torch.equal(sampler.sort_descending(values), values.sort(-1, descending=True).values)


def test_the_logits_are_not_copied_whole():
    """Work in pieces: no operator returns more than a piece, whatever the batch."""

    class Largest(CountCalls):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != logits.data_ptr():
                    self.largest = max(self.largest, tensor.numel())
            return out

    logits = torch.randn(64, 20_000) * 4
    for params in (PLAIN, SamplingParams(top_k=50, min_p=0.1), SamplingParams(top_p=0.8)):
        with Largest() as seen:
            sample(logits, make_sampling([params] * 64))
        assert seen.largest <= sampler.CACHE_NUMBERS


def test_an_extreme_penalty_makes_no_infinity():
    """The only token that is allowed stays, however far down it is pushed."""
    params = SamplingParams(
        temperature=0, allowed_token_ids=[3], logit_bias={3: -100}, repetition_penalty=3.4e38
    )
    batch = make_sampling([params], texts=[([3], [3])])
    assert sample(torch.zeros(1, 8), batch)[0].tolist() == [3]
