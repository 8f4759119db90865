"""Whether the model sees: two halves of random colours, drawn here, sent as a data URI.

One right answer in thirty is luck. A wrong one is told from a dropped picture by the prompt's
length, which a picture that was looked at has raised.
"""

from __future__ import annotations

import base64
import re
import secrets
import struct
import zlib
from typing import Any

from forge.parts.boundaries.probe_client import ProbeAnswer
from forge.parts.toolsets.probe_asking import (
    Judgement,
    ProbeAsker,
    barred_judgement,
    cut_off_judgement,
    prompt_growth,
    quoted_answer,
)

PROBE_COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 20, 30),
    "green": (20, 160, 50),
    "blue": (30, 60, 220),
    "yellow": (250, 220, 30),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
_PICTURE_SIDE = 96  # pixels; two patches of the coarsest encoder
_PICTURE_TOKENS = 256
_PICTURE_PROMPT = (
    "The picture has an upper and a lower half, each of one plain colour. Name the two colours, "
    "the upper one first. Answer with two words out of: red, green, blue, yellow, black, white."
)


async def probe_picture(asker: ProbeAsker) -> Judgement:
    """Show one picture; a first 422 is tried once more, as an image processor that warms up."""
    if asker.facts.vision is False:
        return Judgement("untested", f"the model claims no vision ({asker.facts.vision_source})")
    upper, lower = secrets.SystemRandom().sample(sorted(PROBE_COLOURS), 2)
    address = "data:image/png;base64," + base64.b64encode(two_halves_png(upper, lower)).decode()
    text = {"type": "text", "text": _PICTURE_PROMPT}
    picture: dict[str, Any] = {"type": "image_url", "image_url": {"url": address}}
    content: list[dict[str, Any]] = [picture, text]
    answer = await asker.ask(f"{upper} above {lower}", content, _PICTURE_TOKENS)
    note = ""
    if answer.status == 422:
        answer = await asker.ask("the same once more after a 422", content, _PICTURE_TOKENS)
        note = "; the first request was refused with 422"
    added = None
    if barred_judgement(answer) is None and not shows_colours(answer.content, upper, lower):
        blind: list[dict[str, Any]] = [text]
        added = prompt_growth(
            answer, await asker.ask("without the picture, for its length", blind, 1)
        )
    judged = judged_picture_answer(answer, upper, lower, added)
    return Judgement(judged.verdict, judged.detail + note)


def judged_picture_answer(
    answer: ProbeAnswer, upper: str, lower: str, picture_tokens: int | None
) -> Judgement:
    """The verdict. picture_tokens: prompt tokens that the picture added; None: unknown."""
    early = barred_judgement(answer)
    if early is not None:
        return early
    if shows_colours(answer.content, upper, lower):
        return Judgement(
            "pass", f"{upper} above {lower} was seen: {quoted_answer(answer.content)!r}"
        )
    said = quoted_answer(answer.content)
    if picture_tokens is not None and picture_tokens <= 0:
        return Judgement(
            "silent",
            "the prompt has as many tokens without the picture: it never reached the model, which "
            f"answered {said!r}",
        )
    return cut_off_judgement(answer) or Judgement(
        "fail", f"{upper} above {lower} was described as {said!r}"
    )


def shows_colours(text: str, upper: str, lower: str) -> bool:
    """Whether the first two colours named are the right ones, in order."""
    named = re.findall(rf"\b(?:{'|'.join(PROBE_COLOURS)})\b", text.casefold())
    return named[:2] == [upper, lower]


def two_halves_png(upper: str, lower: str) -> bytes:
    """A square PNG of 8-bit RGB, its halves in two of PROBE_COLOURS."""
    half = _PICTURE_SIDE // 2
    rows = [b"\0" + bytes(PROBE_COLOURS[c]) * _PICTURE_SIDE for c in (upper, lower)]
    header = struct.pack(">IIBBBBB", _PICTURE_SIDE, _PICTURE_SIDE, 8, 2, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"IDAT", zlib.compress(rows[0] * half + rows[1] * half, 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
