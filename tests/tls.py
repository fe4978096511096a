"""TLS in front of a server that does not speak it."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificates:
    """A certificate for 127.0.0.1 that signs itself, and its key."""

    def __init__(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        now = dt.datetime.now(dt.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.certificate = folder / "certificate.pem"
        self.key = folder / "key.pem"
        pem = serialization.Encoding.PEM
        self.certificate.write_bytes(certificate.public_bytes(pem))
        self.key.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )


@contextlib.contextmanager
def tls_in_front_of(port: int, certificates: Certificates) -> Iterator[int]:
    """A TLS endpoint in front of a server: the servers of the wheels are built without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener, context, port), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def accept(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=relay, args=(plain, context, port), daemon=True).start()


def relay(plain: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with contextlib.suppress(OSError), plain:
        client = context.wrap_socket(plain, server_side=True)
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            threading.Thread(target=copy, args=(server, client), daemon=True).start()
            copy(client, server)


def copy(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)
