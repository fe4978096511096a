"""Descriptions from docstrings of the usual styles."""

from __future__ import annotations

import pytest

from capsule_tasks.runs.agents.docstrings import read_docstring

GOOGLE = """Pay an order back.

    Only once.

    Args:
        order (int): The number
            of the order.
        euros: How much: in euros.
        *rest: More.

    Returns:
        A receipt.
    """
NUMPY = """Pay an order back.

    Only once.

    Parameters
    ----------
    order : int
        The number
        of the order.
    euros, more : int, optional
        How much: in euros.

    Returns
    -------
    str
    """
REST = """Pay an order back.

    Only once.

    :param int order: The number
        of the order.
    :param euros: How much: in euros.
    :type euros: int
    :returns: A receipt.
    """


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST])
def test_the_text_and_the_parameters_are_read(docstring: str) -> None:
    found = read_docstring(docstring)
    assert found.text == "Pay an order back.\n\nOnly once."
    assert found.parameters["order"] == "The number of the order."
    assert found.parameters["euros"] == "How much: in euros."


def test_stars_and_several_names_are_read() -> None:
    assert read_docstring(GOOGLE).parameters["rest"] == "More."
    assert read_docstring(NUMPY).parameters["more"] == "How much: in euros."


def test_a_section_right_below_the_text_is_read() -> None:
    found = read_docstring("Text.\nArgs:\n    a: An a.\nMore text.")
    assert (found.text, found.parameters) == ("Text.", {"a": "An a."})


@pytest.mark.parametrize("docstring", [None, "", "  \n", "Args:", "Args:\n", ":param", ":param:"])
def test_odd_docstrings_say_nothing_of_parameters(docstring: str | None) -> None:
    assert read_docstring(docstring).parameters == {}


def test_words_that_look_like_sections_are_text() -> None:
    text = "Note: this is text.\nReturns: so is this.\n\nArgs: and this."
    assert read_docstring(text).text == text
