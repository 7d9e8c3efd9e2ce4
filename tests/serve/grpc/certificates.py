"""Certificates for tests, made by the openssl command."""

import subprocess
from pathlib import Path

_EC = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1".split()


class Authority:
    """Signs certificates for 127.0.0.1; each is a pair of files, `NAME.pem` and `NAME.key`."""

    def __init__(self, folder: Path, name: str = "authority"):
        self._folder, self._name = folder, name
        self._openssl(
            "req", "-x509", *_EC, "-nodes", "-subj", f"/CN={name}", "-out", self.certificate, "-keyout", self._key
        )

    @property
    def certificate(self) -> Path:
        return self._folder / f"{self._name}.pem"

    @property
    def _key(self) -> Path:
        return self._folder / f"{self._name}.key"

    def issue(self, name: str) -> tuple[Path, Path]:
        """The files of a certificate and its key."""
        certificate, key, asked = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        (names := self._folder / "names").write_text("subjectAltName=IP:127.0.0.1")
        self._openssl("req", *_EC, "-nodes", "-subj", f"/CN={name}", "-out", asked, "-keyout", key)
        signed_by = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-extfile", names)
        self._openssl("x509", "-req", "-in", asked, "-out", certificate, *signed_by)
        return certificate, key

    def encrypt(self, key: Path) -> Path:
        """A copy of `key` that needs a password."""
        encrypted = key.with_suffix(".encrypted")
        self._openssl("pkey", "-in", key, "-out", encrypted, "-aes256", "-passout", "pass:a password")
        return encrypted

    def _openssl(self, *arguments: str | Path) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
