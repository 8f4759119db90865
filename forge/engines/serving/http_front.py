"""The HTTP face of one served model: OpenAI's endpoints, health, metrics, and who may ask.

Knows no engine: it talks to a scheduler, and to the model's tokenizer and template.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from forge.engines.serving.answer_parser import AnswerParser
from forge.engines.serving.answers import AnswerForm
from forge.engines.serving.chat_text import ModelText
from forge.engines.serving.constraints import Constraints
from forge.engines.serving.generation import Generation
from forge.engines.serving.http_answer import AnswerResponse, unavailable
from forge.engines.serving.http_gate import HttpGate
from forge.engines.serving.refusal import ApiRefusal, invalid_field
from forge.engines.serving.requests import (
    ChatOrder,
    GenerationOrder,
    read_chat_order,
    read_completion_order,
)
from forge.engines.serving.scheduler import Scheduler
from forge.engines.serving.scheduler_job import NotServing
from forge.engines.serving.serving_metrics import ServingMetrics
from forge.engines.serving.slot_engine import TokenConstraint

BODY_BYTES = 16_000_000  # of one request; the ids of 1,000,000 tokens are half of it
_HANDLED_AT_ONCE = 20_000  # bytes of a body that are read and encoded without leaving the loop
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class FrontSettings:
    """How one model is served. name: the model's, as requests give it. api_key: empty, none is
    asked for. loopback_only: whether requests must name this computer as their host, which no page
    in a browser can make them do."""

    name: str
    api_key: str = ""
    loopback_only: bool = True


class HttpFront:
    """The application: `app` is what an ASGI server runs."""

    def __init__(self, scheduler: Scheduler, text: ModelText, settings: FrontSettings) -> None:
        self._scheduler = scheduler
        self._text = text
        self._constraints = Constraints(text.tokenizer, text.stop_ids)
        self._name = settings.name
        self._begun = int(time.time())
        self.metrics = ServingMetrics(scheduler.view)
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        handlers = {ApiRefusal: self._refuse, HTTPException: self._no_route, Exception: _broken}
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        self.app: ASGIApp = HttpGate(starlette, settings.api_key, settings.loopback_only)

    async def _health(self, request: Request) -> Response:
        now = self._scheduler.view()
        told = {"status": now.phase, "progress": round(now.progress, 4), "message": now.doing}
        return JSONResponse(told, 200 if now.phase == "serving" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        try:
            limits = self._scheduler.limits
        except NotServing as error:
            raise unavailable(error) from None
        model = {
            "id": self._name,
            "object": "model",
            "created": self._begun,
            "owned_by": "local",
            "max_model_len": limits.context,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        def read(data: bytes) -> tuple[ChatOrder, tuple[int, ...]]:
            order = read_chat_order(data, self._text.defaults)
            self._check_model(order.generation)
            text = self._text
            return order, text.chat_ids(order.messages, order.template_flags, order.tools)

        chat, prompt = await _worked_on(await _json_body(request), read)
        return await self._answer(chat.generation, prompt, "messages", chat)

    async def _completions(self, request: Request) -> Response:
        def read(data: bytes) -> tuple[GenerationOrder, tuple[int, ...]]:
            order = read_completion_order(data, self._text.defaults)
            self._check_model(order.generation)
            given = order.prompt
            ids = self._text.text_ids(given) if isinstance(given, str) else given
            return order.generation, ids

        order, prompt = await _worked_on(await _json_body(request), read)
        return await self._answer(order, prompt, "prompt")

    def _parser(
        self, order: GenerationOrder, prompt: Sequence[int], chat: ChatOrder | None
    ) -> AnswerParser:
        """What takes the answer apart: a text completion has no parts."""
        pieces, marks = self._text.token_text, self._text.marks
        if chat is None:
            return AnswerParser(pieces, order.stops)
        begun = marks.opened_thought(prompt)
        return AnswerParser(pieces, order.stops, marks, calls=chat.calls, thought_begun=begun)

    async def _constraint(
        self, order: GenerationOrder, prompt: Sequence[int], chat: ChatOrder | None
    ) -> TokenConstraint | None:
        """What holds the answer to its shape; making it does not hold up the answers of others."""
        if order.shape is None:
            return None
        begun = chat is not None and self._text.marks.opened_thought(prompt) is not None
        return await asyncio.to_thread(
            self._constraints.begin,
            order.shape.shape,
            order.thinking,
            in_thought=begun,
            place=order.shape.place,
        )

    def _check_model(self, order: GenerationOrder) -> None:
        if order.model != self._name:
            words = f"the model {order.model[:100]!r} is not served here; {self._name!r} is"
            raise ApiRefusal(404, words, param="model", code="model_not_found")

    async def _answer(
        self,
        order: GenerationOrder,
        prompt: Sequence[int],
        field: str,
        chat: ChatOrder | None = None,
    ) -> Response:
        """Start the generation; `field` is the one that the prompt came from."""
        try:
            limits = self._scheduler.limits
        except NotServing as error:
            raise unavailable(error) from None
        _check_tokens(prompt, field, limits.vocabulary)
        _check_tokens(sorted(order.stop_ids), "stop_token_ids", limits.vocabulary)
        sampling = order.sampling
        if not order.seeded:
            sampling = replace(sampling, seed=random.getrandbits(63))
        limit = _checked_limit(len(prompt), order.max_tokens, limits.context, field)
        constraint = await self._constraint(order, prompt, chat)
        generation = Generation(
            prompt,
            replace(sampling, top_k=min(sampling.top_k, limits.vocabulary)),
            limit,
            ends=order.stop_ids if order.ignore_eos else order.stop_ids | self._text.stop_ids,
            parser=self._parser(order, prompt, chat),
            metrics=self.metrics,
            constraint=constraint,
            cache_salt=order.cache_salt,
        )
        form = AnswerForm(
            chat=chat is not None,
            identity=f"{'cmpl' if chat is None else 'chatcmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._name,
            logprobs=sampling.logprobs,
            tokens_as_ids=order.tokens_as_ids,
            token_text=self._text.token_text,
            tells_thought=chat is None or chat.tells_thought,
        )
        return AnswerResponse(self._scheduler, generation, form, order)

    async def _refuse(self, request: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, ApiRefusal)
        self.metrics.refused(refusal.status)
        headers = {"Connection": "close"} if refusal.status == 413 else {}
        if refusal.retry_after_s is not None:
            headers["Retry-After"] = str(refusal.retry_after_s)
        return JSONResponse(refusal.body(), refusal.status, headers)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiRefusal(error.status_code, words).body(), error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    """What is no foreseen failure; the server's log has its trace."""
    refusal = ApiRefusal(500, f"the server has a fault: {type(error).__name__}")
    return JSONResponse(refusal.body(), 500)


async def _json_body(request: Request) -> bytes:
    """The request's body. 415 for another type than JSON, 413 for one beyond BODY_BYTES.

    The type is asked for because a page in a browser may send any other to any server unasked.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiRefusal(415, "the body must come as Content-Type: application/json")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                raise ApiRefusal(413, f"the body has more than {BODY_BYTES} bytes")
    except ClientDisconnect:
        raise ApiRefusal(400, "the client left before its body was whole") from None
    return bytes(body)


async def _worked_on(data: bytes, read: Callable[[bytes], _Read]) -> _Read:
    """What `read` makes of `data`; a large one does not hold up the answers of others."""
    return read(data) if len(data) <= _HANDLED_AT_ONCE else await asyncio.to_thread(read, data)


def _check_tokens(tokens: Sequence[int], field: str, vocabulary: int) -> None:
    worst = max(tokens, default=0)
    if worst >= vocabulary:
        raise invalid_field(field, f"token {worst} is not one of the model's {vocabulary}")


def _checked_limit(prompt: int, asked: int | None, context: int, field: str) -> int:
    """How many tokens the answer may have. ApiRefusal where prompt and answer have no room."""
    if not prompt:
        raise invalid_field(field, "holds no token")
    code = "context_length_exceeded"
    if prompt >= context:
        words = f"has {prompt} tokens, and the context of {context} must hold an answer too"
        raise invalid_field(field, words, code)
    if asked is not None and prompt + asked > context:
        words = f"{asked} tokens do not fit behind the {prompt} of the prompt: the context is"
        raise invalid_field("max_tokens", f"{words} {context}", code)
    return context - prompt if asked is None else asked
