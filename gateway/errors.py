"""One exception hierarchy for the gateway; the HTTP edge turns each into OpenAI's error shape.

Every message tells the caller what to do. None ever carries prompt or document text.
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "BodyTimeoutError",
    "ConfigError",
    "ConflictError",
    "ContextLengthError",
    "GenerationError",
    "HeadstartError",
    "InvalidRequestError",
    "MethodNotAllowedError",
    "ModelNotFoundError",
    "NotSupportedByReplica",
    "OverloadedError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PinNotFoundError",
    "RateLimitedError",
    "ReplicaError",
    "ReplicaLost",
    "ReplicaNotFoundError",
    "ReplicaRefusal",
    "ReplicaUnavailable",
    "RequestTimeoutError",
    "TemplateNotFoundError",
]


class HeadstartError(Exception):
    """Base of all errors the gateway raises on purpose.

    ``status`` is the HTTP status, ``type`` and ``code`` the fields of OpenAI's error object, ``param`` the field of the
    body that is at fault, ``retry_after`` seconds for the header of the same name.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(HeadstartError):
    """The configuration cannot be used; raised before anything is started."""


class InvalidRequestError(HeadstartError):
    """The body asks for something that cannot be done; ``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the model or the block pool."""

    code = "context_length_exceeded"


class PayloadTooLargeError(HeadstartError):
    """The body is longer than the limit; counted on the bytes received."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class BodyTimeoutError(HeadstartError):
    """The client took too long to send the body."""

    status = 408
    type = "invalid_request_error"
    code = "timeout"


class AuthenticationError(HeadstartError):
    """No valid API key."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(HeadstartError):
    """A valid identity that may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class RateLimitedError(HeadstartError):
    """The caller has asked more often than ``limits.requests_per_minute``."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, limit: int, *, retry_after: int) -> None:
        super().__init__(f"More than {limit} requests in a minute; come back in {retry_after} s.")
        self.retry_after = retry_after


class ModelNotFoundError(HeadstartError):
    """The named model is not served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class TemplateNotFoundError(HeadstartError):
    """No template of this name or version is registered."""

    status = 404
    type = "invalid_request_error"
    code = "template_not_found"


class ReplicaNotFoundError(HeadstartError):
    """No replica has this id."""

    status = 404
    type = "invalid_request_error"
    code = "replica_not_found"


class PinNotFoundError(HeadstartError):
    """There is no pin of this id."""

    status = 404
    type = "invalid_request_error"
    code = "pin_not_found"


class ConflictError(HeadstartError):
    """What is there already forbids the change."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class MethodNotAllowedError(HeadstartError):
    """The path exists, the method does not. ``allowed`` lists those that do."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class OverloadedError(HeadstartError):
    """The queue is full or the server is draining; the client should come back."""

    status = 503
    type = "server_error"
    code = "overloaded"
    retry_after = 1


class RequestTimeoutError(HeadstartError):
    """The request took longer than ``limits.request_timeout_s``; it was ended."""

    status = 504
    code = "timeout"


class GenerationError(HeadstartError):
    """A replica failed while it computed the request, and trying again did not help."""

    status = 500
    code = "engine_error"


class ReplicaError(HeadstartError):
    """A replica answered a control call with an error."""

    status = 502
    code = "replica_error"


class NotSupportedByReplica(ReplicaError):
    """A server of another kind knows no such control call."""


class ReplicaRefusal(HeadstartError):
    """A remote replica refuses the request for the caller's sake: its own answer, which the caller gets.

    ``status`` is below 500. The message is the replica's and may quote the request: it goes to the caller alone.
    """

    type = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.retry_after = retry_after
        if type is not None:
            self.type = type


class ReplicaUnavailable(HeadstartError):
    """No replica can take the request now."""

    status = 503
    code = "no_replica"
    retry_after = 2

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        if retry_after is not None:
            self.retry_after = retry_after


class ReplicaLost(HeadstartError):
    """The replica died with the request in flight. ``produced`` tells whether any token had come before."""

    status = 502
    code = "replica_lost"

    def __init__(self, message: str, *, produced: bool) -> None:
        super().__init__(message)
        self.produced = produced
