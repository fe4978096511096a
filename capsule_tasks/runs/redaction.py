"""Recognises what looks like a secret: values under certain names, and credentials in URLs.

This is a guess, which rather leaves out too much. A secret under a harmless name is not recognised
unless it is part of a URL, and neither is a secret in a path. A user without a password counts as a
token (`https://TOKEN@host`), except for `git@` and for schemes whose users are only names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

SECRET_NAMES = (
    "*access_key*",
    "*accesskey*",
    "*api_key*",
    "*apikey*",
    "auth",
    "*_auth",
    "*authorization*",
    "*bearer*",
    "*connection_string*",
    "*cookie*",
    "*credential*",
    "*encryption_key*",
    "*headers*",
    "*jwt",
    "*passphrase*",
    "*passwd*",
    "*password*",
    "*private_key*",
    "*privatekey*",
    "pwd",
    "*_pwd",
    "*secret*",
    "*session_key*",
    "*signing_key*",
    "*token",
    "*tokens",
)
"""Shell patterns of the names whose values are left out, in lower case, with `_` for `-`, `.` and
blanks. Numbers under the names of tokens are kept, since they are counts."""

_SECRET_PARAMETERS = ("key", "subscription_key", "sig", "*signature", "pass")
"""Patterns of names that stand for secrets only as parameters of a URL."""

_NAME_SCHEMES = {
    *("ssh", "sftp", "scp", "rsync", "ftp", "postgres", "postgresql", "mysql", "mariadb"),
    *("abfs", "abfss", "wasb", "wasbs", "docker"),
}
"""Schemes, also combined as in `git+ssh`, in which a user without a password is only a name: of a
user, a container or an image."""

_USER_AND_PASSWORD = re.compile(
    r"""(?P<start>://(?:
        : |                               # no user, as in Redis URLs: all up to the @ is a password
        [^/?\#:@"'<>\[\]]+:              # a user, or a host whose port must not count as a password
        (?!\d{1,5}(?:[/?\#"'<>]|$))
    )).+(?=@)                             # also over an @ inside of the password
    """,
    re.VERBOSE,
)
_WITH_BLANKS = re.compile(
    r"""(?P<start>://[^/?\#:@"'<>\[\]\s]*:)
    (?!\d{1,5}\W)                         # a port
    [^/?\#@"'<>\s][^/?\#@"'<>\n]*(?<=\S)(?=@)""",
    re.VERBOSE,
)
_USER_ALONE = re.compile(r"""://(?P<user>[^/?\#:"'<>\[\](),;|{}]+)(?=@)""")
_SCHEME = re.compile(r"[\w.+-]*\Z")
_LONGEST_SCHEME = 40
_PARAMETER = re.compile(r"""(?P<start>[?&;\#](?P<name>[^=&;?\#]{1,64})=)(?P<value>[^&;\#"'<>]+)""")
_HIDDEN = "***"


def without_secrets(value: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A copy without what looks like a secret, and the places where something was left out.

    In a list, `None` replaces what is left out, so that the other items keep their places.
    """
    left_out: list[str] = []

    def kept(part: Any, at: str) -> Any:
        if isinstance(part, Mapping):
            return kept_fields(part, at)
        if isinstance(part, (list, tuple)):
            return [kept(each, f"{at}[{index}]") for index, each in enumerate(part)]
        if isinstance(part, str) and has_credentials(part):
            left_out.append(at)
            return None
        return part

    def kept_fields(fields: Mapping[str, Any], at: str) -> dict[str, Any]:
        shown = {}
        for name, each in fields.items():
            place = f"{at}.{redacted(str(name))}"
            if _is_secret(str(name), each):
                left_out.append(place)
            else:
                shown[name] = kept(each, place)
        return shown

    return kept_fields(value, "$"), tuple(left_out)


@lru_cache(maxsize=1024)
def is_secret_name(
    name: str, *, is_number: bool = False, patterns: tuple[str, ...] = SECRET_NAMES
) -> bool:
    """Whether a value under this name is a secret; a number under the name of tokens is a count."""
    spelled = re.sub(r"[-. ]", "_", name.lower())
    if is_number and spelled.endswith(("token", "tokens")):
        return False
    return any(fnmatchcase(spelled, pattern) for pattern in patterns)


def has_credentials(text: str) -> bool:
    """Whether the text contains a URL with a password or a token."""
    return redacted(text) != text


def redacted(text: str) -> str:
    """The text with `***` for the passwords and tokens of its URLs."""
    if "://" not in text:
        return text
    text = _WITH_BLANKS.sub(rf"\g<start>{_HIDDEN}", text)
    # Each word is searched only up to its last @, so that every search finds one: linear time.
    return "".join(_redacted_word(word) for word in re.split(r"(\s+)", text))


def _redacted_word(word: str) -> str:
    if "://" not in word:
        return word
    before, at, after = word.rpartition("@")
    word = _USER_AND_PASSWORD.sub(rf"\g<start>{_HIDDEN}", before + at) + after
    word = _USER_ALONE.sub(_redacted_user, word)
    return _PARAMETER.sub(_redacted_parameter, word)


def _redacted_user(found: re.Match[str]) -> str:
    end = found.start()
    scheme = _SCHEME.search(found.string[max(0, end - _LONGEST_SCHEME) : end].lower())
    is_name = scheme is not None and not _NAME_SCHEMES.isdisjoint(scheme[0].split("+"))
    return found[0] if is_name or found["user"] == "git" else f"://{_HIDDEN}"


def _redacted_parameter(found: re.Match[str]) -> str:
    is_number, patterns = found["value"].isdecimal(), (*SECRET_NAMES, *_SECRET_PARAMETERS)
    is_secret = is_secret_name(found["name"], is_number=is_number, patterns=patterns)
    return found["start"] + _HIDDEN if is_secret else found[0]


def _is_secret(name: str, value: Any) -> bool:
    if has_credentials(name) or (isinstance(value, str) and has_credentials(value)):
        return True
    return is_secret_name(name, is_number=isinstance(value, (int, float)))
