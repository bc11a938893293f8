"""A certificate for one server of one run. Its key never leaves the process; clients get the certificate itself to trust."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

NAME = "weft"
"""The name in every certificate. Clients trust the certificate itself, not the name."""
VALID = datetime.timedelta(days=3650)
"""How long a certificate is valid."""
EARLIER = datetime.timedelta(days=1)
"""A certificate is valid from this long before it was made, because the clocks of nodes may differ."""


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key, both in PEM form."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "<Certificate with its key>"


def make_certificate() -> Certificate:
    """Make a P-256 key and a certificate that is signed with it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
