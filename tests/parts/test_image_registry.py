"""The image registry's client against one on loopback that asks for a token, as the hub does.

The registry is real sockets; nothing of the client is replaced. What is not to be trusted (a realm
elsewhere, a digest that is none, endless bodies) must end as a named refusal and never as a digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import threading
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import httpx2

from forge.parts.boundaries.image_registry import (
    ImageReference,
    ImageRegistry,
    ResolvedImage,
    parse_image,
    pinned_image,
    resolve_image,
)
from forge.parts.ground.errors import RigError

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}).encode()
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
OTHER = f"sha256:{'5' * 64}"
CANARY = "canary-7f3a91"


@dataclass
class FakeRegistry:
    """One repository `owner/name` with the tag `nightly`; each field makes one thing go wrong.

    `requests` are (method, path, query, headers) of everything that came in.
    """

    url: str = ""
    asks_token: bool = True
    challenge: str = ""  # instead of the one that leads to this registry's own token service
    token_answer: bytes | None = None
    token_status: int = 200
    token_key: str = "token"
    digest: str = DIGEST  # of a HEAD; empty: no such header
    digest_of_get: str = ""
    kind: str = INDEX
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = MANIFEST
    endless: bool = False
    silent: bool = False
    known: tuple[str, ...] = ("owner/name", "library/name")
    requests: list[tuple[str, str, dict[str, list[str]], dict[str, str]]] = field(
        default_factory=list
    )
    tokens: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)

    def methods(self) -> list[str]:
        """What was asked, in order: method and path."""
        return [f"{method} {path}" for method, path, _, _ in self.requests]


class _RegistryHandler(BaseHTTPRequestHandler):
    registry: FakeRegistry
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that had enough
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.registry.requests.append((self.command, parts.path, parse_qs(parts.query), headers))
        if self.registry.silent:
            self.registry.released.wait(30)
            self.close_connection = True
        elif parts.path == "/token":
            self._token(parse_qs(parts.query))
        elif parts.path.startswith("/v2/") and "/manifests/" in parts.path:
            self._manifest(*parts.path.removeprefix("/v2/").split("/manifests/"), headers)
        else:
            self._answer(404, b"{}")

    def _token(self, query: dict[str, list[str]]) -> None:
        registry = self.registry
        token = f"{CANARY}-{secrets.token_hex(8)}"
        registry.tokens.add(f"{query.get('scope', [''])[0]} {token}")
        answer = {registry.token_key: token, "expires_in": 300}
        body = registry.token_answer
        if registry.token_status != 200:
            self._answer(registry.token_status, b'{"details": "no"}', registry.headers)
        elif registry.endless and body is not None:
            self._endless("application/json")
        else:
            self._answer(200, json.dumps(answer).encode() if body is None else body)

    def _manifest(self, repository: str, tag: str, headers: dict[str, str]) -> None:
        registry = self.registry
        scope = f"repository:{repository}:pull"
        given = headers.get("authorization", "").removeprefix("Bearer ")
        allowed = not registry.asks_token or f"{scope} {given}" in registry.tokens
        if not allowed or repository not in registry.known:
            own = f'Bearer realm="{registry.url}/token",service="registry.test",scope="{scope}"'
            errors = b'{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}'
            self._answer(401, errors, {"WWW-Authenticate": registry.challenge or own})
        elif registry.status != 200:
            self._answer(registry.status, b'{"errors":[]}', registry.headers)
        elif tag != "nightly":
            self._answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
        elif registry.endless and self.command == "GET":
            self._endless(registry.kind)
        else:
            named = registry.digest if self.command == "HEAD" else registry.digest_of_get
            more = {"Docker-Content-Digest": named} if named else {}
            self._answer(200, registry.body, {"Content-Type": registry.kind, **more})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _endless(self, kind: str) -> None:
        """More than anybody may read; ends when the client hangs up."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for _ in range(2000):
            self.wfile.write(b'{"x": "' + b"y" * 100_000)


@contextmanager
def running_registry(**faults: Any) -> Iterator[FakeRegistry]:
    """A registry on a loopback port, with these fields."""
    registry = FakeRegistry(**faults)
    handler = type("Handler", (_RegistryHandler,), {"registry": registry})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        registry.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield registry
        finally:
            registry.released.set()
            server.shutdown()
            thread.join()


def asked(
    registry: FakeRegistry, reference: str = "owner/name:nightly", timeout_s: float = 20
) -> str:
    """The digest of `reference` as the client gets it from `registry`."""
    return asyncio.run(ImageRegistry(registry.url).digest(parse_image(reference), timeout_s))


class ReferenceTest(unittest.TestCase):
    def test_the_parts_are_those_that_docker_reads(self) -> None:
        for text, parts in (
            ("name", ("", "name", "latest")),
            ("owner/name", ("", "owner/name", "latest")),
            ("vllm/vllm-tpu:nightly", ("", "vllm/vllm-tpu", "nightly")),
            ("owner/na.me_x__y--z:V1.2-rc", ("", "owner/na.me_x__y--z", "V1.2-rc")),
            ("registry.test/owner/name:1", ("registry.test", "owner/name", "1")),
            ("registry.test:5000/name", ("registry.test:5000", "name", "latest")),
            ("localhost/name:1", ("localhost", "name", "1")),
            ("127.0.0.1:5000/a/b/c:1", ("127.0.0.1:5000", "a/b/c", "1")),
            # Without dot, colon and `localhost` the first component is an owner.
            ("registry/name", ("", "registry/name", "latest")),
        ):
            with self.subTest(text):
                self.assertEqual(parse_image(text), ImageReference(*parts))

    def test_a_reference_is_written_as_it_was_read(self) -> None:
        for text in ("owner/name:nightly", "registry.test:5000/owner/name:1"):
            self.assertEqual(str(parse_image(text)), text)
        self.assertEqual(str(parse_image("owner/name")), "owner/name:latest")
        self.assertEqual(parse_image("registry.test/owner/name:1").name, "registry.test/owner/name")

    def test_whatever_is_no_image_is_refused_by_the_parameters_name(self) -> None:
        for text in (
            "",
            "/",
            ":",
            "owner/",
            "/name",
            "owner//name",
            "Owner/name",
            "owner/name:",
            "owner/name:a b",
            "owner/name:-x",
            "owner/name:" + "t" * 129,
            "-privileged",
            "--privileged",
            "--net=host/name",
            "owner/-name",
            "owner/name-",
            "owner/na..me",
            "owner/na___me",
            "owner/name@" + DIGEST,
            "owner/name:nightly@" + DIGEST,
            "owner/name:nightly\n",
            "owner/name:nightly --privileged",
            "owner/name;id",
            "owner/$(id)",
            "../../etc/passwd",
            "registry.test/../name",
            "https://registry.test/owner/name",
            "user:password@registry.test/owner/name",
            "registry.test:99999999/owner/name",
            "-.test/owner/name",
            "ownér/name",
            "a/" * 300 + "b",
            "x" * 600,
            "-" * 5000,
        ):
            with self.subTest(text[:60]), self.assertRaises(RigError) as caught:
                parse_image(text, "vllm_image")
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertIn("vllm_image", str(caught.exception))

    def test_a_pin_takes_the_tags_place(self) -> None:
        self.assertEqual(pinned_image("owner/name:nightly", ""), "owner/name:nightly")
        self.assertEqual(pinned_image("owner/name:nightly", DIGEST), f"owner/name@{DIGEST}")
        self.assertEqual(
            pinned_image("registry.test:5000/owner/name", DIGEST),
            f"registry.test:5000/owner/name@{DIGEST}",
        )

    def test_a_pin_that_is_no_digest_is_refused(self) -> None:
        for pin in (
            "nightly",
            "sha256:",
            f"sha256:{'g' * 64}",
            f"sha256:{'a' * 63}",
            f"sha256:{'a' * 65}",
            f"sha256:{'A' * 64}",
            f"sha512:{'a' * 128}",
            f"{DIGEST}\n",
            f"{DIGEST} --privileged",
            f" {DIGEST}",
        ):
            with self.subTest(pin), self.assertRaises(RigError) as caught:
                pinned_image("owner/name:nightly", pin)
            self.assertEqual(caught.exception.error_class, "INVALID")


class ProtocolTest(unittest.TestCase):
    """What goes over the wire, in order."""

    def test_refused_first_then_with_the_token_that_the_registry_asked_for(self) -> None:
        with running_registry() as registry:
            self.assertEqual(asked(registry), DIGEST)
        self.assertEqual(
            registry.methods(),
            [
                "HEAD /v2/owner/name/manifests/nightly",
                "GET /token",
                "HEAD /v2/owner/name/manifests/nightly",
            ],
        )
        first, token, second = registry.requests
        self.assertNotIn("authorization", first[3])
        self.assertNotIn("authorization", token[3])
        self.assertEqual(
            token[2], {"service": ["registry.test"], "scope": ["repository:owner/name:pull"]}
        )
        self.assertTrue(second[3]["authorization"].startswith(f"Bearer {CANARY}-"))

    def test_indexes_and_single_manifests_of_both_families_are_accepted(self) -> None:
        with running_registry() as registry:
            asked(registry)
        for _, _, _, headers in (registry.requests[0], registry.requests[2]):
            accepted = headers["accept"].split(", ")
            self.assertEqual(len(accepted), 4)
            for family in ("vnd.oci.image.index.v1", "vnd.docker.distribution.manifest.list.v2"):
                self.assertIn(f"application/{family}+json", accepted)
            for family in ("vnd.oci.image.manifest.v1", "vnd.docker.distribution.manifest.v2"):
                self.assertIn(f"application/{family}+json", accepted)
            self.assertEqual(headers["accept-encoding"], "identity")

    def test_an_open_registry_is_asked_once(self) -> None:
        with running_registry(asks_token=False) as registry:
            self.assertEqual(asked(registry), DIGEST)
        self.assertEqual(registry.methods(), ["HEAD /v2/owner/name/manifests/nightly"])

    def test_the_other_name_of_a_token(self) -> None:
        with running_registry(token_key="access_token") as registry:
            self.assertEqual(asked(registry), DIGEST)

    def test_a_name_without_owner_lies_where_the_public_hub_keeps_it(self) -> None:
        with running_registry() as registry:
            self.assertEqual(asked(registry, "name:nightly"), DIGEST)
        self.assertEqual(registry.methods()[0], "HEAD /v2/library/name/manifests/nightly")

    def test_without_the_header_the_manifest_itself_is_hashed(self) -> None:
        with running_registry(digest="") as registry:
            self.assertEqual(asked(registry), DIGEST)
        self.assertEqual(registry.methods()[-1], "GET /v2/owner/name/manifests/nightly")
        self.assertIn("authorization", registry.requests[-1][3])

    def test_proxies_and_logins_of_this_computer_are_not_used(self) -> None:
        stray = {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}
        with running_registry() as registry, mock.patch.dict("os.environ", stray):
            self.assertEqual(asked(registry), DIGEST)

    def test_a_slash_at_the_addresss_end_does_not_count(self) -> None:
        with running_registry() as registry:
            found = asyncio.run(
                ImageRegistry(f"{registry.url}/").digest(parse_image("owner/name:nightly"))
            )
        self.assertEqual(found, DIGEST)


class RefusalTest(unittest.TestCase):
    """Every fault has its class, its reason and a next step, and no fault gives a digest."""

    def refused(
        self, error_class: str, words: str, reference: str = "owner/name:nightly", **faults: Any
    ) -> FakeRegistry:
        """The registry with these faults, after the client was refused in this way."""
        with running_registry(**faults) as registry, self.assertRaises(RigError) as caught:
            asked(registry, reference)
        error = caught.exception
        self.assertEqual(error.error_class, error_class, error)
        self.assertIn(words, error.what)
        self.assertNotIn(CANARY, str(error))
        self.assertTrue(error.next_step or error_class == "DENIED", error)
        return registry

    def test_no_such_tag(self) -> None:
        self.refused("NOT_FOUND", "owner/name:weekly", "owner/name:weekly")

    def test_no_such_repository_is_told_apart_from_a_private_one_by_nobody(self) -> None:
        registry = self.refused("AUTH", "does not exist, or it is private", "owner/secret:nightly")
        # Asked twice and no more: a refused token is not tried again.
        self.assertEqual(len(registry.requests), 3)

    def test_too_many_requests(self) -> None:
        self.refused("QUOTA", "for 3600 s", status=429, headers={"Retry-After": "3600"})
        self.refused("QUOTA", "no more requests", status=429)
        self.refused("QUOTA", "no more requests", token_status=429)
        for odd in ("Wed, 21 Oct 2026 07:28:00 GMT", "-1", "9" * 30, "１２"):
            with self.subTest(odd):
                headers = {"Retry-After": odd.encode().decode("latin-1")}
                registry = {"status": 429, "headers": headers}
                self.refused("QUOTA", "no more requests", **registry)

    def test_refused_and_broken(self) -> None:
        self.refused("DENIED", "403", status=403)
        self.refused("DENIED", "403", token_status=403)
        self.refused("AUTH", "private", token_status=401)
        for status in (500, 502, 503):
            self.refused("UNREACHABLE", str(status), status=status)
        self.refused("UNREACHABLE", "500", token_status=500)

    def test_no_redirect_is_followed(self) -> None:
        with running_registry() as other:
            for status in (301, 302, 307, 308):
                target = {"Location": f"{other.url}/v2/owner/name/manifests/nightly"}
                self.refused("DENIED", str(status), status=status, headers=target)
                self.refused("DENIED", str(status), token_status=status, headers=target)
        self.assertEqual(other.requests, [])

    def test_what_is_no_sha256_digest_is_none(self) -> None:
        for bad in (
            "sha256:abc",
            f"sha512:{'a' * 128}",
            "latest",
            f"sha256:{'A' * 64}",
            DIGEST[7:],
        ):
            with self.subTest(bad):
                self.refused("DENIED", "no sha256 digest", digest=bad)

    def test_a_manifest_that_is_not_what_the_registry_says(self) -> None:
        self.refused("DENIED", "not what the registry says", digest="", digest_of_get=OTHER)

    def test_another_kind_of_thing_under_that_name(self) -> None:
        for kind in ("text/html", "application/vnd.docker.distribution.manifest.v1+prettyjws"):
            with self.subTest(kind):
                self.refused("DENIED", "no image that Docker runs", kind=kind)
                self.refused("DENIED", "no image that Docker runs", kind=kind, digest="")

    def test_an_endless_manifest_is_left(self) -> None:
        self.refused("DENIED", "beyond all bounds", digest="", endless=True)

    def test_an_endless_token_answer_is_left(self) -> None:
        self.refused("DENIED", "gave no token", token_answer=b"", endless=True)

    def test_a_token_answer_without_a_token(self) -> None:
        for answer in (
            b"",
            b"{}",
            b"[]",
            b"null",
            b"not json",
            b'{"token": 5}',
            b'{"token": ""}',
            b'{"token": {"token": "x"}}',
            b'{"token": "two words"}',
            b'{"token": "line\\r\\nX-Injected: 1"}',
            b'{"token": "\\ud800"}',
            json.dumps({"token": "t" * 20_000}).encode(),
            b"[" * 50_000,
        ):
            with self.subTest(answer[:40]):
                registry = self.refused("DENIED", "gave no token", token_answer=answer)
                self.assertEqual(registry.methods()[-1], "GET /token")

    def test_a_challenge_that_is_none(self) -> None:
        self.refused("AUTH", "wants an account", challenge='Basic realm="registry"')
        self.refused("AUTH", "wants an account", challenge="x")
        self.refused("AUTH", "wants an account", challenge="Bearer")
        for challenge in (
            'Bearer service="x",scope="y"',
            'Bearer realm=""',
            "Bearer realm=http://127.0.0.1/token",
            'Bearer realm="file:///etc/passwd"',
            'Bearer realm="ftp://127.0.0.1/token"',
            'Bearer realm="http://registry.test/token"',
            'Bearer realm="http://169.254.169.254/computeMetadata/v1/"',
            'Bearer realm="http://user:password@127.0.0.1/token"',
            'Bearer realm="http://127.0.0.1/token?a=b"',
            'Bearer realm="http://127.0.0.1:0/token"',
            'Bearer realm="http://127.0.0.1:99999/token"',
            'Bearer realm="http://[::1/token"',
            'Bearer realm="//127.0.0.1/token"',
            "Bearer " + 'realm="' * 3000,
        ):
            with self.subTest(challenge[:60]):
                registry = self.refused("DENIED", "names no token service", challenge=challenge)
                self.assertEqual(len(registry.requests), 1)

    def test_a_registry_elsewhere_cannot_send_us_to_this_computers_own_services(self) -> None:
        asked_for: list[str] = []

        def elsewhere(request: httpx2.Request) -> httpx2.Response:
            asked_for.append(str(request.url))
            return httpx2.Response(401, headers={"WWW-Authenticate": f'Bearer realm="{realm}"'})

        def wire(timeout_s: float) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(transport=httpx2.MockTransport(elsewhere))

        registry = ImageRegistry("https://registry.test")
        for realm in (
            "http://127.0.0.1:8000/token",
            "http://localhost/token",
            "https://localhost/token",
            "https://127.0.0.1/token",
            "https://[::1]/token",
        ):
            asked_for.clear()
            with (
                self.subTest(realm),
                mock.patch.object(registry, "_http", wire),
                self.assertRaises(RigError) as caught,
            ):
                asyncio.run(registry.digest(parse_image("owner/name:nightly")))
            self.assertEqual(caught.exception.error_class, "DENIED")
            self.assertEqual(asked_for, ["https://registry.test/v2/owner/name/manifests/nightly"])

    def test_nobody_listens(self) -> None:
        with running_registry() as registry:
            pass
        with self.assertRaises(RigError) as caught:
            asked(registry)
        self.assertEqual(caught.exception.error_class, "UNREACHABLE")
        self.assertIn("127.0.0.1", caught.exception.what)

    def test_one_that_never_answers_is_left_in_time(self) -> None:
        with running_registry(silent=True) as registry, self.assertRaises(RigError) as caught:
            asked(registry, timeout_s=0.3)
        self.assertEqual(caught.exception.error_class, "TIMEOUT")
        self.assertIn("0.3 s", caught.exception.what)

    def test_no_tls_where_tls_is_asked_for(self) -> None:
        with running_registry() as registry:
            address = registry.url.replace("http:", "https:")
            with self.assertRaises(RigError) as caught:
                asyncio.run(ImageRegistry(address).digest(parse_image("owner/name:nightly")))
        self.assertEqual(caught.exception.error_class, "UNREACHABLE")
        self.assertEqual(registry.requests, [])

    def test_addresses_that_are_not_asked(self) -> None:
        for address in (
            "",
            "registry.test",
            "http://registry.test",
            "http://127.0.0.1.registry.test",
            "https://user:password@registry.test",
            "https://registry.test/path",
            "https://registry.test#x",
            "https://",
            "ftp://127.0.0.1",
            "file:///etc/passwd",
            "https://registry.test:0",
            "https://registry.test:99999",
            "https://[::1",
        ):
            with self.subTest(address), self.assertRaises(RigError) as caught:
                ImageRegistry(address)
            self.assertEqual(caught.exception.error_class, "INVALID")
            self.assertNotIn("password", str(caught.exception))


class ResolveTest(unittest.TestCase):
    """From the settings to what docker is given."""

    def resolved(self, reference: str, address: str, pin: str = "") -> ResolvedImage:
        return asyncio.run(resolve_image(reference, address, pin))

    def test_the_tag_of_now_by_digest(self) -> None:
        with running_registry() as registry:
            found = self.resolved("owner/name:nightly", registry.url)
        self.assertEqual((found.image, found.digest), (f"owner/name@{DIGEST}", DIGEST))
        self.assertIn("owner/name:nightly", found.note)

    def test_a_pin_wins_and_nobody_is_asked(self) -> None:
        with running_registry() as registry:
            found = self.resolved("owner/name:nightly", registry.url, OTHER)
        self.assertEqual((found.image, found.digest), (f"owner/name@{OTHER}", OTHER))
        self.assertIn("pinned", found.note)
        self.assertEqual(registry.requests, [])

    def test_without_an_address_the_tag_stays_and_the_note_says_so(self) -> None:
        found = self.resolved("owner/name:nightly", "")
        self.assertEqual((found.image, found.digest), ("owner/name:nightly", ""))
        self.assertIn("not resolved", found.note)

    def test_a_reference_that_names_its_registry_is_asked_for_there(self) -> None:
        with running_registry() as registry, running_registry() as other:
            host = registry.url.removeprefix("http://")
            found = self.resolved(f"{host}/owner/name:nightly", other.url)
            plain = self.resolved(f"{host}/owner/name:nightly", "")
        self.assertEqual(found.image, f"{host}/owner/name@{DIGEST}")
        self.assertEqual(plain, found)
        self.assertEqual(other.requests, [])
        # A registry of one's own has no place for names without an owner.
        self.assertEqual(registry.methods()[0], "HEAD /v2/owner/name/manifests/nightly")

    def test_faults_are_not_taken_for_an_answer(self) -> None:
        with running_registry(status=503) as registry, self.assertRaises(RigError) as caught:
            self.resolved("owner/name:nightly", registry.url)
        self.assertEqual(caught.exception.error_class, "UNREACHABLE")
        self.assertIn("IMAGE_DIGEST", caught.exception.next_step)
        for reference, pin in (("owner/name:-x", ""), ("owner/name:nightly", "sha256:1")):
            with self.subTest(reference), self.assertRaises(RigError) as caught:
                self.resolved(reference, "", pin)
            self.assertEqual(caught.exception.error_class, "INVALID")


if __name__ == "__main__":
    unittest.main()
