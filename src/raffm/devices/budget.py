"""A Budget: what a device can hold. All of its limits must be kept together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from raffm.errors import BudgetError

Kind = Literal["params", "bytes", "flops", "memory"]
"""What a submodel costs: numbers, bytes on disk, work of one example, peak bytes of a training step."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Budget:
    """The most that a submodel may cost; limits that are not given do not count.

    >>> Budget(max_params=45_000_000).limits
    {'params': 45000000}
    """

    max_params: int | None = None
    max_bytes: int | None = None
    max_flops: int | None = None
    max_memory: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            _refuse(entry.name, getattr(self, entry.name))
        if not self.limits:
            raise BudgetError(f"the budget has no limit. Give at least one of {', '.join(f'max_{kind}' for kind in KINDS)}.")

    @property
    def limits(self) -> dict[Kind, int]:
        """The limits that were given."""
        every = {kind: getattr(self, f"max_{kind}") for kind in KINDS}
        return {kind: limit for kind, limit in every.items() if limit is not None}


def _refuse(name: str, limit: object) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit != limit:
        raise BudgetError(f"{name} is {limit!r}, but a limit is a number.")
    if limit <= 0:
        raise BudgetError(f"{name} is {limit!r}, but no submodel costs nothing. Give a limit above 0.")
