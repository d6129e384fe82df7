"""Exceptions for a service's gRPC errors."""

from __future__ import annotations

from typing import Any

import grpc


class ServiceError(RuntimeError):
    """A call failed, or the service cannot be reached; the message is the service's own sentence.

    Subclasses: InvalidArgument, ResourceExhausted, Unavailable, Aborted, NotFound,
    DeadlineExceeded, Unauthenticated. This class itself stands for any other status.
    """


class InvalidArgument(ServiceError, ValueError):
    """The request can never be served as it is; the message names the field."""


class ResourceExhausted(ServiceError):
    """The service has no room, or the client reads too slowly; the message names the cap."""


class Unavailable(ServiceError):
    """The service cannot be reached, starts or drains, or could not replace what it lost."""


class Aborted(ServiceError):
    """The request was aborted."""


class NotFound(ServiceError):
    """No such request is running or waiting."""


class Unauthenticated(ServiceError):
    """The API key is missing or unknown."""


class DeadlineExceeded(ServiceError):
    """The request was aborted: not ended within timeout_s, or not placed within queue_timeout_s."""


_ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Aborted,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def service_error(target: str, error: Any) -> ServiceError:
    """The exception for a grpc.RpcError of a call to `target`, host:port."""
    code, details = error.code(), error.details() or ""
    absences = ("failed to connect", "DNS resolution failed", "errors resolving")
    if code is grpc.StatusCode.UNAVAILABLE and any(absence in details for absence in absences):
        hint = "; if it has TLS, give --tls or --ca" if "Socket closed" in details else ""
        return Unavailable(f"no service answers at {target} ({details}){hint}")
    if "Deadline Exceeded" in details:  # gRPC's own, on this side or on the other.
        return DeadlineExceeded("timeout_s ran out before the end")
    return _ERRORS.get(code, ServiceError)(details or code.name)
