"""A week of a server in miniature: 2,000 requests of random length, arrival, end and mistake.

Speaks HTTP by hand, so that a client can leave at any byte. Knows no engine: who starts it says
what an answer must be.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

REQUESTS = 2_000
# The log probabilities of an answer, in the form of a text completion.
AnswerTold = dict[str, list[Any]]


class Week:
    """Clients at random. Counts what each saw; `wrong` keeps what should not have been.

    judge: what is wrong with the answer to a request, empty for nothing. hold: called with True now
    and then to hold the engine, so that the queue runs over, and with False to let it go on.
    """

    def __init__(
        self,
        port: int,
        model: str,
        *,
        vocabulary: int,
        context: int,
        judge: Callable[[dict[str, Any], AnswerTold], str],
        hold: Callable[[bool], None] = lambda on: None,
    ) -> None:
        self.port = port
        self.model = model
        self.vocabulary = vocabulary
        self.context = context
        self.judge = judge
        self.hold = hold
        self.chance = random.Random(2026)
        self.seen = dict.fromkeys(("answered", "left", "refused", "full"), 0)
        self.completion_tokens = 0
        self.wrong: list[str] = []

    def body(self) -> dict[str, Any]:
        """A request. One in twelve cannot be."""
        chance = self.chance
        prompt = [
            chance.randrange(self.vocabulary) for _ in range(chance.choice((1, 2, 9, 40, 120)))
        ]
        room = self.context - len(prompt)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": chance.choice((1, 2, 5, min(30, room), min(150, room))),
            "stream": chance.random() < 0.6,
            "seed": chance.randrange(100),
            "temperature": chance.choice((0, 0.5, 1)),
            "logprobs": 2,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        if chance.random() < 1 / 12:
            body |= chance.choice(({"n": 2}, {"model": "x"}, {"max_tokens": 10**6}, {"prompt": []}))
        return body

    async def client(self, number: int) -> None:
        body = self.body()
        leaves = self.chance.random() < 0.25
        reads_first = self.chance.random() < 0.5
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        if leaves:
            got = b""
            if reads_first:
                got = await reader.read(2000)
            else:
                await asyncio.sleep(self.chance.random() * 0.02)
            writer.transport.abort()
            self.seen["left"] += 1
            if b" 500 " in got[:20]:
                self.wrong.append(f"{number}: {got!r}")
            return
        answer = await reader.read()
        writer.close()
        self.take(number, body, answer)

    def take(self, number: int, body: dict[str, Any], answer: bytes) -> None:
        """Count one whole answer, and judge it."""
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 429:
            self.seen["full"] += 1
        elif status in (400, 404):
            self.seen["refused"] += 1
        elif status == 200:
            told = self.told_in(rest, bool(body["stream"]))
            fault = self.judge(body, told)
            self.wrong += [f"{number}: {fault}"] if fault else []
            self.seen["answered"] += 1
            self.completion_tokens += len(told["tokens"])
        else:
            self.wrong.append(f"{number}: {answer[:300]!r}")

    @staticmethod
    def told_in(rest: bytes, streamed: bool) -> AnswerTold:
        """The log probabilities of a whole answer, those of a stream put together."""
        if not streamed:
            return dict(json.loads(rest)["choices"][0]["logprobs"])
        told: AnswerTold = {"tokens": [], "top_logprobs": []}
        for line in rest.split(b"\n"):
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])["choices"][0]["logprobs"] or {}
                for name, values in told.items():
                    values += piece.get(name, [])
        return told

    async def run(self) -> None:
        """Arrivals in bursts, at most 60 clients at once. Now and then the engine stands still, so
        that the queue runs over."""
        room = asyncio.Semaphore(60)

        async def one(number: int) -> None:
            try:
                await self.client(number)
            finally:
                room.release()

        tasks = []
        for number in range(REQUESTS):
            await room.acquire()
            tasks.append(asyncio.create_task(one(number)))
            if number % 400 == 100:
                self.hold(True)
            if number % 400 == 200:
                self.hold(False)
            if self.chance.random() < 0.02:
                await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
