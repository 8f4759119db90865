"""What a request gets that is not carried out: a status and OpenAI's error object.

Knows no endpoint and no field.
"""

from __future__ import annotations

from typing import Any


class ApiRefusal(Exception):
    """A request that is not carried out, with the HTTP `status` that says whose fault it is.

    `param` names the field, where one is to blame; `code` is a word for programs. `retry_after_s`
    (seconds) goes out as the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients read an error from."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid_field(param: str, message: str, code: str = "invalid_value") -> ApiRefusal:
    """A 400 that names the field to blame."""
    return ApiRefusal(400, f"{param}: {message}", param=param, code=code)
