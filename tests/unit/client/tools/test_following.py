"""Outputs of executions, as models read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.client.tools.following import BoundedText, as_text, bounded


@given(st.lists(st.text("ab\n", max_size=30)), st.integers(2, 40))
def test_a_text_is_whole_or_has_its_beginning_and_its_end(pieces: list[str], limit: int) -> None:
    text, whole = BoundedText(limit), "".join(pieces)
    for piece in pieces:
        text.add(piece)
    half = limit // 2
    if len(whole) <= 2 * half:
        assert text.text == whole
        return
    left_out = len(whole) - 2 * half
    note = f"\n[{left_out} characters are left out here]\n"
    assert text.text == whole[:half] + note + whole[-half:]


def test_a_text_within_its_limit_stays() -> None:
    assert bounded("abc", 3) == "abc"
    assert bounded("abcdef", 4) == "ab\n[2 characters are left out here]\nef"


def test_values_are_json_or_what_they_look_like() -> None:
    assert as_text("text") == "text"
    assert as_text({"n": [1, None]}) == '{"n":[1,null]}'
    assert as_text({1, 2}) == "[1,2]"
    assert as_text({"n": 1j}) == '{"n":"1j"}'
