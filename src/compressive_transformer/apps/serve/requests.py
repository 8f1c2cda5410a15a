"""Bodies of requests. Options of generation are the fields of `Sampling`, whichever there are."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from ...errors import CompressiveError
from ...generate import Sampling
from .errors import Refusal

MAX_STOPS = 4
STRICT = ConfigDict(extra="forbid")

# Fields of OpenAI's completions that are not supported, with the values that request nothing.
UNSUPPORTED = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}


def _stops(value: Any) -> Any:
    """Return one stop string as a tuple."""
    if isinstance(value, list) and len(value) > MAX_STOPS:
        raise CompressiveError(f"stop must be at most {MAX_STOPS} texts, got {len(value)}")
    return (value,) if isinstance(value, str) else value


class Append(BaseModel):
    """Text to read."""

    model_config = STRICT
    text: str
    pieces: bool = False
    """True to get the bits of each piece of the text."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Generate(Sampling):
    """Text to generate in a session."""

    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    tokens: int = 200
    stream: bool = True


@dataclass(frozen=True, config=STRICT)
class StreamOptions:
    """Options of a stream."""

    include_usage: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Completion(Sampling):
    """Completion in OpenAI's format; null is the default of each field."""

    model: str
    prompt: str | list[str] = ""
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    max_tokens: int = 16
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    """Ignored: a name that clients send for their statistics."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, content: Any) -> Any:
        """Refuse what is not supported: no field is ignored silently."""
        if not isinstance(content, dict):
            return content
        known = {field.name for field in fields(cls)}
        for name, value in content.items():
            if name not in known and name not in UNSUPPORTED:
                raise Refusal(400, "unknown_field", f"unknown field {name[:100]!r}")
            if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
                raise Refusal(400, "unsupported", f"{name} is not supported; leave it out")
        return {name: value for name, value in content.items() if value is not None and name in known}
