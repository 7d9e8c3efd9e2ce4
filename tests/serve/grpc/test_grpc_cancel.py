"""However a call ends, its request leaves the engine: GR-01, GR-02, GR-04, GR-12, GR-14."""

import asyncio
import subprocess
import sys
import time

import grpc
import pytest
from grpc_harness import chunks, completes, request
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serve.grpc.mailbox import Mailbox
from serve.request import Output, TokenLogprob


def long(**settings) -> pb.GenerateRequest:
    return request([5, 6, 7], stream=True, max_tokens=4000, **settings)


def abort(harness, *ids: str) -> None:
    harness.stub.Abort(pb.AbortRequest(request_ids=ids), timeout=5)


def test_gr01_two_hundred_streams_cancelled_after_their_first_message(serving):
    harness = serving(num_slots=200, max_queue=1, step_seconds=0.02)
    calls = [harness.stub.Generate(long()) for _ in range(200)]
    for call in calls:
        next(call)
    assert harness.engine.stats().num_running == 200  # so the request that follows needs a slot of theirs
    for call in calls:
        call.cancel()
    started = time.monotonic()
    assert harness.complete([5], max_tokens=1).finish_reason == "length"
    assert time.monotonic() - started < 1
    harness.wait_idle()


CLIENT = """
import sys
import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb, vllm_engine_pb2_grpc as pb_grpc
stub = pb_grpc.VllmEngineStub(grpc.insecure_channel(sys.argv[1]))
params = pb.SamplingParams(max_tokens=4000)
request = pb.GenerateRequest(request_id="killed", text="hello", sampling_params=params, stream=True)
for chunk in stub.Generate(request):
    print("streaming", flush=True)
"""


def test_gr02_killed_client_frees_its_slot_within_a_second(serving):
    harness = serving(step_seconds=0.005)
    command = [sys.executable, "-c", CLIENT, harness.server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "streaming\n"
        assert harness.engine.stats().num_running == 1
        client.kill()
        harness.wait_idle(1.0)


@pytest.mark.parametrize("how", ["abort", "cancel"])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
def test_gr04_cancelled_at_any_stage(serving, stage, how):
    prefill = 60 if stage == "prefill" else 0
    harness = serving(num_slots=2, step_seconds=0.003, prefill_seconds=prefill)
    others = []
    if stage != "prefill":
        others.append(harness.stub.Generate(request([8, 9], stream=True, max_tokens=150)))
        next(others[0])
    if stage == "queued":
        others.append(harness.stub.Generate(request([8, 9], stream=True, max_tokens=150)))
        next(others[1])
    call = harness.stub.Generate(long(request_id="victim"))
    expected = {"queued": (2, 1), "prefill": (1, 0), "decode": (2, 0)}[stage]
    harness.wait_for(lambda stats: (stats.num_running, stats.num_waiting) == expected)
    if stage == "decode":
        next(call)
    if how == "cancel":
        call.cancel()
    else:
        abort(harness, "victim")
        assert completes(list(call))[0].finish_reason == "abort"
    harness.wait_for(lambda stats: stats.num_running + stats.num_waiting <= len(others), 1.0)
    for other in others:
        assert list(other)[-1].complete.completion_tokens == 150
    harness.wait_idle()


def test_gr04_abort_after_the_end_twice_and_of_unknown_ids(serving):
    harness = serving(step_seconds=0.003)
    other = harness.stub.Generate(request([8, 9], stream=True, max_tokens=100))
    next(other)
    list(harness.stub.Generate(request([5], request_id="done", max_tokens=1)))
    abort(harness, "done")
    call = harness.stub.Generate(long(request_id="victim"))
    next(call)
    abort(harness, "victim", "never-seen")
    abort(harness, "victim")
    assert completes(list(call))[0].finish_reason == "abort"
    assert list(other)[-1].complete.completion_tokens == 100
    harness.wait_idle()


def test_gr04_abort_ends_every_output_of_n(serving):
    harness = serving(step_seconds=0.003)
    call = harness.stub.Generate(long(request_id="victim", n=3))
    next(call)
    abort(harness, "victim")
    assert sorted((c.index, c.finish_reason) for c in completes(list(call))) == [(i, "abort") for i in range(3)]
    harness.wait_idle()


def test_gr04_cancel_of_n_frees_every_slot(serving):
    harness = serving(num_slots=2, step_seconds=0.003)
    call = harness.stub.Generate(long(n=4))
    next(call)
    call.cancel()
    harness.wait_idle()


@pytest.mark.parametrize("queued", [False, True])
def test_gr14_deadline_ends_the_request(serving, queued):
    harness = serving(num_slots=1, step_seconds=0.005)
    if queued:
        other = harness.stub.Generate(long())
        next(other)
    with pytest.raises(grpc.RpcError) as error:
        list(harness.stub.Generate(request([3], stream=True, max_tokens=4000), timeout=0.3))
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    harness.wait_for(lambda stats: (stats.num_running, stats.num_waiting) == (int(queued), 0), 1.0)
    if queued:
        other.cancel()
    harness.wait_idle()


def test_gr12_slow_readers_are_bounded_and_slow_nobody(serving):
    harness = serving(num_slots=8, max_model_len=30_000, max_queue=8)

    def seconds_of_a_quick_one() -> float:
        started = time.monotonic()
        assert harness.complete([5], max_tokens=200).completion_tokens == 200
        return time.monotonic() - started

    # Each call has its own connection with a small window, as a client on a slow line has.
    window = ("grpc.http2.lookahead_bytes", 1024)
    slow = []
    for _ in range(6):
        stub = type(harness.stub)(harness.connect(window, ("grpc.http2.bdp_probe", 0)))
        slow.append(stub.Generate(request([5, 6, 7], stream=True, max_tokens=20_000), timeout=30))
    for call in slow:
        next(call)
    assert seconds_of_a_quick_one() < 2
    harness.wait_for(lambda stats: stats.num_running == 0, 20)  # the engine waited for no reader
    for call in slow:
        messages = list(call)
        streamed = [token for chunk in chunks(messages) for token in chunk.token_ids]
        assert len(streamed) >= 19_000 and streamed == list(messages[-1].complete.output_ids)[-len(streamed) :]
        assert len(messages) < 10_000  # what the reader was late for came merged
    harness.wait_idle()


def test_gr12_mailbox_holds_one_piece_of_news_a_sequence():
    entry = TokenLogprob(7, -1.0)

    async def scenario():
        mailbox = Mailbox()
        mailbox.put(0, Output("r", (0,), prompt_logprobs=(None, entry)))
        for i in range(1, 50_000):
            mailbox.put(i % 2, Output("r", (i,), logprobs=(entry,), num_output_tokens=i))
        mailbox.put(0, Output("r", (), finish_reason="length"))
        news = await mailbox.get()
        assert [index for index, _ in news] == [0, 1]
        assert news[0][1].token_ids == tuple(range(0, 50_000, 2)) and news[0][1].finish_reason == "length"
        assert news[0][1].prompt_logprobs == (None, entry) and news[0][1].logprobs == (entry,) * 24_999
        mailbox.put(1, Output("r", (1,)))  # and it can be used again
        assert [(i, o.token_ids) for i, o in await mailbox.get()] == [(1, (1,))]

    asyncio.run(scenario())
