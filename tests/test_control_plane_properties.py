"""Random lives of the control plane, with every rule checked after every step.

A state machine adds requests (equal prompts, salts, priorities, several continuations, some that
must be refused), steps, aborts in every state and also while the model runs, and interrupts the
model. The mock runner answers from the KV slots alone, so a wrong slot, table or shared block
changes an answer, and the end of every run compares all answers with the oracle.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine, MockModelRunner
from tinyvllm.request import Request, SamplingParams

VOCAB_SIZE = 40
EOS = VOCAB_SIZE - 1
MAX_MODEL_LEN = 48
# A sequence alone samples within this many steps, even if it computes one token a step.
PATIENCE = 2 * MAX_MODEL_LEN
PREAMBLES = [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9]]


class InterruptibleRunner(MockModelRunner):
    """Runs a callback in the middle of a step, where a user's abort or Ctrl-C would land."""

    during_step = None

    def execute(self, batch):
        if self.during_step is not None:
            callback, self.during_step = self.during_step, None
            callback()
        return super().execute(batch)


class ControlPlane(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        usable_slots=st.integers(16, 96),
        budget=st.integers(1, 64),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        threshold=st.sampled_from([0, 0, 3, 8]),
        chunked=st.sampled_from([True, True, False]),
        reserve=st.booleans(),
    )
    def build(
        self,
        block_size,
        usable_slots,
        budget,
        max_num_seqs,
        policy,
        caching,
        threshold,
        chunked,
        reserve,
    ):
        num_blocks = max(usable_slots // block_size, 1) + 1
        self.runner = InterruptibleRunner(VOCAB_SIZE, num_blocks, block_size, MAX_MODEL_LEN)
        config = EngineConfig(
            block_size=block_size,
            max_num_batched_tokens=budget if chunked else max(budget, MAX_MODEL_LEN),
            max_num_seqs=max_num_seqs,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
            scheduler_reserve_full_isl=reserve,
        )
        self.engine = Engine(config, self.runner, EOS)
        self.engine.observers.append(self.observe)
        self.requests, self.outputs, self.aborted = {}, {}, set()
        self.events = []
        self.idle_steps = 0

    def observe(self, event):
        """Check one step's event on its own."""
        self.events.append(event)
        config = self.engine.config
        scheduled = {seq_id for seq_id, _, _ in event.scheduled}
        assert sum(num for _, _, num in event.scheduled) <= config.max_num_batched_tokens
        assert all(num >= 1 for _, _, num in event.scheduled)
        assert event.scheduled or event.preempted
        assert scheduled.isdisjoint(event.preempted)
        assert len(scheduled) == len(event.scheduled) <= config.max_num_seqs
        assert not (event.preempted and (event.new or event.resumed))
        self.idle_steps = 0 if event.sampled else self.idle_steps + 1
        assert self.idle_steps < PATIENCE

    def collect(self, outputs):
        for output in outputs:
            assert output.request_id not in self.aborted
            self.outputs[output.request_id] = output

    @rule(
        preamble=st.sampled_from(PREAMBLES),
        own=st.lists(st.integers(0, VOCAB_SIZE), max_size=30),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a", "b"]),
        ignore_eos=st.booleans(),
    )
    def add(self, preamble, own, max_tokens, n, priority, salt, ignore_eos):
        request_id = f"r{len(self.requests)}"
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=salt,
            ignore_eos=ignore_eos,
        )
        self.requests[request_id] = Request(request_id, preamble + own, params)
        self.engine.add_request(self.requests[request_id])

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.collect(self.engine.step())
            self.engine.check_invariants()

    def abort_one(self, request_id):
        was_alive = request_id in self.engine._outputs.keys() | self.engine._undelivered.keys()
        output = self.engine.abort(request_id)
        assert (output is not None) == was_alive
        assert self.engine.abort(request_id) is None  # a second abort does nothing
        if was_alive:
            assert output.finished
            assert {c.finish_reason for c in output.outputs} <= {"abort", "stop", "length"}
            self.aborted.add(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.abort_one(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort_while_the_model_runs(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.runner.during_step = lambda: self.abort_one(request_id)
        self.collect(self.engine.step())
        self.runner.during_step = None

    @rule(data=st.data(), abort=st.booleans())
    def interrupt_the_model(self, data, abort):
        """Ctrl-C in the middle of a step, perhaps with an abort just before."""

        def interrupt():
            if abort and self.requests:
                self.abort_one(data.draw(st.sampled_from(sorted(self.requests))))
            raise KeyboardInterrupt

        self.runner.during_step = interrupt
        try:
            self.collect(self.engine.step())
        except KeyboardInterrupt:
            self.idle_steps = 0  # the interrupted work starts over
        self.runner.during_step = None

    @rule()
    def explain(self):
        for request_id in self.engine._outputs:
            assert self.engine.explain(request_id)

    @invariant()
    def rules_hold(self):
        self.engine.check_invariants()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_unfinished_requests():
            self.step(1)
            steps += 1
            assert steps < 5000, "the work does not end"
        assert self.engine.kv.num_free_blocks == self.engine.kv.num_usable_blocks
        for request_id in self.requests.keys() - self.aborted:
            self.check_output(self.outputs[request_id])

    def check_output(self, output):
        """Compare every token with the oracle, which has no cache and no neighbours."""
        request = self.requests[output.request_id]
        params = request.sampling_params
        assert output.finished
        if output.error is not None:
            assert not output.outputs
            return
        assert len(output.outputs) == params.n
        for completion in output.outputs:
            token_ids = list(request.prompt_token_ids)
            for token_id in completion.token_ids:
                assert token_id == self.runner.next_token(token_ids)
                token_ids.append(token_id)
            ended_by_eos = token_ids[-1] == EOS and not params.ignore_eos
            full = len(completion.token_ids) == params.max_tokens
            full = full or len(token_ids) == MAX_MODEL_LEN
            assert completion.finish_reason == ("stop" if ended_by_eos else "length")
            assert ended_by_eos or full


TestControlPlane = ControlPlane.TestCase
TestControlPlane.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
