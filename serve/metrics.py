"""Prometheus metrics of one engine under vLLM's names, so that dashboards made for vLLM work. docs/metrics.md has all.

The engine's thread only adds to plain numbers, and a scrape only reads them: neither ever waits for the other. Labels
are the model's name, vLLM's engine number and the reason a request ended; nothing that grows with traffic.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from serve.engine import Engine
    from serve.request import Output
    from serve.scheduler import Sequence

# Upper bounds of the buckets in seconds; vLLM's.
BUCKETS = {
    "first token": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "token": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    "request": (
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
        *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
    ),
}
# By what `Metrics` calls it: its name, what it is, and which bounds it has.
_HISTOGRAMS = {
    "first_token": ("time_to_first_token_seconds", "From a request's arrival to its first token.", "first token"),
    "inter_token": ("inter_token_latency_seconds", "Between two tokens of a request.", "token"),
    "time_per_token": ("request_time_per_output_token_seconds", "A request's mean time between tokens.", "token"),
    "end_to_end": ("e2e_request_latency_seconds", "From a request's arrival to its end.", "request"),
    "queue": ("request_queue_time_seconds", "From a request's arrival to its admission.", "request"),
    "prefill": ("request_prefill_time_seconds", "From a request's admission to its first token.", "request"),
    "decode": ("request_decode_time_seconds", "From a request's first token to its last.", "request"),
    "inference": ("request_inference_time_seconds", "From a request's admission to its last token.", "request"),
    "prompt": ("request_prompt_tokens", "A request's prompt tokens.", "tokens"),
    "generation": ("request_generation_tokens", "A request's new tokens.", "tokens"),
}
FINISH_REASONS = ("stop", "length", "abort", "error")
LABELS = ("model_name", "engine")


class Metrics(Collector):
    """Counts what an engine does, from its construction on: make it before the engine starts.

    Args:
        model_name: value of the label `model_name`.
        engine: the engine to observe; this becomes its `observer`.

    Attributes:
        registry: Prometheus' registry with these metrics alone, so that several engines of a process stay apart.

    Raises:
        ValueError: the engine has an observer already.
    """

    def __init__(self, model_name: str, engine: Engine):
        if engine.observer is not None:
            raise ValueError("the engine has an observer already; one engine has one Metrics")
        self._engine = engine
        self._labels = (model_name, "0")
        self._finished: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        # Upper bounds of requests' numbers of tokens.
        bounds = BUCKETS | {"tokens": tuple(_one_two_five(engine.max_model_len))}
        self._histograms = {
            key: _Histogram(f"vllm:{name}", meaning, bounds[unit]) for key, (name, meaning, unit) in _HISTOGRAMS.items()
        }
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(self)
        engine.observer = self.record

    def record(self, sequence: Sequence, output: Output) -> None:
        """Counts one output of a request. The engine calls it, on its own thread."""
        now = time.monotonic()
        if output.token_ids:
            previous, sequence.last_token_at = sequence.last_token_at, now
            if previous is None:
                self._histograms["first_token"].add(now - sequence.arrived_at)
                sequence.first_token_at = now
            else:
                # A visit to the device brings several tokens at once; shared out among them, its time is a token's.
                count = len(output.token_ids)
                self._histograms["inter_token"].add((now - previous) / count, count)
        if output.finish_reason is not None:
            self._record_end(sequence, output, output.finish_reason, now)

    def _record_end(self, sequence: Sequence, output: Output, reason: str, now: float) -> None:
        # What a request did not live to see is not measured: no zeros for the phases of one that was aborted early.
        self._finished[reason] += 1
        self._histograms["end_to_end"].add(now - sequence.arrived_at)
        self._histograms["prompt"].add(output.num_prompt_tokens)
        self._histograms["generation"].add(output.num_output_tokens)
        admitted, first, last = sequence.admitted_at, sequence.first_token_at, sequence.last_token_at
        if admitted is None:
            return
        self._histograms["queue"].add(admitted - sequence.arrived_at)
        if first is None or last is None:
            return
        self._histograms["prefill"].add(first - admitted)
        self._histograms["decode"].add(last - first)
        self._histograms["inference"].add(last - admitted)
        if output.num_output_tokens > 1:
            self._histograms["time_per_token"].add((last - first) / (output.num_output_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """All metrics as of now, as `registry` asks for them; from any thread."""
        stats = self._engine.stats()
        yield self._gauge("vllm:num_requests_running", "Requests that have a slot.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", stats.num_waiting)
        usage = stats.kv_pages_used / stats.kv_pages_total
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's pages in use, 0 to 1.", usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens read.", stats.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens_total)
        if self._engine.num_draft_tokens:
            drafts, drafted = self._engine.drafts_total, stats.draft_tokens_total
            yield self._counter("vllm:spec_decode_num_drafts", "Steps of a request that checked drafts.", drafts)
            yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", drafted)
            accepted = stats.accepted_tokens_total
            yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that became output.", accepted)
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=[*LABELS, "finished_reason"]
        )
        for reason, count in self._finished.items():
            finished.add_metric([*self._labels, reason], count)
        yield finished
        for histogram in self._histograms.values():
            yield histogram.family(self._labels)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, meaning, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, meaning: str, value: int) -> Metric:
        family = CounterMetricFamily(name, meaning, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


class _Histogram:
    """Observations by bucket. One thread adds and others may read, without a lock, unlike Prometheus' own."""

    def __init__(self, name: str, meaning: str, bounds: tuple[float, ...]):
        self.name, self.meaning, self.bounds = name, meaning, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts `value`, as often as `times` says."""
        self._counts[bisect.bisect_left(self.bounds, value)] += times  # a bound belongs to the bucket below it
        self._sum += value * times

    def family(self, labels: tuple[str, ...]) -> Metric:
        """As it is now. The sum may be one observation behind the counts, never the counts behind one another."""
        total, counts = self._sum, list(self._counts)
        bounds = map(floatToGoString, (*self.bounds, float("inf")))
        family = HistogramMetricFamily(self.name, self.meaning, labels=LABELS)
        family.add_metric(labels, list(zip(bounds, itertools.accumulate(counts), strict=True)), total)
        return family


def _one_two_five(limit: int) -> Iterable[int]:
    """1, 2, 5, 10, 20, 50 and so on up to `limit`: vLLM's buckets for numbers of tokens."""
    steps = (digit * 10**exponent for exponent in itertools.count() for digit in (1, 2, 5))
    return itertools.takewhile(lambda step: step <= limit, steps)


class MetricsServer:
    """A running endpoint; see `serve_metrics`.

    Attributes:
        port: where it listens.
    """

    def __init__(self, metrics: Metrics, host: str, port: int):
        self._server, self._thread = start_http_server(port, host, metrics.registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops listening and ends the thread. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(metrics: Metrics, host: str, port: int) -> MetricsServer:
    """Answers HTTP at /metrics, from threads of its own, until the server returned is closed.

    Args:
        host: name or address to listen at; "0.0.0.0" or "::" for all of the machine's.
        port: 0 lets the system pick one, which is then the server's `port`.

    Raises:
        OSError: the port cannot be had; the message is for the operator.
    """
    try:
        return MetricsServer(metrics, host, port)
    except (OSError, OverflowError) as error:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"Cannot serve metrics on {address}: {reason}. Choose another port or host for them.") from None
