"""From a plan to flat arrays: many sequences, each with its chunk, laid end to end.

Built, step by step, in notebooks/06_execution_batch.ipynb.
"""

from dataclasses import dataclass

import numpy as np

from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.scheduler import SchedulerOutput


@dataclass
class ExecutionBatch:
    """All that crosses from policy to tensors in a step; arrays only, no sequences.

    Shapes: T tokens are scheduled for S sequences, and R rows of logits are sampled. The
    tokens of sequence s lie at `query_start_loc[s]` to `query_start_loc[s + 1] - 1`.
    Names follow vllm/v1/worker/gpu_model_runner.py.

    Attributes:
        input_ids: int64 [T], the scheduled tokens of all sequences, laid end to end.
        positions: int64 [T], each token's position in its sequence.
        query_start_loc: int32 [S + 1], where each sequence's tokens start.
        seq_lens: int32 [S], keys visible to the sequence's last token, itself included.
        block_table: int32 [S, most blocks of a sequence], padded with the null block.
        slot_mapping: int64 [T], where the token's keys and values go:
            block id * block size + offset.
        logits_indices: int64 [R], the rows of T whose logits are sampled.
        temperatures: float32 [R], 0 means greedy.
        seeds: int64 [R], what the row's draw is a function of.
        output_indices: int64 [R], the index of the output token that is drawn.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    logits_indices: np.ndarray
    temperatures: np.ndarray
    seeds: np.ndarray
    output_indices: np.ndarray


@dataclass
class ModelRunnerOutput:
    """What comes back across the seam: R sampled ids, in the order of `logits_indices`."""

    sampled_token_ids: list[int]


def flatten(plan: SchedulerOutput, kv: KVCacheManager) -> ExecutionBatch:
    """Lay a plan out as flat arrays.

    Args:
        plan: what the scheduler decided; at least one sequence is scheduled.
        kv: holds the block tables of the scheduled sequences.
    """
    num_seqs = len(plan.scheduled)
    starts = np.fromiter((start for _, start, _ in plan.scheduled), np.int64, num_seqs)
    lengths = np.fromiter((num for _, _, num in plan.scheduled), np.int64, num_seqs)
    query_start_loc = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])

    # Row of each token: sequence s is repeated once for each of its tokens.
    rows = np.repeat(np.arange(num_seqs), lengths)
    positions = np.arange(len(rows)) - query_start_loc[rows] + starts[rows]
    input_ids = np.fromiter(
        (
            token_id
            for seq, start, num in plan.scheduled
            for token_id in seq.token_ids[start : start + num]
        ),
        np.int64,
        len(rows),
    )

    block_ids = [kv.block_ids(seq) for seq, _, _ in plan.scheduled]
    block_table = np.zeros((num_seqs, max(map(len, block_ids))), np.int32)
    for row, ids in zip(block_table, block_ids, strict=True):
        row[: len(ids)] = ids
    blocks = block_table[rows, positions // kv.block_size].astype(np.int64)

    ends = starts + lengths
    samples = np.fromiter((seq.num_tokens for seq, _, _ in plan.scheduled), np.int64) == ends
    sampling = plan.sampling
    return ExecutionBatch(
        input_ids=input_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=ends.astype(np.int32),
        block_table=block_table,
        slot_mapping=blocks * kv.block_size + positions % kv.block_size,
        logits_indices=query_start_loc[1:][samples].astype(np.int64) - 1,
        temperatures=np.array([seq.params.temperature for seq in sampling], np.float32),
        seeds=np.array([seq.seed for seq in sampling], np.int64),
        output_indices=np.array([seq.num_output_tokens for seq in sampling], np.int64),
    )
