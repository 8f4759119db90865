"""Container images by name: the reference's grammar, and the digest that a tag stands for now.

Speaks the OCI distribution API (https://github.com/opencontainers/distribution-spec) as anybody
may, without an account. Pulls nothing and knows no engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

import httpx2

from forge.parts.ground.errors import RigError, invalid_parameter
from forge.parts.ground.state import json_object

_MANIFEST_BYTES = 4 << 20  # what a registry must accept at most, by the specification
_TOKEN_BYTES = 64_000  # of a token service's answer
_REFERENCE_LIMIT = 512  # characters; repository and registry together are 255 by the specification
# The index (several platforms) first: its digest is what `docker pull repo:tag` records.
_MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_IMAGE_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_IMAGE_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_IMAGE_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*")
_REGISTRY_HOST = re.compile(
    r"(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]{0,61}[A-Za-z0-9])"
    r"(?:\.(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]{0,61}[A-Za-z0-9])){0,20}(?::[0-9]{1,5})?"
)
# Bearer realm="https://…",service="…",scope="…" (RFC 6750; values are quoted strings)
_CHALLENGE_PART = re.compile(r'([A-Za-z]{1,20})="([^"\\\x00-\x1f]{0,500})"')
_TOKEN_TEXT = re.compile(r"[A-Za-z0-9._~+/=-]{1,16000}")
_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ImageReference:
    """`registry/repository:tag`, in parts. `registry` is empty where the reference names none."""

    registry: str
    repository: str
    tag: str

    @property
    def name(self) -> str:
        """The reference without its tag."""
        return f"{self.registry}/{self.repository}" if self.registry else self.repository

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


@dataclass(frozen=True)
class ResolvedImage:
    """What Docker is to be given. `digest` is empty where the tag stands; `note` says why."""

    image: str
    digest: str
    note: str


def parse_image(reference: str, parameter: str = "image") -> ImageReference:
    """The parts of `repo`, `repo:tag` or `host[:port]/repo:tag`; the tag is `latest` where none is.

    As Docker reads it: the first component is a registry only with a dot, a colon, or as
    `localhost`. Raises RigError INVALID, also for a reference with a digest.
    """
    head, slash, rest = reference.partition("/")
    if not slash or not ("." in head or ":" in head or head == "localhost"):
        head, rest = "", reference
    repository, colon, tag = rest.partition(":")
    if not colon:
        tag = "latest"
    whole = (
        len(reference) <= _REFERENCE_LIMIT
        and (not head or _REGISTRY_HOST.fullmatch(head))
        and all(_IMAGE_PATH.fullmatch(part) for part in repository.split("/"))
        and _IMAGE_TAG.fullmatch(tag)
    )
    if not whole:
        raise invalid_parameter(parameter, "must be an image such as owner/name:tag")
    return ImageReference(head, repository, tag)


def pinned_image(reference: str, digest: str, parameter: str = "image") -> str:
    """`repo@sha256:…` of that reference, or the reference with its tag where `digest` is empty.

    Raises RigError INVALID.
    """
    parsed = parse_image(reference, parameter)
    if not digest:
        return str(parsed)
    if not _IMAGE_DIGEST.fullmatch(digest):
        raise invalid_parameter(f"{parameter} digest", "must be sha256: and 64 hex digits")
    return f"{parsed.name}@{digest}"


async def resolve_image(
    reference: str, registry_url: str, pin: str = "", timeout_s: float = 10.0
) -> ResolvedImage:
    """What `reference` stands for now, by digest, so that every machine gets the same image.

    `pin` wins and asks nobody. `registry_url` serves references that name no registry; with neither
    a registry nor that address the tag stays. Raises RigError as ImageRegistry.digest does.
    """
    parsed = parse_image(reference)
    if pin:
        return ResolvedImage(pinned_image(reference, pin), pin, "pinned by the settings")
    base = _registry_base(parsed.registry) if parsed.registry else registry_url
    if not base:
        note = f"not resolved: {parsed} is whatever the tag means when the machine pulls it"
        return ResolvedImage(str(parsed), "", note)
    digest = await ImageRegistry(base).digest(parsed, timeout_s)
    return ResolvedImage(pinned_image(reference, digest), digest, f"{parsed} as it is now")


class ImageRegistry:
    """A registry at `base_url`: https, or http on loopback. No account, no proxy, no redirect."""

    def __init__(self, base_url: str) -> None:
        self._base = base_url.rstrip("/")
        if not _trusted_address(self._base, loopback_ok=True) or urlsplit(self._base).path:
            raise invalid_parameter("image_registry", "must be https://host, or http on loopback")

    async def digest(self, image: ImageReference, timeout_s: float = 10.0) -> str:
        """The digest (``sha256:…``) that the tag of `image` stands for, within `timeout_s` seconds.

        Raises RigError NOT_FOUND (no such tag), AUTH (absent or private: the registry tells neither
        apart), DENIED (refused, or an answer that cannot be trusted), QUOTA (too many requests),
        TIMEOUT or UNREACHABLE.
        """
        host = urlsplit(self._base).hostname
        try:
            async with asyncio.timeout(timeout_s), self._http(timeout_s) as http:
                return await self._digest(http, image)
        except (TimeoutError, httpx2.TimeoutException):
            raise RigError(
                "TIMEOUT", f"{host} did not answer for {image} in {timeout_s:g} s", _PIN_STEP
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RigError(
                "UNREACHABLE",
                f"{host} cannot be asked for {image}: {type(error).__name__}",
                _PIN_STEP,
            ) from None

    async def _digest(self, http: httpx2.AsyncClient, image: ImageReference) -> str:
        repository = image.repository
        if not image.registry and "/" not in repository:
            repository = f"library/{repository}"  # where the public hub keeps unowned names
        url = f"{self._base}/v2/{repository}/manifests/{image.tag}"
        headers = {"Accept": ", ".join(_MANIFEST_TYPES), "Accept-Encoding": "identity"}
        # HEAD: the public hub counts a GET as a pull, and limits those.
        response = await http.head(url, headers=headers)
        if response.status_code == 401:
            challenge = response.headers.get("WWW-Authenticate", "")
            headers["Authorization"] = f"Bearer {await self._token(http, challenge, image)}"
            response = await http.head(url, headers=headers)
        _check_registry_answer(response, image)
        named = response.headers.get("Docker-Content-Digest", "")
        if not named:  # the header is optional: then the manifest's own hash is the digest
            return await self._hashed(http, url, headers, image)
        if not _IMAGE_DIGEST.fullmatch(named):
            raise RigError("DENIED", f"the registry names no sha256 digest for {image}", _PIN_STEP)
        return named

    async def _hashed(
        self,
        http: httpx2.AsyncClient,
        url: str,
        headers: Mapping[str, str],
        image: ImageReference,
    ) -> str:
        async with http.stream("GET", url, headers=dict(headers)) as response:
            _check_registry_answer(response, image)
            body = await _bounded_read(response, _MANIFEST_BYTES)
        if body is None:
            raise RigError("DENIED", f"the manifest of {image} is beyond all bounds", _PIN_STEP)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if response.headers.get("Docker-Content-Digest", digest) != digest:
            raise RigError(
                "DENIED", f"the manifest of {image} is not what the registry says it is", _PIN_STEP
            )
        return digest

    async def _token(self, http: httpx2.AsyncClient, challenge: str, image: ImageReference) -> str:
        """A token to read that one repository, from the service that the registry names."""
        if not challenge.lower().startswith("bearer "):
            raise RigError("AUTH", f"the registry wants an account for {image}", _PIN_STEP)
        asked = {name.lower(): value for name, value in _CHALLENGE_PART.findall(challenge[:4000])}
        realm = asked.pop("realm", "")
        # A registry elsewhere must not send this computer to one of its own services.
        own = _trusted_address(self._base, loopback_ok=True) == "loopback"
        if not _trusted_address(realm, loopback_ok=own) or "?" in realm:
            raise RigError("DENIED", f"the registry of {image} names no token service", _PIN_STEP)
        wanted = {name: asked[name] for name in ("service", "scope") if name in asked}
        async with http.stream("GET", f"{realm}?{urlencode(wanted)}") as response:
            _check_registry_answer(response, image, manifest=False)
            body = await _bounded_read(response, _TOKEN_BYTES)
        answer = json_object(body or b"") or {}
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not _TOKEN_TEXT.fullmatch(token):
            raise RigError("DENIED", f"the token service of {image} gave no token", _PIN_STEP)
        return token

    def _http(self, timeout_s: float) -> httpx2.AsyncClient:
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # loopback http: no trust store to read
        return httpx2.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            verify=plain if self._base.startswith("http:") else True,
            timeout=timeout_s,
            headers={"Accept-Encoding": "identity"},
        )


_PIN_STEP = "set IMAGE_DIGEST to a digest that you know, or IMAGE_REGISTRY= to go by the tag"


def _registry_base(registry: str) -> str:
    """Where a registry that a reference names is asked: https, on loopback http as Docker does."""
    host = registry.rpartition(":")[0] or registry
    return f"{'http' if host in _LOOPBACK_HOSTS else 'https'}://{registry}"


def _trusted_address(url: str, *, loopback_ok: bool) -> str:
    """ "https", or "loopback" for plain http to this computer where that is allowed; else empty."""
    try:
        parts = urlsplit(url)
        host, port, login = parts.hostname or "", parts.port, "@" in parts.netloc
    except ValueError:
        return ""
    if not host or login or parts.fragment or port == 0:
        return ""
    if parts.scheme == "http" and host in _LOOPBACK_HOSTS:
        return "loopback" if loopback_ok else ""
    # https to this computer is no way around that either.
    return (
        "https" if parts.scheme == "https" and (loopback_ok or host not in _LOOPBACK_HOSTS) else ""
    )


def _check_registry_answer(
    response: httpx2.Response, image: ImageReference, *, manifest: bool = True
) -> None:
    """Raise what a status other than 200 means; then, of a manifest, whether it is of our kinds."""
    status = response.status_code
    if status == 200:
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
        if manifest and kind and kind not in _MANIFEST_TYPES:
            raise RigError("DENIED", f"{image} is no image that Docker runs ({kind[:80]})")
        return
    if status == 404 and manifest:
        raise RigError(
            "NOT_FOUND", f"the registry has no {image}", "check the image that tpu.env names"
        )
    if status == 401:
        raise RigError(
            "AUTH",
            f"{image} does not exist, or it is private",
            "check the image that tpu.env names",
        )
    if status == 429:
        waits = response.headers.get("Retry-After", "")
        wait = f" for {waits} s" if waits.isascii() and waits.isdigit() and len(waits) < 7 else ""
        raise RigError("QUOTA", f"the registry takes no more requests{wait}", _PIN_STEP)
    if status >= 500:
        raise RigError("UNREACHABLE", f"the registry answered {status} for {image}", _PIN_STEP)
    raise RigError("DENIED", f"the registry answered {status} for {image}", _PIN_STEP)


async def _bounded_read(response: httpx2.Response, limit: int) -> bytes | None:
    """The body as it came over the wire; None where it is longer than `limit` bytes."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)
