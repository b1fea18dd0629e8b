"""Types of message fields, with their bounds: decoders check them, encoders do not."""

from typing import Annotated

from msgspec import Meta

from offbeat.protocols.text import NAME_PATTERN

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""An id, a version, a size."""
NaturalOrNone = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""A `Natural`, or -1 for none."""
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e18)]
Checksum = Annotated[int, Meta(ge=0)]
"""`common.weights.flat.checksum`; all 64 bits are used."""
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
NameOrEmpty = Annotated[str, Meta(pattern=f"{NAME_PATTERN}|^\\Z")]
Label = Annotated[str, Meta(max_length=256)]
"""A few words, compared or shown, made plain like `FreeText`."""
FreeText = Annotated[str, Meta(max_length=1 << 16)]
"""A sentence for logs and operators; no code reads its content. Decoding makes it plain (`protocols.text`)."""
PART_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z"
"""Pattern of the name of a part of a reward, which becomes part of a metric's name."""
MAX_PARTS = 32
"""Largest number of named parts of a reward."""
PartName = Annotated[str, Meta(pattern=f"^{PART_NAME}")]
RewardParts = Annotated[dict[PartName, float], Meta(max_length=MAX_PARTS)]
LeaseIds = Annotated[tuple[Natural, ...], Meta(max_length=1 << 18)]
LARGEST_REWARD = 1e6
"""Largest absolute value of a reward. The actor fails a reward beyond it, the learner rejects the group: squares and sums of
such numbers would swamp every other reward, and overflow in float32."""
Counts = Annotated[dict[Name, Seconds], Meta(max_length=16)]
"""Numbers of what an actor has used, by name; at least 0."""
Sources = Annotated[dict[Label, Label], Meta(max_length=256)]
"""Hashes of source files, by their paths below the folder of the import path (`common.user_code.functions.hash_sources`)."""
