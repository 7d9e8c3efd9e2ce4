"""When a request that found the queue full should come again."""

import json

import grpc
import pytest
from grpc_harness import request

from serve.grpc.pace import Pace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_mean_time_between_ends_times_the_queue(clock):
    pace = Pace(clock)
    first, second = pace.running(1), pace.running(1)
    first.__enter__()
    clock.now += 1
    second.__enter__()
    clock.now += 1
    first.__exit__(None, None, None)  # 2 s after the server began to have something to do
    clock.now += 1
    second.__exit__(None, None, None)
    clock.now += 1000  # nothing to do
    with pace.running(1):
        assert pace.retry_after_s(4) == pytest.approx(4 * 1.5)
        assert pace.retry_after_s(0) == pytest.approx(1.5)
        clock.now += 6
        assert pace.retry_after_s(4) == pytest.approx(4 * 6)  # slower than before


def test_a_request_of_several_sequences_frees_as_many_places(clock):
    pace = Pace(clock)
    with pace.running(4):
        clock.now += 8
    assert pace.retry_after_s(1) == pytest.approx(2)


def test_only_the_last_ones_count_and_failed_ones_too(clock):
    pace = Pace(clock)
    for seconds in [20.0] * 10 + [0.5] * 32:
        with pytest.raises(RuntimeError), pace.running(1):
            clock.now += seconds
            raise RuntimeError("cancelled")
    assert pace.retry_after_s(3) == pytest.approx(1.5)


def test_the_hint_has_bounds(clock):
    pace = Pace(clock)
    assert pace.retry_after_s(1000) == 0.1  # nothing is known yet
    with pace.running(1):
        clock.now += 5
        assert pace.retry_after_s(1000) == 30.0


def fill(harness, max_tokens: int) -> list:
    """Takes the one slot and the one place in the queue."""
    calls = []
    for wanted in ((1, 0), (1, 1)):
        calls.append(harness.stub.Generate(request([5], stream=True, max_tokens=max_tokens)))
        harness.wait_for(lambda stats, wanted=wanted: (stats.num_running, stats.num_waiting) == wanted)
    return calls


def test_the_hint_follows_the_time_that_requests_take(serving):
    harness = serving(num_slots=1, max_queue=1, step_seconds=0.01)
    for _ in range(3):
        harness.complete([5], max_tokens=50)
    calls = fill(harness, 2000)
    with pytest.raises(grpc.RpcError) as error:
        harness.generate([5])
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 400 < int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) < 3000  # 50 steps of 10 ms
    for call in calls:
        call.cancel()


def test_a_message_that_is_too_large_has_no_hint(serving):
    harness = serving(max_message_mb=1)
    message = request([5])
    message.tokenized.original_text = "x" * 1_100_000
    with pytest.raises(grpc.RpcError) as error:
        list(harness.stub.Generate(message, timeout=5))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "grpc-retry-pushback-ms" not in dict(error.value.trailing_metadata() or ())


def test_a_client_with_a_retry_policy_comes_again_by_itself(serving):
    harness = serving(num_slots=1, max_queue=1, step_seconds=0.01)
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "60s",  # the test would run out of time if the server's hint did not count
        "maxBackoff": "60s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    stub = type(harness.stub)(harness.connect(("grpc.service_config", config)))
    for _ in range(3):
        harness.complete([5], max_tokens=30)
    calls = fill(harness, 30)
    (answer,) = stub.Generate(request([5, 0]), timeout=10)
    assert list(answer.complete.output_ids) == [5, 0]
    assert all(list(call)[-1].complete.finish_reason == "length" for call in calls)
