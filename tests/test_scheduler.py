"""The scheduler, step by step: over a memory that only counts, and over the real one."""

import itertools
import random

import pytest

from book.tools.plans import PlannedModel, describe, run, sequence
from tinyvllm.config import EngineConfig
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.request import Request, SamplingParams
from tinyvllm.scheduler import Scheduler, SchedulerOutput, WaitingQueue
from tinyvllm.sequence import Sequence, SequenceStatus


class CountingMemory:
    """Memory that counts blocks and never finds a prefix, as in chapter 03."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = self.num_free_blocks = num_blocks
        self.block_size = block_size
        self.held = {}

    def get_computed_blocks(self, seq):
        return [], 0

    def num_blocks_to_take(self, seq, num_tokens, hits=()):
        return max(-(-num_tokens // self.block_size) - self.held.get(seq.seq_id, 0), 0)

    def allocate_slots(self, seq, num_new_tokens, hits=(), full_sequence_must_fit=False):
        needed = self.num_blocks_to_take(seq, seq.num_computed_tokens + num_new_tokens)
        whole = self.num_blocks_to_take(seq, seq.num_tokens) if full_sequence_must_fit else 0
        if max(needed, whole) > self.num_free_blocks:
            return None
        self.num_free_blocks -= needed
        self.held[seq.seq_id] = self.held.get(seq.seq_id, 0) + needed
        return ["block"] * needed

    def free(self, seq):
        self.num_free_blocks += self.held.pop(seq.seq_id, 0)

    def check_invariants(self, admitted):
        """A sequence holds what its computed tokens need, and nothing is lost."""
        assert set(self.held) == {seq.seq_id for seq in admitted}
        for seq in admitted:
            assert self.held[seq.seq_id] == -(-seq.num_computed_tokens // self.block_size)
        assert self.num_free_blocks + sum(self.held.values()) == self.num_blocks


def plain_blocks(num_blocks: int, block_size: int) -> KVCacheManager:
    """The block manager with this many usable blocks, without prefix caching."""
    return KVCacheManager(num_blocks + 1, block_size, enable_caching=False)


def cached_blocks(num_blocks: int, block_size: int) -> KVCacheManager:
    """The block manager with this many usable blocks, with prefix caching."""
    return KVCacheManager(num_blocks + 1, block_size)


# Where nothing is found in a cache, blocks or counters must lead to the same plans.
without_prefixes = pytest.mark.parametrize("memory", [CountingMemory, plain_blocks])
every_memory = pytest.mark.parametrize("memory", [CountingMemory, plain_blocks, cached_blocks])


def small(num_blocks=99, memory=CountingMemory, eos_token_id=None, **settings) -> Scheduler:
    """A budget of 8 tokens a step, and blocks of 4."""
    settings = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 8} | settings
    config = EngineConfig(**settings)
    return Scheduler(config, memory(num_blocks, config.block_size), eos_token_id)


def with_prompt(name: str, token_ids: list[int], arrival: int = 0, **params) -> Sequence:
    return Sequence(name, Request(name, token_ids, SamplingParams(**params)), arrival=arrival)


def checked(scheduler, *loads, model=None):
    """Run to the end, with the rules for plans and for the state between steps."""

    def watched(plan):
        check_plan(plan, scheduler)
        return model(plan) if model else [0] * len(plan.sampling)

    for plan in run(scheduler, *loads, model=watched):
        check_state(scheduler)
        yield plan
    assert not scheduler.running and not scheduler.waiting


def described(scheduler, *loads) -> list[str]:
    return [describe(plan) for plan in checked(scheduler, *loads)]


def check_state(scheduler):
    scheduler.check_invariants()
    scheduler.kv.check_invariants(scheduler.running)


def check_plan(plan, scheduler):
    """Between `schedule` and `update`: what every plan keeps to."""
    config = scheduler.config
    scheduled = [seq for seq, _, _ in plan.scheduled]
    assert sum(num for _, _, num in plan.scheduled) <= config.max_num_batched_tokens
    assert len({seq.seq_id for seq in scheduled}) == len(scheduled)
    assert not (plan.preempted and plan.new + plan.resumed)
    assert [seq for seq in scheduled if seq in plan.new] == plan.new
    assert [seq for seq in scheduled if seq in plan.resumed] == plan.resumed
    for seq in plan.preempted:
        assert seq not in scheduled and seq not in scheduler.running
    for seq, start, num in plan.scheduled:
        assert seq in scheduler.running
        assert num >= 1 and seq.num_computed_tokens == start + num <= seq.num_tokens
        assert start + num <= config.max_model_len - 1
    done = [seq for seq in scheduled if seq.num_computed_tokens == seq.num_tokens]
    assert plan.sampling == done


def random_load(rng, count=12) -> dict:
    return {
        f"r{i}": (rng.randint(1, 24), rng.randint(1, 16), rng.randint(0, 2)) for i in range(count)
    }


# ---------------------------------------------------------------------------------------------
# Running first, then waiting, out of one budget


@without_prefixes
def test_sequences_catch_up_out_of_one_budget(memory):
    load = {"a": (5, 3), "b": (7, 2), "c": (4, 2)}
    assert described(small(memory=memory), load) == [
        "a[0:5] b[0:3] | new: a b | sampling: a",
        "a[5:6] b[3:7] c[0:3] | new: c | sampling: a b",
        "a[6:7] b[7:8] c[3:4] | sampling: a b c",
        "c[4:5] | sampling: c",
    ]


def test_counters_advance_with_the_plan():
    """The next step could be planned while the model runs: nothing of `update` is needed."""
    scheduler = small()
    scheduler.add(sequence("a", 20, 1))
    starts = [scheduler.schedule().scheduled[0][1:] for _ in range(3)]
    assert starts == [(0, 8), (8, 8), (16, 4)]


def test_seats():
    load = {"a": (1, 3), "b": (1, 1), "c": (1, 1)}
    assert described(small(max_num_seqs=1), load) == [
        "a[0:1] | new: a | sampling: a",
        "a[1:2] | sampling: a",
        "a[2:3] | sampling: a",
        "b[0:1] | new: b | sampling: b",
        "c[0:1] | new: c | sampling: c",
    ]


@without_prefixes
def test_nobody_overtakes_the_head(memory):
    """`b` needs three blocks and two are free; `c` would fit, and waits."""
    scheduler = small(4, memory)
    steps = run(scheduler, {"a": (8, 3), "b": (12, 1), "c": (4, 1)})
    assert describe(next(steps)) == "a[0:8] | new: a | sampling: a"
    assert describe(next(steps)) == "a[8:9] | sampling: a"
    assert [seq.seq_id for seq in scheduler.waiting] == ["b", "c"]
    assert describe(next(steps)) == "a[9:10] | sampling: a"
    assert describe(next(steps)) == "b[0:8] | new: b"
    assert describe(next(steps)) == "b[8:12] c[0:4] | new: c | sampling: b c"


def test_threshold_caps_one_among_several():
    load = {"long": (20, 1), "short": (4, 2)}
    assert described(small(long_prefill_token_threshold=4), load) == [
        "long[0:4] short[0:4] | new: long short | sampling: short",
        "long[4:8] short[4:5] | sampling: short",
        "long[8:16]",  # alone, it is not capped
        "long[16:20] | sampling: long",
    ]


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it():
    load = {"a": (5, 2), "b": (6, 1), "c": (1, 1)}
    assert described(small(enable_chunked_prefill=False), load) == [
        "a[0:5] | new: a | sampling: a",
        "a[5:6] b[0:6] c[0:1] | new: b c | sampling: a b c",
    ]


@without_prefixes
@pytest.mark.parametrize("reserve, preempted", [(False, 10), (True, 0)])
def test_the_gate_reserves_the_whole_sequence(memory, reserve, preempted):
    scheduler = small(10, memory, scheduler_reserve_full_isl=reserve)
    load = dict.fromkeys("abcd", (24, 8))
    assert sum(len(plan.preempted) for plan in checked(scheduler, load)) == preempted


def test_max_model_len_is_never_exceeded():
    scheduler = small(max_model_len=12)
    seq = sequence("a", 9, 100)
    scheduler.add(seq)
    for _ in checked(scheduler):
        pass
    assert seq.num_tokens == 12 and seq.finish_reason == "length"


def test_who_cannot_go_on_is_skipped_and_does_not_stop_the_others():
    """The engine refuses such a prompt; the scheduler alone must neither spin nor plan nothing."""
    scheduler = small(max_model_len=8)
    steps = run(scheduler, {"long": (12, 1), "a": (2, 2)})
    assert [describe(plan) for plan in itertools.islice(steps, 3)] == [
        "long[0:8] | new: long",
        "a[0:2] | new: a | sampling: a",
        "a[2:3] | sampling: a",
    ]
    with pytest.raises(RuntimeError, match="long is running: prefill, 8 of 12 tokens"):
        next(steps)


def test_a_cached_prefix_is_not_computed_again():
    prompt = list(range(12))
    scheduler = small(memory=cached_blocks, max_num_batched_tokens=64)
    for arrival, name in enumerate("abc"):
        scheduler.add(with_prompt(name, prompt, arrival, max_tokens=1))
    # Admitted in one step, they share what the first is about to compute; the last block of a
    # prompt is recomputed, because somebody needs its logits.
    assert described(scheduler) == ["a[0:12] b[8:12] c[8:12] | new: a b c | sampling: a b c"]
    assert scheduler.prefix_cache_stats.num_queried == 36
    assert scheduler.prefix_cache_stats.num_hit == 16


def test_case_6_decodes_advance_in_every_step_while_prompts_arrive():
    scheduler = small()
    loads = [{"a": (4, 40), "b": (4, 40)}, *({f"p{i}": (8, 1)} for i in range(30))]
    for number, plan in zip(range(31), checked(scheduler, *loads), strict=False):
        sampling = [seq.seq_id for seq in plan.sampling]
        assert sampling[:2] == ["a", "b"], f"step {number}: {describe(plan)}"


def test_unresolved_config_is_refused():
    with pytest.raises(ValueError, match="max_model_len must be set"):
        Scheduler(EngineConfig(), CountingMemory(9, 4))


def test_id_in_use_is_refused():
    scheduler = small()
    scheduler.add(sequence("a", 4, 4))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(sequence("a", 4, 4, arrival=1))
    check_state(scheduler)


# ---------------------------------------------------------------------------------------------
# Rank and preemption


def test_waiting_queue_is_a_sorted_list():
    rng, queue, model = random.Random(0), WaitingQueue(), []
    for arrival in range(400):
        action = rng.random()
        if action < 0.5 or not model:
            seq = sequence(f"r{arrival}", 1, 1)
            rank = (rng.randint(0, 3), arrival)
            queue.push(rank, seq)
            model = sorted([*model, (rank, seq)], key=lambda entry: entry[0])
        elif action < 0.75:
            assert queue.head is model[0][1]
            assert queue.pop() is model.pop(0)[1]
        else:
            queue.remove(model.pop(rng.randrange(len(model)))[1])
        assert list(queue) == [seq for _, seq in model] and len(queue) == len(model)


def test_priority_decides_who_is_admitted():
    load = {"a": (8, 1, 2), "b": (8, 1, 0), "c": (8, 1, 1), "d": (8, 1, 0)}
    order = [plan.new[0].seq_id for plan in checked(small(scheduling_policy="priority"), load)]
    assert order == ["b", "d", "c", "a"]
    order = [plan.new[0].seq_id for plan in checked(small(), load)]
    assert order == ["a", "b", "c", "d"]


@every_memory
def test_fcfs_is_priority_with_equal_priorities(memory):
    for seed in range(4):
        load = {name: want[:2] for name, want in random_load(random.Random(seed)).items()}
        fcfs, priority = (
            described(small(10, memory, scheduling_policy=policy), load)
            for policy in ("fcfs", "priority")
        )
        assert fcfs == priority


@without_prefixes
def test_the_last_is_preempted_and_computes_its_outputs_again(memory):
    load = {"a": (4, 5), "b": (4, 3), "c": (3, 2)}
    assert described(small(3, memory), load) == [
        "a[0:4] b[0:4] | new: a b | sampling: a b",
        "a[4:5] | preempted: b | sampling: a",
        "a[5:6] | sampling: a",
        "a[6:7] | sampling: a",
        "a[7:8] | sampling: a",
        "b[0:5] c[0:3] | new: c | resumed: b | sampling: b c",
        "b[5:6] c[3:4] | sampling: b c",
    ]


@without_prefixes
def test_a_victim_leaves_the_plan_and_gives_its_budget_back(memory):
    """`a` is planned first; then `b`, more urgent, takes its block, and `c` its token."""
    scheduler = small(4, memory, max_num_batched_tokens=4, scheduling_policy="priority")
    steps = checked(scheduler, {"a": (2, 9, 1)}, {"b": (3, 9, 0)}, {"c": (5, 9, 0)})
    assert describe(next(steps)) == "a[0:2] | new: a | sampling: a"
    assert describe(next(steps)) == "a[2:3] b[0:3] | new: b | sampling: a b"
    assert describe(next(steps)) == "a[3:4] b[3:4] c[0:2] | new: c | sampling: a b"
    assert describe(next(steps)) == "b[4:5] c[2:5] | preempted: a | sampling: b c"


def test_in_a_step_that_preempts_nobody_is_admitted():
    scheduler = small(3)
    steps = run(scheduler, {"a": (4, 9), "b": (4, 9), "c": (1, 1)})
    next(steps)
    plan = next(steps)
    assert [seq.seq_id for seq in plan.preempted] == ["b"]
    assert plan.new == [] and scheduler.kv.num_free_blocks == 1


def test_a_step_may_do_nothing_but_preempt():
    """Under priority the victim may stand first, ask first, and find no other victim."""
    steps = checked(small(3, scheduling_policy="priority"), {"a": (3, 5, 1)}, {"b": (5, 2, 0)})
    assert describe(next(steps)) == "a[0:3] | new: a | sampling: a"
    assert describe(next(steps)) == "a[3:4] b[0:5] | new: b | sampling: a b"
    assert describe(next(steps)) == "| preempted: a"
    assert describe(next(steps)) == "b[5:6] | sampling: b"
    assert describe(next(steps)) == "a[0:5] | resumed: a | sampling: a"


@every_memory
def test_case_8_what_never_fits_raises_instead_of_spinning(memory):
    scheduler = small(3, memory)
    scheduler.add(sequence("a", 13, 4))
    with pytest.raises(RuntimeError, match="a is waiting: needs 4 blocks, 3 free"):
        scheduler.schedule()
    check_state(scheduler)


@every_memory
def test_case_8_what_outgrows_the_memory_raises_and_everyone_else_was_served(memory):
    scheduler = small(3, memory)
    served = set()
    with pytest.raises(RuntimeError, match="a is preempted: needs 4 blocks, 3 free"):
        for plan in checked(scheduler, {"a": (5, 40), "b": (3, 2)}):
            served |= {seq.seq_id for seq in plan.sampling if seq.finish_reason}
    assert served == {"b"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@every_memory
def test_case_10_no_plan_holds_a_victim_and_nobody_is_skipped_for_one(memory, policy):
    """Whoever runs after `schedule` is in the plan, unless the budget is spent or the last
    victim was itself the one that asked, which ends the pass."""
    victims = 0
    for seed in range(12):
        rng = random.Random(seed)
        scheduler = small(10, memory, scheduling_policy=policy)
        pending = [random_load(rng, 3), *({f"s{i}": (rng.randint(1, 9), 9)} for i in range(9))]
        arrivals = itertools.count()
        while pending or scheduler.sequences:
            for name, want in (pending.pop(0) if pending else {}).items():
                scheduler.add(sequence(name, *want, arrival=next(arrivals)))
            before = list(scheduler.running)
            plan = scheduler.schedule()
            check_plan(plan, scheduler)
            victims += len(plan.preempted)
            spent = sum(num for _, _, num in plan.scheduled)
            scheduled = [seq for seq, _, _ in plan.scheduled]
            left_out = [seq for seq in scheduler.running if seq not in scheduled]
            if left_out and spent < scheduler.config.max_num_batched_tokens:
                asked = plan.preempted[-1]
                passed = [before.index(seq) for seq in scheduled]
                assert max(passed, default=-1) < before.index(asked) < before.index(left_out[0])
                assert scheduler.rank(asked) > max(map(scheduler.rank, scheduler.running))
            scheduler.update(plan, [0] * len(plan.sampling))
            check_state(scheduler)
    assert victims > 5


def test_case_10_the_list_moves_up_under_the_index():
    """`a` stands before `b`, which preempts it; `c`, behind `b`, still gets its token."""
    scheduler = small(4, scheduling_policy="priority")
    steps = checked(scheduler, {"a": (3, 9, 1)}, {"b": (4, 9), "c": (3, 9)})
    assert describe(next(steps)) == "a[0:3] | new: a | sampling: a"
    assert describe(next(steps)) == "a[3:4] b[0:4] c[0:3] | new: b c | sampling: a b c"
    assert describe(next(steps)) == "b[4:5] c[3:4] | preempted: a | sampling: b c"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@every_memory
def test_case_11_the_resumed_precede_those_who_never_ran(memory, policy):
    resumed = 0
    for seed in range(8):
        load = {name: want[:2] for name, want in random_load(random.Random(seed), 16).items()}
        scheduler = small(10, memory, scheduling_policy=policy)
        for plan in checked(scheduler, load):
            admitted = [seq for seq, _, _ in plan.scheduled if seq in plan.new + plan.resumed]
            assert admitted == plan.resumed + plan.new
            resumed += len(plan.resumed)
            waiting = [seq.num_preemptions > 0 for seq in scheduler.waiting]
            assert waiting == sorted(waiting, reverse=True)
            assert not (plan.new and any(waiting))
    assert resumed > 5


def test_case_13_recomputed_tokens_are_no_hits():
    """Prompts that share nothing: a resumed sequence finds its own blocks, the rate stays 0."""
    rng, scheduler, found = random.Random(5), small(9, cached_blocks), 0
    for arrival in range(20):
        prompt = [rng.randrange(10**6) for _ in range(rng.randint(5, 20))]
        scheduler.add(with_prompt(f"r{arrival}", prompt, arrival, max_tokens=12))
    sequences = list(scheduler.sequences.values())
    for plan in checked(scheduler, model=lambda p: [rng.randrange(10**6) for _ in p.sampling]):
        starts = {seq.seq_id: start for seq, start, _ in plan.scheduled}
        found += sum(starts[seq.seq_id] > 0 for seq in plan.resumed)
    assert found > 0
    stats = scheduler.prefix_cache_stats
    assert stats.num_hit == 0
    assert stats.num_queried == sum(seq.num_prompt_tokens for seq in sequences)
    assert {seq.num_cached_tokens for seq in sequences} == {0}


@every_memory
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_no_plan_changes_a_token(memory, policy, budget):
    for seed, (threshold, reserve) in enumerate(itertools.product((0, 3), (True, False))):
        load = random_load(random.Random(100 * budget + seed))
        scheduler = small(
            11,
            memory,
            max_num_batched_tokens=budget,
            scheduling_policy=policy,
            long_prefill_token_threshold=threshold,
            scheduler_reserve_full_isl=reserve,
        )
        tokens = {}
        model = PlannedModel() if memory is not cached_blocks else PrefixModel()
        for plan in checked(scheduler, load, model=model):
            tokens |= {seq.seq_id: seq.token_ids for seq in plan.sampling}
        assert [tokens[name] for name in load] == PlannedModel.naive(load)
        assert scheduler.kv.num_free_blocks == 11


class PrefixModel(PlannedModel):
    """Takes the tokens of a hit as computed, and checks nothing but gaps after it."""

    def __call__(self, plan):
        for seq, start, _ in plan.scheduled:
            if seq in plan.new + plan.resumed:
                self.seen[seq.seq_id] = seq.token_ids[:start]
        return super().__call__(plan)


# ---------------------------------------------------------------------------------------------
# Update, abort, rollback


@without_prefixes
def test_the_finished_leave_at_once_and_so_does_their_memory(memory):
    scheduler = small(9, memory, eos_token_id=7)
    for arrival, name in enumerate("abcd"):
        scheduler.add(with_prompt(name, [1, 2], arrival, max_tokens=3, stop_token_ids=[8]))
    plan = scheduler.schedule()
    finished = scheduler.update(plan, [7, 8, 5, 5])
    assert [(seq.seq_id, seq.finish_reason, seq.stop_reason) for seq in finished] == [
        ("a", "stop", None),
        ("b", "stop", 8),
    ]
    assert [seq.seq_id for seq in scheduler.running] == ["c", "d"]
    assert scheduler.kv.num_free_blocks == 7
    check_state(scheduler)
    for token_id in (5, 5):
        finished = scheduler.update(scheduler.schedule(), [token_id, token_id])
    assert [(seq.seq_id, seq.finish_reason) for seq in finished] == [
        ("c", "length"),
        ("d", "length"),
    ]
    assert scheduler.kv.num_free_blocks == 9 and not scheduler.sequences


@pytest.mark.parametrize("token_ids", [[], [1, 2]])
def test_update_wants_one_token_for_each_that_samples(token_ids):
    scheduler = small()
    scheduler.add(sequence("a", 3, 3))
    with pytest.raises(ValueError):
        scheduler.update(scheduler.schedule(), token_ids)


def test_a_chunk_from_the_middle_samples_nothing():
    scheduler = small()
    scheduler.add(sequence("a", 9, 1))
    assert scheduler.schedule().sampling == []
    assert [seq.seq_id for seq in scheduler.schedule().sampling] == ["a"]


@every_memory
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
@pytest.mark.parametrize("while_the_model_runs", [False, True])
def test_abort_in_every_state(memory, state, while_the_model_runs):
    scheduler = small(3, memory)
    loads = {
        "waiting": {"a": (8, 3), "b": (4, 3)},
        "prefill": {"b": (11, 1)},
        "decode": {"b": (4, 3)},
        "preempted": {"a": (4, 5), "b": (4, 3)},
    }
    steps = run(scheduler, loads[state])
    for _ in range(2 if state == "preempted" else 1):
        next(steps)
    explained = scheduler.explain("b")
    assert state in explained
    plan = scheduler.schedule() if while_the_model_runs else None
    aborted = scheduler.abort("b")
    assert aborted.seq_id == "b" and aborted.finish_reason == "abort"
    assert scheduler.abort("b") is None and scheduler.abort("unknown") is None
    num_tokens = aborted.num_tokens
    if plan:
        scheduler.update(plan, [0] * len(plan.sampling))
    check_state(scheduler)
    for plan in checked(scheduler):
        assert aborted not in [seq for seq, _, _ in plan.scheduled]
    assert aborted.num_tokens == num_tokens
    assert scheduler.kv.num_free_blocks == 3


@every_memory
def test_a_step_that_was_not_executed_leaves_no_trace_in_the_answers(memory):
    """Every third step is planned and rolled back, among them steps that preempt."""
    load = random_load(random.Random(8))
    scheduler = small(11, memory, max_num_batched_tokens=64)
    for arrival, (name, want) in enumerate(load.items()):
        scheduler.add(sequence(name, *want, arrival=arrival))
    model, tokens, number = PrefixModel(), {}, 0
    while scheduler.sequences:
        plan, number = scheduler.schedule(), number + 1
        if number % 3 == 0:
            scheduler.rollback(plan)
        else:
            tokens |= {seq.seq_id: seq.token_ids for seq in plan.sampling}
            scheduler.update(plan, model(plan))
        check_state(scheduler)
    assert [tokens[name] for name in load] == PlannedModel.naive(load)


@every_memory
def test_rollback_gives_everything_back(memory):
    scheduler = small(9, memory)
    for arrival, name in enumerate("ab"):
        scheduler.add(sequence(name, 5, 3, arrival=arrival))
    scheduler.rollback(scheduler.schedule())
    check_state(scheduler)
    assert scheduler.kv.num_free_blocks == 9
    assert [seq.status for seq in scheduler.waiting] == [SequenceStatus.PREEMPTED] * 2
    # Nothing that was only planned may be found in the cache.
    assert all(scheduler.kv.get_computed_blocks(seq)[1] == 0 for seq in scheduler.waiting)


def test_rollback_keeps_what_earlier_steps_have_computed():
    scheduler = small(9, cached_blocks)
    seq = sequence("a", 20, 3)
    scheduler.add(seq)
    scheduler.update(scheduler.schedule(), [])
    scheduler.rollback(scheduler.schedule())
    assert scheduler.kv.get_computed_blocks(seq)[1] == 8
    assert describe(scheduler.schedule()) == "a[8:16] | resumed: a"


@every_memory
def test_rollback_after_an_abort_while_the_model_ran(memory):
    scheduler = small(9, memory)
    for arrival, name in enumerate("ab"):
        scheduler.add(sequence(name, 3, 3, arrival=arrival))
    plan = scheduler.schedule()
    scheduler.abort("a")
    scheduler.rollback(plan)
    check_state(scheduler)
    assert list(scheduler.sequences) == ["b"] and scheduler.kv.num_free_blocks == 9


# ---------------------------------------------------------------------------------------------
# Explain, and the rules


@without_prefixes
def test_explain_says_where_everybody_is(memory):
    scheduler = small(6, memory)
    steps = run(scheduler, {"a": (4, 9), "b": (14, 4), "c": (12, 4), "d": (4, 4)})
    next(steps), next(steps)
    assert {name: scheduler.explain(name) for name in "abcd"} == {
        "a": "running: decode, 2 tokens generated",
        "b": "running: prefill, 11 of 14 tokens",
        "c": "waiting: needs 3 blocks, 1 free",
        "d": "waiting: head of the queue is c",
    }
    scheduler.abort("b")
    assert scheduler.explain("c") == "waiting: next in line, wants 12 tokens of the step's budget"
    with pytest.raises(KeyError):
        scheduler.explain("b")


def test_explain_names_every_obstacle():
    scheduler = small(3, max_num_seqs=1)
    next(run(scheduler, {"a": (8, 9), "b": (8, 1), "c": (8, 1)}))
    assert scheduler.explain("c") == (
        "waiting: all 1 seats (max_num_seqs) are taken; needs 2 blocks, 1 free; "
        "head of the queue is b"
    )


def test_explain_says_preempted():
    scheduler = small(3)
    steps = run(scheduler, {"a": (4, 9), "b": (4, 9)})
    next(steps), next(steps)
    assert scheduler.explain("b") == "preempted: needs 2 blocks, 1 free"


def test_explain_counts_a_prompt_that_lacks_one_token_as_prefill():
    scheduler = small()
    next(run(scheduler, {"a": (9, 3)}))
    assert scheduler.explain("a") == "running: prefill, 8 of 9 tokens"


@pytest.mark.parametrize("reserve", [False, True])
def test_explain_asks_for_no_more_blocks_than_admission_does(reserve):
    """Without the gate the first chunk has to fit, and nothing else."""
    scheduler = small(5, scheduler_reserve_full_isl=reserve)
    next(run(scheduler, {"a": (8, 9), "b": (20, 1)}))
    if reserve:
        assert scheduler.explain("b") == "waiting: needs 5 blocks, 3 free"
    else:
        assert scheduler.explain("b") == (
            "waiting: next in line, wants 20 tokens of the step's budget"
        )
        assert [seq.seq_id for seq in scheduler.schedule().new] == ["b"]


def test_explain_counts_hits():
    scheduler = small(memory=cached_blocks, max_num_seqs=1)
    for arrival, name in enumerate("ab"):
        scheduler.add(with_prompt(name, list(range(8)), arrival, max_tokens=1))
    scheduler.update(scheduler.schedule(), [0])
    assert scheduler.explain("b") == "waiting: next in line, wants 4 tokens of the step's budget"


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda s: s.running.clear(), "alive are"),
        (lambda s: s.running.append(s.running[0]), "alive are"),
        (lambda s: s.running.append(s.waiting.head), "alive are"),
        (lambda s: s.sequences.pop("c"), "alive are"),
        (lambda s: s.running.append(s.waiting.pop()), "3 sequences run"),
        (lambda s: setattr(s.running[0], "status", SequenceStatus.PREEMPTED), "in running"),
        (lambda s: setattr(s.running[0], "num_computed_tokens", 0), "impossible counters"),
        (lambda s: setattr(s.running[0], "num_computed_tokens", 6), "impossible counters"),
        (lambda s: setattr(s.running[0], "num_tokens", 65), "impossible counters"),
        (lambda s: setattr(s.waiting.head, "status", SequenceStatus.RUNNING), "in waiting"),
        (lambda s: setattr(s.waiting.head, "num_computed_tokens", 1), "waits with computed"),
        (lambda s: s.running[0].token_ids.pop(), "has 5 token ids"),
    ],
)
def test_every_rule_trips(damage, message):
    scheduler = small(max_num_seqs=2)
    next(run(scheduler, {"a": (5, 3), "b": (7, 2), "c": (4, 2)}))
    scheduler.check_invariants()
    damage(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.check_invariants()


def test_an_empty_scheduler_plans_nothing():
    assert small().schedule() == SchedulerOutput()
