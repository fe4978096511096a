"""Histories encrypted at rest, with keys that the caller keeps (extra `encryption`).

A record is AES-256-GCM over the item's JSON, under a key made for its session, and bound to the
session: moved to another history it cannot be read there. Redis sees sizes, counts and times.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from capsule_tasks.errors import InvalidSetting, UnknownKey
from capsule_tasks.storage.codec import Item, Unreadable, decoded, encoded

KEY_BYTES = 32
NONCE_BYTES = 12
SESSIONS_KEPT = 1024

H = TypeVar("H", bound=Any)


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    """A record: JSON again, so that a reader without keys sees what it is."""

    capsule_key: str
    sealed: str


class EncryptingCodec:
    """Seals with the first key and opens with any: put a new key in front to change keys.

    A record under a key that was not given raises UnknownKey: it is no corrupt record, and must
    not end in quarantine. One that is not sealed, or was changed, is corrupt.
    """

    def __init__(self, *keys: Any) -> None:
        if not keys:
            raise InvalidSetting("keys", keys, f"at least one key of {KEY_BYTES} bytes")
        for number, key in enumerate(keys):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                shown = f"<{type(key).__name__}>"
                raise InvalidSetting(f"keys[{number}]", shown, f"{KEY_BYTES} bytes, all of them")
        self._keys = {sha256(b"capsule key id" + key).hexdigest()[:16]: key for key in keys}
        self._first = next(iter(self._keys))
        beginning = b'{"capsule_key":"'
        self.guard = (beginning, *(beginning + name.encode() + b'"' for name in self._keys))
        self._decode = msgspec.json.Decoder(_Sealed).decode
        self._cipher = lru_cache(SESSIONS_KEPT)(self._new_cipher)

    def encode(self, item: Item, session_id: str) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher(self._first, session_id).encrypt(nonce, encoded(item), None)
        return msgspec.json.encode(_Sealed(self._first, b64encode(nonce + sealed).decode()))

    def decode(self, record: bytes, session_id: str) -> Item:
        try:
            envelope = self._decode(record)
        except (ValueError, msgspec.MsgspecError):
            raise Unreadable("it is not sealed") from None
        if envelope.capsule_key not in self._keys:
            raise UnknownKey(envelope.capsule_key, tuple(self._keys))
        cipher = self._cipher(envelope.capsule_key, session_id)
        try:
            sealed = b64decode(envelope.sealed, validate=True)
            return decoded(cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None))
        except (InvalidTag, ValueError):
            raise Unreadable("it was changed, or is another session's") from None

    def _new_cipher(self, key_id: str, session_id: str) -> AESGCM:
        info = b"capsule_tasks history " + session_id.encode()
        return AESGCM(HKDF(SHA256(), KEY_BYTES, None, info).derive(self._keys[key_id]))


def encrypted(history: H, keys: Sequence[bytes]) -> H:
    """The same history with every item encrypted; it shares the connections of the one given."""
    sealed: H = history.with_codec(EncryptingCodec(*keys))
    return sealed
