"""The control plane's cost, counted in function calls: the same on every machine.

Times are in benchmarks/control_plane.py; they vary, calls do not.
"""

import sys

from tinyvllm.block_pool import Block, FreeList
from tinyvllm.config import EngineConfig
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.request import Request, SamplingParams
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence


def count_calls(function) -> int:
    """Calls of Python and C functions while `function` runs."""
    calls = 0

    def profile(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


class Compared(Sequence):
    """A sequence of which a search through a list can be seen: it calls `==`."""

    def __eq__(self, other):
        return self is other

    __hash__ = Sequence.__hash__


def calls_of_a_decode_step(num_sequences: int, max_tokens=lambda index: None) -> int:
    """Calls of the first step after the prefill, of prompts of 8 tokens each."""
    config = EngineConfig(
        max_model_len=64, max_num_seqs=num_sequences, max_num_batched_tokens=8 * num_sequences
    )
    kv = KVCacheManager(4 * num_sequences + 1, config.block_size)
    scheduler = Scheduler(config, kv)
    for index in range(num_sequences):
        params = SamplingParams(max_tokens=max_tokens(index))
        request = Request(f"r{index}", [index] * 8, params)
        scheduler.add(Compared(f"r{index}", request, arrival=index))
    answers = [0] * num_sequences
    scheduler.update(scheduler.schedule(), answers)
    return count_calls(lambda: scheduler.update(scheduler.schedule(), answers))


def test_a_decode_step_is_linear_in_sequences():
    small, large = calls_of_a_decode_step(16), calls_of_a_decode_step(1024)
    per_sequence = (large - small) / (1024 - 16)
    assert per_sequence == int(per_sequence)  # exactly linear
    assert per_sequence <= 12


def test_many_sequences_leave_together_in_linear_time():
    def calls(num_sequences):
        return calls_of_a_decode_step(num_sequences, lambda index: 2 if index % 2 else None)

    assert calls(1024) < 17 * calls(64)


def test_free_list_operations_do_not_depend_on_its_length():
    def operations(num_blocks):
        blocks = [Block(block_id) for block_id in range(num_blocks)]
        free_list = FreeList(blocks)

        def run():
            free_list.append(free_list.popleft())
            free_list.prepend(free_list.popleft())
            free_list.remove(blocks[num_blocks // 2])

        return count_calls(run)

    assert operations(100) == operations(10_000) < 30
