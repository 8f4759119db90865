"""The small services of the fake Google: Secret Manager, Cloud Logging, OS Login.

A secret's payload is kept here and in no record. Knows their REST APIs as far as gcloud and
Google's Python clients ask for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forge.suites.fake_google_world import GoogleRefusal, GoogleWorld

_SECRET_PATH = re.compile(
    r"/v1/projects/([^/:]+)/secrets(?:/([^/:]+))?(/versions(?:/([^/:]+))?)?(?::(\w+))?"
)
_LOGIN_PATH = re.compile(r"/v1(?:beta|alpha)?/users/([^/:]+)(/loginProfile|:importSshPublicKey)")
_FILTER_TOKEN = re.compile(
    r"\s*(?:(?P<mark>[()])|(?P<word>AND|OR|NOT)\b"
    r'|(?P<field>(?:[\w\-/]|\.|"[^"]*")+?)\s*(?P<sign>>=|<=|!=|=~|!~|=|:|<|>)'
    r'\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s()"]+))'
    r'|(?P<text>"[^"]*"|[^\s()"]+))'
)
_SEVERITIES = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT")


class FakeSecrets:
    """Secrets by name, each with the payloads of its versions (base64, as they were sent), its
    labels, and the numbers of the versions that are disabled."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.payloads: dict[str, list[str]] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.disabled: set[tuple[str, int]] = set()

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Secret Manager says to one request. Raises GoogleRefusal."""
        matched = _SECRET_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")
        project, name, versions, version, verb = matched.groups()
        self.world.check("secrets", project)
        root = f"projects/{project}/secrets"
        if name is None and method == "GET":
            page, more = self.world.paged([{"name": f"{root}/{n}"} for n in self.payloads], query)
            return {"secrets": page, **more}
        if name is None:
            return self._create(root, query.get("secretId", ""), body.get("labels") or {})
        if name not in self.payloads:
            raise GoogleRefusal(404, "NOT_FOUND", f"Secret [{root}/{name}] not found.")
        if verb == "addVersion":
            self.payloads[name].append(body["payload"]["data"])
            made = {"name": f"{root}/{name}/versions/{len(self.payloads[name])}"}
            # Without this gcloud takes the payload for damaged.
            return {**made, "state": "ENABLED", "clientSpecifiedPayloadChecksum": True}
        if versions:
            return self._version(root, name, version, verb, query)
        if method == "DELETE":
            del self.payloads[name]
            self.labels.pop(name, None)
            return {}
        return self._shown(root, name)

    def _shown(self, root: str, name: str) -> dict[str, Any]:
        labels = {"labels": self.labels[name]} if self.labels.get(name) else {}
        return {"name": f"{root}/{name}", "replication": {"automatic": {}}, **labels}

    def _create(self, root: str, name: str, labels: dict[str, str]) -> dict[str, Any]:
        if name in self.payloads:
            raise GoogleRefusal(409, "ALREADY_EXISTS", f"Secret [{root}/{name}] already exists.")
        self.payloads[name], self.labels[name] = [], dict(labels)
        return self._shown(root, name)

    def _version(
        self,
        root: str,
        secret: str,
        version: str | None,
        verb: str | None,
        query: Mapping[str, str],
    ) -> dict[str, Any]:
        payloads, path = self.payloads[secret], f"{root}/{secret}/versions"
        if version is None:
            found = [self._about(path, secret, n) for n in range(len(payloads), 0, -1)]
            wanted = query.get("filter", "").partition("state:")[2]
            page, more = self.world.paged(
                [one for one in found if wanted in ("", one["state"])], query
            )
            return {"versions": page, **more}
        number = len(payloads) if version == "latest" else int(version)
        if not 1 <= number <= len(payloads):
            what = f"Secret Version [{path}/{version}] not found."
            raise GoogleRefusal(404, "NOT_FOUND", what)
        if verb == "access":
            return {"name": f"{path}/{number}", "payload": {"data": payloads[number - 1]}}
        return self._about(path, secret, number)

    def _about(self, path: str, secret: str, number: int) -> dict[str, str]:
        state = "DISABLED" if (secret, number) in self.disabled else "ENABLED"
        return {"name": f"{path}/{number}", "state": state}


class FakeLogging:
    """Log entries, oldest first, as a test or a client wrote them."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.entries: list[dict[str, Any]] = []

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What Cloud Logging says to one request. Raises GoogleRefusal."""
        if method == "POST" and path == "/v2/entries:write":
            self.world.check("logging", self.world.project)
            for entry in body.get("entries", []):
                common: dict[str, Any] = {
                    key: body[key] for key in ("logName", "resource") if key in body
                }
                self.add({**common, **entry})
            return {}
        if method == "POST" and path == "/v2/entries:list":
            for name in body.get("resourceNames", []):
                self.world.check("logging", name.split("/")[1])
            seen = [one for one in self.entries if log_matches(body.get("filter", ""), one)]
            if "desc" in body.get("orderBy", ""):
                seen.reverse()
            page, more = self.world.paged(seen, {k: str(v) for k, v in body.items()})
            return {"entries": page, **more}
        raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")

    def add(self, entry: Mapping[str, Any]) -> None:
        """One more entry; what a real one always has is filled in."""
        own = {"timestamp": self.world.stamp(), "insertId": self.world.serial()}
        name = f"projects/{self.world.project}/logs/unnamed"
        self.entries.append({**own, "logName": name, "severity": "DEFAULT", **entry})


class FakeLogin:
    """OS Login: one profile for each address that asks, with the keys that were imported."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.keys: dict[str, list[str]] = {}

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """What OS Login says to one request. Raises GoogleRefusal."""
        matched = _LOGIN_PATH.fullmatch(path)
        if not matched:
            raise GoogleRefusal(404, "NOT_FOUND", f"no such path: {path}")
        self.world.check("oslogin", self.world.project)
        user, verb = matched.groups()
        keys = self.keys.setdefault(user, [])
        if method == "POST" and verb == ":importSshPublicKey":
            keys.append(str(body.get("key", "")))
        account = {"primary": True, "username": re.sub(r"\W", "_", user), "uid": "2000000"}
        public = {str(number): {"key": key} for number, key in enumerate(keys)}
        profile = {"name": user, "posixAccounts": [account], "sshPublicKeys": public}
        return {"loginProfile": profile} if verb.startswith(":") else profile


def log_matches(expression: str, entry: Mapping[str, Any]) -> bool:
    """Whether `entry` is meant by a filter. Raises GoogleRefusal for one that cannot be read.

    Understood are comparisons, texts, AND (also unwritten), OR, NOT and parentheses; NOT binds
    closest, then OR, then AND, as Google's documents have it.
    """
    tokens: list[re.Match[str]] = []
    at = 0
    while at < len(expression.rstrip()):
        found = _FILTER_TOKEN.match(expression, at)
        if found is None:
            raise _unreadable_filter(expression)
        tokens.append(found)
        at = found.end()
    verdict = _all_of(tokens, entry, expression)
    if tokens:
        raise _unreadable_filter(expression)
    return verdict


def _all_of(tokens: list[re.Match[str]], entry: Mapping[str, Any], whole: str) -> bool:
    verdict = True
    while tokens and tokens[0]["mark"] != ")":
        verdict = _any_of(tokens, entry, whole) and verdict
        if tokens and tokens[0]["word"] == "AND":
            tokens.pop(0)
            if not tokens or tokens[0]["mark"] == ")":
                raise _unreadable_filter(whole)
    return verdict


def _any_of(tokens: list[re.Match[str]], entry: Mapping[str, Any], whole: str) -> bool:
    verdict = _one_term(tokens, entry, whole)
    while tokens and tokens[0]["word"] == "OR":
        tokens.pop(0)
        verdict = _one_term(tokens, entry, whole) or verdict
    return verdict


def _one_term(tokens: list[re.Match[str]], entry: Mapping[str, Any], whole: str) -> bool:
    if not tokens:
        raise _unreadable_filter(whole)
    token = tokens.pop(0)
    if token["word"] == "NOT":
        return not _one_term(tokens, entry, whole)
    if token["mark"] == "(":
        verdict = _all_of(tokens, entry, whole)
        if not tokens or tokens.pop(0)["mark"] != ")":
            raise _unreadable_filter(whole)
        return verdict
    if token["field"]:
        value = token["bare"] if token["quoted"] is None else token["quoted"]
        return _compared(token["field"], token["sign"], value, entry)
    if token["text"]:
        return token["text"].strip('"').lower() in str(entry).lower()
    raise _unreadable_filter(whole)


def _compared(field: str, sign: str, value: str, entry: Mapping[str, Any]) -> bool:
    found: Any = entry
    for quoted, plain in re.findall(r'"([^"]*)"|([^."]+)', field):
        found = found.get(quoted or plain, "") if isinstance(found, Mapping) else ""
    left: Any = str(found)
    right: Any = value
    if sign in ("=~", "!~"):
        return (re.search(value, left) is not None) == (sign == "=~")
    if field == "severity":
        left, right = _severity(left), _severity(value)
    verdicts: dict[str, bool] = {
        "=": left == right,
        "!=": left != right,
        ">=": left >= right,
        "<=": left <= right,
        ">": left > right,
        "<": left < right,
        ":": value.lower() in str(found).lower(),
    }
    return verdicts[sign]


def _unreadable_filter(expression: str) -> GoogleRefusal:
    what = f"Unparseable filter: syntax error in {expression!r}"
    return GoogleRefusal(400, "INVALID_ARGUMENT", what)


def _severity(name: str) -> int:
    return _SEVERITIES.index(name) if name in _SEVERITIES else 0
