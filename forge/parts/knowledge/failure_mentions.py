"""Whether a line reports a failure or only mentions one: levels, hints, what was got over.

Knows how logs are worded, and no particular failure.
"""

from __future__ import annotations

import re

from forge.parts.knowledge.failure_signature import FailureSignature

_CALM_LEVEL = re.compile(
    r"^.{0,120}?(?:(?<![\w-])(?:INFO|DEBUG|TRACE|NOTICE)(?![\w-])|(?<!\w)\[?(?:info|debug)\]?[ :\]]"
    r"|level=(?:info|debug)|severity\W{1,4}(?:INFO|DEBUG|NOTICE))|^\s*I\d{4} "
)
_WARNING_LEVEL = re.compile(r"^.{0,60}?(?<![\w-])(?:WARNING|WARN)(?![\w-])|^\s*W\d{4} |level=warn")
_ERROR_HEAD = re.compile(
    r"\b\w*(?:Error|Exception|OutOfResources|OutOfMemory)\b|\bERROR\b|\berror:|\bfatal\b|\bFATAL\b"
    r"|Error response|[Pp]ermission denied|error loading|startup-script|cloud-init",
)
# Not what happened, but what might, or what was got over.
_ONLY_TALK = re.compile(
    r"(?:\b(?:in case|if (?:you|it|this|the|there)|to (?:avoid|prevent|reduce)|avoid(?:s|ing)?"
    r"|prevent(?:s|ing)?|no longer|simulat\w+|handles|checks? for|watch(?:es|ing)? for"
    r"|instead of|tip|hint|(?:might|may|could|can) (?:get|see|receive|hit|cause|lead))\b[^.;]{0,60}"
    r"|\b(?:no|not|zero|0|without|any)\s+(?:an?\s+)?)$",
    re.I,
)
_GOT_OVER = re.compile(
    r"\b(?:retrying|will retry|will be retried|falling back|fell back|recovered|succeeded after"
    r"|ignoring|is ignored|harmless|trying (?:the next|another|port))\b",
    re.I,
)

_ERROR_ROW = re.compile(
    r"^.{0,100}?(?<![\w-])(?:ERROR|CRITICAL|FATAL|SEVERE)(?![\w-])"
    r"|^[EF]\d{4} |level=(?:error|fatal)|severity\W{1,4}(?:ERROR|CRITICAL|ALERT)"
    r"|^\s*(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)|^panic: |Segmentation fault|core dumped"
)
# Error lines that healthy starts print, each from its program's own source.
_HARMLESS_ROW = re.compile(
    r"Unable to register cu(?:DNN|FFT|BLAS) factory|TF-TRT Warning|Could not find TensorRT"
    r"|computation placer already registered|\b0 errors?\b|errors?[=:]\s*0\b",
    re.I,
)
SERVER_UP = re.compile(
    rb"Application startup complete|server is listening on|Uvicorn running on"
    rb"|llama runner started|Starting vLLM API server|GEMMA4-BOOT ready done"
)


def only_mentioned(signature: FailureSignature, text: str, at: int) -> bool:
    """Whether a line only talks of a failure: an informing level, a hint, something got over.

    A warning counts only for what a signature is certain of.
    """
    if signature.any_level:
        return False
    if _CALM_LEVEL.search(text) and not _ERROR_HEAD.search(text):
        return True
    if signature.certainty != "certain" and _WARNING_LEVEL.search(text):
        return True
    return bool(_ONLY_TALK.search(text[:at]) or _GOT_OVER.search(text))


def reports_error(text: str) -> bool:
    """Whether a row reports an error in so many words, and none that programs print in health."""
    if not _ERROR_ROW.search(text) or _HARMLESS_ROW.search(text):
        return False
    return not _GOT_OVER.search(text)
