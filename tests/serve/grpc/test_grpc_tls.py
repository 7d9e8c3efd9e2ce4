"""TLS of the port, the client's certificates, and the files that cannot be used."""

import re

import grpc
import pytest
from certificates import Authority
from grpc_harness import request, write_tokenizer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from test_grpc_process import process, run

from serve.grpc.config import parse
from serve.grpc.tls import server_credentials


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(authority):
    """Files of the server's certificate and key."""
    return tuple(str(path) for path in authority.issue("server"))


@pytest.fixture(scope="module")
def client(authority):
    return authority.issue("client")


def roots(authority: Authority, pair=None) -> grpc.ChannelCredentials:
    """A client's credentials: whom it trusts, and who it is."""
    certificate, key = (None, None) if pair is None else (path.read_bytes() for path in pair)
    return grpc.ssl_channel_credentials(authority.certificate.read_bytes(), key, certificate)


def tokens_of(address: str, credentials: grpc.ChannelCredentials) -> list[int]:
    with grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        (answer,) = pb_grpc.VllmEngineStub(channel).Generate(request([5, 0]), timeout=5)
        return list(answer.complete.output_ids)


def refusal(address: str, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        tokens_of(address, credentials)
    return error.value.code()


def test_everything_on_the_port_is_encrypted(serving, authority, pair):
    harness = serving(credentials=server_credentials(*pair, None))
    address = harness.server.address
    assert tokens_of(address, roots(authority)) == [5, 0]
    with grpc.secure_channel(address, roots(authority)) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=5)
        assert len(answer.list_services_response.service) == 3
    with pytest.raises(grpc.RpcError) as error:  # the harness's own channel is not
        harness.generate([5, 0])
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_trusts_another_authority_stays_away(serving, tmp_path, pair):
    harness = serving(credentials=server_credentials(*pair, None))
    assert refusal(harness.server.address, roots(Authority(tmp_path))) is grpc.StatusCode.UNAVAILABLE


def test_mutual_tls_asks_for_a_certificate_of_the_authority(serving, authority, tmp_path, pair, client):
    harness = serving(credentials=server_credentials(*pair, str(authority.certificate)))
    address = harness.server.address
    assert tokens_of(address, roots(authority, client)) == [5, 0]
    assert refusal(address, roots(authority)) is grpc.StatusCode.UNAVAILABLE
    stranger = Authority(tmp_path).issue("stranger")
    assert refusal(address, roots(authority, stranger)) is grpc.StatusCode.UNAVAILABLE


def test_no_files_no_tls():
    assert server_credentials(None, None, None) is None


def test_comments_in_a_bundle_may_be_in_any_language(authority, pair, tmp_path):
    (bundle := tmp_path / "bundle.pem").write_bytes("# Zürich\n".encode() + authority.certificate.read_bytes() * 2)
    assert server_credentials(*pair, str(bundle)) is not None


DAMAGED = b"-----BEGIN CERTIFICATE-----\nbm90IGEgY2VydGlmaWNhdGU=\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("option", ["tls_certificate", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\x30\x82\x01\xff", "holds no usable"),  # DER begins so
        (DAMAGED, "holds no usable"),
    ],
)
def test_unusable_files_are_named_by_their_option(authority, pair, tmp_path, option, content, says):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    files = dict(zip(("tls_certificate", "tls_key"), pair, strict=True)) | {"tls_client_ca": str(authority.certificate)}
    files[option] = str(path)
    with pytest.raises(ValueError, match=rf"^{option}: .*{says}"):
        server_credentials(*files.values())


def test_swapped_mismatched_and_encrypted_keys_are_told_apart(authority, pair, client, tmp_path):
    certificate, key = pair
    with pytest.raises(ValueError, match=r"tls_certificate: .* no usable certificate"):
        server_credentials(key, certificate, None)
    with pytest.raises(ValueError, match=r"tls_key: .* is not the key of the certificate in tls_certificate"):
        server_credentials(certificate, str(client[1]), None)
    with pytest.raises(ValueError, match=r"tls_key: .* is encrypted"):
        server_credentials(certificate, str(authority.encrypt(client[1])), None)
    with pytest.raises(ValueError, match=r"tls_key: .* cannot be read: Is a directory"):
        server_credentials(certificate, str(tmp_path), None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tls_certificate: a.pem", "tls_certificate is given without tls_key; give both for TLS, or neither."),
        ("tls_key: a.key", "tls_key is given without tls_certificate"),
        ("tls_client_ca: a.pem", "tls_client_ca is given without tls_certificate and tls_key"),
        ("host: 0.0.0.0\nauth_token_file: t", "host is 0.0.0.0: tokens could be read on the way"),
        ("host: '::'\nauth_token_file: t", "set insecure_auth to true"),
        ("host: example.org\nauth_token_file: t", "Give tls_certificate and tls_key"),
    ],
)
def test_options_that_do_not_fit_each_other_are_named(tmp_path, text, says):
    (path := tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(["--config", str(path)])


@pytest.mark.parametrize(
    "options",
    ["--host localhost", "--host ::1", "--host 0.0.0.0 --insecure-auth", "--host :: --tls-certificate a --tls-key b"],
)
def test_tokens_are_taken_where_nobody_listens_or_the_user_says_so(options):
    assert parse([*options.split(), "--auth-token-file", "tokens"]).auth_token_file == "tokens"


@pytest.mark.parametrize("option", ["tls-key", "auth-token-file"])
def test_unusable_files_are_exit_code_2_before_the_model_is_loaded(pair, option):
    code = (
        "import sys\n"
        "from serve.grpc.__main__ import main\n"
        "def assemble(*_, **__):\n"
        "    raise ValueError('loaded')\n"
        "sys.exit(main(['--port', '0', *sys.argv[1:]], assemble))"
    )
    files = {"tls-certificate": pair[0], "tls-key": pair[1]} | {option: "no-such-file"}
    answer = run("-c", code, *(word for name, path in files.items() for word in (f"--{name}", path)))
    assert (answer.returncode, answer.stdout) == (2, "")
    last = f"error: {option.replace('-', '_')}: 'no-such-file' cannot be read: No such file or directory."
    assert answer.stderr.splitlines()[-1] == last


def test_a_whole_server_with_tls_and_tokens(tmp_path, authority, pair):
    write_tokenizer(tmp_path)
    (tokens := tmp_path / "tokens").write_text("a-token-for-the-test\n")
    options = ["--tls-certificate", pair[0], "--tls-key", pair[1], "--auth-token-file", str(tokens)]
    with process(tmp_path, *options) as server:
        address = re.search(r"grpc=(\S+)", server.stdout.readline())[1]
        bearer = grpc.composite_channel_credentials(
            roots(authority), grpc.access_token_call_credentials("a-token-for-the-test")
        )
        assert tokens_of(address, bearer) == [5, 0]
        assert refusal(address, roots(authority)) is grpc.StatusCode.UNAUTHENTICATED
        server.terminate()
        _, log = server.communicate(timeout=20)
        assert "Clients need TLS, one of 1 tokens" in log and "a-token" not in log
