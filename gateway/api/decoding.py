"""JSON bodies to typed structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from gateway.errors import InvalidRequestError

__all__ = ["decode_body"]

_Body = TypeVar("_Body")

_AT: Final = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `([^`]+)`")
_MAX_PARAM: Final = 128


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode a body.

    Raises:
        InvalidRequestError: It is no JSON, nested too deeply, or a field has a wrong type or value; ``param`` is the
            path of that field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("The body is not valid UTF-8.") from None


def _invalid_field(message: str) -> InvalidRequestError:
    place = _AT.search(message)
    path = place[1] if place else ""
    reason = message[: place.start()] if place else message
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        reason = "this field is required"
    param = path[:_MAX_PARAM] or None
    return InvalidRequestError(f"{param}: {reason}." if param else f"{reason}.", param=param)
