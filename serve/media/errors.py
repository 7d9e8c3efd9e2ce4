"""The one exception of this package."""

from __future__ import annotations

from serve.request import InvalidRequest


class UnusableMedia(InvalidRequest):
    """A picture or clip cannot be used; the message says why and what to send instead. gRPC: INVALID_ARGUMENT."""
