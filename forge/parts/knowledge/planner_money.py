"""What a rate per hour means per token, and when renting beats an API that bills input too.

Knows no catalogue: rates come in as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


def usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """USD per million tokens at a rate and a throughput. Raises ValueError for no throughput."""
    if tokens_per_s <= 0:
        raise ValueError("no throughput, no price per token")
    return usd_per_hour / 3600 / tokens_per_s * 1e6


def million_tokens(tokens_per_s: float, hours: float) -> float:
    """Millions of tokens in `hours` hours."""
    return tokens_per_s * hours * 3600 / 1e6


def usd_for(usd_per_hour: float, seconds: float) -> float:
    """USD for `seconds` seconds."""
    return usd_per_hour * seconds / 3600


def with_cold_start(usd: float, session_s: float, start_s: float) -> float:
    """A price per token with the start paid for as well: x T / (T - start)."""
    if start_s >= session_s:
        raise ValueError(f"a start of {start_s:.0f} s leaves nothing of {session_s:.0f} s")
    return usd * session_s / (session_s - start_s)


@dataclass(frozen=True, slots=True)
class ApiPrice:
    """USD per million tokens of an API, in and out."""

    input: float
    output: float

    def per_million_output(self, prompt: float, output: float) -> float:
        """What the API bills for a million output tokens when each `output` brings its `prompt`."""
        return self.output + self.input * prompt / output


def break_even_tokens_per_s(
    usd_per_hour: float, api: ApiPrice, prompt: float, output: float
) -> float:
    """Output tokens per second, held all the time, above which renting is cheaper than the API.

    Leaving out the API's input price, as the 940 tokens per second of the article on TPU v6e do,
    makes it three times too high at 8 tokens in for one out.
    """
    billed = api.per_million_output(prompt, output)
    if billed <= 0:
        raise ValueError("an API that costs nothing is never beaten")
    return usd_per_hour / 3600 * 1e6 / billed
