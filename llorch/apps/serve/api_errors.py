"""What a request is refused with: a status, and an error in the form of OpenAI's API."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SHOWN = 80  # characters of a value in a message


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Take an HTTP status and a message; `param` names the field at fault, `code` is for programs."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, object]:
        """Make the JSON of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Make the answer; 429 and 503 say when to try again."""
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        return JSONResponse(self.body(), self.status, headers)


def wrong(param: str, expected: str, actual: object = None) -> ApiError:
    """Make an error of status 400 for a field of the request."""
    text = f"{param}: expected {expected}" + ("" if actual is None else f", got {_shortened(actual)}")
    return ApiError(400, text, param=param)


def of_validation(error: ValidationError, body: object) -> ApiError:
    """Make the reply 400 for the first invalid field; if the field has several forms, list each expected one."""
    found = [
        (_field(one["loc"], body, missing=one["type"] == "missing"), one) for one in error.errors(include_url=False)
    ]
    top = found[0][0].partition(".")[0]
    param = max((field for field, _ in found if field.partition(".")[0] == top), key=lambda field: field.count("."))
    wrong_there = [one for field, one in found if field == param]
    said = " or ".join(dict.fromkeys(one["msg"] for one in wrong_there))
    actual = "" if wrong_there[0]["type"] == "missing" else f", got {_shortened(wrong_there[0]['input'])}"
    return ApiError(400, f"{param or 'body'}: {said}{actual}", param=param or None)


def _field(loc: Sequence[int | str], body: object, *, missing: bool) -> str:
    """Write the path to a value in the body, without the branches of unions that pydantic also names."""
    parts: list[str] = []
    for part in loc:
        if isinstance(body, Mapping) and part in body:
            body = body[part]
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        elif not missing or part is not loc[-1]:
            continue
        parts.append(str(part))
    return ".".join(parts)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
