"""Errors of the API: an HTTP status, and a body in OpenAI's format."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MAX_VALUE = 80  # characters of a value in a message


class ApiError(Exception):
    """Error that becomes the answer to a request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Hold an HTTP status and a message; `param` names the wrong field, `code` is for programs."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, object]:
        """Return the body as JSON values."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Make the HTTP response; 429 and 503 have a retry-after header."""
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        return JSONResponse(self.body(), self.status, headers)


def wrong(param: str, expected: str, actual: object = None) -> ApiError:
    """Make an ApiError 400 for a field of the request."""
    text = f"{param}: expected {expected}" + ("" if actual is None else f", got {_shorten(actual)}")
    return ApiError(400, text, param=param)


def to_validation_error(error: ValidationError, body: object) -> ApiError:
    """Make an ApiError 400 for the first invalid field, as deep as possible; list each type that it may have."""
    issues = [
        (_field(issue["loc"], body, missing=issue["type"] == "missing"), issue)
        for issue in error.errors(include_url=False)
    ]
    top = issues[0][0].partition(".")[0]
    param = max((field for field, _ in issues if field.partition(".")[0] == top), key=lambda field: field.count("."))
    field_issues = [issue for field, issue in issues if field == param]
    messages = " or ".join(dict.fromkeys(issue["msg"] for issue in field_issues))
    actual = "" if field_issues[0]["type"] == "missing" else f", got {_shorten(field_issues[0]['input'])}"
    return ApiError(400, f"{param or 'body'}: {messages}{actual}", param=param or None)


def _field(loc: Sequence[int | str], body: object, *, missing: bool) -> str:
    """Format the path of a value in the body, without the union branches in pydantic's location."""
    keys: list[str] = []
    for key in loc:
        if isinstance(body, Mapping) and key in body:
            body = body[key]
        elif isinstance(body, list) and isinstance(key, int) and key < len(body):
            body = body[key]
        elif not missing or key is not loc[-1]:
            continue
        keys.append(str(key))
    return ".".join(keys)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."
