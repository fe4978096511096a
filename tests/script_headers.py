"""Parse the headers of scripts, so that tests can compare them with code and documents."""

from __future__ import annotations

from dataclasses import dataclass

from capsule_tasks.storage.scripts import sections_of, text_of


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    shape: str


@dataclass(frozen=True)
class Header:
    purpose: str
    keys: tuple[Key, ...]
    args: tuple[str, ...]
    returns: str
    refuses: str
    uses: tuple[str, ...]


def header_of(name: str) -> Header:
    sections = sections_of(text_of(name))
    return Header(
        purpose=" ".join(sections[""]),
        keys=tuple(Key(*line.split(None, 2)) for line in sections["KEYS"]),
        args=tuple(line.split()[0] for line in sections["ARGV"]),
        returns=" ".join(sections["RETURNS"]),
        refuses=" ".join(sections["REFUSES"]),
        uses=tuple(part.strip() for part in " ".join(sections["USES"]).split(",")),
    )
