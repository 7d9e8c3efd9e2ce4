"""Generate: fields, outputs, streaming, n, stop strings, log-probabilities."""

import dataclasses

import grpc
import pytest
from grpc_harness import END, SENTENCE, chunks, completes, request
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serve.request import SamplingParams


def test_every_sampling_field_arrives(quick):
    quick.complete(
        [5, 6, 7],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[11, 12],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        seed=42,
        logit_bias={3: -1.5, 4: 2.0},
    )
    arrived = quick.engine.submitted[-1]
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
        prompt_logprobs=2,
        seed=42,
        logit_bias={3: -1.5, 4: 2.0},
    )


def test_sa01_unset_fields_are_neutral(quick):
    quick.complete([5, 6, 0])
    assert quick.engine.submitted[-1].sampling == SamplingParams()


def test_set_zeros_of_optional_fields_are_kept(quick):
    quick.complete([5, 6, 0], temperature=0.0, seed=0, logprobs=0, prompt_logprobs=0)
    expected = SamplingParams(temperature=0.0, seed=0, logprobs=0, prompt_logprobs=0)
    assert quick.engine.submitted[-1].sampling == expected


def test_sa01_top_k_minus_one_without_its_sign_is_no_limit(quick):
    quick.complete([5, 6, 0], top_k=2**32 - 1)
    assert quick.engine.submitted[-1].sampling.top_k == 0


def test_text_prompt_reads_special_tokens(quick):
    complete = quick.complete(f"<|user|>{SENTENCE}", max_tokens=2)
    prompt = quick.engine.submitted[-1].prompt_token_ids
    assert prompt == (quick.tokenizer.special_token_ids["<|user|>"], *quick.encode(SENTENCE))
    assert complete.prompt_tokens == len(prompt)


def test_one_shot_complete(quick):
    complete = quick.complete([5, 6, 7], max_tokens=4)
    assert list(complete.output_ids) == [5, 6, 7, 5]
    assert complete.finish_reason == "length"
    assert (complete.prompt_tokens, complete.completion_tokens, complete.index) == (3, 4, 0)
    assert complete.WhichOneof("matched_stop") is None


def test_end_token_is_included_and_named(quick):
    complete = quick.complete([5, 6, 0, 7])
    assert list(complete.output_ids) == [5, 6, 0]
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", "matched_token_id")
    assert complete.matched_token_id == 0


def test_streamed_tokens_come_once_then_complete(quick):
    messages = quick.generate(list(range(5, 55)), stream=True, max_tokens=120)
    assert messages[-1].HasField("complete") and len(completes(messages)) == 1
    streamed = [token for chunk in chunks(messages) for token in chunk.token_ids]
    assert streamed == list(messages[-1].complete.output_ids)
    assert len(streamed) == 120 == messages[-1].complete.completion_tokens
    assert sum(chunk.completion_tokens for chunk in chunks(messages)) == 120


@pytest.mark.parametrize("stream", [False, True])
def test_n_gives_one_complete_an_index_with_derived_seeds(quick, stream):
    messages = quick.generate([5, 6, 7], stream=stream, n=3, seed=4, max_tokens=3)
    finished = {complete.index: list(complete.output_ids) for complete in completes(messages)}
    assert finished == {0: [6, 7, 5], 1: [7, 5, 6], 2: [5, 6, 7]}
    assert [r.sampling.seed for r in quick.engine.submitted[-3:]] == [4, 5, 6]
    assert len(completes(messages)) == 3
    for index, expected in finished.items():
        streamed = [token for chunk in chunks(messages) if chunk.index == index for token in chunk.token_ids]
        assert streamed == (expected if stream else [])


@pytest.mark.parametrize("stream", [False, True])
def test_sa05_stop_string_that_begins_inside_a_token(quick, stream):
    messages = quick.generate(SENTENCE, stream=stream, stop=["lue sky"])
    complete = completes(messages)[0]
    # " blue" holds a letter that belongs to the answer, so the tokens go up to the end of the stop string.
    assert quick.decode(complete.output_ids) == "A wide blue sky"
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "lue sky")
    assert quick.decode(complete.output_ids).partition(complete.matched_stop_str)[0] == "A wide b"
    assert [t for c in chunks(messages) for t in c.token_ids] == (list(complete.output_ids) if stream else [])
    quick.wait_idle()  # the engine was told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "A wide"), (True, "A wide blue")])
def test_sa12_stop_string_that_begins_with_a_token(quick, stream, include, text):
    messages = quick.generate(SENTENCE, stream=stream, stop=["zzz", " blue"], include_stop_str_in_output=include)
    complete = completes(messages)[0]
    assert quick.decode(complete.output_ids) == text
    assert complete.completion_tokens == len(complete.output_ids)
    assert complete.matched_stop_str == " blue"
    assert [t for c in chunks(messages) for t in c.token_ids] == (list(complete.output_ids) if stream else [])


def test_stop_string_across_the_prompt_repeated(quick):
    complete = quick.complete(SENTENCE, stop=["aboveA wide"])
    assert quick.decode(complete.output_ids) == SENTENCE + "A wide"  # "above" is not a token of its own


def test_unmatched_stop_string_changes_nothing(quick):
    ids = quick.encode(SENTENCE)
    complete = quick.complete([*ids, 0], stop=["sky below"])
    assert list(complete.output_ids) == [*ids, 0]
    assert complete.matched_token_id == 0
    held = quick.generate([*ids, 0], stream=True, stop=["above and beyond"])  # its beginning is held back to the end
    assert [token for chunk in chunks(held) for token in chunk.token_ids] == [*ids, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_pa19_tokens_held_for_a_stop_string_all_arrive(quick, stream):
    """Its beginning, then control tokens, just before the end: none is lost, none is cut."""
    ids = quick.encode(f"{SENTENCE}<|user|><|assistant|>")
    messages = quick.generate([*ids, 0], stream=stream, stop=["above<|user|><|assistant|>!", "|>!"])
    complete = completes(messages)[0]
    assert list(complete.output_ids) == [*ids, 0] and complete.matched_token_id == 0
    assert [token for chunk in chunks(messages) for token in chunk.token_ids] == ([*ids, 0] if stream else [])


def test_the_end_token_ends_even_when_its_text_is_a_stop_string(quick):
    complete = quick.complete(f"A{END}", stop=[END])
    assert (complete.WhichOneof("matched_stop"), complete.matched_token_id) == ("matched_token_id", 0)
    assert quick.decode(complete.output_ids) == f"A{END}"


def test_skip_special_tokens_decides_what_stop_strings_see(quick):
    prompt, stop = "A<|user|> wide", ["A wide"]
    assert quick.complete(prompt, stop=stop, max_tokens=9).finish_reason == "length"
    assert quick.complete(prompt, stop=stop, max_tokens=9, skip_special_tokens=True).matched_stop_str == "A wide"


def test_min_tokens_holds_for_stop_strings_and_end_tokens(quick):
    complete = quick.complete(SENTENCE, stop=[" blue"], min_tokens=4)
    assert quick.decode(complete.output_ids) == SENTENCE + "A wide"
    assert quick.complete([0, 5], min_tokens=1).completion_tokens == 3


def test_sa10_ignore_eos_runs_on_but_user_stops_hold(quick):
    assert quick.complete([5, 0], ignore_eos=True, max_tokens=6).completion_tokens == 6
    assert quick.complete([5, 0], ignore_eos=True, stop_token_ids=[5]).matched_token_id == 5


def test_tk07_every_end_token_stops(serving):
    harness = serving(eos_token_ids=(7, 8, 9))
    for token in (7, 8, 9):
        for stream in (False, True):
            complete = completes(harness.generate([5, 6, token, 5], stream=stream))[0]
            assert (complete.finish_reason, complete.matched_token_id) == ("stop", token)


def test_logprobs_one_shot(quick):
    complete = quick.complete([5, 6, 7], max_tokens=3, logprobs=2, prompt_logprobs=1)
    out, prompt = complete.output_logprobs, complete.input_logprobs
    assert list(out.token_ids) == [5, 6, 7] and list(out.token_logprobs) == [-0.5] * 3
    assert [list(top.token_ids) for top in out.top_logprobs] == [[5, 6], [6, 7], [7, 8]]
    assert [list(top.values) for top in out.top_logprobs] == [[-0.5, -1.5]] * 3
    assert list(prompt.token_ids) == [5, 6, 7]
    assert not prompt.token_logprobs[0].HasField("value") and prompt.token_logprobs[1].value == -0.5
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [6], [7]]


def test_sa07_streamed_logprobs_match_one_shot_under_a_stop_string(quick):
    sampling = {"logprobs": 2, "prompt_logprobs": 0, "stop": [" above"]}
    one_shot = quick.complete(SENTENCE, **sampling)
    streamed = chunks(quick.generate(SENTENCE, stream=True, **sampling))
    assert [t for c in streamed for t in c.output_logprobs.token_ids] == list(one_shot.output_logprobs.token_ids)
    assert [t for c in streamed for t in c.token_ids] == list(one_shot.output_logprobs.token_ids)
    assert sum(len(c.output_logprobs.top_logprobs) for c in streamed) == len(one_shot.output_logprobs.token_ids) == 4
    assert [c.HasField("input_logprobs") for c in streamed] == [True] + [False] * (len(streamed) - 1)
    assert streamed[0].input_logprobs == one_shot.input_logprobs


def test_truncate_prompt_tokens_keeps_the_end(serving):
    harness = serving(max_model_len=20)
    harness.complete(range(1, 30), truncate_prompt_tokens=5, max_tokens=1)
    assert harness.engine.submitted[-1].prompt_token_ids == tuple(range(25, 30))
    harness.complete(range(1, 40), truncate_prompt_tokens=-1, max_tokens=8)
    assert harness.engine.submitted[-1].prompt_token_ids == tuple(range(28, 40))


def test_request_without_id_gets_one(quick):
    message = request([5, 6], max_tokens=1)
    message.request_id = ""
    assert len(list(quick.stub.Generate(message, timeout=5))) == 1


def test_engine_error_is_internal_with_its_sentence(serving):
    harness = serving(fail_after=3)
    with pytest.raises(grpc.RpcError) as error:
        harness.generate([5, 6], stream=True)
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert error.value.details() == "The stub was told to fail."
    harness.wait_idle()


def test_tokens_after_a_stop_string_in_one_output_are_dropped(quick):
    from serve.grpc.choice import Choice
    from serve.grpc.stops import TokenStops
    from serve.request import Output, TokenLogprob
    from serve.text.detokenize import IncrementalDetokenizer
    from serve.text.stop import StopStrings

    ids = quick.encode(SENTENCE)
    detokenizer = IncrementalDetokenizer(quick.tokenizer, skip_special_tokens=True)
    stops = TokenStops(detokenizer, StopStrings(["sky"]), include_stop=False, min_tokens=0)
    choice = Choice(0, stream=False, prompt_token_ids=ids, stops=stops)
    output = Output("r", tuple(ids), tuple(TokenLogprob(i, -1.0) for i in ids), finish_reason="length")
    (piece,) = choice.advance(dataclasses.replace(output, num_prompt_tokens=5))
    assert quick.decode(piece.token_ids) == "A wide blue sky"
    assert [entry.token_id for entry in piece.logprobs] == list(piece.token_ids)
    assert piece.finish_reason == "stop"


def test_a_request_without_sampling_params_gets_the_checkpoints_defaults(quick):
    bare = pb.GenerateRequest(request_id="bare", tokenized=pb.TokenizedInput(input_ids=[1] * 4080))  # 16 tokens of room
    calls = len(quick.engine.submitted)
    list(quick.stub.Generate(bare, timeout=30))
    sampling = quick.engine.submitted[calls].sampling
    assert (sampling.temperature, sampling.top_k) == (pytest.approx(0.7), 20)
    assert sampling.top_p == pytest.approx(0.95)


def test_defaults_of_no_limit_are_understood(serving):
    harness = serving(load=False)
    harness.model.generation_config = {"temperature": 0.0, "top_k": -1, "top_p": None}
    harness.load()
    assert list(harness.stub.Generate(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 0])), timeout=5))
    assert harness.engine.submitted[-1].sampling == SamplingParams(temperature=0.0, top_k=-1)


@pytest.mark.parametrize("top_k", [2**32 - 2, 2**31])
def test_sa01_other_negative_top_k_is_refused(quick, top_k):
    bad = request([1], top_k=top_k)
    with pytest.raises(grpc.RpcError) as caught:
        list(quick.stub.Generate(bad, timeout=5))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "top_k" in caught.value.details()
