"""What a step costs before any model runs: `schedule() + update()` and the free list.

    python benchmarks/control_plane.py [--json FILE]

Prints the median microseconds of `schedule() + update()` for running decodes, beside vLLM
0.32's on a machine of the same kind, and of each free-list operation for a small and a large
pool.
"""

import argparse
import gc
import json
import platform
import statistics
import time

from tinyvllm.block_pool import Block, FreeList
from tinyvllm.config import EngineConfig
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.request import Request, SamplingParams
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence

VLLM_MICROSECONDS = {16: 191, 64: 703, 256: 2845}
PROMPT_TOKENS = 64
DECODE_STEPS = 400


def decode_steps(num_sequences: int) -> list[float]:
    """Microseconds of each decode step with this many running sequences."""
    max_model_len = PROMPT_TOKENS + DECODE_STEPS + 1
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * PROMPT_TOKENS,
    )
    kv = KVCacheManager(num_sequences * -(-max_model_len // 16) + 1, config.block_size)
    scheduler = Scheduler(config, kv, eos_token_id=50256)
    params = SamplingParams(max_tokens=None)
    for index in range(num_sequences):
        prompt = [index * 7919 % 50000 + i for i in range(PROMPT_TOKENS)]
        scheduler.add(Sequence(f"r{index}", Request(f"r{index}", prompt, params), arrival=index))
    scheduler.update(scheduler.schedule(), list(range(num_sequences)))
    answers = list(range(num_sequences))
    microseconds = []
    for _ in range(DECODE_STEPS - 1):
        start = time.perf_counter_ns()
        scheduler.update(scheduler.schedule(), answers)
        microseconds.append((time.perf_counter_ns() - start) / 1000)
    return microseconds


def free_list_nanoseconds(num_blocks: int, num_operations: int) -> dict[str, float]:
    """Nanoseconds of each free-list operation on a list of this many blocks."""
    blocks = [Block(block_id) for block_id in range(num_blocks)]
    free_list = FreeList(blocks)
    times = {}

    def measure(name, operation):
        start = time.perf_counter_ns()
        for _ in range(num_operations):
            operation()
        times[name] = (time.perf_counter_ns() - start) / num_operations

    middle = blocks[num_blocks // 2]

    def remove_and_append():
        free_list.remove(middle)
        free_list.append(middle)

    measure("popleft + append", lambda: free_list.append(free_list.popleft()))
    measure("popleft + prepend", lambda: free_list.prepend(free_list.popleft()))
    measure("remove from the middle + append", remove_and_append)
    return times


def main():
    """Measure, print two tables, and save them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="save the figures to this file")
    parser.add_argument("--operations", type=int, default=10**6, help="of each free-list kind")
    arguments = parser.parse_args()
    gc.disable()

    rows = []
    print("running decodes   tinyvllm us   us/sequence   vLLM 0.32 us   ratio")
    for num_sequences in (16, 64, 256, 1024):
        median = statistics.median(decode_steps(num_sequences))
        vllm = VLLM_MICROSECONDS.get(num_sequences)
        ratio = round(median / vllm, 3) if vllm else None
        rows.append({"sequences": num_sequences, "us": median, "vllm_us": vllm, "ratio": ratio})
        print(
            f"{num_sequences:15d} {median:13.1f} {median / num_sequences:13.2f} "
            f"{vllm or '-':>14} {ratio or '-':>7}"
        )

    free_list = {n: free_list_nanoseconds(n, arguments.operations) for n in (10**2, 10**5)}
    print(f"\nfree list, {arguments.operations} of each      100 blocks ns   100000 blocks ns")
    for name in free_list[10**2]:
        print(f"{name:32} {free_list[10**2][name]:16.0f} {free_list[10**5][name]:18.0f}")

    if arguments.json:
        evidence = {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "schedule_and_update": rows,
            "free_list_ns": {str(n): times for n, times in free_list.items()},
        }
        with open(arguments.json, "w") as file:
            json.dump(evidence, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
