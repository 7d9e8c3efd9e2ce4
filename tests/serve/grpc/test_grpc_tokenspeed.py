"""TokenSpeedScheduler: fields, outputs, streaming, errors, and which services a server offers."""

import dataclasses
import json

import grpc
import pytest
from grpc_harness import SENTENCE, Harness
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from media_messages import tokenspeed
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as ts
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serve.request import SamplingParams, Speculation

Status = grpc.StatusCode
Health = health_pb2.HealthCheckResponse
VLLM, TOKENSPEED = "vllm.grpc.engine.VllmEngine", "tokenspeed.grpc.scheduler.TokenSpeedScheduler"


@pytest.fixture(scope="module")
def server(loop, model_folder):
    with Harness(loop, model_folder, services=("tokenspeed",)) as harness:
        yield harness


def run(harness, prompt, **options) -> list[ts.GenerateResponse]:
    return list(harness.tokenspeed.Generate(tokenspeed(prompt, **options), timeout=10))


def complete(harness, prompt, **options) -> ts.GenerateComplete:
    (message,) = run(harness, prompt, **options)
    return message.complete


def test_every_sampling_field_arrives(server):
    complete(
        server,
        [5, 6, 7],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=[11, 12],
        ignore_eos=True,
        return_logprob=True,
        top_logprobs_num=3,
        logprob_start_len=-1,  # as smg sends it: none of the prompt
        sampling_seed=2**64 - 2,
        logit_bias={"3": -1.5, "4": 2.0},
    )
    arrived = server.engine.submitted[-1]
    assert arrived.prompt_token_ids == (5, 6, 7)
    assert arrived.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(11, 12),
        ignore_eos=True,
        logprobs=3,
        seed=2**64 - 2,
        logit_bias={3: -1.5, 4: 2.0},
    )


def test_sa01_unset_fields_are_the_model_s_defaults_and_zeros_are_kept(server):
    complete(server, [5, 6, 0])
    assert server.engine.submitted[-1].sampling == SamplingParams(temperature=0.7, top_p=0.95, top_k=20)
    complete(server, [5, 6, 0], temperature=0.0, top_k=0, top_p=1.0, sampling_seed=0)
    assert server.engine.submitted[-1].sampling == SamplingParams(temperature=0.0, seed=0)
    complete(server, [5, 6, 0], top_k=-1)
    assert server.engine.submitted[-1].sampling.top_k == -1


def test_one_shot(server):
    answer = complete(server, [5, 6, 7], max_new_tokens=4)
    assert list(answer.output_ids) == [5, 6, 7, 5]
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens, answer.index) == ("length", 3, 4, 0)
    assert answer.WhichOneof("matched_stop") is None and not answer.HasField("output_logprobs")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_the_end_token_is_named_and_part_of_the_output_where_asked_for(server, keep, stream):
    messages = run(server, [5, 6, 0, 7], stream=stream, no_stop_trim=keep, return_logprob=True)
    answer = messages[-1].complete
    expected = [5, 6, 0] if keep else [5, 6]
    assert list(answer.output_ids) == expected
    assert (answer.finish_reason, answer.matched_token_id, answer.completion_tokens) == ("stop", 0, 3)
    if stream:
        assert [token for m in messages[:-1] for token in m.chunk.token_ids] == expected
        assert [t for m in messages[:-1] for t in m.chunk.output_logprobs.token_ids] == expected
        assert not answer.HasField("output_logprobs")
    else:
        assert list(answer.output_logprobs.token_ids) == expected


def test_chunks_count_all_tokens_so_far_and_name_the_request(server):
    messages = run(server, [5, 6, 7], stream=True, max_new_tokens=50, request_id="mine")
    assert {message.request_id for message in messages} == {"mine"}
    seen = 0
    for message in messages[:-1]:
        seen += len(message.chunk.token_ids)
        assert message.chunk.completion_tokens == seen
    assert seen == 50 == messages[-1].complete.completion_tokens


def test_n_gives_one_complete_an_index(server):
    messages = run(server, [5, 6, 7], n=3, sampling_seed=4, max_new_tokens=3)
    assert {m.complete.index: list(m.complete.output_ids) for m in messages} == {
        0: [6, 7, 5],
        1: [7, 5, 6],
        2: [5, 6, 7],
    }


@pytest.mark.parametrize("stream", [True, False])
def test_sa05_stop_strings(server, stream):
    ids = server.encode(SENTENCE)
    answer = run(server, ids, stop=["zzz", "lue sky"], stream=stream)[-1].complete
    assert server.decode(answer.output_ids) == "A wide blue sky"
    assert (answer.finish_reason, answer.matched_stop_str) == ("stop", "lue sky")
    answer = run(server, ids, stop=[" blue"], stream=stream)[-1].complete
    assert server.decode(answer.output_ids) == "A wide"
    answer = run(server, ids, stop=[" blue"], no_stop_trim=True, stream=stream)[-1].complete
    assert server.decode(answer.output_ids) == "A wide blue"
    server.wait_idle()


def test_logprobs(server):
    out = complete(server, [5, 6, 7], max_new_tokens=3, return_logprob=True, top_logprobs_num=2).output_logprobs
    assert list(out.token_ids) == [5, 6, 7] and list(out.token_logprobs) == [-0.5] * 3
    assert [list(top.token_ids) for top in out.top_logprobs] == [[5, 6], [6, 7], [7, 8]]


def test_how_drafts_fared_is_told(server, monkeypatch):
    emitted = type(server.engine)._emit

    def emit(self, sequence, *args, **more):
        drafts = Speculation(num_steps=2, num_draft_tokens=8, num_accepted_tokens=5)
        on_output = sequence.on_output
        sequence.on_output = lambda output: on_output(dataclasses.replace(output, speculation=drafts))
        emitted(self, sequence, *args, **more)
        sequence.on_output = on_output

    monkeypatch.setattr(type(server.engine), "_emit", emit)
    answer = complete(server, [5, 6], max_new_tokens=2)
    assert (answer.spec_draft_tokens, answer.spec_accepted_tokens) == (8, 5)


def test_without_drafts_there_are_none(server):
    answer = complete(server, [5, 6], max_new_tokens=2)
    assert (answer.spec_draft_tokens, answer.spec_accepted_tokens) == (0, 0)


def with_field(name: str, **fields) -> ts.GenerateRequest:
    message = tokenspeed([5])
    getattr(message, name).CopyFrom(type(getattr(message, name))(**fields))
    return message


def with_rank(rank: int) -> ts.GenerateRequest:
    message = tokenspeed([5])
    message.data_parallel_rank = rank
    return message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (ts.GenerateRequest(request_id="x"), "no prompt"),
        (tokenspeed([]), "prompt is empty"),
        (tokenspeed([5] * 4096), "at most 4095 fit"),
        (tokenspeed([5, 1024]), "1024"),
        (tokenspeed([5], max_new_tokens=0), "max_tokens"),
        (tokenspeed([5], temperature=-1.0), "temperature"),
        (tokenspeed([5], n=129), "may have 128 outputs"),
        (tokenspeed([5], logit_bias={"sky": 1.0}), "must name token ids"),
        (tokenspeed([5], return_logprob=True, top_logprobs_num=21), "logprobs"),
        (tokenspeed([5], stop=[""]), "stop string"),
        (with_rank(1), "data_parallel_rank is 1"),
    ],
)
def test_gr10_unusable_requests_are_invalid_argument(server, message, says):
    with pytest.raises(grpc.RpcError) as error:
        list(server.tokenspeed.Generate(message, timeout=5))
    assert error.value.code() is Status.INVALID_ARGUMENT and says in error.value.details()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (tokenspeed([5], json_schema="{}"), "json_schema"),
        (tokenspeed([5], structural_tag="{}"), "tool_choice"),
        (tokenspeed([5], return_logprob=True, logprob_start_len=0), "logprob_start_len"),
        (tokenspeed([5], return_logprob=True, token_ids_logprob=[3]), "token_ids_logprob"),
        (with_field("kv_bootstrap_info", bootstrap_room=1), "kv_bootstrap_info"),
        (with_field("encode_bootstrap_info"), "kv_bootstrap_info"),
    ],
)
def test_gr10_what_is_not_supported_is_unimplemented_never_ignored(server, message, says):
    with pytest.raises(grpc.RpcError) as error:
        list(server.tokenspeed.Generate(message, timeout=5))
    assert error.value.code() is Status.UNIMPLEMENTED and says in error.value.details()


def test_gr04_abort_ends_a_call_and_says_whether_it_was_there(loop, model_folder):
    with Harness(loop, model_folder, services=("tokenspeed",), step_seconds=0.01) as harness:
        call = harness.tokenspeed.Generate(tokenspeed([5], request_id="long", stream=True, ignore_eos=True))
        next(call)
        assert harness.tokenspeed.Abort(ts.AbortRequest(request_id="long"), timeout=5).success
        assert list(call)[-1].complete.finish_reason == "abort"
        harness.wait_idle()
        again = harness.tokenspeed.Abort(ts.AbortRequest(request_id="long"), timeout=5)
        assert not again.success and "No request" in again.message
        cancelled = harness.tokenspeed.Generate(tokenspeed([5], stream=True, ignore_eos=True))
        next(cancelled)
        cancelled.cancel()
        harness.wait_idle()


def test_information(inkling, server):
    facts = inkling.tokenspeed.GetModelInfo(ts.GetModelInfoRequest(), timeout=5)
    assert (facts.served_model_name, facts.model_path) == ("served-name", "stub-inkling")
    assert (facts.model_type, list(facts.architectures)) == ("inkling_mm_model", ["InklingForConditionalGeneration"])
    assert (facts.max_context_length, facts.max_req_input_len, facts.vocab_size) == (4096, 4095, 1024)
    assert list(facts.eos_token_ids) == list(inkling.engine.eos_token_ids)
    assert facts.supports_vision and facts.supports_multimodal
    assert list(facts.supported_modalities) == [common_pb2.IMAGE, common_pb2.AUDIO]
    assert json.loads(facts.default_sampling_params_json) == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
    assert inkling.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5).supports_vision
    facts = server.tokenspeed.GetModelInfo(ts.GetModelInfoRequest(), timeout=5)
    assert not facts.supports_vision and not facts.supports_multimodal and not facts.supported_modalities


def test_server_info_loads_and_tokenizer(loop, model_folder):
    with Harness(loop, model_folder, services=("tokenspeed",), num_slots=2, prefill_seconds=60) as harness:
        calls = [harness.tokenspeed.Generate(tokenspeed([5], stream=True)) for _ in range(3)]
        harness.wait_for(lambda stats: stats.num_running == 2 and stats.num_waiting == 1)
        facts = harness.tokenspeed.GetServerInfo(ts.GetServerInfoRequest(), timeout=5)
        assert (facts.active_requests, facts.server_args["max_num_seqs"]) == (3, 2)
        assert facts.uptime_seconds > 0 and facts.start_time.seconds > 1_700_000_000
        (load,) = harness.tokenspeed.GetLoads(ts.GetLoadsRequest(), timeout=5).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.token_usage) == (2, 1, 1.0)
        assert list(harness.tokenspeed.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=5))[-1].sha256
        assert harness.tokenspeed.HealthCheck(ts.HealthCheckRequest(), timeout=5).healthy
        for call in calls:
            call.cancel()


def code(call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code()


def listed(harness) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(harness.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=5)
    return {service.name for service in answer.list_services_response.service} & {VLLM, TOKENSPEED}


def health(harness, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(harness.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


@pytest.mark.parametrize(
    ("reads_media", "services", "offered"),
    [
        (False, None, {VLLM}),
        (True, None, {TOKENSPEED}),
        (False, ("tokenspeed",), {TOKENSPEED}),
        (True, ("vllm",), {VLLM}),
        (True, ("vllm", "tokenspeed"), {VLLM, TOKENSPEED}),
    ],
)
def test_services_follow_the_model_unless_named(loop, inkling_model, reads_media, services, offered):
    folder, settings = inkling_model
    settings = settings if reads_media else settings | {"media_format": None}
    with Harness(loop, folder, services=services, load=False, **settings) as harness:
        asks = {
            VLLM: lambda: harness.stub.HealthCheck(pb.HealthCheckRequest(), timeout=5),
            TOKENSPEED: lambda: harness.tokenspeed.HealthCheck(ts.HealthCheckRequest(), timeout=5),
        }
        assert {code(ask) for ask in asks.values()} == {Status.UNAVAILABLE} and listed(harness) == set()
        harness.load()
        assert listed(harness) == offered and health(harness, "") == Health.SERVING
        for name, ask in asks.items():
            if name in offered:
                assert ask().healthy and health(harness, name) == Health.SERVING
            else:
                assert code(ask) is Status.UNIMPLEMENTED
                assert services or health(harness, name) == Health.NOT_SERVING
        refused = {VLLM: lambda: harness.generate([5]), TOKENSPEED: lambda: run(harness, [5])}
        for name in refused.keys() - offered:
            assert code(refused[name]) is Status.UNIMPLEMENTED


def test_one_id_for_both_services(inkling):
    """They share the calls: an id runs once, and Abort of either finds it."""
    with Harness(inkling._loop, inkling.model.model_dir, services=("vllm", "tokenspeed"), step_seconds=0.01) as harness:
        call = harness.tokenspeed.Generate(tokenspeed([5], request_id="one", stream=True, ignore_eos=True))
        next(call)
        message = pb.GenerateRequest(request_id="one", tokenized=pb.TokenizedInput(input_ids=[5]))
        assert code(lambda: list(harness.stub.Generate(message))) is Status.ALREADY_EXISTS
        harness.stub.Abort(pb.AbortRequest(request_ids=["one"]), timeout=5)
        assert list(call)[-1].complete.finish_reason == "abort"
