"""The book's one standard workload, and the scoreboard that grows through the chapters.

Nothing here is a measurement of a machine. A step costs, by definition,
`1 + tokens / TOKENS_PER_UNIT` units of time: one for reading the weights, which every step does
once, and a share for each token computed. The scheduling decisions are the real ones.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

from tinyvllm.config import EngineConfig
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.request import Request, SamplingParams
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence

TOKENS_PER_UNIT = 64
MAX_MODEL_LEN = 256
NUM_SLOTS = 1024  # tokens the KV memory holds, however it is divided
BLOCK_SIZE = 16
MAX_NUM_SEQS = 16
STATIC_BATCH = 4  # NUM_SLOTS // MAX_MODEL_LEN


@dataclass(frozen=True)
class Arrival:
    """A request of the workload: when it comes, and how much it wants."""

    request_id: str
    time: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def standard_workload() -> list[Arrival]:
    """24 requests: one every 3 units; two in three share a 48-token preamble; a few are long."""
    rng = random.Random(24)
    preamble = tuple(rng.randrange(1000) for _ in range(48))
    arrivals = []
    for index in range(24):
        length = rng.randint(120, 180) if index % 6 == 5 else rng.randint(8, 40)
        own = tuple(rng.randrange(1000) for _ in range(length))
        prompt = own if index % 3 == 2 else preamble + own
        arrivals.append(Arrival(f"r{index}", 3.0 * index, prompt, rng.randint(8, 48)))
    return arrivals


class ContiguousMemory:
    """KV memory before paging: every sequence reserves room for its longest possible self."""

    def __init__(self, num_slots: int, max_model_len: int):
        self.num_free_blocks = num_slots // max_model_len
        self.admitted: set[str] = set()

    def get_computed_blocks(self, seq: Sequence) -> tuple[list, int]:
        """Nothing is ever found: there is no prefix cache."""
        return [], 0

    def num_blocks_to_take(self, seq: Sequence, num_tokens: int, hits: list) -> int:
        """One region a sequence, whatever its length."""
        return 0 if seq.seq_id in self.admitted else 1

    def allocate_slots(self, seq: Sequence, num_new_tokens: int, hits=(), reserve=False):
        """Reserve a region when the sequence is admitted; later tokens have their room."""
        needed = self.num_blocks_to_take(seq, num_new_tokens, hits)
        if needed > self.num_free_blocks:
            return None
        self.num_free_blocks -= needed
        self.admitted.add(seq.seq_id)
        return []

    def free(self, seq: Sequence):
        """Give the region back."""
        if seq.seq_id in self.admitted:
            self.admitted.remove(seq.seq_id)
            self.num_free_blocks += 1


@dataclass
class Score:
    """What the workload cost. Times are in units, see above.

    Attributes:
        units: until the last token.
        steps: forward passes.
        computed: tokens computed, recomputation included.
        first_token: mean time from arrival to the first token.
        worst_gap: the longest time a request waited between two of its tokens.
        most_running: the most requests that ran in one step.
    """

    units: float
    steps: int
    computed: int
    first_token: float
    worst_gap: float
    most_running: int


class Clock:
    """Adds up steps and remembers when each request got its tokens."""

    def __init__(self):
        self.now = 0.0
        self.steps = self.computed = self.most_running = 0
        self.token_times: dict[str, list[float]] = {}

    def step(self, num_tokens: int, request_ids: list[str], num_running: int):
        """A step over `num_tokens` tokens, after which these requests have one token more."""
        self.now += 1 + num_tokens / TOKENS_PER_UNIT
        self.steps += 1
        self.computed += num_tokens
        self.most_running = max(self.most_running, num_running)
        for request_id in request_ids:
            self.token_times.setdefault(request_id, []).append(self.now)

    def score(self, workload: list[Arrival]) -> Score:
        """The figures of a finished run."""
        waits = [self.token_times[a.request_id][0] - a.time for a in workload]
        gaps = [
            later - earlier
            for times in self.token_times.values()
            for earlier, later in pairwise(times)
        ]
        return Score(
            round(self.now, 1),
            self.steps,
            self.computed,
            round(sum(waits) / len(waits), 1),
            round(max(gaps), 1),
            self.most_running,
        )


def run_one_at_a_time(workload: list[Arrival], cache_kv: bool) -> Score:
    """Serve requests in order, alone; without a KV cache each step computes all tokens again."""
    clock = Clock()
    for arrival in workload:
        clock.now = max(clock.now, arrival.time)
        length = len(arrival.prompt_token_ids)
        for index in range(arrival.max_tokens):
            new_tokens = 1 if cache_kv and index else length + index
            clock.step(new_tokens, [arrival.request_id], 1)
    return clock.score(workload)


def run_static_batches(workload: list[Arrival]) -> Score:
    """Serve batches of four: wait for all to arrive, run until the longest is done."""
    clock = Clock()
    for first in range(0, len(workload), STATIC_BATCH):
        batch = workload[first : first + STATIC_BATCH]
        clock.now = max(clock.now, batch[-1].time)
        for index in range(max(arrival.max_tokens for arrival in batch)):
            alive = [a.request_id for a in batch if index < a.max_tokens]
            # Finished rows are computed as well: the tensor keeps its shape.
            tokens = sum(1 if index else len(a.prompt_token_ids) for a in batch)
            clock.step(tokens, alive, len(alive))
    return clock.score(workload)


def run_scheduler(workload: list[Arrival], kv, **settings) -> Score:
    """Serve with the real scheduler over the given KV memory.

    Args:
        workload: the requests.
        kv: a `KVMemory`.
        settings: fields of `EngineConfig` that differ from the scoreboard's.
    """
    config = EngineConfig(
        **{
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": NUM_SLOTS,
            "block_size": BLOCK_SIZE,
            **settings,
        }
    )
    scheduler, clock, pending = Scheduler(config, kv), Clock(), list(workload)
    while pending or scheduler.sequences:
        if not scheduler.sequences:
            clock.now = max(clock.now, pending[0].time)
        while pending and pending[0].time <= clock.now:
            arrival = pending.pop(0)
            params = SamplingParams(max_tokens=arrival.max_tokens)
            request = Request(arrival.request_id, list(arrival.prompt_token_ids), params)
            number = len(workload) - len(pending)
            scheduler.add(Sequence(arrival.request_id, request, arrival=number))
        plan = scheduler.schedule()
        num_running = len(scheduler.running)
        scheduler.update(plan, [0] * len(plan.sampling))
        num_tokens = sum(num for _, _, num in plan.scheduled)
        clock.step(num_tokens, [seq.seq_id for seq in plan.sampling], num_running)
    return clock.score(workload)


def _paged(enable_caching: bool) -> KVCacheManager:
    return KVCacheManager(NUM_SLOTS // BLOCK_SIZE + 1, BLOCK_SIZE, enable_caching)


ROWS = {
    "00 naive loop": lambda w: run_one_at_a_time(w, cache_kv=False),
    "02 KV cache, one at a time": lambda w: run_one_at_a_time(w, cache_kv=True),
    "03 static batches": run_static_batches,
    "03 continuous batching": lambda w: run_scheduler(
        w,
        ContiguousMemory(NUM_SLOTS, MAX_MODEL_LEN),
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    ),
    "04 KV blocks": lambda w: run_scheduler(
        w, _paged(False), enable_chunked_prefill=False, enable_prefix_caching=False
    ),
    "05 prefix cache": lambda w: run_scheduler(w, _paged(True), enable_chunked_prefill=False),
    "06 chunked prefill": lambda w: run_scheduler(w, _paged(True), max_num_batched_tokens=40),
}


def scoreboard(until: str):
    """Print the standard workload's figures, a row for each way of serving up to a chapter.

    Args:
        until: number of the last chapter to show, e.g. "03".
    """
    workload = standard_workload()
    print(f"{'':27}units steps computed first token worst gap  running")
    for name, run in ROWS.items():
        if name[:2] <= until:
            s = run(workload)
            print(
                f"{name:27}{s.units:5.0f}{s.steps:6d}{s.computed:9d}"
                f"{s.first_token:12.1f}{s.worst_gap:10.1f}{s.most_running:9d}"
            )
