"""A validation error as sentences for people and for results, without the input that caused it.

Knows no schema.
"""

from __future__ import annotations

from pydantic import ValidationError

_FAULTS_TOLD = 10


def schema_faults(error: ValidationError) -> list[str]:
    """`error` as one sentence a fault, each with the place in the record; ten at most."""
    items = error.errors(include_input=False, include_url=False)[:_FAULTS_TOLD]
    return [f"{'.'.join(str(p) for p in item['loc']) or 'report'}: {item['msg']}" for item in items]
