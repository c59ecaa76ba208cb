"""A model beside the policy that engines of this cluster serve: an older version, a judge."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.model.chat_model import ChatModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """A model that is never trained."""

    name: str
    """The model's name in the settings."""
    kind: str
    """version or engine."""
    model: ChatModel
    recorded_bytes: int
    """Size of the messages that the record of a call keeps."""
