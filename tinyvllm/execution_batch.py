"""From a plan to flat arrays: many sequences, each with its chunk, laid end to end.

Built, step by step, in notebooks/06_execution_batch.ipynb.
"""

from dataclasses import dataclass

import numpy as np

from tinyvllm.block_pool import NULL_BLOCK_ID
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
        slot_mapping: int64 [T], where a token's keys and values go (block * size + offset).
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
class ModelRunnerOutput:
    """What comes back across the seam: R sampled ids, in the order of `logits_indices`."""

    sampled_token_ids: list[int]


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


def flatten(plan: SchedulerOutput, kv: KVCacheManager) -> ExecutionBatch:
    """Lay a plan out as flat arrays; at least one sequence is scheduled, `kv` has its table."""
    sequences, starts, lengths = zip(*plan.scheduled, strict=True)
    starts, lengths = np.array(starts, np.int64), np.array(lengths, np.int64)
    ends = starts + lengths
    rows, positions = token_positions(starts, lengths)
    query_start_loc = np.concatenate([[0], np.cumsum(lengths)])
    input_ids = [token for seq, i, num in plan.scheduled for token in seq.token_ids[i : i + num]]
    block_table = pad_block_tables([kv.block_ids(seq) for seq in sequences])
    samples = ends == [seq.num_tokens for seq in sequences]
    return ExecutionBatch(
        input_ids=np.array(input_ids, np.int64),
        positions=positions,
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_table=block_table,
        slot_mapping=token_slots(block_table, rows, positions, kv.block_size),
        logits_indices=query_start_loc[1:][samples] - 1,
        temperatures=np.array([seq.params.temperature for seq in plan.sampling], np.float32),
        seeds=np.array([seq.seed for seq in plan.sampling], np.int64),
        output_indices=np.array([seq.num_output_tokens for seq in plan.sampling], np.int64),
    )
