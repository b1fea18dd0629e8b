"""The base of every section of settings, and the bounded types of their values."""

from typing import Annotated

import msgspec
from msgspec import Meta

NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFraction = Annotated[float, Meta(gt=0, le=1)]
ImportPath = Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")]
RewardName = Annotated[str, Meta(pattern=r"^(\w+|[\w.]+:\w+)$")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of every section: immutable, and strict about unknown settings."""
