"""Replay decisions of vLLM's own scheduler through ours and report every difference.

    python tests/replay_vllm_traces.py tests/data/vllm-traces

A trace (one JSON file) holds a workload and, step by step, what vLLM decided. A step is: add
arrivals, apply aborts, schedule, update. A trace is identical if every step is, all of the
workload arrived, and every request came to its end with the outputs that the trace states.
Prints one line a difference and `N/N identical` last; the exit status is 0 if all traces are
identical. A trace that cannot be replayed is different, and the others go on.
"""

import json
import sys
from pathlib import Path

from tinyvllm.config import EngineConfig
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.request import Request, SamplingParams
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence

COMPARED = (
    "scheduled",
    "new",
    "resumed",
    "preempted",
    "waiting",
    "block_ids",
    "sampled",
    "finished",
    "free_blocks_after",
)
CONFIG_FIELDS = (
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "scheduler_reserve_full_isl",
)
# What each part of a trace must hold.
KEYS = {
    "trace": ("config", "eos_token_id", "requests", "steps", "outputs"),
    "config": ("policy", "num_blocks", *CONFIG_FIELDS),
    "request": (
        "request_id",
        "arrival_step",
        "abort_step",
        "prompt_token_ids",
        "max_tokens",
        "priority",
        "model_output_token_ids",
    ),
    # A trace without queues is complete all the same.
    "step": ("step", "added", "aborted", *(key for key in COMPARED if key != "waiting")),
}


def format_errors(trace: dict) -> list[str]:
    """One line for each part of a trace that lacks a key, or whose settings we do not know."""
    parts = [("trace", "trace", trace)]
    parts += [("config", "config", trace.get("config", {}))]
    parts += [("request", f"request {i}", r) for i, r in enumerate(trace.get("requests", []))]
    parts += [("step", f"step {i}", step) for i, step in enumerate(trace.get("steps", []))]
    lines = []
    for kind, where, part in parts:
        lacking = [key for key in KEYS[kind] if key not in part]
        if lacking:
            lines.append(f"{where}: missing {', '.join(lacking)}")
    # Whatever an unknown setting does, we would not do it. `kind` is the workload's name.
    unknown = trace.get("config", {}).keys() - {"kind", "watermark", *KEYS["config"]}
    if unknown:
        lines.append(f"config: unknown {', '.join(sorted(unknown))}")
    return lines


class TraceReplay:
    """One trace's workload, driven through our scheduler and block manager."""

    def __init__(self, trace: dict):
        self.trace = trace
        self.where = "trace"  # what is being read, for the message if it cannot be

    def _start(self):
        self.where = "config"
        settings = self.trace["config"]
        if settings.get("watermark", 0.0) != 0.0:
            raise ValueError(f"watermark must be 0.0, got {settings['watermark']!r}")
        config = EngineConfig(
            scheduling_policy=settings["policy"],
            **{name: settings[name] for name in CONFIG_FIELDS},
        )
        self.kv = KVCacheManager(
            settings["num_blocks"], config.block_size, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(config, self.kv, self.trace["eos_token_id"])
        self.requests = {request["request_id"]: request for request in self.trace["requests"]}
        self.sequences: dict[str, Sequence] = {}  # all that have arrived

    def _add(self, request_id: str):
        entry = self.requests[request_id]
        params = SamplingParams(max_tokens=entry["max_tokens"], priority=entry["priority"])
        request = Request(request_id, entry["prompt_token_ids"], params)
        seq = Sequence(request_id, request, arrival=len(self.sequences))
        self.scheduler.add(seq)
        self.sequences[request_id] = seq

    def due(self, key: str, step: int) -> list[str]:
        """The requests whose `arrival_step` or `abort_step` this is."""
        return [request_id for request_id, r in self.requests.items() if r[key] == step]

    def step(self, expected: dict) -> dict:
        """Run one step with the arrivals and aborts of `expected`; return what was decided."""
        for request_id in expected["added"]:
            self._add(request_id)
        for request_id in expected["aborted"]:
            self.scheduler.abort(request_id)
        plan = self.scheduler.schedule()
        answers = [
            self.requests[seq.seq_id]["model_output_token_ids"][seq.num_output_tokens]
            for seq in plan.sampling
        ]
        decided = {
            "scheduled": [[seq.seq_id, start, num] for seq, start, num in plan.scheduled],
            "new": [seq.seq_id for seq in plan.new],
            "resumed": [seq.seq_id for seq in plan.resumed],
            # vLLM reports the preempted as a set; the traces list it sorted.
            "preempted": sorted(seq.seq_id for seq in plan.preempted),
            "block_ids": {seq.seq_id: self.kv.block_ids(seq) for seq, _, _ in plan.scheduled},
            "sampled": {
                seq.seq_id: token for seq, token in zip(plan.sampling, answers, strict=True)
            },
        }
        finished = self.scheduler.update(plan, answers)
        decided["finished"] = {seq.seq_id: seq.finish_reason for seq in finished}
        decided["waiting"] = [seq.seq_id for seq in self.scheduler.waiting]
        decided["free_blocks_after"] = self.kv.num_free_blocks
        self.scheduler.check_invariants()
        self.kv.check_invariants(self.scheduler.running)
        return decided

    def differences(self) -> list[str]:
        """Replay the whole trace; return one line for each difference, of one step at most.

        After the first step that differs the two engines hold different states, so comparing
        on would only repeat the news.
        """
        try:
            lines = format_errors(self.trace)
            if not lines:
                self._start()
                lines = self._step_differences() or self._end_differences()
        except Exception as error:  # a trace that says nonsense, or an engine that trips over it
            text = " ".join(str(error).split())
            lines = [f"{self.where}: {type(error).__name__}: {text}"]
        return lines

    def _step_differences(self) -> list[str]:
        for i, expected in enumerate(self.trace["steps"]):
            self.where = f"step {i}"
            if expected["step"] != i:
                return [f"{self.where}: the trace goes on with step {expected['step']}"]
            alive = set(self.scheduler.sequences)
            arrivals = self.due("arrival_step", i)
            aborts = [r for r in self.due("abort_step", i) if r in alive or r in arrivals]
            decided = {"added": arrivals, "aborted": aborts, **self.step(expected)}
            expected = {"waiting": decided["waiting"], **expected}
            # Sets, in whatever order they were written down.
            for key in ("added", "aborted", "preempted"):
                decided[key], expected[key] = sorted(decided[key]), sorted(expected[key])
            lines = [
                f"step {i}: {key}: vLLM {expected[key]}, ours {decided[key]}"
                for key in ("added", "aborted", *COMPARED)
                if decided[key] != expected[key]
            ]
            if lines:
                return lines
        return []

    def _end_differences(self) -> list[str]:
        """What is left open after the last step: a trace must tell its workload to the end."""
        self.where = "end"
        num_steps, outputs = len(self.trace["steps"]), self.trace["outputs"]
        # Where nothing but aborts would follow, no further step is on record.
        expected = self.requests.keys() - self.due("abort_step", num_steps)
        never = [r for r in self.requests if r in expected and r not in self.sequences]
        alive = [r for r in self.scheduler.sequences if r in expected]
        lines = [] if num_steps else ["end: the trace has no steps"]
        if never:
            lines.append(f"end: never added: {', '.join(never)}")
        if alive:
            lines.append(f"end: not finished after {num_steps} steps: {', '.join(alive)}")
        for request_id in self.requests:
            seq = self.sequences.get(request_id)
            ours = seq.output_token_ids if seq else []
            theirs = outputs.get(request_id)
            if theirs != ours and request_id not in never + alive:
                lines.append(f"end: outputs of {request_id}: vLLM {theirs}, ours {ours}")
        strays = sorted(outputs.keys() - self.requests.keys())
        if strays:
            lines.append(f"end: outputs of nobody: {', '.join(strays)}")
        return lines


def main(folder: str) -> int:
    """Replay every trace in `folder`; return the exit status."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        print(f"no *.json in {folder}", file=sys.stderr)
        return 2
    identical = 0
    for path in paths:
        try:
            trace = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            differences = [f"cannot be read: {type(error).__name__}: {error}"]
        else:
            differences = TraceReplay(trace).differences()
        identical += not differences
        for line in differences:
            print(f"{path.name}: {line}")
    print(f"{identical}/{len(paths)} identical")
    return 0 if identical == len(paths) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/replay_vllm_traces.py DIR")
    sys.exit(main(sys.argv[1]))
