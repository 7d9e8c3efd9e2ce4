"""Requests that are not served end with a status and a sentence (GR-10), and messages have a limit (GR-05)."""

import grpc
import pytest
from grpc_harness import END, SENTENCE, request
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from serve.grpc.server import server_options

Status = grpc.StatusCode


def refused(harness, message: pb.GenerateRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        list(harness.stub.Generate(message, timeout=10))
    harness.wait_idle()
    return error.value


def without_prompt() -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="no-prompt", sampling_params=pb.SamplingParams(max_tokens=3))


def with_media() -> pb.GenerateRequest:
    message = request([5])
    message.mm_inputs.pixel_values.shape.append(1)
    return message


def with_media_refs() -> pb.GenerateRequest:
    message = request([5])
    message.media_refs.items.add(url="http://localhost/x.png")
    return message


def with_kv_transfer() -> pb.GenerateRequest:
    message = request([5])
    message.kv_transfer_params_json = "{}"
    return message


def with_rank(rank: int) -> pb.GenerateRequest:
    message = request([5])
    message.data_parallel_rank = rank
    return message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (without_prompt(), "set tokenized or text"),
        (request([]), "prompt is empty"),
        (request(""), "prompt is empty"),
        (request([5] * 4096), "at most 4095 fit"),
        (request([5, 1024]), "1024"),
        (request([5], max_tokens=0), "max_tokens"),
        (request([5], max_tokens=2**32 - 3), "max_tokens is -3"),
        (request([5], min_tokens=2**32 - 1), "min_tokens is -1"),
        (request([5], n=2**32 - 1), "n is -1"),
        (request([5], n=129), "may have 128 outputs"),
        (request([5], temperature=-1.0), "temperature"),
        (request([5], top_p=1.5), "top_p"),
        (request([5], logprobs=-1), "logprobs"),
        (request([5], prompt_logprobs=21), "prompt_logprobs"),
        (request([5], stop=["a", ""]), "stop string"),
        (request([5], stop=["x"] * 65), "may have 64"),
        (request([5], stop=["x" * 1025]), "may have 1024"),
        (request("sky " * 20_000), "cannot fit: it has 80000 bytes"),
        (request([5], truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
        (request([5], truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (request([5], logit_bias={4096: 1.0}), "logit_bias"),
        (with_rank(1), "data_parallel_rank is 1"),
    ],
)
def test_gr10_unusable_requests_are_invalid_argument(quick, message, says):
    error = refused(quick, message)
    assert error.code() is Status.INVALID_ARGUMENT
    assert says in error.details()


@pytest.mark.parametrize("keep", [7, -1])
def test_a_text_of_any_length_can_be_truncated_and_its_head_is_not_encoded(serving, monkeypatch, keep):
    harness = serving()
    encoded = []
    encode = harness.tokenizer.encode
    monkeypatch.setattr(
        harness.tokenizer, "encode", lambda text, **more: encoded.append(len(text)) or encode(text, **more)
    )
    harness.complete("y" * 300_000 + f" {SENTENCE}" * 20_000, max_tokens=1, truncate_prompt_tokens=keep)
    prompt = harness.engine.submitted[-1].prompt_token_ids
    assert list(prompt) == (harness.encode(f" {SENTENCE}" * 2000)[-len(prompt) :])
    assert len(prompt) == (7 if keep == 7 else 4095) and encoded[0] < 60_000


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (request([5], json_schema="{}"), "json_schema"),
        (request([5], regex="a+"), "regex"),
        (request([5], grammar="root ::= 'a'"), "grammar"),
        (request([5], structural_tag="{}"), "tool_choice"),
        (request([5], json_object=True), "json_object"),
        (request([5], choice=["a"]), "choice"),
        (with_media(), "text only"),
        (with_media_refs(), "fetches no media"),
        (with_kv_transfer(), "kv_transfer_params"),
    ],
)
def test_gr10_what_is_not_supported_is_unimplemented_never_ignored(quick, message, says):
    error = refused(quick, message)
    assert error.code() is Status.UNIMPLEMENTED
    assert says in error.details()


def test_gr10_overload_is_resource_exhausted_with_a_retry_hint(serving):
    harness = serving(num_slots=1, max_queue=1, step_seconds=0.01)
    calls = [harness.stub.Generate(request([5], stream=True, max_tokens=2000))]
    harness.wait_for(lambda stats: stats.num_running == 1)
    calls.append(harness.stub.Generate(request([5], stream=True, max_tokens=2000)))
    harness.wait_for(lambda stats: stats.num_waiting == 1)
    with pytest.raises(grpc.RpcError) as error:
        harness.generate([5])
    assert error.value.code() is Status.RESOURCE_EXHAUSTED
    assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
    for call in calls:
        call.cancel()
    harness.wait_idle()
    assert harness.complete([5], max_tokens=1).finish_reason == "length"


def test_gr10_n_that_does_not_fit_leaves_nothing_behind(serving):
    harness = serving(num_slots=1, max_queue=2, prefill_seconds=30)
    assert refused(harness, request([5], n=10)).code() is Status.RESOURCE_EXHAUSTED


def test_gr10_duplicate_request_id_is_already_exists(serving):
    harness = serving(step_seconds=0.01)
    first = harness.stub.Generate(request([5], stream=True, request_id="twice", max_tokens=50))
    next(first)
    with pytest.raises(grpc.RpcError) as error:
        list(harness.stub.Generate(request([5], request_id="twice")))
    assert error.value.code() is Status.ALREADY_EXISTS and "twice" in error.value.details()
    assert [m for m in first][-1].complete.completion_tokens == 50  # the first one went on
    harness.wait_idle()
    assert len(list(harness.stub.Generate(request([5], request_id="twice", max_tokens=1)))) == 1


def test_an_id_can_be_used_again_at_once_after_a_stop_string(serving):
    harness = serving(step_seconds=0.01)
    for _ in range(10):
        message = request(SENTENCE, request_id="again", stop=[" wide"])
        assert [m.complete.finish_reason for m in harness.stub.Generate(message)] == ["stop"]


def test_gr10_unserved_methods_are_unimplemented(quick):
    calls = [
        lambda: quick.stub.Embed(pb.EmbedRequest(request_id="e")),
        lambda: quick.stub.FlushCache(common_pb2.FlushCacheRequest()),
        lambda: list(quick.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() is Status.UNIMPLEMENTED and error.value.details().startswith("This server")


@pytest.mark.parametrize("megabytes", [5, 20, 100])
def test_gr05_large_requests_pass(quick, megabytes):
    message = request([5, 0])
    message.tokenized.original_text = "x" * (megabytes * 1_000_000)
    stub = pb_grpc.VllmEngineStub(quick.connect(("grpc.max_send_message_length", -1)))
    (answer,) = stub.Generate(message, timeout=20)
    assert list(answer.complete.output_ids) == [5, 0]


def test_gr05_beyond_the_limit_is_resource_exhausted_in_both_directions(serving):
    harness = serving(max_message_mb=1, max_model_len=40_000, vocab_size=2048)
    message = request([5, 0])
    message.tokenized.original_text = "x" * 1_100_000
    assert refused(harness, message).code() is Status.RESOURCE_EXHAUSTED
    message.tokenized.original_text = "x" * 900_000
    assert len(list(harness.stub.Generate(message))) == 1
    large_answer = request(range(1, 2000), prompt_logprobs=20, max_tokens=1, logprobs=20)
    assert len(list(harness.stub.Generate(large_answer))) == 1
    too_large = request([*range(1, 2000)] * 4, prompt_logprobs=20, max_tokens=1)
    assert refused(harness, too_large).code() is Status.RESOURCE_EXHAUSTED


def test_gr05_large_logprobs_answer_passes(serving):
    harness = serving(max_model_len=40_000, vocab_size=2048)
    complete = harness.complete([*range(1, 2000)] * 16, prompt_logprobs=20, max_tokens=1)
    assert complete.ByteSize() > 4 * 2**20  # more than a client takes that sets no limit of its own
    assert len(complete.input_logprobs.token_ids) == 16 * 1999


def test_gr05_the_documented_limit_is_the_default():
    assert dict(server_options())["grpc.max_receive_message_length"] == 256 * 2**20
    assert dict(server_options())["grpc.max_send_message_length"] == 256 * 2**20


def test_end_marker_in_text_is_a_token(quick):
    assert quick.complete(f"A{END}").matched_token_id == 0
