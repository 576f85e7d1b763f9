"""Run a scheduler by hand: small loads, plans as text and as a figure, and two oracles.

Chapter 03 builds the scheduler and its tests share these helpers. Nothing here imports a
scheduler: each function takes the one to run, finished or broken.
"""

import itertools
from collections.abc import Callable, Iterator

from book.tools.stepper import Stepper
from tinyvllm.config import EngineConfig
from tinyvllm.request import Request, SamplingParams
from tinyvllm.scheduler import SchedulerOutput
from tinyvllm.sequence import Sequence

Load = dict[str, tuple[int, ...]]  # name -> (prompt tokens, max_tokens[, priority])


def sequence(
    name: str, prompt_tokens: int, max_tokens: int, priority: int = 0, arrival: int = 0
) -> Sequence:
    """A sequence whose prompt is the token ids 0, 1, 2, ..."""
    params = SamplingParams(max_tokens=max_tokens, priority=priority)
    return Sequence(name, Request(name, list(range(prompt_tokens)), params), arrival=arrival)


def run(scheduler, *loads: Load, model: Callable | None = None) -> Iterator[SchedulerOutput]:
    """Serve until nobody is left, and yield the plan of each step when the step is over.

    Args:
        scheduler: the one to run.
        loads: what arrives before step 0, before step 1, and so on.
        model: takes a plan, returns a token id for each of `plan.sampling`. None: always 0.
    """
    pending, arrivals = list(loads), itertools.count()
    while pending or scheduler.sequences:
        for name, want in (pending.pop(0) if pending else {}).items():
            scheduler.add(sequence(name, *want, arrival=next(arrivals)))
        plan = scheduler.schedule()
        scheduler.update(plan, model(plan) if model else [0] * len(plan.sampling))
        yield plan


def describe(plan: SchedulerOutput) -> str:
    """A plan in one line. `a[5:8]` reads like a slice: tokens 5, 6 and 7 of sequence a."""
    words = [f"{seq.seq_id}[{start}:{start + num}]" for seq, start, num in plan.scheduled]
    for kind in ("new", "resumed", "preempted", "sampling"):
        if names := [seq.seq_id for seq in getattr(plan, kind)]:
            words += [f"| {kind}:", *names]
    return " ".join(words)


def film(title: str, scheduler, *loads: Load) -> Stepper:
    """A run as a figure: the queues after each step, and what each step computed."""
    computed = {name: [] for load in loads for name in load}
    frames = []
    for number, plan in enumerate(run(scheduler, *loads)):
        for cells in computed.values():
            cells.append(None)
        for seq, start, num in plan.scheduled:
            decode = num == 1 and start >= seq.num_prompt_tokens
            computed[seq.seq_id][-1] = (str(num), "decode" if decode else "prefill")
        for seq in plan.preempted:
            computed[seq.seq_id][-1] = ("×", "preempted")
        frames.append(_frame(number, plan, scheduler, computed))
    return Stepper(title, frames, legend={"used": "running", "new": "came in with this step"})


def _frame(number: int, plan: SchedulerOutput, scheduler, computed: dict[str, list]) -> dict:
    admitted = plan.new + plan.resumed
    running = [(seq.seq_id, "new" if seq in admitted else "used") for seq in scheduler.running]
    waiting = [
        (seq.seq_id, "preempted" if seq.num_preemptions else "waiting") for seq in scheduler.waiting
    ]
    served = [name for name, cells in computed.items() if any(cells)]
    finished = [(name, "finished") for name in served if name not in scheduler.sequences]
    spent = sum(num for _, _, num in plan.scheduled)
    return {
        "caption": f"Step {number}: {_news(plan)}.",
        "rows": [
            "Queues after the step",
            ("waiting", waiting),
            ("running", running),
            ("finished", finished),
            "Tokens computed, a column for each step",
            *((name, list(cells)) for name, cells in computed.items()),
        ],
        "note": f"budget used: {spent} of {scheduler.config.max_num_batched_tokens}; "
        f"free blocks: {scheduler.kv.num_free_blocks}",
    }


def _news(plan: SchedulerOutput) -> str:
    verbs = {
        "preempted": "lost memory",
        "resumed": "came back",
        "new": "came in",
        "sampling": "got a token",
    }
    news = []
    for kind, verb in verbs.items():
        if names := [seq.seq_id for seq in getattr(plan, kind)]:
            *others, last = names
            news.append(f"{', '.join(others)} and {last} {verb}" if others else f"{last} {verb}")
    return "; ".join(news) or "nobody got a token"


class PlannedModel:
    """A model that knows only what the plans computed.

    It keeps the tokens of each sequence as they are scheduled, refuses a gap or a repetition,
    forgets them when the sequence is preempted, and answers with a function of all it holds.
    """

    def __init__(self):
        self.seen: dict[str, list[int]] = {}

    @staticmethod
    def next_token(token_ids: list[int]) -> int:
        """The token that follows these."""
        return sum(place * token for place, token in enumerate(token_ids, start=7)) % 991

    @classmethod
    def naive(cls, load: Load) -> list[list[int]]:
        """The oracle: each sequence of a load alone, all of its tokens in every step."""
        everything = []
        for prompt_tokens, max_tokens, *_ in load.values():
            token_ids = list(range(prompt_tokens))
            for _ in range(max_tokens):
                token_ids.append(cls.next_token(token_ids))
            everything.append(token_ids)
        return everything

    def __call__(self, plan: SchedulerOutput) -> list[int]:
        """A token for each of `plan.sampling`."""
        for seq in plan.preempted:
            self.seen.pop(seq.seq_id, None)
        for seq, start, num in plan.scheduled:
            seen = self.seen.setdefault(seq.seq_id, [])
            if start != len(seen):
                raise AssertionError(f"{seq} goes from token {len(seen)} to token {start}")
            seen += seq.token_ids[start : start + num]
        return [self.next_token(self.seen[seq.seq_id]) for seq in plan.sampling]


def config_of(trace: dict) -> EngineConfig:
    """The settings under which vLLM took the decisions of a trace."""
    settings = trace["config"]
    names = set(settings) & set(EngineConfig.__dataclass_fields__)
    return EngineConfig(
        scheduling_policy=settings["policy"], **{name: settings[name] for name in names}
    )


def replay(trace: dict, scheduler) -> Iterator[tuple[dict, dict]]:
    """Feed a trace's arrivals, aborts and tokens to a scheduler: (vLLM's step, our decisions).

    Both hold the same keys, all but the numbers of the blocks.
    """
    requests = {entry["request_id"]: entry for entry in trace["requests"]}
    arrivals = itertools.count()
    for step in trace["steps"]:
        for name in step["added"]:
            entry = requests[name]
            params = SamplingParams(max_tokens=entry["max_tokens"], priority=entry["priority"])
            request = Request(name, entry["prompt_token_ids"], params)
            scheduler.add(Sequence(name, request, arrival=next(arrivals)))
        for name in step["aborted"]:
            scheduler.abort(name)
        plan = scheduler.schedule()
        sampled = {
            seq.seq_id: requests[seq.seq_id]["model_output_token_ids"][seq.num_output_tokens]
            for seq in plan.sampling
        }
        finished = scheduler.update(plan, list(sampled.values()))
        ours = {
            "scheduled": [[seq.seq_id, start, num] for seq, start, num in plan.scheduled],
            "new": _ids(plan.new),
            "resumed": _ids(plan.resumed),
            "preempted": sorted(_ids(plan.preempted)),  # vLLM keeps a set
            "sampled": sampled,
            "finished": {seq.seq_id: seq.finish_reason for seq in finished},
            "waiting": _ids(scheduler.waiting),
            "free_blocks_after": scheduler.kv.num_free_blocks,
        }
        yield {key: step[key] for key in ours}, ours


def found_prefix(step: dict) -> bool:
    """Whether somebody was admitted beyond position 0: the prefix was in the cache."""
    admitted = step["new"] + step["resumed"]
    return any(start and name in admitted for name, start, _ in step["scheduled"])


def _ids(sequences) -> list[str]:
    return [seq.seq_id for seq in sequences]
