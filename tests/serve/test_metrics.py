"""What Prometheus reads equals what was asked of the engine, and reading it disturbs nobody."""

from __future__ import annotations

import queue
import socket
import threading
import urllib.request
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tiny import tiny_flint
from tiny_inkling import tiny_inkling

from serve.engine import Engine, EngineConfig
from serve.metrics import BUCKETS, Metrics, serve_metrics
from serve.request import Output, Request, SamplingParams

CONFIG = EngineConfig(num_slots=2, prefill_chunks=(16,), max_model_len=512, decode_steps=4, progress=False)
ENDLESS = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return tiny_flint(max_position_embeddings=512)


def started(model, name="tiny", config=CONFIG) -> tuple[Engine, Metrics]:
    engine = Engine(model, config)
    metrics = Metrics(name, engine)
    engine.start()
    return engine, metrics


@pytest.fixture
def served(model):
    engine, metrics = started(model)
    with closing(engine):
        yield engine, metrics


def prompt(length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(length).integers(0, 128, length))


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def submit(engine, name: str, length: int, sampling: SamplingParams) -> queue.SimpleQueue[Output]:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(Request(name, prompt(length), sampling), outputs.put)
    return outputs


def until_finished(outputs) -> Output:
    while not (output := outputs.get(timeout=60)).finish_reason:
        pass
    return output


class Read:
    """A scrape's text, parsed: `read("name")` is a sample's value, of the only series or the one with the labels."""

    def __init__(self, text: str):
        self.samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        self.names = {s.name for s in self.samples}

    def __call__(self, name: str, **labels: str) -> float:
        [sample] = [s for s in self.samples if s.name == f"vllm:{name}" and labels.items() <= s.labels.items()]
        return sample.value


def read(metrics: Metrics) -> Read:
    return Read(generate_latest(metrics.registry).decode())


def test_counts_are_what_was_asked_for(served):
    engine, metrics = served
    stop = next(iter(engine.generate([Request("first", prompt(30), greedy(7))]))).token_ids[3]
    waiting = [
        submit(engine, "length", 20, greedy(9)),
        submit(engine, "stop", 30, greedy(40, stop_token_ids=(stop,))),
        submit(engine, "one", 5, greedy(1)),
        submit(engine, "stop string", 8, ENDLESS),
    ]
    waiting[-1].get(timeout=60)
    engine.abort("stop string", "stop")
    ended = [until_finished(outputs) for outputs in waiting]
    assert [output.finish_reason for output in ended] == ["length", "stop", "length", "stop"]
    victim = submit(engine, "victim", 17, ENDLESS)
    victim.get(timeout=60)
    engine.abort("victim")
    ended.append(until_finished(victim))

    found = read(metrics)
    assert found("prompt_tokens_total", model_name="tiny", engine="0") == 30 + 20 + 30 + 5 + 8 + 17
    generated = 7 + sum(output.num_output_tokens for output in ended)
    assert found("generation_tokens_total") == generated
    reasons = {r: found("request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 2, "length": 3, "abort": 1, "error": 0}
    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    ):
        assert found(f"{name}_count") == found(f"{name}_bucket", le="+Inf") == 6, name
    assert found("request_time_per_output_token_seconds_count") == 5  # "one" has no time between tokens
    assert found("request_prompt_tokens_sum") == found("prompt_tokens_total")
    assert found("request_generation_tokens_sum") == generated
    assert found("request_prompt_tokens_bucket", le="20.0") == 4  # 5, 8, 17 and 20 itself
    # Every token but a request's first came after another one, and decoding is the time between tokens.
    assert found("inter_token_latency_seconds_count") == generated - 6
    assert found("inter_token_latency_seconds_sum") == pytest.approx(found("request_decode_time_seconds_sum"))
    phases = sum(found(f"request_{phase}_time_seconds_sum") for phase in ("queue", "prefill", "decode"))
    assert 0 < phases <= found("e2e_request_latency_seconds_sum")
    assert not any("spec_decode" in name for name in found.names)  # this model drafts nothing


def test_gauges_show_what_runs_and_go_back_to_zero(served):
    engine, metrics = served
    outputs = [submit(engine, f"r{i}", 20, ENDLESS) for i in range(5)]
    outputs[1].get(timeout=60)
    found = read(metrics)
    assert (found("num_requests_running"), found("num_requests_waiting")) == (2, 3)
    assert 0 < found("kv_cache_usage_perc") <= 1
    for i in reversed(range(5)):  # those that wait first: no slot becomes free for them
        engine.abort(f"r{i}")
    for out in outputs:
        until_finished(out)
    found = read(metrics)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found(name) == 0
    # Three never had a slot: they have an end, and no phases.
    assert found("request_success_total", finished_reason="abort") == found("e2e_request_latency_seconds_count") == 5
    assert found("request_queue_time_seconds_count") == 2


def test_drafts_are_counted_where_the_model_drafts():
    config = EngineConfig(num_slots=2, prefill_chunks=(16,), max_model_len=192, num_draft_tokens=2, progress=False)
    engine, metrics = started(tiny_inkling(), config=config)
    with closing(engine):
        done = list(engine.generate([Request(f"r{n}", prompt(n), greedy(20, ignore_eos=True)) for n in (5, 9)]))
        found, told = read(metrics), [one.speculation for one in done]
    assert found("spec_decode_num_draft_tokens_total") == sum(s.num_draft_tokens for s in told) > 0
    assert found("spec_decode_num_accepted_tokens_total") == sum(s.num_accepted_tokens for s in told)
    steps = sum(s.num_steps for s in told)
    assert steps - 2 <= found("spec_decode_num_drafts_total") <= steps  # a last token alone is not drafted for


def test_scrapes_while_requests_run(served):
    """Over HTTP, from several threads: totals never fall, buckets never disagree, and no answer changes."""
    engine, metrics = served
    work = [Request(f"r{i}", prompt(10 + i), greedy(60)) for i in range(8)]
    quiet = {done.request_id: done.token_ids for done in engine.generate(work)}
    server = serve_metrics(metrics, "127.0.0.1", 0)
    over, faults, scrapes = threading.Event(), [], []

    def scrape():
        last = 0.0
        try:
            while not over.is_set():
                with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
                    found = Read(reply.read().decode())
                total = found("generation_tokens_total")
                assert total >= last
                for name in ("inter_token_latency_seconds", "e2e_request_latency_seconds"):
                    buckets = [s.value for s in found.samples if s.name == f"vllm:{name}_bucket"]
                    assert buckets == sorted(buckets)
                    assert buckets[-1] == found(f"{name}_count")
                last = total
                scrapes.append(total)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    busy = {done.request_id: done.token_ids for done in engine.generate(work)}
    over.set()
    for thread in threads:
        thread.join()
    server.close()
    server.close()
    assert not faults
    assert len(set(scrapes)) > 1
    assert busy == quiet
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5)


def test_a_scrape_waits_for_no_lock_of_the_engine(served):
    engine, metrics = served
    with engine._lock:
        assert read(metrics)("num_requests_running") == 0


def test_two_engines_of_a_process_stay_apart(model):
    (one, of_one), (two, of_two) = started(model, "one"), started(model, "two")
    with closing(one), closing(two):
        list(one.generate([Request("a", prompt(9), greedy(5))]))
        list(two.generate([Request("b", prompt(4), greedy(3)), Request("c", prompt(4), greedy(3))]))
        assert read(of_one)("generation_tokens_total", model_name="one") == 5
        assert read(of_two)("generation_tokens_total", model_name="two") == 6
        assert read(of_two)("e2e_request_latency_seconds_count") == 2
    with pytest.raises(ValueError, match="observer already"):
        Metrics("again", one)


def test_metrics_that_raise_harm_no_request(model, caplog):
    engine = Engine(model, CONFIG)

    def broken(sequence, output):
        raise SystemExit("counting is hard")

    engine.observer = broken
    with engine:
        [done] = engine.generate([Request("a", prompt(9), greedy(12))])
        assert (len(done.token_ids), done.finish_reason) == (12, "length")
        assert engine.stats().kv_pages_used == 0
    assert "observer raised" in caplog.text


def test_the_last_output_finds_its_request_counted(served):
    """A client that has its answer and looks at once sees itself."""
    engine, metrics = served
    counts: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()

    def on_output(output):
        if output.finish_reason:
            found = read(metrics)
            counts.put((found("request_success_total", finished_reason="length"), found("num_requests_running")))

    engine.submit(Request("a", prompt(9), greedy(3)), on_output)
    assert counts.get(timeout=60) == (1, 0)


def test_lost_requests_are_errors(served, monkeypatch):
    engine, metrics = served
    with monkeypatch.context() as patch:
        patch.setattr(engine._programs, "prefill", lambda *_: (_ for _ in ()).throw(RuntimeError("no luck")))
        assert until_finished(submit(engine, "doomed", 9, greedy(3))).finish_reason == "error"
    found = read(metrics)
    assert found("request_success_total", finished_reason="error") == 1
    assert found("time_to_first_token_seconds_count") == found("request_prefill_time_seconds_count") == 0


def test_a_port_in_use_is_a_clear_error(served):
    _, metrics = served
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"Cannot serve metrics on 127.0.0.1:{port}: .*in use.*Choose another"):
            serve_metrics(metrics, "127.0.0.1", port)
    with pytest.raises(OSError, match=r"Cannot serve metrics on 127\.0\.0\.1:70000"):
        serve_metrics(metrics, "127.0.0.1", 70000)
    with pytest.raises(OSError, match="Cannot serve metrics on no such host:0"):
        serve_metrics(metrics, "no such host", 0)


def test_one_metric_can_be_asked_for(served):
    _, metrics = served
    server = serve_metrics(metrics, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}/metrics?name[]=vllm:num_requests_running"
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert Read(reply.read().decode()).names == {"vllm:num_requests_running"}
    server.close()


@pytest.mark.parametrize("bounds", BUCKETS.values(), ids=BUCKETS)
def test_bounds_ascend(bounds):
    assert list(bounds) == sorted(set(bounds))


def test_every_metric_is_documented(served):
    _, metrics = served
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}`" in page, name
