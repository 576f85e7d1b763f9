"""`AsyncEngine`: many consumers, each with its own outputs, and nothing is left when they go."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from babbler import make_babbler, train_backend

from tinyvllm import LLM, AsyncEngine, EngineDeadError, MockModelRunner, SamplingParams
from tinyvllm.async_llm import Mailbox
from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine
from tinyvllm.gpt2 import ModelLoadError
from tinyvllm.request import GenerationOutput
from tinyvllm.tokenizer import Tokenizer

TOKENIZER = Tokenizer(train_backend())
PROMPTS = ["Once upon a time", "a fox", "สวัสดี", "Once upon a boat"]
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def make_engine(num_blocks=400, **config):
    """An engine on a model that is no network, with 256 places and blocks of 4."""
    runner = MockModelRunner(TOKENIZER.vocab_size, num_blocks, block_size=4, max_model_len=256)
    return AsyncEngine(Engine(EngineConfig(block_size=4, **config), runner), TOKENIZER)


def expected_ids(engine, prompt, max_tokens):
    """What the model says to the prompt, by asking it directly."""
    ids = TOKENIZER.encode(prompt)
    for _ in range(max_tokens):
        ids.append(engine.engine.runner.next_token(ids))
    return ids[len(TOKENIZER.encode(prompt)) :]


def engine_threads():
    return [t for t in threading.enumerate() if t.name.startswith("tinyvllm-engine")]


def check_nothing_is_left(engine):
    """No request, no block, no thread, no mailbox; and the engine's rules hold."""
    assert not engine.engine.has_unfinished_requests()
    assert engine.engine.kv.num_free_blocks == engine.engine.kv.num_usable_blocks
    engine.engine.check_invariants()
    assert not engine.mailboxes and not engine.output_processor.inboxes
    assert not engine.output_processor.texts
    assert not engine_threads()


def run(body, **kwargs):
    """Run `body(engine)` on an event loop, shut down, and look whether anything is left."""

    async def main():
        engine = make_engine(**kwargs)
        async with engine:
            result = await asyncio.wait_for(body(engine), timeout=60)
        assert len(asyncio.all_tasks()) == 1  # this one
        check_nothing_is_left(engine)
        return result

    return asyncio.run(main())


async def last_of(engine, prompt, params=LONG, request_id="one"):
    """Read a request to its end."""
    async for output in engine.generate(prompt, params, request_id):
        last = output
    return last


async def idle(engine):
    """Wait until the engine has nothing to do."""
    while engine._commands or engine.engine.has_unfinished_requests():
        await asyncio.sleep(0.001)


async def busy(engine):
    """Wait until the engine has something to do."""
    while not engine.engine.has_unfinished_requests():
        await asyncio.sleep(0.001)


def hold(engine) -> threading.Event:
    """Let every step of the engine wait until the event is set."""
    going, execute = threading.Event(), engine.engine.runner.execute

    def held(batch):
        going.wait(30)
        return execute(batch)

    engine.engine.runner.execute = held
    return going


class TestOutputs:
    def test_snapshots_grow_to_the_whole(self):
        async def body(engine):
            seen = [output async for output in engine.generate("a fox", LONG, "one")]
            ids = [list(output.outputs[0].token_ids) for output in seen]
            assert ids[-1] == expected_ids(engine, "a fox", 100)
            assert all(ids[-1][: len(some)] == some for some in ids)
            assert sorted(set(map(len, ids))) == list(map(len, ids))  # each has more
            final = seen[-1].outputs[0]
            assert all(final.text.startswith(output.outputs[0].text) for output in seen)
            assert final.text == TOKENIZER.decode(ids[-1])
            assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
            assert (seen[-1].prompt, seen[-1].request_id) == ("a fox", "one")

        run(body)

    def test_everybody_gets_their_own(self):
        async def body(engine):
            readers = [last_of(engine, PROMPTS[i % 4], LONG, f"r{i}") for i in range(20)]
            outputs = await asyncio.gather(*readers)
            for i, output in enumerate(outputs):
                assert output.request_id == f"r{i}"
                assert output.outputs[0].token_ids == expected_ids(engine, PROMPTS[i % 4], 100)

        run(body)

    def test_stop_strings_n_and_logprobs(self):
        async def body(engine):
            whole = TOKENIZER.decode(expected_ids(engine, "a fox", 100))
            stop = whole[60:63]
            params = SamplingParams(n=3, max_tokens=100, ignore_eos=True, stop=stop, logprobs=0)
            async for output in engine.generate("a fox", params, "one"):
                for index, completion in enumerate(output.outputs):
                    assert completion.index == index and stop not in completion.text
                    assert len(completion.logprobs) == len(completion.token_ids)
            for completion in output.outputs:
                assert completion.text == whole[: whole.index(stop)]
                assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)

        run(body)

    def test_snapshots_are_the_consumers(self):
        """What a consumer does to them, or when it looks, changes nothing."""

        async def body(engine):
            params = SamplingParams(max_tokens=50, logprobs=1, prompt_logprobs=1, ignore_eos=True)
            seen = []
            async for output in engine.generate("a fox", params, "one"):
                (completion,) = output.outputs
                seen.append((output, len(completion.token_ids), completion.text))
                completion.logprobs.append("mine")
            for output, count, text in seen:
                assert output.outputs[0].text == text
                assert len(output.outputs[0].token_ids) == count
                assert len(output.outputs[0].logprobs) == count + 1
            assert seen[-1][0].prompt_logprobs[0] is None
            assert len(seen[-1][0].prompt_logprobs) == len(TOKENIZER.encode("a fox"))

        run(body)

    def test_refused_requests_have_an_error(self):
        async def body(engine):
            good = asyncio.create_task(last_of(engine, "a fox", LONG, "good"))
            for bad in ("", [9999], [1] * 256):
                outputs = [output async for output in engine.generate(bad, LONG, "bad")]
                assert len(outputs) == 1 and outputs[0].finished and outputs[0].error
            assert (await good).outputs[0].token_ids == expected_ids(engine, "a fox", 100)

        run(body)

    def test_abort_by_id(self):
        async def body(engine):
            seen = []
            async for output in engine.generate("a fox", LONG, "one"):
                seen.append(output)
                if len(seen) == 3:
                    await engine.abort("one")
                    await engine.abort("nobody")
            final = seen[-1].outputs[0]
            assert seen[-1].finished and final.finish_reason == "abort"
            count = len(final.token_ids)
            assert 3 <= count < 100
            assert final.token_ids == expected_ids(engine, "a fox", count)
            assert final.text == TOKENIZER.decode(final.token_ids)

        run(body)


class TestBadCalls:
    """What is wrong with one call is that caller's error, and nobody else notices."""

    @pytest.mark.parametrize(
        "prompt, params, error, words",
        [
            (None, LONG, TypeError, "prompt must be a string"),
            ("\ud800", LONG, ValueError, "prompt: text is not valid Unicode"),
            ("a", SamplingParams(bad_words=[" "]), ValueError, "at least one token, got ' '"),
            ("a", {"n": 1}, ValueError, "must be a SamplingParams"),
        ],
    )
    def test_raises_there(self, prompt, params, error, words):
        async def body(engine):
            good = asyncio.create_task(last_of(engine, "a fox", LONG, "good"))
            await asyncio.sleep(0)
            with pytest.raises(error, match=words):
                await last_of(engine, prompt, params, "bad")
            assert len((await good).outputs[0].token_ids) == 100

        run(body)

    def test_id_in_use(self):
        async def body(engine):
            good = asyncio.create_task(last_of(engine, "a fox"))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="request_id 'one' is in use"):
                await last_of(engine, "other")
            assert (await good).outputs[0].token_ids == expected_ids(engine, "a fox", 100)
            assert len((await last_of(engine, "other")).outputs[0].token_ids) == 100

        run(body)

    def test_id_that_the_engine_refuses(self):
        """`n` continuations of "x" are the sequences "0_x" and so on."""

        async def body(engine):
            going = hold(engine)
            many = SamplingParams(n=2, max_tokens=50, ignore_eos=True)
            good = asyncio.create_task(last_of(engine, "a fox", many, "x"))
            await busy(engine)
            bad = asyncio.create_task(last_of(engine, "other", LONG, "0_x"))
            await asyncio.sleep(0)
            going.set()
            with pytest.raises(ValueError, match="request_id '0_x' is in use"):
                await bad
            assert [len(c.token_ids) for c in (await good).outputs] == [50, 50]

        run(body)


class TestLeaving:
    @pytest.mark.parametrize("how", ["break", "aclose", "cancel", "error", "never started"])
    def test_gives_everything_back(self, how):
        async def leave(engine):
            async for output in engine.generate("a fox", LONG, "leaving"):
                if how == "error":
                    raise ZeroDivisionError
                if how == "cancel" and len(output.outputs[0].token_ids) > 3:
                    asyncio.current_task().cancel()
                if how == "break":
                    break

        async def body(engine):
            stays = asyncio.create_task(last_of(engine, "Once upon", LONG, "stays"))
            if how == "never started":
                engine.generate("a fox", LONG, "leaving")
            elif how == "aclose":
                async with aclosing(engine.generate("a fox", LONG, "leaving")) as outputs:
                    await anext(outputs)
            else:
                await asyncio.gather(leave(engine), return_exceptions=True)
            assert len((await stays).outputs[0].token_ids) == 100
            await idle(engine)
            assert list(engine.mailboxes) == []
            assert engine.engine.kv.num_free_blocks == engine.engine.kv.num_usable_blocks

        run(body)

    def test_cancelled_before_it_is_added(self):
        async def body(engine):
            task = asyncio.create_task(last_of(engine, "a fox"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await idle(engine)
            assert engine.engine.num_steps <= 2

        run(body)

    def test_id_can_be_used_again_at_once(self):
        """Nothing of the request that was left reaches the one that has its name now."""

        async def body(engine):
            for prompt in PROMPTS * 5:
                outputs = engine.generate(prompt, LONG, "one")
                first = await anext(outputs)
                count = len(first.outputs[0].token_ids)
                assert first.outputs[0].token_ids == expected_ids(engine, prompt, count)
                await outputs.aclose()
            output = await last_of(engine, "a fox", LONG, "one")
            assert output.outputs[0].token_ids == expected_ids(engine, "a fox", 100)

        run(body)


class TestSlowConsumers:
    def test_skip_what_they_missed_and_hold_nobody_up(self):
        async def body(engine):
            slow = engine.generate("Once upon", LONG, "slow")
            first = await anext(slow)
            fast = await last_of(engine, "a fox", LONG, "fast")  # 100 steps go by
            assert len(fast.outputs[0].token_ids) == 100
            await idle(engine)
            rest = [output async for output in slow]
            assert len(rest) == 1 and rest[0].finished  # one place, one output
            assert rest[0].outputs[0].token_ids == expected_ids(engine, "Once upon", 100)
            assert len(first.outputs[0].token_ids) < 100

        run(body)

    def test_mailbox_keeps_the_last(self):
        async def main():
            mailbox = Mailbox("one")
            outputs = [GenerationOutput("one", None, [1]) for _ in range(3)]
            mailbox.put(outputs[0])
            mailbox.put(outputs[1])
            assert await mailbox.get() is outputs[1]
            outputs[2].finished = True
            mailbox.put(outputs[2])
            mailbox.put(RuntimeError("too late"))
            assert await mailbox.get() is outputs[2]

        asyncio.run(main())


class TestDeath:
    def test_error_in_a_step_reaches_everybody(self):
        async def body(engine):
            execute = engine.engine.runner.execute

            def breaks_when_all_are_there(batch):
                if len(batch.seq_lens) < 5:
                    return execute(batch)
                raise MemoryError("the device is full")

            engine.engine.runner.execute = breaks_when_all_are_there
            readers = [asyncio.create_task(last_of(engine, "a", LONG, f"r{i}")) for i in range(5)]
            for error in await asyncio.gather(*readers, return_exceptions=True):
                assert type(error) is EngineDeadError
                assert str(error) == "the engine died: MemoryError: the device is full"
                assert type(error.__cause__) is MemoryError
            assert not engine_threads()
            for _ in range(2):
                with pytest.raises(EngineDeadError) as caught:
                    await last_of(engine, "a fox")
                assert type(caught.value.__cause__) is MemoryError
            assert engine.engine.kv.num_free_blocks == engine.engine.kv.num_usable_blocks

        run(body)

    def test_shutdown_wakes_whoever_waits(self):
        async def body(engine):
            readers = [asyncio.create_task(last_of(engine, "a", LONG, f"r{i}")) for i in range(5)]
            await asyncio.sleep(0)
            await engine.shutdown()
            for error in await asyncio.gather(*readers, return_exceptions=True):
                assert type(error) is EngineDeadError and error.__cause__ is None
                assert str(error) == "the engine was shut down"
            with pytest.raises(EngineDeadError, match="was shut down"):
                await last_of(engine, "a fox")
            await engine.shutdown()  # a second time does nothing

        run(body)

    def test_what_was_finished_is_still_delivered(self):
        async def body(engine):
            outputs = engine.generate("a fox", LONG, "one")
            await anext(outputs)
            await idle(engine)
            await engine.shutdown()
            (last,) = [output async for output in outputs]
            assert last.finished and len(last.outputs[0].token_ids) == 100

        run(body)

    def test_shutdown_of_an_engine_that_never_ran(self):
        async def body(engine):
            assert not engine_threads()
            await engine.shutdown()
            with pytest.raises(EngineDeadError):
                await last_of(engine, "a fox")

        run(body)

    def test_event_loop_that_ends_without_shutdown(self):
        async def main():
            engine = make_engine()
            await anext(engine.generate("a fox", LONG, "one"))
            return engine

        engine = asyncio.run(main())
        assert engine.dead == "died: asyncio.exceptions.CancelledError"
        check_nothing_is_left(engine)


class TestLoop:
    def test_idle_engine_sleeps(self):
        async def body(engine):
            await last_of(engine, "a fox")
            await idle(engine)
            await asyncio.sleep(0.01)
            steps, cpu = engine.engine.num_steps, time.process_time()
            await asyncio.sleep(0.3)
            assert engine.engine.num_steps == steps
            assert time.process_time() - cpu < 0.1
            assert len((await last_of(engine, "a fox")).outputs[0].token_ids) == 100

        run(body)

    def test_event_loop_stays_responsive_in_a_long_step(self):
        async def body(engine):
            execute = engine.engine.runner.execute

            def slow(batch):
                time.sleep(0.2)
                return execute(batch)

            engine.engine.runner.execute = slow
            reader = asyncio.create_task(
                last_of(engine, "a fox", SamplingParams(max_tokens=3, ignore_eos=True))
            )
            ticks = 0
            while not reader.done():
                await asyncio.sleep(0.005)
                ticks += 1
            assert ticks > 20  # three steps of 0.2 s, and the loop was never away

        run(body)

    def test_engine_is_only_touched_by_its_thread(self):
        async def body(engine):
            names = set()
            engine.engine.observers.append(lambda event: names.add(threading.current_thread().name))
            await asyncio.gather(*[last_of(engine, "a", LONG, f"r{i}") for i in range(5)])
            assert names == {"tinyvllm-engine_0"}

        run(body)


async def stress(engine, prompts, params, count, seed, check):
    """`count` consumers; some read to the end, some slowly, some leave, in one way or another."""
    rng = random.Random(seed)

    async def reader(i, how, patience):
        prompt, outputs = prompts[i % len(prompts)], None
        await asyncio.sleep(rng.random() * 0.05)
        async for outputs in engine.generate(prompt, params(i), f"r{i}"):
            if how == "slow":
                await asyncio.sleep(rng.random() * 0.01)
            if how == "break" and len(outputs.outputs[0].token_ids) >= patience:
                return None
        check(i, prompt, outputs)
        return outputs

    tasks, cancelled = [], 0
    for i in range(count):
        how = rng.choice(["read", "slow", "break", "cancel"])
        tasks.append(asyncio.create_task(reader(i, how, rng.randrange(20))))
        if how == "cancel":
            asyncio.get_running_loop().call_later(rng.random() * 0.3, tasks[-1].cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = sum(isinstance(result, asyncio.CancelledError) for result in results)
    served = sum(isinstance(result, GenerationOutput) for result in results)
    errors = [r for r in results if isinstance(r, Exception)]
    assert errors == [] and cancelled and served
    await idle(engine)
    assert not engine.mailboxes and not engine.output_processor.inboxes
    assert engine.engine.kv.num_free_blocks == engine.engine.kv.num_usable_blocks
    engine.engine.check_invariants()


def test_500_consumers_and_random_leavers():
    async def body(engine):
        preempted = []
        engine.engine.observers.append(lambda event: preempted.extend(event.preempted))
        expected = {prompt: expected_ids(engine, prompt, 30) for prompt in PROMPTS}

        def params(i):
            return SamplingParams(max_tokens=30, ignore_eos=True, n=1 + i % 2)

        def check(i, prompt, output):
            for completion in output.outputs:
                assert completion.token_ids == expected[prompt]
                assert completion.text == TOKENIZER.decode(expected[prompt])

        await stress(engine, PROMPTS, params, 500, 15, check)
        assert preempted

    run(body, num_blocks=120)  # so little memory that some are preempted


def test_real_model(tmp_path):
    """The answers of `LLM`, whoever else comes and goes."""
    folder = make_babbler(tmp_path)
    llm = LLM(folder, device="cpu", num_gpu_blocks_override=60, block_size=4)
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=12, stop=["a", "ก"])
    expected = {o.prompt: o.outputs for o in llm.generate(PROMPTS, drawn, use_tqdm=False)}

    async def main():
        engine = AsyncEngine.from_engine_args(
            folder, device="cpu", num_gpu_blocks_override=60, block_size=4
        )
        async with engine:

            def check(i, prompt, output):
                assert output.outputs == expected[prompt]

            await stress(engine, PROMPTS, lambda i: drawn, 40, 3, check)
        check_nothing_is_left(engine)

    asyncio.run(main())


def test_construction_errors_are_those_of_llm():
    with pytest.raises(TypeError, match="max_seqs"):
        AsyncEngine.from_engine_args(max_seqs=3)
    with pytest.raises(ModelLoadError, match=r"\./nowhere: no such folder"):
        AsyncEngine.from_engine_args("./nowhere")


def test_a_request_that_an_observer_aborts_ends_for_its_consumer():
    async def main():
        engine = AsyncEngine(Engine(EngineConfig(max_num_seqs=1), MockModelRunner()), TOKENIZER)
        observers = engine.engine.observers
        observers.append(lambda event: event.step == 2 and engine.engine.abort("b"))

        async def consume(name):
            stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=10), name)
            return [output.outputs[0].finish_reason async for output in stream][-1]

        async with engine, asyncio.timeout(30):
            assert await asyncio.gather(consume("a"), consume("b")) == ["length", "abort"]
        assert not engine.mailboxes and not engine.output_processor.inboxes

    asyncio.run(main())


def test_a_step_loop_that_is_cancelled_before_it_begins_is_dead():
    async def main():
        engine = AsyncEngine(Engine(EngineConfig(), MockModelRunner()), TOKENIZER)
        stream = engine.generate([1, 2], SamplingParams(), "x")
        consumer = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        with pytest.raises(EngineDeadError):
            async with asyncio.timeout(30):
                await anext(engine.generate([1, 2], SamplingParams(), "y"))

    asyncio.run(main())


def on_another_loop(coroutine):
    """What the coroutine raises on an event loop of its own, in a thread of its own."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, coroutine).exception(timeout=30)


def test_a_second_event_loop_is_told_so():
    async def first(engine, stream):
        return await anext(stream)

    async def main():
        async with make_engine() as engine:
            stream = engine.generate("a fox", LONG, "mine")
            await anext(stream)
            # An event loop that waits for this one would wait for ever: it runs on the side.
            for call in (
                lambda: first(engine, engine.generate("a fox", LONG, "theirs")),
                lambda: engine.abort("mine"),
                lambda: engine.shutdown(),
            ):
                error = await asyncio.to_thread(on_another_loop, call())
                assert type(error) is RuntimeError and "another event loop" in str(error), error
            assert list(engine.mailboxes) == ["mine"]
            last = [output async for output in stream][-1]
            assert last.finished and len(last.outputs[0].token_ids) == 100
        await engine.shutdown()  # a second time
        check_nothing_is_left(engine)

    asyncio.run(main())


@pytest.mark.parametrize("used", [False, True])
def test_the_engine_of_a_loop_that_ended_can_be_shut_down(used):
    engine = make_engine()

    async def leave():
        await anext(engine.generate("a fox", LONG, "r"))

    if used:
        asyncio.run(leave())
        with pytest.raises(EngineDeadError):
            asyncio.run(leave())
    asyncio.run(engine.shutdown())
    check_nothing_is_left(engine)


def test_the_engine_of_a_loop_that_was_closed_in_the_middle_can_be_shut_down():
    engine, loop = make_engine(), asyncio.new_event_loop()
    stream = engine.generate("a fox", LONG, "r")
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(engine.shutdown())
    assert not engine_threads() and not engine.engine.has_unfinished_requests()


@pytest.mark.parametrize("name", ["", None, 7, ["r"], {}])
def test_what_is_no_id_is_named(name):
    async def body(engine):
        with pytest.raises(ValueError, match="request_id must be a non-empty string"):
            await anext(engine.generate("a fox", LONG, name))
        with pytest.raises(ValueError, match="request_id must be a non-empty string"):
            await engine.abort(name)

    run(body)


class UnspeakableError(Exception):
    def __repr__(self):
        raise ValueError("no words")

    __str__ = __repr__


@pytest.mark.parametrize("error", [StopIteration(), StopIteration("value"), UnspeakableError()])
def test_no_exception_of_a_step_keeps_anybody_waiting(error):
    """Not even one that a future cannot hold, or one that cannot be shown."""

    async def main():
        engine = make_engine()

        def fail(event):
            raise error

        async with asyncio.timeout(30):
            stream = engine.generate("a fox", LONG, "r")
            await anext(stream)
            engine.engine.observers.append(fail)
            with pytest.raises(EngineDeadError, match="the engine died") as caught:
                async for _ in stream:
                    pass
            cause = caught.value.__cause__
            assert error in (cause, cause.__cause__)
            await engine.shutdown()
        assert not engine_threads() and not engine.engine.has_unfinished_requests()

    asyncio.run(main())


def test_a_loop_that_is_closed_while_a_consumer_waits_leaves_an_engine_that_can_be_shut_down():
    engine, loop = make_engine(), asyncio.new_event_loop()
    going = hold(engine)

    async def start():
        consumer = asyncio.create_task(anext(engine.generate("a fox", LONG, "r")))
        await busy(engine)
        return consumer

    consumer = loop.run_until_complete(start())
    loop.close()
    going.set()
    asyncio.run(engine.shutdown())
    assert not engine_threads() and not engine.engine.has_unfinished_requests()
    assert engine.engine.kv.num_free_blocks == engine.engine.kv.num_usable_blocks
    consumer._log_destroy_pending = False  # it will never end
