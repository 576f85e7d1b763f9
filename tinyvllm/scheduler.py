"""Who runs in the next step, and how many tokens of each: vLLM's scheduler, step for step.

Built, step by step, in notebooks/03_scheduler.ipynb.
"""

import heapq
from dataclasses import dataclass, field
from typing import Protocol

from tinyvllm.config import EngineConfig
from tinyvllm.sequence import Sequence, SequenceStatus


@dataclass
class SchedulerOutput:
    """The plan of one step.

    Attributes:
        scheduled: (sequence, start position, number of tokens), in execution order.
        new: sequences admitted for the first time.
        resumed: sequences admitted again after a preemption.
        preempted: sequences that lost their blocks in this step; never among `scheduled`.
        sampling: the scheduled sequences whose last known token is computed in this step, in
            order: exactly these get a new token.
    """

    scheduled: list[tuple[Sequence, int, int]] = field(default_factory=list)
    new: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    sampling: list[Sequence] = field(default_factory=list)


class KVMemory(Protocol):
    """What the scheduler asks of memory. It decides who gets slots, never which.

    `hits` is opaque here: the scheduler carries it from the lookup to the allocation.
    """

    num_free_blocks: int

    def get_computed_blocks(self, seq: Sequence) -> tuple[list, int]:
        """Find the cached prefix: the hits and how many tokens they hold. Changes nothing."""

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        hits: list = (),
        full_sequence_must_fit: bool = False,
    ) -> list | None:
        """Give the sequence slots for its next tokens, all or nothing; None: they do not fit."""

    def num_blocks_to_take(self, seq: Sequence, num_tokens: int, hits: list) -> int:
        """Free blocks that holding `num_tokens` tokens would use up."""

    def free(self, seq: Sequence):
        """Take all of the sequence's slots back."""


@dataclass
class PrefixCacheStats:
    """Tokens of first admissions: looked up, and found in the prefix cache.

    Resumed sequences are left out: finding one's own tokens again is no sharing.
    """

    num_queried: int = 0
    num_hit: int = 0


class WaitingQueue:
    """Sequences that wait for admission, the smallest rank first.

    First come, first served is priority scheduling with all priorities equal: a preempted
    sequence arrived before everyone who still waits, so its rank alone puts it in front.
    """

    def __init__(self):
        self.heap: list[tuple[tuple[int, int], Sequence]] = []
        self.removed: set[Sequence] = set()  # still in the heap, but never at its head

    def push(self, rank: tuple[int, int], seq: Sequence):
        """Add a sequence. Ranks are unique, because arrivals are."""
        heapq.heappush(self.heap, (rank, seq))

    def pop(self) -> Sequence:
        """Take the head."""
        seq = heapq.heappop(self.heap)[1]
        self._uncover_head()
        return seq

    def remove(self, seq: Sequence):
        """Take a sequence out of the middle, for good."""
        self.removed.add(seq)
        self._uncover_head()

    def _uncover_head(self):
        while self.heap and self.heap[0][1] in self.removed:
            self.removed.remove(heapq.heappop(self.heap)[1])

    @property
    def head(self) -> Sequence:
        """The next to be admitted."""
        return self.heap[0][1]

    def __len__(self) -> int:
        return len(self.heap) - len(self.removed)

    def __iter__(self):
        return (seq for _, seq in sorted(self.heap) if seq not in self.removed)


class Scheduler:
    """Continuous batching with chunked prefill (follows vllm/v1/core/sched/scheduler.py).

    Args:
        config: a resolved config (`max_model_len` is set).
        kv: gives and takes back the slots for tokens.
        eos_token_id: the model's end-of-sequence token; None if it has none.
    """

    def __init__(self, config: EngineConfig, kv: KVMemory, eos_token_id: int | None = None):
        if config.max_model_len is None:
            raise ValueError("max_model_len must be set, got None: call config.resolve() first")
        self.config = config
        self.kv = kv
        self.eos_token_id = eos_token_id
        self.sequences: dict[str, Sequence] = {}  # all that are alive
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order of admission
        self.in_flight: list[tuple[Sequence, int, int]] = []  # what the model may be computing
        self.leaving: list[Sequence] = []  # aborted meanwhile
        self.prefix_cache_stats = PrefixCacheStats()

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """Who goes first: the smallest rank is admitted first and preempted last."""
        by_priority = self.config.scheduling_policy == "priority"
        return (seq.params.priority if by_priority else 0, seq.arrival)

    def add(self, seq: Sequence):
        """Put a new sequence into the waiting queue."""
        if seq.seq_id in self.sequences:
            raise ValueError(f"seq_id {seq.seq_id!r} is in use")
        self.sequences[seq.seq_id] = seq
        self.waiting.push(self.rank(seq), seq)

    def _admit_waiting(self, plan: SchedulerOutput, budget: int, threshold: int):
        """Admit waiting sequences from the head, until one does not fit. Nobody overtakes."""
        config = self.config
        while self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            seq = self.waiting.head
            hits, num_hit_tokens = self.kv.get_computed_blocks(seq)
            # A resumed sequence recomputes its outputs too: they are prompt now.
            num_tokens = min(seq.num_tokens - num_hit_tokens, threshold)
            if num_tokens > budget and not config.enable_chunked_prefill:
                return
            num_tokens = min(num_tokens, budget)
            reserve = config.scheduler_reserve_full_isl
            if self.kv.allocate_slots(seq, num_tokens, hits, reserve) is None:
                return
            self.waiting.pop()
            self.running.append(seq)
            (plan.resumed if seq.num_preemptions else plan.new).append(seq)
            seq.status = SequenceStatus.RUNNING
            seq.num_computed_tokens = num_hit_tokens
            if seq.num_cached_tokens < 0:
                seq.num_cached_tokens = num_hit_tokens
                self.prefix_cache_stats.num_queried += seq.num_tokens
                self.prefix_cache_stats.num_hit += num_hit_tokens
            plan.scheduled.append((seq, num_hit_tokens, num_tokens))
            budget -= num_tokens

    def _schedule_running(self, plan: SchedulerOutput, budget: int, threshold: int) -> int:
        """Let running sequences catch up, preempting from the last rank where memory lacks.

        Returns the budget that is left.
        """
        position_limit = self.config.max_model_len - 1
        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            start = seq.num_computed_tokens
            num_tokens = seq.num_tokens - start
            if num_tokens > 1:  # a decode is never cut short
                num_tokens = min(num_tokens, threshold, budget, position_limit - start)
            index += 1
            if num_tokens <= 0:
                continue
            while self.kv.allocate_slots(seq, num_tokens) is None:
                victim = max(self.running, key=self.rank)
                victim_index = self.running.index(victim)
                budget += self._preempt(plan, victim)
                if victim is seq:
                    return budget
                # The list has moved up: without this, the next in line would be skipped.
                index -= victim_index < index
            plan.scheduled.append((seq, start, num_tokens))
            budget -= num_tokens
        return budget

    def _preempt(self, plan: SchedulerOutput, victim: Sequence) -> int:
        """Take a running sequence's blocks and send it back to wait; its outputs are kept.

        Returns the tokens that it gives back to the budget, if it was already in the plan.
        """
        self.running.remove(victim)
        self.kv.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = SequenceStatus.PREEMPTED
        self.waiting.push(self.rank(victim), victim)
        plan.preempted.append(victim)
        for entry in plan.scheduled:
            if entry[0] is victim:
                plan.scheduled.remove(entry)
                return entry[2]
        return 0

    def schedule(self) -> SchedulerOutput:
        """Plan the next step.

        Running sequences come first, then waiting ones are admitted; each gets as many tokens
        as it lacks and the budget allows. There are no phases: a decode is a chunk of one.

        Raises:
            RuntimeError: sequences are alive, yet the step would do nothing, and so would
                every later one.
        """
        plan = SchedulerOutput()
        threshold = self.config.long_prefill_token_threshold
        if threshold == 0 or len(self.sequences) <= 1:
            threshold = self.config.max_model_len  # no sequence ever wants more
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens, threshold)
        if not plan.preempted:
            self._admit_waiting(plan, budget, threshold)
        if not plan.scheduled and not plan.preempted and self.sequences:
            stuck = self.running[0] if self.running else self.waiting.head
            why = self.explain(stuck.seq_id)
            raise RuntimeError(f"no progress is possible: {stuck.seq_id} is {why}")
        self._advance(plan)
        return plan

    def _advance(self, plan: SchedulerOutput):
        """Count the scheduled tokens as computed, so the next step can be planned meanwhile."""
        for seq, start, num_tokens in plan.scheduled:
            seq.num_computed_tokens = end = start + num_tokens
            if end == seq.num_tokens:
                plan.sampling.append(seq)
        self.in_flight = plan.scheduled

    def update(self, plan: SchedulerOutput, token_ids: list[int]) -> list[Sequence]:
        """Append the sampled tokens and let go of sequences that are finished.

        Args:
            plan: what `schedule` returned.
            token_ids: one id for each sequence in `plan.sampling`, in that order.

        Returns:
            The sequences that finished; their blocks are free.
        """
        self._land()
        finished = []
        for seq, token_id in zip(plan.sampling, token_ids, strict=True):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # aborted while the model ran
            seq.append(token_id)
            if seq.check_stop(self.eos_token_id, self.config.max_model_len):
                finished.append(seq)
        for seq in finished:
            self.kv.free(seq)
        self._forget(finished)
        return finished

    def _land(self):
        """The model is done with the step: the aborted no longer need their slots."""
        self.in_flight = []
        while self.leaving:
            self.kv.free(self.leaving.pop())

    def _forget(self, finished: list[Sequence]):
        for seq in finished:
            del self.sequences[seq.seq_id]
        if finished:  # one pass over all, however many leave together
            self.running = [seq for seq in self.running if not seq.status.finished]

    def abort(self, seq_id: str) -> Sequence | None:
        """Finish a sequence early and return it. Unknown or finished: do nothing."""
        seq = self.sequences.get(seq_id)
        if seq is not None:
            if seq.status is not SequenceStatus.RUNNING:
                self.waiting.remove(seq)
            seq.status = SequenceStatus.FINISHED_ABORTED
            if any(entry[0] is seq for entry in self.in_flight):
                self.leaving.append(seq)
            else:
                self.kv.free(seq)
            self._forget([seq])
        return seq

    def explain(self, seq_id: str) -> str:
        """Say in one sentence where a sequence is, and what it waits for.

        Raises:
            KeyError: no such sequence is alive.
        """
        seq = self.sequences[seq_id]
        if seq.status is not SequenceStatus.RUNNING:
            return f"{seq.status.value}: {self._obstacle(seq)}"
        if seq.num_output_tokens and seq.num_computed_tokens >= seq.num_tokens - 1:
            return f"running: decode, {seq.num_output_tokens} tokens generated"
        return f"running: prefill, {seq.num_computed_tokens} of {seq.num_tokens} tokens"

    def _obstacle(self, seq: Sequence) -> str:
        """What keeps a waiting sequence from being admitted in the next step."""
        config = self.config
        hits, num_hit_tokens = self.kv.get_computed_blocks(seq)
        wanted = seq.num_tokens - num_hit_tokens
        first_chunk = min(wanted, config.max_num_batched_tokens)
        must_fit = wanted if config.scheduler_reserve_full_isl else first_chunk
        needed = self.kv.num_blocks_to_take(seq, num_hit_tokens + must_fit, hits)
        obstacles = []
        if len(self.running) >= config.max_num_seqs:
            obstacles.append(f"all {config.max_num_seqs} seats (max_num_seqs) are taken")
        if needed > self.kv.num_free_blocks:
            obstacles.append(f"needs {needed} blocks, {self.kv.num_free_blocks} free")
        if self.waiting.head is not seq:
            obstacles.append(f"head of the queue is {self.waiting.head.seq_id}")
        if not obstacles:
            obstacles.append(f"next in line, wants {wanted} tokens of the step's budget")
        return "; ".join(obstacles)

    def check_invariants(self):
        """Raise an AssertionError that names the first broken rule. Call it between steps."""
        running, waiting = self.running, list(self.waiting)
        alive, queued = sorted(self.sequences), sorted(seq.seq_id for seq in running + waiting)
        if alive != queued:
            raise AssertionError(f"alive are {alive}, but queued are {queued}")
        if len(running) > self.config.max_num_seqs:
            raise AssertionError(f"{len(running)} sequences run")
        for seq in running:
            if seq.status is not SequenceStatus.RUNNING:
                raise AssertionError(f"{seq} is in running")
            if not 0 < seq.num_computed_tokens < seq.num_tokens <= self.config.max_model_len:
                raise AssertionError(f"{seq} has impossible counters")
        for seq in waiting:
            if seq.status not in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
                raise AssertionError(f"{seq} is in waiting")
            if seq.num_computed_tokens != 0:
                raise AssertionError(f"{seq} waits with computed tokens")
        for seq in self.sequences.values():
            if seq.num_tokens != len(seq.token_ids):
                raise AssertionError(f"{seq} has {len(seq.token_ids)} token ids")

    def rollback(self, plan: SchedulerOutput):
        """Undo a planned step that the model did not execute, e.g. after an interrupt.

        Its sequences go back to wait: the slots they were promised hold nothing.
        """
        # All counters first: `kv.free` reads them to tell which blocks hold what they promise.
        for seq, start, _ in plan.scheduled:
            seq.num_computed_tokens = start
        self._land()
        for seq, _, _ in plan.scheduled:
            if not seq.status.finished:
                self._preempt(SchedulerOutput(), seq)
