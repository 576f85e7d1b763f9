"""From logits to tokens: edits, temperature, truncation, and a draw that depends on nothing else.

Built, step by step, in notebooks/10_sampler.ipynb.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tinyvllm.execution_batch import SamplingBatch, TokenLogprobs
from tinyvllm.request import GREEDY_BELOW

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9 - 2**32  # 2**32 / golden ratio, as an int32: a start that is not zero


def xor_shift(h: Tensor, shift: int) -> None:
    """`h ^= h >> shift` on int32, in place; the sign bit moves like any other bit."""
    shifted = h >> shift
    shifted &= MASK >> shift
    h ^= shifted


def mix(h: Tensor) -> Tensor:
    """Scramble int32 numbers in place: one changed input bit changes half of the output's.

    Shifts and odd multipliers in the manner of MurmurHash3's finaliser. Products wrap around,
    so every device gives the same bits.
    """
    xor_shift(h, 15)
    h *= 0x2C1B3C6D
    xor_shift(h, 12)
    h *= 0x297A2D39
    xor_shift(h, 15)
    return h


def row_keys(seeds: Tensor, output_indices: Tensor) -> Tensor:
    """One int32 key for every row `[R]`: a hash of its seed (all 64 bits) and output index."""
    keys = torch.full_like(seeds, GOLDEN, dtype=torch.int32)
    for word in (seeds, seeds >> 32, output_indices):
        keys = mix(keys ^ word.to(torch.int32))  # the lower 32 bits
    return keys


def token_keys(token_ids: Tensor) -> Tensor:
    """One int32 key for every token id, in the shape of `token_ids`."""
    return mix(token_ids.to(torch.int32) + 1)


def random_bits(rows: Tensor, tokens: Tensor) -> Tensor:
    """32 random bits for each row and token, int32 `[R, C]`, from the keys of the rows `[R]` and
    those of the tokens: `[C]`, the same for all rows, or `[R, C]`.

    A pure function. No generator is advanced, so it does not matter which other rows and
    tokens there are, in which order they are drawn, or how often.
    """
    return mix(rows[:, None] ^ tokens)


BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


def gumbel_noise(rows: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise float32 `[R, C]` for keys as in `random_bits`.

    It is `-log(-log(1 - v))`, with v uniform in (0, 1) from 31 of the 32 bits. The largest
    noise, which decides a draw, comes from a v near 0, where float32 is at its finest.
    """
    bits = random_bits(rows, tokens)
    bits &= MASK >> 1
    minus_v = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-BELOW_ONE)
    return minus_v.log1p_().neg_().log_().neg_()


def draw(scaled: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """For each row of `scaled` `[R, C]` the column of a draw from its softmax, int64 `[R]`."""
    return gumbel_noise(rows, tokens).add_(scaled).argmax(dim=-1)


LARGEST = torch.finfo(torch.float32).max


def penalize(logits: Tensor, batch: SamplingBatch) -> None:
    """Make the tokens of a row's past less (or more) likely, in place.

    Repetition looks at prompt and output, frequency and presence at the output. Works on the
    tokens that occur, not on the vocabulary. vLLM: `v1/sample/ops/penalties.py`.
    """
    index, token, generated = batch.history.T
    pairs, occurrence = np.unique(index * logits.shape[1] + token, return_inverse=True)
    counts = np.bincount(occurrence, weights=generated).astype(np.float32)
    index, token = np.divmod(pairs, logits.shape[1])
    repetition, frequency, presence = (
        torch.from_numpy(column).to(logits.device) for column in batch.penalties[index].T.copy()
    )
    counts = torch.from_numpy(counts).to(logits.device)
    where = (batch.penalized[index], token)
    x = logits[where]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x -= frequency * counts + presence * (counts > 0)
    # An extreme penalty must not make an infinity; what is forbidden stays so.
    logits[where] = x.clamp(-LARGEST, LARGEST).masked_fill(logits[where].isneginf(), -torch.inf)


def edit_logits(logits: Tensor, batch: SamplingBatch) -> None:
    """All that changes single logits, in place: allowed and forbidden ids, biases, penalties.

    Rows that ask for nothing are not touched. vLLM: `v1/sample/sampler.py`,
    `v1/sample/logits_processor/builtin.py`, `v1/sample/ops/bad_words.py`.
    """
    for row, token_ids in batch.allowed:
        kept = logits[row, token_ids]
        logits[row] = -torch.inf
        logits[row, token_ids] = kept
    if len(batch.forbidden):
        logits[tuple(batch.forbidden.T)] = -torch.inf
    if len(batch.biased):
        logits[tuple(batch.biased.T)] += torch.from_numpy(batch.biases).to(logits.device)
    if len(batch.penalized):
        penalize(logits, batch)


def scale(logits: Tensor, temperatures: Tensor, min_ps: Tensor | None = None) -> Tensor:
    """Logits `[R, V]` less their row's maximum, divided by its temperature `[R]`, in place.

    A token less likely than `min_ps` `[R]` times the likeliest becomes -inf. The best token is
    at 0, so its weight `exp(scaled)` is 1, and nothing overflows at a low temperature.
    """
    peaks = logits.amax(dim=-1, keepdim=True).clamp(min=-LARGEST)  # not NaN if all are -inf
    scaled = logits.sub_(peaks).div_(temperatures[:, None])
    if min_ps is not None:
        scaled.masked_fill_(scaled < min_ps.log()[:, None], -torch.inf)
    return scaled


def weight(values: Tensor) -> Tensor:
    """The sum of `exp(values)` of each row, float64 `[R, 1]`."""
    return values.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)


def top_p_bars(values: Tensor, top_ps: Tensor, total: Tensor) -> Tensor:
    """The smallest value that top-p keeps, `[R, 1]`; -inf where `top_ps` `[R]` is 1.

    `values` `[R, C]` are sorted, best first. A token stays if those before it have less than
    `top_ps` of the weight `total` float64 `[R, 1]`; so the best one always does.
    """
    weights = values.exp()
    before = weights.cumsum(dim=-1, dtype=torch.float64).sub_(weights)
    kept = (before < top_ps[:, None] * total).sum(dim=-1, keepdim=True).clamp_(min=1)
    return values.gather(1, kept - 1).masked_fill_(top_ps[:, None] >= 1, -torch.inf)


def truncation_bars(
    values: Tensor, total: Tensor | None, top_ks: Tensor | None, top_ps: Tensor
) -> tuple[Tensor, Tensor]:
    """The bar `[R, 1]` that a value must reach after top-k, then top-p; ties stay together.

    Args:
        values: `[R, C]`, the largest of each row, best first; more of them than the largest k.
        total: weight of the whole row, float64 `[R, 1]`; None with top-k, which leaves less.
        top_ks: int64 `[R]`; None if there is no top-k.
        top_ps: `[R]`.

    Returns:
        The bars, and whether the values were enough `[R]`: if the last one passes, others may.
    """
    if top_ks is None:
        bars = must_pass = top_p_bars(values, top_ps, total)
    else:
        must_pass = values.gather(1, top_ks[:, None] - 1)
        left = values.masked_fill(values < must_pass, -torch.inf)
        bars = must_pass.maximum(top_p_bars(left, top_ps, weight(left)))
    last = values[:, -1:]
    return bars, ((last < must_pass) | last.isneginf())[:, 0]


class RandomRows:
    """Draws the tokens of a batch's random rows; `logits` `[R, V]` are edited already.

    Attributes:
        token_ids: int64 `[R]`; those of random rows are replaced.
        bars: float32 `[R, 1]`, what a scaled value has to reach; those of truncated rows are set.
    """

    def __init__(self, logits: Tensor, batch: SamplingBatch, token_ids: Tensor, bars: Tensor):
        self.logits, self.batch, self.device = logits, batch, logits.device
        self.token_ids, self.bars = token_ids, bars
        every = np.arange(len(logits))
        self.keys = row_keys(self.take("seeds", every), self.take("output_indices", every))
        self.vocabulary = token_keys(torch.arange(logits.shape[1], device=self.device))

    def take(self, name: str, rows: np.ndarray) -> Tensor:
        """A parameter of these rows, where the logits are."""
        return torch.from_numpy(getattr(self.batch, name)[rows]).to(self.device)

    def scaled(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Scaled copies of the rows: all at once, or on a CPU a few at a time."""
        at_once = len(rows)
        if self.device.type == "cpu":
            at_once = max(1, CACHE_NUMBERS // self.logits.shape[1])
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            min_ps = self.take("min_ps", some) if self.batch.min_ps[some].any() else None
            yield some, scale(self.logits[some], self.take("temperatures", some), min_ps)

    def draw_whole(self, rows: np.ndarray) -> None:
        """Draw these rows from the whole vocabulary."""
        for some, scaled in self.scaled(rows):
            self.token_ids[some] = draw(scaled, self.keys[some], self.vocabulary)

    def draw_best(self, rows: np.ndarray, has_top_k: bool, count: int) -> np.ndarray:
        """Draw these rows among their `count` best tokens; returns those that need more."""
        best = []
        for _, scaled in self.scaled(rows):
            total = scaled[:, :0] if has_top_k else weight(scaled)  # top-k leaves less
            best.append((*scaled.topk(count), total))
        values, ids, total = map(torch.cat, zip(*best, strict=True))
        top_ks = self.take("top_ks", rows) if has_top_k else None
        bars, enough = truncation_bars(values, total, top_ks, self.take("top_ps", rows))
        kept = values.masked_fill(values < bars, -torch.inf)
        columns = draw(kept, self.keys[rows], token_keys(ids))
        self.token_ids[rows] = ids.gather(1, columns[:, None])[:, 0]
        self.bars[rows] = bars
        return rows[~enough.cpu().numpy()]

    def draw_sorted(self, rows: np.ndarray, has_top_k: bool) -> None:
        """Draw these rows from the whole vocabulary, cut at bars that sorting finds."""
        for some, scaled in self.scaled(rows):
            top_ks = self.take("top_ks", some) if has_top_k else None
            values, top_ps = sort_descending(scaled), self.take("top_ps", some)
            bars, _ = truncation_bars(values, weight(values), top_ks, top_ps)
            scaled.masked_fill_(scaled < bars, -torch.inf)
            self.token_ids[some] = draw(scaled, self.keys[some], self.vocabulary)
            self.bars[some] = bars

    def draw(self) -> None:
        """Draw every random row, those of a kind together."""
        batch, vocab_size = self.batch, self.logits.shape[1]
        random = batch.temperatures >= GREEDY_BELOW
        top_k = random & (batch.top_ks > 0) & (batch.top_ks < vocab_size)
        few = top_k & (batch.top_ks < CANDIDATES)
        nucleus = random & ~top_k & (batch.top_ps < 1)
        self.draw_whole(np.flatnonzero(random & ~top_k & ~nucleus))
        self.draw_sorted(np.flatnonzero(top_k & ~few), True)
        # With top-k, one candidate more than the largest k: then a tie at the k-th value shows.
        largest = int(batch.top_ks[few].max(initial=0))
        for kind, has_top_k, count in (
            (few, True, largest + 1),
            (nucleus, False, min(CANDIDATES, vocab_size)),
        ):
            if kind.any():
                more = self.draw_best(np.flatnonzero(kind), has_top_k, count)
                self.draw_sorted(more, has_top_k)


CACHE_NUMBERS = 1 << 19  # numbers a CPU works on at a time, so that they stay in its cache


def sort_descending(scaled: Tensor) -> Tensor:
    """Each row sorted, best first. On a CPU by NumPy, many times faster than `Tensor.sort`."""
    if scaled.device.type == "cpu":
        return torch.from_numpy(np.sort(scaled.neg().numpy(), axis=-1)).neg_()
    return scaled.sort(dim=-1, descending=True).values


CANDIDATES = 1024  # tokens of a row that are looked at, at most, before it is sorted


def score(logprobs: Tensor, token_ids: Tensor, num_logprobs: int) -> TokenLogprobs:
    """Look up `token_ids` `[N]` in `logprobs` `[N, V]`, with the likeliest next to them.

    A rank is one more than the number of tokens that are strictly likelier. `num_logprobs` -1
    means all. vLLM: `v1/sample/sampler.py`.
    """
    vocab_size = logprobs.shape[1]
    count = vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = 1 + (logprobs > own).sum(dim=-1)
    best = logprobs.topk(count)
    ids = torch.cat([token_ids[:, None], best.indices], dim=1)
    values = torch.cat([own, best.values], dim=1)
    return TokenLogprobs(ids.cpu().numpy(), values.cpu().numpy(), ranks.cpu().numpy())


def processed_logprobs(logits: Tensor, batch: SamplingBatch, bars: Tensor) -> Tensor:
    """The log of the distribution that the rows `batch.logprob_rows` are drawn from, `[L, V]`.

    Greedy rows: of the edited logits, without temperature. `bars` are those of `RandomRows`.
    """
    rows = batch.logprob_rows
    random = batch.temperatures[rows] >= GREEDY_BELOW
    temperatures = torch.from_numpy(np.where(random, batch.temperatures[rows], np.float32(1)))
    min_ps = torch.from_numpy(np.where(random, batch.min_ps[rows], np.float32(0)))
    scaled = scale(logits[rows], temperatures.to(logits.device), min_ps.to(logits.device))
    return scaled.masked_fill_(scaled < bars[rows], -torch.inf).log_softmax(dim=-1)


def sample(
    logits: Tensor, batch: SamplingBatch, logprobs_mode: str = "raw_logprobs"
) -> tuple[Tensor, TokenLogprobs | None]:
    """Choose one token per row.

    Args:
        logits: `[R, V]`, any float dtype; float32 ones are edited in place.
        batch: how each row chooses.
        logprobs_mode: what is reported: the model's "raw_logprobs", or "processed_logprobs",
            those of the distribution that is drawn from.

    Returns:
        int64 `[R]` token ids, and the log-probabilities of the rows `batch.logprob_rows`, None
        if there are none. vLLM: `v1/sample/sampler.py`.
    """
    reported, logprobs = batch.logprob_rows, None
    if len(reported) and logprobs_mode == "raw_logprobs":
        logprobs = logits[reported].float().log_softmax(dim=-1)
    logits = logits.float()
    edit_logits(logits, batch)
    greedy, bars = batch.temperatures < GREEDY_BELOW, logits.new_full((len(logits), 1), -torch.inf)
    if greedy.any():
        token_ids = logits.argmax(dim=-1)
    else:
        token_ids = logits.new_empty(len(logits), dtype=torch.int64)
    if not greedy.all():
        RandomRows(logits, batch, token_ids, bars).draw()
    if not len(reported):
        return token_ids, None
    if logprobs is None:
        logprobs = processed_logprobs(logits, batch, bars)
    return token_ids, score(logprobs, token_ids[reported], batch.num_logprobs)


SCORED_AT_ONCE = 64  # rows of logits that exist at a time


def score_prompt(
    compute_logits: Callable, hidden: Tensor, token_ids: Tensor, num_logprobs: int
) -> TokenLogprobs:
    """Score tokens `[Q]` by the rows `[Q, d]` that predict them, a few rows of logits at a time.

    Always raw: before any sampling parameter. vLLM: `v1/worker/gpu/sample/prompt_logprob.py`.
    """
    chunks = zip(hidden.split(SCORED_AT_ONCE), token_ids.split(SCORED_AT_ONCE), strict=True)
    parts = [
        score(compute_logits(rows).float().log_softmax(dim=-1), ids, num_logprobs)
        for rows, ids in chunks
    ]
    fields = ("token_ids", "logprobs", "ranks")
    return TokenLogprobs(*(np.concatenate([getattr(p, name) for p in parts]) for name in fields))
