"""What looks like a secret: values under certain names, and credentials in URLs.

A guess that errs on the side of leaving out. A secret under an innocent name that is no part of a
URL is not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
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
"""Shell patterns of the names, in lower case and with `_` for `-`, `.` and blanks, whose values are
left out. Under those of tokens a number is kept: it counts them."""

_USER_AND_PASSWORD = re.compile(
    r"""(?P<start>://(?:
        : |                               # no user, as in Redis URLs: all up to the @ is a password
        [^/?\#:@"'<>\[\]]+:              # a user, or a host whose port must not count as a password
        (?!\d{1,5}(?:[/?\#"'<>]|$))
    ))[^@]+(?=@)""",
    re.VERBOSE,
)
_PARAMETER = re.compile(r"""(?P<start>[?&;\#](?P<name>[^=&;?\#]{1,64})=)(?P<value>[^&;\#"'<>]+)""")
_HIDDEN = "***"


def without_secrets(value: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A copy without what looks like a secret, and where that was.

    In a list `None` takes the place of what is left out, so that the others keep theirs.
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


def is_secret_name(name: str) -> bool:
    return any(fnmatchcase(_spelled(name), pattern) for pattern in SECRET_NAMES)


def has_credentials(text: str) -> bool:
    """Whether there is a URL in the text, anywhere, with a password or a token."""
    return redacted(text) != text


def redacted(text: str) -> str:
    """The text with `***` for the passwords and tokens of its URLs."""
    if "://" not in text:
        return text
    # Word by word, each up to its last @, so that no search for an @ is in vain: linear time.
    return "".join(_redacted_word(word) for word in re.split(r"(\s+)", text))


def _redacted_word(word: str) -> str:
    if "://" not in word:
        return word
    before, at, after = word.rpartition("@")
    word = _USER_AND_PASSWORD.sub(rf"\g<start>{_HIDDEN}", before + at) + after
    return _PARAMETER.sub(_redacted_parameter, word)


def _redacted_parameter(found: re.Match[str]) -> str:
    is_harmless = not is_secret_name(found["name"]) or (
        found["value"].isdecimal() and _may_be_counted(found["name"])
    )
    return found[0] if is_harmless else found["start"] + _HIDDEN


def _is_secret(name: str, value: Any) -> bool:
    if has_credentials(name) or (isinstance(value, str) and has_credentials(value)):
        return True
    is_count = isinstance(value, (int, float)) and _may_be_counted(name)
    return is_secret_name(name) and not is_count


def _may_be_counted(name: str) -> bool:
    return _spelled(name).endswith(("token", "tokens"))


def _spelled(name: str) -> str:
    return re.sub(r"[-. ]", "_", name.lower())
