"""Certificates for tests of TLS: an authority, and files of what it signs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of PEM files, as settings want them."""

    ca: Path
    cert: Path
    key: Path


def issued(authority: trustme.CA, folder: Path, name: str = "server") -> Files:
    """A certificate for 127.0.0.1 and localhost, written into `folder`."""
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    files = Files(*(folder / f"{name}.{part}.pem" for part in ("ca", "cert", "key")))
    authority.cert_pem.write_to_path(str(files.ca))
    files.cert.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(str(files.key))
    return files
