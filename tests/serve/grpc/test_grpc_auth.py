"""Tokens: which calls need one, what is refused, and a file of tokens that changes under way."""

import asyncio
import logging
import os
import re

import grpc
import pytest
from grpc_harness import request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from serve.grpc.auth import TokenFile, TokenInterceptor

TOKEN, NEXT = "the-first-token-of-all", "its-successor-0123456"
HEALTH = health_pb2.HealthCheckRequest()


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


@pytest.fixture
def path(tmp_path):
    (path := tmp_path / "tokens").write_text(f"# of the gateway\n\n  {TOKEN}\t\r\n")
    return path


@pytest.fixture
def guarded(serving, path):
    return serving(tokens=TokenFile(str(path)), step_seconds=0.01)


def ask(harness, *metadata: tuple[str, str]) -> list[int]:
    (answer,) = harness.stub.Generate(request([5, 0]), metadata=metadata, timeout=5)
    return list(answer.complete.output_ids)


def refusal(call, *arguments, **more) -> str:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **more)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN not in error.value.details()
    return error.value.details()


def rewrite(path, text: str) -> None:
    """Writes the file, and makes sure that its time differs however fast the test is."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_a_call_with_a_token_is_answered(guarded, scheme):
    assert ask(guarded, ("authorization", f"{scheme} {TOKEN}")) == [5, 0]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ([], "This server asks for a token: send the metadata 'authorization: Bearer <token>'"),
        ([("x-api-key", TOKEN)], "asks for a token"),
        ([bearer(NEXT)], "The token is not known here"),
        ([bearer(TOKEN[:-1])], "not known here"),
        ([bearer(TOKEN + "x")], "not known here"),
        ([bearer("")], "not known here"),
        ([bearer("# of the gateway")], "not known here"),
        ([("authorization", "Bearer")], "not known here"),
        ([("authorization", TOKEN)], "is no Bearer token"),
        ([("authorization", f"Basic {TOKEN}")], "is no Bearer token"),
        ([("authorization", "")], "is no Bearer token"),
        ([bearer(TOKEN), bearer(TOKEN)], "There are 2 authorization entries in the metadata; send one."),
        ([bearer(NEXT), bearer(TOKEN)], "send one"),
    ],
)
def test_calls_without_a_known_token_are_unauthenticated(guarded, metadata, says):
    assert says in refusal(ask, guarded, *metadata)
    assert not guarded.engine.submitted


def test_all_but_the_standard_health_service_is_protected(guarded):
    reflection = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    calls = [
        lambda **more: guarded.stub.HealthCheck(pb.HealthCheckRequest(), **more),
        lambda **more: guarded.stub.GetModelInfo(pb.GetModelInfoRequest(), **more),
        lambda **more: list(guarded.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), **more)),
        lambda **more: list(guarded.stub.Generate(request([5, 0], stream=True), **more)),
        lambda **more: list(reflection.ServerReflectionInfo(iter([listing]), **more)),
    ]
    for call in calls:
        assert "asks for a token" in refusal(call, timeout=5)
        assert call(timeout=5, metadata=[bearer(TOKEN)])
    unknown = guarded.channel.unary_unary("/no.such.Service/Method")
    refusal(unknown, b"", timeout=5)  # nor is it told what is there
    almost = guarded.channel.unary_unary("/grpc.health.v1.HealthX/Check")
    refusal(almost, b"", timeout=5)


def test_health_needs_no_token(guarded):
    stub = health_pb2_grpc.HealthStub(guarded.channel)
    assert stub.Check(HEALTH, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(HEALTH, timeout=5)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


@pytest.mark.parametrize("asks", ["unary", "stream"])
@pytest.mark.parametrize("answers", ["unary", "stream"])
def test_methods_of_all_four_kinds(loop, path, asks, answers):
    """The method sends back what it got."""

    async def one(asked, context):
        return b"".join([part async for part in asked]) if asks == "stream" else asked

    async def many(asked, context):
        yield await one(asked, context)

    kind = f"{asks}_{answers}"

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=[TokenInterceptor(TokenFile(str(path)))])
        handler = getattr(grpc, f"{kind}_rpc_method_handler")(one if answers == "unary" else many)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    def call(channel: grpc.Channel, *metadata: tuple[str, str]) -> bytes:
        given = iter([b"he", b"llo"]) if asks == "stream" else b"hello"
        answer = getattr(channel, kind)("/test.Echo/Echo")(given, metadata=metadata, timeout=5)
        return b"".join(answer) if answers == "stream" else answer

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert call(channel, bearer(TOKEN)) == b"hello"
            assert "asks for a token" in refusal(call, channel)
            assert "not known here" in refusal(call, channel, bearer(NEXT))
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(20)


def test_clients_of_asyncio(guarded):
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(guarded.server.address) as channel:
            stub = pb_grpc.VllmEngineStub(channel)
            for metadata in ((), (bearer(NEXT),)):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata, timeout=5)
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    [_ async for _ in stub.Generate(request([5, 0]), metadata=metadata, timeout=5)]
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            answers = [a async for a in stub.Generate(request([5, 0]), metadata=(bearer(TOKEN),), timeout=5)]
            assert list(answers[0].complete.output_ids) == [5, 0]

    guarded.call(scenario())


def test_a_large_message_without_a_token_is_refused_unread(guarded):
    message = request([5, 0])
    message.tokenized.original_text = "x" * 50_000_000
    assert "asks for a token" in refusal(lambda: list(guarded.stub.Generate(message, timeout=10)))


def test_tokens_are_rotated_without_a_restart_and_calls_under_way_go_on(guarded, path, caplog):
    caplog.set_level(logging.INFO, "serve.grpc")
    running = guarded.stub.Generate(request([5, 6], stream=True, max_tokens=30), metadata=[bearer(TOKEN)])
    next(running)
    refusal(ask, guarded, bearer(NEXT))
    rewrite(path, f"{TOKEN}\n{NEXT}\n")
    assert ask(guarded, bearer(TOKEN)) == ask(guarded, bearer(NEXT)) == [5, 0]
    rewrite(path, NEXT)
    assert "it may have been replaced" in refusal(ask, guarded, bearer(TOKEN))
    assert ask(guarded, bearer(NEXT)) == [5, 0]
    assert list(running)[-1].complete.completion_tokens == 30
    said = [record.getMessage() for record in caplog.records if "token" in record.getMessage()]
    assert said == [f"auth_token_file has changed: {n} tokens are in force" for n in (2, 1)]


@pytest.mark.parametrize("broken", ["", "# none", f"{NEXT}\nshort", None])
def test_a_broken_file_keeps_the_tokens_before_with_one_warning(guarded, path, caplog, broken):
    if broken is None:
        path.unlink()
    else:
        rewrite(path, broken)
    for _ in range(3):
        assert ask(guarded, bearer(TOKEN)) == [5, 0]
        refusal(ask, guarded, bearer(NEXT))
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage().endswith("The 1 tokens read before stay in force")
    assert not re.search(f"{TOKEN}|{NEXT}|short", warning.getMessage())
    rewrite(path, NEXT)
    assert ask(guarded, bearer(NEXT)) == [5, 0]
    refusal(ask, guarded, bearer(TOKEN))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "holds no token; write one a line"),
        (b"\n# a comment\n  \n", "holds no token"),
        (b"# a comment\n123456789012345\n", "line 2 of .* has 15 characters; a token has at least 16"),
        (b"two words make no token\n", "line 1 of .* has a space"),
        ("ein-schlüssel-mit-umlaut\n".encode(), "line 1 of .* beyond ASCII"),
        (bytes(range(128, 256)), "line 1 of"),
    ],
)
def test_unusable_files_are_named_and_never_shown(tmp_path, content, says):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^auth_token_file: .*{says}") as error:
        TokenFile(str(path))
    assert "12345678" not in str(error.value) and "words" not in str(error.value)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        TokenFile(str(tmp_path))


def test_nothing_of_a_token_is_kept(path):
    tokens = TokenFile(str(path))
    assert len(tokens) == 1 and TOKEN not in repr(vars(tokens))
