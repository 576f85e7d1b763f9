"""Sequences: two counters that catch up, and the rules that end one."""

from itertools import product

import pytest

from tinyvllm.request import Request, SamplingParams
from tinyvllm.sequence import Sequence, SequenceStatus

EOS = 99
LIMIT = 1000  # max_model_len, out of reach


def sequence(prompt=(1, 2, 3), **params) -> Sequence:
    return Sequence("s0", Request("r0", list(prompt), SamplingParams(**params)))


def after(token_id: int, max_model_len: int = LIMIT, eos_token_id: int | None = EOS, **params):
    """(status, stop_reason) of a sequence after its first token."""
    seq = sequence(**params)
    seq.append(token_id)
    finished = seq.check_stop(eos_token_id, max_model_len)
    assert finished == seq.status.finished == (seq.finish_reason is not None)
    return seq.status, seq.stop_reason


ALIVE = (SequenceStatus.WAITING, None)  # the scheduler sets RUNNING, not the stop rules
STOPPED = (SequenceStatus.FINISHED_STOPPED, None)
LENGTH = (SequenceStatus.FINISHED_LENGTH, None)


def test_a_new_sequence_knows_its_prompt_and_has_computed_nothing():
    params = SamplingParams(n=2)
    request = Request("r0", [5, 6], params)
    seq = Sequence("1_r0", request, index=1, arrival=7, seed=42)
    assert (seq.seq_id, seq.index, seq.arrival, seq.seed) == ("1_r0", 1, 7, 42)
    assert seq.request is request and seq.params is params
    assert seq.status is SequenceStatus.WAITING and seq.finish_reason is None
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_output_tokens) == (2, 2, 0)
    assert (seq.num_computed_tokens, seq.num_cached_tokens, seq.num_preemptions) == (0, -1, 0)
    assert seq.token_ids == [5, 6] and seq.output_token_ids == [] and seq.block_hashes == []


def test_append_adds_a_known_token_that_is_not_computed():
    seq = sequence()
    seq.num_computed_tokens = 3
    seq.append(8)
    seq.append(9)
    assert seq.token_ids == [1, 2, 3, 8, 9] and seq.output_token_ids == [8, 9]
    assert (seq.num_tokens, seq.num_output_tokens, seq.num_computed_tokens) == (5, 2, 3)
    assert seq.request.prompt_token_ids == [1, 2, 3]


def test_two_sequences_of_a_request_share_no_tokens():
    request = Request("r0", [1], SamplingParams(n=2))
    first, second = Sequence("0_r0", request), Sequence("1_r0", request, index=1)
    first.append(5)
    first.block_hashes.append(b"h")
    assert second.token_ids == [1] and second.block_hashes == []


def test_output_token_ids_is_a_copy():
    seq = sequence()
    seq.append(8)
    seq.output_token_ids.append(9)
    assert seq.token_ids == [1, 2, 3, 8]


def test_slots_refuse_a_misspelt_attribute():
    seq = sequence()
    assert not hasattr(seq, "__dict__")
    with pytest.raises(AttributeError):
        seq.num_computed_token = 3


def test_repr_says_id_status_and_counters():
    seq = sequence()
    assert repr(seq) == "Sequence('s0', waiting, 0/3 tokens computed)"
    seq.status, seq.num_computed_tokens = SequenceStatus.RUNNING, 3
    seq.append(4)
    assert repr(seq) == "Sequence('s0', running, 3/4 tokens computed)"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WAITING", None),
        ("RUNNING", None),
        ("PREEMPTED", None),
        ("FINISHED_STOPPED", "stop"),
        ("FINISHED_LENGTH", "length"),
        ("FINISHED_ABORTED", "abort"),
    ],
)
def test_every_status_and_its_reason(name, reason):
    seq = sequence()
    seq.status = SequenceStatus[name]
    assert seq.finish_reason == reason
    assert seq.status.finished == (reason is not None)


def test_no_status_is_forgotten_above():
    assert len(SequenceStatus) == 6


@pytest.mark.parametrize(
    ("is_eos", "listed", "ignore_eos", "last", "full"), list(product((False, True), repeat=5))
)
def test_truth_table_of_the_stop_rules(is_eos, listed, ignore_eos, last, full):
    token_id = EOS if is_eos else 5
    if is_eos and not ignore_eos:
        expected = STOPPED
    elif listed:
        expected = (SequenceStatus.FINISHED_STOPPED, token_id)
    elif last or full:
        expected = LENGTH
    else:
        expected = ALIVE
    assert expected == after(
        token_id,
        max_model_len=4 if full else LIMIT,
        ignore_eos=ignore_eos,
        stop_token_ids=[7, token_id] if listed else [7],
        max_tokens=1 if last else 16,
    )


def test_ignore_eos_is_not_defeated_by_the_eos_and_honours_the_users_ids():
    """CASES 21: engines put EOS among the stop ids, and `ignore_eos` no longer held."""
    params = SamplingParams(ignore_eos=True, max_tokens=None)
    seq = Sequence("s0", Request("r0", [1], params))
    for _ in range(20):
        seq.append(EOS)
        assert not seq.check_stop(EOS, LIMIT)
    assert params.stop_token_ids == []
    assert after(EOS, ignore_eos=True, stop_token_ids=[EOS])[1] == EOS
    assert after(5, ignore_eos=True, stop_token_ids=[5])[1] == 5


def test_a_model_without_an_eos_token_never_stops_at_one():
    assert after(EOS, eos_token_id=None) == ALIVE
    assert after(0, eos_token_id=None) == ALIVE
    assert after(0, eos_token_id=0) == STOPPED


def test_max_tokens_counts_outputs_and_max_model_len_counts_all():
    seq = sequence(max_tokens=3)
    ends = []
    for token_id in (4, 5, 6):
        seq.append(token_id)
        ends.append(seq.check_stop(EOS, LIMIT))
    assert ends == [False, False, True] and seq.finish_reason == "length"
    assert after(4, max_model_len=5, max_tokens=None) == ALIVE
    assert after(4, max_model_len=4, max_tokens=None) == LENGTH


def test_only_the_newest_token_is_judged():
    """Stop tokens and EOS inside the prompt end nothing, nor does one from an earlier step."""
    seq = sequence(prompt=[EOS, 5], stop_token_ids=[5])
    seq.append(6)
    assert not seq.check_stop(EOS, LIMIT)
    assert after(6, stop_token_ids=[5]) == ALIVE


def test_what_preemption_keeps():
    """Resetting the one counter is all it takes: tokens and block hashes stay as they are."""
    seq = sequence(prompt=range(8))
    seq.num_computed_tokens = 8
    seq.append(50)
    seq.block_hashes.append(b"first block")
    seq.status, seq.num_computed_tokens = SequenceStatus.PREEMPTED, 0
    seq.num_preemptions += 1
    assert seq.num_tokens - seq.num_computed_tokens == 9
    assert seq.output_token_ids == [50] and seq.block_hashes == [b"first block"]
    assert not seq.check_stop(EOS, LIMIT) and seq.finish_reason is None
