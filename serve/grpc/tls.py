"""TLS of the port: PEM files to gRPC's credentials, checked here because gRPC calls any fault a taken port."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc


def server_credentials(
    certificate: str | None, key: str | None, client_ca: str | None
) -> grpc.ServerCredentials | None:
    """What the port shows its clients and asks of them; None for a port without TLS.

    Args:
        certificate: PEM file (`tls_certificate`): the server's certificate, then those between it and its authority.
        key: PEM file (`tls_key`): the private key, not encrypted.
        client_ca: PEM file (`tls_client_ca`): authorities; every client must then show a certificate of one of them.

    Raises:
        ValueError: a file cannot be read, is empty or not what its option says, or the key is another certificate's.
            The message names the option, and shows nothing of the files' content.
    """
    if certificate is None or key is None:
        return None
    chain = _certificates("tls_certificate", certificate)
    private = _read("tls_key", key)
    _check_key(certificate, key)
    roots = None if client_ca is None else _certificates("tls_client_ca", client_ca)
    return grpc.ssl_server_credentials([(private, chain)], roots, require_client_auth=roots is not None)


def _certificates(option: str, path: str) -> bytes:
    content = _read(option, path)
    try:
        # Comments between the certificates may be in any language.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        message = f"{option}: {path} holds no usable certificate in PEM form; it must have lines from"
        raise ValueError(f"{message} -----BEGIN CERTIFICATE----- to -----END CERTIFICATE-----.") from None
    return content


def _check_key(certificate: str, key: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_refuse_password)
    except _Encrypted:
        message = f"tls_key: {key} is encrypted, and nobody is there to type its password;"
        raise ValueError(f"{message} write it without one (openssl pkey -in KEY -out PLAIN).") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"tls_key: {key} is not the key of the certificate in tls_certificate, {certificate}"
            raise ValueError(message + "; name the pair that was made together.") from None
        message = f"tls_key: {key} holds no usable private key in PEM form (-----BEGIN PRIVATE KEY-----)."
        raise ValueError(message) from None


class _Encrypted(Exception):
    pass


def _refuse_password() -> str:
    raise _Encrypted  # OpenSSL would ask at the terminal


def _read(option: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ValueError(f"{option}: {path!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not content.strip():
        raise ValueError(f"{option}: {path} is empty.")
    return content
