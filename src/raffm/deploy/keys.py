"""Certificates and keys for a trial: an authority, whom it vouches for, and a key for every node."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365


LOCAL = ("localhost", "127.0.0.1", "::1")


def write_certificates(folder: Path, hosts: tuple[str, ...] = LOCAL) -> None:
    """Write ca.crt, server.pem and .key for these names and addresses, local.pem and .key for a node's talk with itself.

    The authority's own key is not kept: it vouches for nobody else.
    """
    authority = ec.generate_private_key(ec.SECP256R1())
    root = _certificate("raffm trial authority", authority.public_key(), None, authority, is_authority=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    for name, known in (("server", hosts), ("local", LOCAL)):
        own = ec.generate_private_key(ec.SECP256R1())
        made = _certificate(known[0], own.public_key(), root, authority, hosts=known)
        (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        _write_secret(folder / f"{name}.key", _pem(own, serialization.PrivateFormat.PKCS8))


def write_node_key(path: Path) -> None:
    """Write a node's private key, and beside it the public one, which the server is told."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_secret(path, _pem(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    hosts: tuple[str, ...] = (),
    is_authority: bool = False,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(is_authority), critical=True)
    )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return made.sign(signer, hashes.SHA256())


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
    """Readable by its owner alone, from the first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
