"""Overlap: the next step is predicted, and launched, before it is planned.

Built, step by step, in notebooks/13_cuda_graphs.ipynb.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from tinyvllm.block_pool import NULL_BLOCK_ID
from tinyvllm.engine import Engine
from tinyvllm.execution_batch import ExecutionBatch, ModelRunnerOutput, flatten, token_slots
from tinyvllm.scheduler import Scheduler, SchedulerOutput
from tinyvllm.sequence import Sequence


def next_decodes(batch: ExecutionBatch, new_blocks: dict[int, int], block_size: int):
    """The `ExecutionBatch` after one whose sequences all get a token and go on; its input ids
    are those tokens, which nobody knows yet. `new_blocks` are ids by row."""
    positions = batch.seq_lens.astype(np.int64)
    rows, columns = np.arange(len(positions)), positions // block_size
    missing = max(0, int(columns.max()) + 1 - batch.block_table.shape[1])
    table = np.pad(batch.block_table, ((0, 0), (0, missing)), constant_values=NULL_BLOCK_ID)
    for row, block_id in new_blocks.items():
        table[row, columns[row]] = block_id
    return replace(
        batch,
        input_ids=np.zeros(len(rows), np.int64),
        positions=positions,
        query_start_loc=np.arange(len(rows) + 1, dtype=np.int32),
        seq_lens=batch.seq_lens + np.int32(1),
        block_table=table,
        slot_mapping=token_slots(table, rows, positions, block_size),
        logits_indices=rows,
        sampling=replace(batch.sampling, output_indices=batch.sampling.output_indices + 1),
        prompt_logits_indices=np.empty(0, np.int64),
        prompt_targets=np.empty(0, np.int64),
    )


def may_admit(scheduler: Scheduler) -> bool:
    """Whether the next step could let a waiting sequence in, if nobody leaves before."""
    return len(scheduler.waiting) > 0 and len(scheduler.running) < scheduler.config.max_num_seqs


@dataclass
class Prediction:
    """The step after the one that runs, as it will be if nobody finishes, comes or goes.

    Attributes:
        sequences: which decode in it.
        batch: its arrays, but for the tokens.
        new_blocks: the block that a row takes, for rows that begin a new one.
    """

    sequences: list[Sequence]
    batch: ExecutionBatch
    new_blocks: dict[int, int]

    def holds(self, scheduler: Scheduler) -> bool:
        """Whether all went as predicted, up to now."""
        return scheduler.running == self.sequences and not may_admit(scheduler)

    def check(self, plan: SchedulerOutput, kv) -> None:
        """Raise a RuntimeError that names the first difference between the plan and this."""
        positions = self.batch.positions.tolist()
        expected = [(seq, p, 1) for seq, p in zip(self.sequences, positions, strict=True)]
        if plan.scheduled != expected or plan.preempted:
            raise RuntimeError(f"predicted {expected}, planned {plan.scheduled}")
        for row, block_id in self.new_blocks.items():
            got = kv.block_ids(self.sequences[row])[-1]
            if got != block_id:
                raise RuntimeError(f"predicted block {block_id} for row {row}, planned {got}")


def will_continue(seq: Sequence, max_model_len: int) -> bool:
    """Whether one more token does not end a sequence by length, and changes no wish of it."""
    full = seq.num_output_tokens + 1 == seq.params.max_tokens
    return not (full or seq.num_tokens + 1 >= max_model_len or seq.edits_logits)


def predict(
    scheduler: Scheduler, plan: SchedulerOutput, batch: ExecutionBatch
) -> Prediction | None:
    """What follows the step `plan` that is being computed; None if that is not plain arithmetic.
    Changes nothing."""
    running, kv, limit = scheduler.running, scheduler.kv, scheduler.config.max_model_len
    if [seq for seq, _, _ in plan.scheduled] != running or plan.sampling != running:
        return None  # somebody is left out, or has a part of a prompt to come
    if may_admit(scheduler) or not all(will_continue(seq, limit) for seq in running):
        return None
    rows = np.flatnonzero(batch.seq_lens % kv.block_size == 0).tolist()
    blocks = list(islice(kv.pool.free_list, len(rows)))
    if len(blocks) < len(rows) or any(block.block_hash is not None for block in blocks):
        return None  # somebody would be preempted, or a cached prefix be forgotten
    new_blocks = {row: block.block_id for row, block in zip(rows, blocks, strict=True)}
    batch = next_decodes(batch, new_blocks, kv.block_size)
    return Prediction(list(running), batch, new_blocks)


class OverlappedEngine(Engine):
    """An `Engine` that prepares the next step while the model computes this one.

    Same plans, same tokens, same events. A runner without `launch` computes in a thread, which
    lives as long as there are requests. Abort between steps only. vLLM has a scheduler of its own
    for this, which plans with placeholders: v1/core/sched/async_scheduler.py.

    Attributes:
        num_predicted: steps that were launched before they were planned.
    """

    def __init__(self, config, runner, eos_token_id: int | None = None):
        super().__init__(config, runner, eos_token_id)
        self.num_predicted = 0
        self._prediction: Prediction | None = None
        self._thread: ThreadPoolExecutor | None = None

    def _launch(self, batch: ExecutionBatch):
        """Start a step; the answer's `result()` waits for its output."""
        if hasattr(self.runner, "launch"):
            return self.runner.launch(batch)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tinyvllm-model")
        return self._thread.submit(self.runner.execute, batch)

    def _forget(self, request_id: str):
        Engine._forget(self, request_id)
        if not self._outputs and self._thread is not None:
            self._thread.shutdown()  # waits: after two interrupts a step may still run, and the
            self._thread = None  # next thread must not write to the cache beside it

    def _plan_and_execute(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        prediction, self._prediction = self._prediction, None
        if prediction is not None and not prediction.holds(self.scheduler):
            prediction = None
        plan = pending = None
        try:
            if prediction is not None:  # the device is idle: launch first, plan then
                batch = prediction.batch
                batch.input_ids[:] = [seq.token_ids[-1] for seq in prediction.sequences]
                pending = self._launch(batch)
            plan = self.scheduler.schedule()
            if prediction is not None:
                prediction.check(plan, self.kv)
                self.num_predicted += 1
            elif not plan.scheduled:  # under priority a step may do nothing but preempt
                return plan, ModelRunnerOutput([])
            else:
                batch = flatten(plan, self.kv, self.scheduler.eos_token_id)
                pending = self._launch(batch)
            self._prediction = predict(self.scheduler, plan, batch)
            return plan, pending.result()
        except BaseException:
            self._undo(plan, pending, prediction)
            raise

    def _undo(self, plan: SchedulerOutput | None, pending, prediction: Prediction | None):
        """After an error or an interrupt: no block may promise what it does not hold."""
        self._prediction = None
        if pending is not None:
            with suppress(BaseException):  # it is the reason, or a second one
                pending.result()
        if plan is None and prediction is not None:
            plan = self.scheduler.schedule()  # what was launched is taken back as planned
        if plan is not None:
            self.scheduler.rollback(plan)
