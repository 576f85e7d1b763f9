"""From a plan to flat arrays: many sequences, each with its chunk, laid end to end.

Built, step by step, in notebooks/06_execution_batch.ipynb.
"""

from dataclasses import dataclass

import numpy as np

from tinyvllm.block_pool import NULL_BLOCK_ID
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.scheduler import SchedulerOutput
from tinyvllm.sequence import Sequence


@dataclass
class SamplingBatch:
    """How each of the R sampled rows becomes a token; vLLM: v1/sample/metadata.py.

    Every row has the first six. The rest is for rows that ask for it; a pair is (row, token id).
    """

    temperatures: np.ndarray  #: float32 [R], 0 means greedy
    top_ks: np.ndarray  #: int64 [R], 0 means all tokens
    top_ps: np.ndarray  #: float32 [R], 1 means all tokens
    min_ps: np.ndarray  #: float32 [R], 0 means all tokens
    seeds: np.ndarray  #: int64 [R], what the row's draw is a function of
    output_indices: np.ndarray  #: int64 [R], the index of the output token that is drawn

    allowed: list[tuple[int, np.ndarray]]  #: (row, int64 ids), rows that may take only these ids
    forbidden: np.ndarray  #: int64 [F, 2], pairs that cannot be drawn now
    biased: np.ndarray  #: int64 [B, 2], pairs with a bias
    biases: np.ndarray  #: float32 [B], what is added to their logits
    penalized: np.ndarray  #: int64 [P], rows with penalties
    penalties: np.ndarray  #: float32 [P, 3], their repetition, frequency and presence penalty
    history: np.ndarray  #: int64 [H, 3], their tokens: (index into penalized, id, 1 if generated)

    logprob_rows: np.ndarray  #: int64 [L], rows that report log-probabilities
    num_logprobs: int  #: how many of the likeliest tokens they report; -1 means all


@dataclass
class ExecutionBatch:
    """All that crosses from policy to tensors in a step; arrays only, no sequences.

    Shapes: T tokens are scheduled for S sequences, R rows of logits are sampled, and Q rows
    score a token of their prompt. The tokens of sequence s lie at `query_start_loc[s]` to
    `query_start_loc[s + 1] - 1`. Names follow vllm/v1/worker/gpu_model_runner.py.

    Attributes:
        input_ids: int64 [T], the scheduled tokens of all sequences, laid end to end.
        positions: int64 [T], each token's position in its sequence.
        query_start_loc: int32 [S + 1], where each sequence's tokens start.
        seq_lens: int32 [S], keys visible to the sequence's last token, itself included.
        block_table: int32 [S, most blocks of a sequence], padded with the null block.
        slot_mapping: int64 [T], where a token's keys and values go (block * size + offset).
        logits_indices: int64 [R], the rows of T whose logits are sampled.
        sampling: how those rows become tokens.
        prompt_logits_indices: int64 [Q], the rows of T that score a prompt token.
        prompt_targets: int64 [Q], the prompt tokens that they score.
        num_prompt_logprobs: how many of the likeliest tokens they report; -1 means all.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    logits_indices: np.ndarray
    sampling: SamplingBatch
    prompt_logits_indices: np.ndarray
    prompt_targets: np.ndarray
    num_prompt_logprobs: int

    def check_invariants(self, block_size: int):
        """Raise an AssertionError that names the first broken rule."""
        used = self.slot_mapping // block_size
        if len(np.unique(self.slot_mapping)) != len(self.slot_mapping):
            raise AssertionError("two tokens are stored in one slot")
        if (used == NULL_BLOCK_ID).any():
            raise AssertionError("a token is stored in the null block")
        for seq, end in enumerate(self.seq_lens.tolist()):
            first, last = self.query_start_loc[seq : seq + 2].tolist()
            positions = np.arange(end - (last - first), end)
            if not np.array_equal(self.positions[first:last], positions):
                raise AssertionError(f"row {seq}: positions must run up to {end - 1} without gaps")
            if not np.array_equal(used[first:last], self.block_table[seq, positions // block_size]):
                raise AssertionError(f"row {seq}: tokens are stored outside of its block table")


@dataclass
class TokenLogprobs:
    """Log-probabilities at N places: of the token there, and of the k likeliest tokens.

    Attributes:
        token_ids: int64 [N, 1 + k], the token there, then the likeliest, best first.
        logprobs: float32 [N, 1 + k], theirs.
        ranks: int64 [N], rank of the token there; 1 is the likeliest.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


@dataclass
class ModelRunnerOutput:
    """What comes back across the seam.

    Attributes:
        sampled_token_ids: R ids, in the order of `logits_indices`.
        logprobs: for `sampling.logprob_rows`; None or empty if there are none.
        prompt_logprobs: for `prompt_logits_indices`; None or empty if there are none.
    """

    sampled_token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


def token_positions(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For chunks of `lengths` tokens that begin at `starts` in their sequences (both int64 [S]),
    the sequence's row and the position in the sequence of every token (both int64 [T])."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    first_token = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) - first_token[rows] + starts[rows]


def pad_block_tables(block_ids: list[list[int]]) -> np.ndarray:
    """Block tables as one int32 matrix [S, longest], filled up with the null block."""
    table = np.full((len(block_ids), max(map(len, block_ids))), NULL_BLOCK_ID, np.int32)
    for row, ids in zip(table, block_ids, strict=True):
        row[: len(ids)] = ids
    return table


def token_slots(
    block_table: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """The slot int64 [T] of every token: block id * block_size + offset in the block."""
    blocks = block_table[rows, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def forbidden_now(seq: Sequence, eos_token_id: int | None) -> set[int]:
    """Token ids that `seq` cannot take next. Bad words give way where they would ban all that is
    allowed."""
    ending, completing, generated = set(), set(), seq.output_token_ids
    if len(generated) < seq.params.min_tokens:
        ending.update(seq.params.stop_token_ids)
        if eos_token_id is not None:
            ending.add(eos_token_id)
    for *beginning, last in seq.request.bad_words_token_ids or ():
        if generated[len(generated) - len(beginning) :] == beginning:
            completing.add(last)
    allowed = seq.params.allowed_token_ids
    if allowed is not None and (ending | completing).issuperset(allowed):
        return ending
    return ending | completing


def token_history(sequences: list[Sequence]) -> np.ndarray:
    """Every token of the sequences, int64 [H, 3]: (index of the sequence, token id, generated)."""
    parts = []
    for index, seq in enumerate(sequences):
        part = np.empty((seq.num_tokens, 3), np.int64)
        part[:, 0], part[:, 1] = index, seq.token_ids
        part[:, 2] = np.arange(seq.num_tokens) >= seq.num_prompt_tokens
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty((0, 3), np.int64)


def pairs(items: list[tuple[int, int]]) -> np.ndarray:
    """(row, token id) pairs as int64 [len(items), 2]."""
    return np.array(items, np.int64).reshape(-1, 2)


def logit_edits(sequences: list[Sequence], eos_token_id: int | None) -> dict:
    """The fields of a `SamplingBatch` that change logits, for sequences that sample one a row."""
    allowed, forbidden, biased, penalized = [], [], {}, []
    for row, seq in enumerate(sequences):
        if not seq.edits_logits:
            continue
        if seq.params.allowed_token_ids is not None:
            allowed.append((row, np.array(seq.params.allowed_token_ids, np.int64)))
        forbidden += [(row, token_id) for token_id in forbidden_now(seq, eos_token_id)]
        biased |= {(row, token_id): bias for token_id, bias in seq.params.logit_bias.items()}
        if seq.params.penalizes:
            penalized.append(row)
    params = [sequences[row].params for row in penalized]
    penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    return {
        "allowed": allowed,
        "forbidden": pairs(forbidden),
        "biased": pairs(list(biased)),
        "biases": np.array(list(biased.values()), np.float32),
        "penalized": np.array(penalized, np.int64),
        "penalties": np.array(penalties, np.float32).reshape(-1, 3),
        "history": token_history([sequences[row] for row in penalized]),
    }


def sampling_batch(sequences: list[Sequence], eos_token_id: int | None) -> SamplingBatch:
    """How the sequences that get a token in this step, one a row, choose it."""
    params = [seq.params for seq in sequences]
    reporting = [row for row, p in enumerate(params) if p.logprobs is not None]
    counts = [params[row].logprobs for row in reporting]
    return SamplingBatch(
        temperatures=np.array([p.temperature for p in params], np.float32),
        top_ks=np.array([max(p.top_k, 0) for p in params], np.int64),
        top_ps=np.array([p.top_p for p in params], np.float32),
        min_ps=np.array([p.min_p for p in params], np.float32),
        seeds=np.array([seq.seed for seq in sequences], np.int64),
        output_indices=np.array([seq.num_output_tokens for seq in sequences], np.int64),
        logprob_rows=np.array(reporting, np.int64),
        num_logprobs=-1 if -1 in counts else max(counts, default=0),
        **logit_edits(sequences, eos_token_id),
    )


def prompt_scores(plan: SchedulerOutput, query_start_loc: np.ndarray):
    """The rows of T that score a prompt token, the tokens they score (both int64 [Q]), and how
    many of the likeliest tokens to report."""
    indices, targets, counts = [], [], []
    for (seq, start, num), first in zip(plan.scheduled, query_start_loc.tolist()[:-1], strict=True):
        if seq.skip_reading_prefix_cache:
            scored = seq.token_ids[start + 1 : min(start + num + 1, seq.num_prompt_tokens)]
            indices += range(first, first + len(scored))
            targets += scored
            counts.append(seq.params.prompt_logprobs)
    most = -1 if -1 in counts else max(counts, default=0)
    return np.array(indices, np.int64), np.array(targets, np.int64), most


def flatten(
    plan: SchedulerOutput, kv: KVCacheManager, eos_token_id: int | None = None
) -> ExecutionBatch:
    """Lay a plan out as flat arrays; at least one sequence is scheduled, `kv` has its table."""
    sequences, starts, lengths = zip(*plan.scheduled, strict=True)
    starts, lengths = np.array(starts, np.int64), np.array(lengths, np.int64)
    ends = starts + lengths
    rows, positions = token_positions(starts, lengths)
    query_start_loc = np.concatenate([[0], np.cumsum(lengths)])
    input_ids = [token for seq, i, num in plan.scheduled for token in seq.token_ids[i : i + num]]
    block_table = pad_block_tables([kv.block_ids(seq) for seq in sequences])
    samples = ends == [seq.num_tokens for seq in sequences]
    prompt_logits_indices, prompt_targets, num_prompt_logprobs = prompt_scores(
        plan, query_start_loc
    )
    return ExecutionBatch(
        input_ids=np.array(input_ids, np.int64),
        positions=positions,
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_table=block_table,
        slot_mapping=token_slots(block_table, rows, positions, kv.block_size),
        logits_indices=query_start_loc[1:][samples] - 1,
        sampling=sampling_batch(plan.sampling, eos_token_id),
        prompt_logits_indices=prompt_logits_indices,
        prompt_targets=prompt_targets,
        num_prompt_logprobs=num_prompt_logprobs,
    )
