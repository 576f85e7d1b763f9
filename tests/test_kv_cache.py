"""The KV cache manager, where the traces and the random lives do not lead: resetting it."""

import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine, MockModelRunner
from tinyvllm.request import Request, SamplingParams

PROMPT = list(range(10))


def serve(engine: Engine, name: str) -> int:
    """Serve the prompt to its end; returns how many of its tokens the cache had."""
    engine.add_request(Request(name, PROMPT, SamplingParams(max_tokens=3)))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    return output.num_cached_tokens


def test_a_prefix_cache_that_was_reset_finds_nothing():
    engine = Engine(EngineConfig(block_size=4), MockModelRunner(block_size=4))
    assert [serve(engine, "first"), serve(engine, "second")] == [0, 8]
    engine.kv.reset_prefix_cache()
    engine.check_invariants()
    assert [serve(engine, "third"), serve(engine, "fourth")] == [0, 8]


def test_a_prefix_cache_in_use_is_not_reset():
    engine = Engine(EngineConfig(block_size=4), MockModelRunner(block_size=4))
    engine.add_request(Request("r", PROMPT, SamplingParams(max_tokens=3)))
    engine.step()
    with pytest.raises(RuntimeError, match="cannot reset: 1 sequences hold blocks"):
        engine.kv.reset_prefix_cache()
    engine.check_invariants()
