"""Every setting is checked where it is made: the error names field, value and range."""

import dataclasses

import numpy as np
import pytest

from tinyvllm.config import EngineConfig

# field -> (bad values, what the message says is allowed)
BAD_VALUES = {
    "model": (["", 3], "None or a non-empty string"),
    "dtype": (["int8", None, ["auto"]], "one of auto, float32, float16, bfloat16"),
    "device": (["tpu", "cuda:", "cuda:x", "cpu:0", "", None, 0], "auto, cpu, cuda or cuda:N"),
    "seed": ([2**63, -(2**63) - 1, 0.5, None, True], "an integer from -9223372036854775808 to"),
    "max_model_len": ([0, -1, 1.5, "8", True], "an integer >= 1"),
    "block_size": ([0, None, 16.0, True], "an integer >= 1"),
    "num_gpu_blocks_override": ([1, 0, 2.5, True], "an integer >= 2"),
    "kv_cache_memory_bytes": ([0, "1G", True], "an integer >= 1"),
    "gpu_memory_utilization": (
        [0, 0.009, 1.01, float("nan"), float("inf"), "0.9", None, True],
        "a number from 0.01 to 1.0",
    ),
    "enable_prefix_caching": ([None, 1, "yes"], "True or False"),
    "max_num_batched_tokens": ([0, -8, None, 8.0, True], "an integer >= 1"),
    "max_num_seqs": ([0, None, "256", True], "an integer >= 1"),
    "enable_chunked_prefill": ([None, 0], "True or False"),
    "scheduling_policy": (["FCFS", "fair", None, ["fcfs"]], "one of fcfs, priority"),
    "long_prefill_token_threshold": ([-1, None, 0.5, True], "an integer >= 0"),
    "scheduler_reserve_full_isl": ([None, 1], "True or False"),
    "enforce_eager": ([None, 1, "no"], "True or False"),
    "async_scheduling": ([None, 0, "auto"], "True or False"),
    "logprobs_mode": (["raw", None, "raw_logits"], "one of raw_logprobs, processed_logprobs"),
}
GOOD_VALUES = {
    "model": [None, "gpt2", "/some/folder"],
    "dtype": ["auto", "float32", "float16", "bfloat16"],
    "device": ["auto", "cpu", "cuda", "cuda:0", "cuda:12"],
    "seed": [0, 2**63 - 1, -(2**63)],
    "max_model_len": [None, 1, 1024],
    "block_size": [1, 3, 16],
    "num_gpu_blocks_override": [None, 2],
    "kv_cache_memory_bytes": [None, 1],
    "gpu_memory_utilization": [0.01, 0.5, 1, 1.0],
    "max_num_batched_tokens": [1],
    "max_num_seqs": [1],
    "scheduling_policy": ["fcfs", "priority"],
    "logprobs_mode": ["raw_logprobs", "processed_logprobs"],
    "long_prefill_token_threshold": [0, 1],
}
FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]


def cases(table, values):
    return [(name, value) for name, entry in table.items() for value in values(entry)]


def test_no_field_is_left_out():
    assert sorted(BAD_VALUES) == sorted(FIELDS)


@pytest.mark.parametrize("name, value", cases(BAD_VALUES, lambda entry: entry[0]))
def test_bad_value_is_named(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name} must be ")
    assert BAD_VALUES[name][1] in message
    assert message.endswith(f"got {value!r}")


@pytest.mark.parametrize("name, value", cases(GOOD_VALUES, lambda entry: entry))
def test_good_value_is_kept(name, value):
    assert getattr(EngineConfig(**{name: value}), name) == value


def test_defaults_are_vllms():
    config = EngineConfig()
    assert (config.block_size, config.max_num_batched_tokens, config.max_num_seqs) == (
        16,
        2048,
        256,
    )
    assert config.enable_prefix_caching and config.enable_chunked_prefill
    assert config.scheduler_reserve_full_isl
    assert (config.scheduling_policy, config.long_prefill_token_threshold) == ("fcfs", 0)


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().max_num_seqs = 3


def test_unknown_field_is_refused():
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineConfig(max_num_sequences=3)


def test_resolve_takes_the_models_limit():
    config = EngineConfig(max_num_seqs=3)
    resolved = config.resolve(1024)
    assert resolved == dataclasses.replace(config, max_model_len=1024)
    assert config.max_model_len is None


@pytest.mark.parametrize("max_model_len", [1, 512, 1024])
def test_resolve_keeps_a_shorter_length(max_model_len):
    assert EngineConfig(max_model_len=max_model_len).resolve(1024).max_model_len == max_model_len


def test_resolve_twice_changes_nothing():
    resolved = EngineConfig().resolve(1024)
    assert resolved.resolve(1024) == resolved


def test_resolve_refuses_more_than_the_model_can():
    with pytest.raises(
        ValueError, match="max_model_len must be an integer from 1 to 1024, got 1025"
    ):
        EngineConfig(max_model_len=1025).resolve(1024)


def test_without_chunks_a_step_must_hold_the_longest_prompt():
    settings = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    with pytest.raises(ValueError, match=r"max_num_batched_tokens .* \(1024\) .* got 512"):
        EngineConfig(**settings).resolve(1024)
    assert EngineConfig(max_model_len=512, **settings).resolve(1024).max_model_len == 512
    assert EngineConfig(max_num_batched_tokens=512).resolve(1024).max_model_len == 1024


def test_numbers_of_numpy_become_pythons():
    numbers = {"seed": 3, "block_size": 4, "max_num_seqs": 5, "max_model_len": 100}
    config = EngineConfig(**{name: np.int8(value) for name, value in numbers.items()})
    assert {name: getattr(config, name) for name in numbers} == numbers
    assert {type(getattr(config, name)) for name in numbers} == {int}
