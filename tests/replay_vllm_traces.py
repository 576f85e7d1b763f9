"""Replay decisions of vLLM's own scheduler through ours and report every difference.

    python tests/replay_vllm_traces.py tests/data/vllm-traces

A trace (one JSON file) holds a workload and, step by step, what vLLM decided. A step is: add
arrivals, apply aborts, schedule, update. Prints one line a difference and `N/N identical` last;
the exit status is 0 if all traces are identical.
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


class TraceReplay:
    """One trace's workload, driven through our scheduler and block manager."""

    def __init__(self, trace: dict):
        self.trace = trace
        settings = trace["config"]
        if settings.get("watermark", 0.0) != 0.0:
            raise ValueError(f"watermark must be 0.0, got {settings['watermark']!r}")
        config = EngineConfig(
            scheduling_policy=settings["policy"],
            **{name: settings[name] for name in CONFIG_FIELDS},
        )
        self.kv = KVCacheManager(
            settings["num_blocks"], config.block_size, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(config, self.kv, trace["eos_token_id"])
        self.requests = {request["request_id"]: request for request in trace["requests"]}
        self.num_added = 0

    def _add(self, request_id: str):
        entry = self.requests[request_id]
        params = SamplingParams(max_tokens=entry["max_tokens"], priority=entry["priority"])
        request = Request(request_id, entry["prompt_token_ids"], params)
        self.scheduler.add(Sequence(request_id, request, arrival=self.num_added))
        self.num_added += 1

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
        decided["free_blocks_after"] = self.kv.num_free_blocks
        self.scheduler.check_invariants()
        self.kv.check_invariants(self.scheduler.running)
        return decided

    def differences(self) -> list[str]:
        """Replay the whole trace; return one line for each difference, at most one step's worth.

        After the first step that differs the two engines hold different states, so comparing
        on would only repeat the news.
        """
        for expected in self.trace["steps"]:
            decided = self.step(expected)
            lines = [
                f"step {expected['step']}: {key}: vLLM {expected[key]}, ours {decided[key]}"
                for key in COMPARED
                if decided[key] != (sorted(expected[key]) if key == "preempted" else expected[key])
            ]
            if lines:
                return lines
        return []


def main(folder: str) -> int:
    """Replay every trace in `folder`; return the exit status."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        print(f"no *.json in {folder}", file=sys.stderr)
        return 2
    identical = 0
    for path in paths:
        differences = TraceReplay(json.loads(path.read_text())).differences()
        identical += not differences
        for line in differences:
            print(f"{path.name}: {line}")
    print(f"{identical}/{len(paths)} identical")
    return 0 if identical == len(paths) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/replay_vllm_traces.py DIR")
    sys.exit(main(sys.argv[1]))
