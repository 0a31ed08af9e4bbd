"""Certificates of the cluster: one certification authority, one key pair per program.

Made anew at every start (27 elliptic-curve keys take some hundredths of a second), so that nothing
has to be renewed and a removed cluster leaves no key that is still good.
"""

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from foremoe_cluster.settings import API_SERVER, API_SERVICE_ADDRESS, CLUSTER_DOMAIN, HOST_ADDRESS, Node

VALID = datetime.timedelta(days=365)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who a certificate is for."""

    name: str
    """File name."""
    user: str
    group: str | None = None
    hosts: tuple[str, ...] = ()
    """DNS names and addresses it may serve."""
    kubeconfig: bool = False


def identities(nodes: Sequence[Node]) -> list[Identity]:
    """Every program that needs to prove itself, as Kubernetes' own roles expect them."""
    service = "kubernetes.default.svc"
    hosts = ("kubernetes", "kubernetes.default", service, f"{service}.{CLUSTER_DOMAIN}", "localhost")
    return [
        Identity(
            name="apiserver", user="kube-apiserver", hosts=(*hosts, API_SERVICE_ADDRESS, HOST_ADDRESS, "127.0.0.1")
        ),
        Identity(name="apiserver-kubelet-client", user="apiserver-kubelet-client", group="system:masters"),
        Identity(name="front-proxy-client", user="front-proxy-client"),
        Identity(name="admin", user="admin", group="system:masters", kubeconfig=True),
        Identity(name="controller-manager", user="system:kube-controller-manager", kubeconfig=True),
        Identity(name="scheduler", user="system:kube-scheduler", kubeconfig=True),
        Identity(name="kube-proxy", user="system:kube-proxy", kubeconfig=True),
        Identity(name="coredns", user="system:coredns", kubeconfig=True),
        Identity(name="volumes", user="foremoe:volumes", kubeconfig=True),
        *(
            Identity(
                name=node.name,
                user=f"system:node:{node.name}",
                group="system:nodes",
                hosts=(node.name, node.address),
                kubeconfig=True,
            )
            for node in nodes
        ),
    ]


def create(folder: Path, nodes: Sequence[Node]) -> None:
    """Write ca.crt, sa.key, sa.pub, and NAME.crt, NAME.key, NAME.kubeconfig of every identity."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("foremoe-cluster")
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    _write(folder / "ca.key", _private(ca_key))
    _write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    for identity in identities(nodes):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(identity, key.public_key(), ca, ca_key).public_bytes(serialization.Encoding.PEM)
        _write(folder / f"{identity.name}.key", _private(key))
        _write(folder / f"{identity.name}.crt", certificate)
        if identity.kubeconfig:
            text = kubeconfig(ca.public_bytes(serialization.Encoding.PEM), certificate, _private(key))
            _write(folder / f"{identity.name}.kubeconfig", text.encode())
    service_accounts = ec.generate_private_key(ec.SECP256R1())
    _write(folder / "sa.key", _private(service_accounts))
    public = service_accounts.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _write(folder / "sa.pub", public)


def kubeconfig(ca: bytes, certificate: bytes, key: bytes) -> str:
    """A kubeconfig that needs no other file (JSON, which is YAML)."""

    def data(pem: bytes) -> str:
        return base64.b64encode(pem).decode()

    name = "foremoe-cluster"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": API_SERVER, "certificate-authority-data": data(ca)}}],
        "users": [{"name": name, "user": {"client-certificate-data": data(certificate), "client-key-data": data(key)}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    return json.dumps(document, indent=1) + "\n"


def _sign(
    identity: Identity, key: ec.EllipticCurvePublicKey, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(_name(identity.user, identity.group), ca.subject, key)
        .add_extension(_key_usage(), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    if identity.hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in identity.hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + VALID)
    )


def _key_usage(*, sign_certificates: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=sign_certificates, crl_sign=sign_certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(user: str, group: str | None = None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
    if group:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
