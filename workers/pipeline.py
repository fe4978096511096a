"""The tasks of the demo: a batch of numbers is fetched, squared, summed and reported."""

from __future__ import annotations

import asyncio

from workers.app import app


@app.task
async def fetch(page: int) -> list[int]:
    """Stands for a page from a slow service; many pages are awaited at the same time."""
    await asyncio.sleep(0.2)
    return [page * 10 + digit for digit in range(10)]


@app.task
def square(numbers: list[int]) -> int:
    print(f"squaring {len(numbers)} numbers from {numbers[0]}")  # noqa: T201 - shown in the worker's log and the stream
    return sum(number * number for number in numbers)


@app.task
def total(parts: list[int]) -> int:
    return sum(parts)


@app.task
def report(value: int, title: str) -> str:
    return f"{title}: {value}"
