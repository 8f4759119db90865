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
_FILTER_TERM = re.compile(r'([\w.\-/"]+?)\s*(>=|<=|!=|=|:)\s*"?([^"\s]+)"?')
_SEVERITIES = ("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT")


class FakeSecrets:
    """Secrets by name, each with the payloads of its versions (base64, as they were sent)."""

    def __init__(self, world: GoogleWorld) -> None:
        self.world = world
        self.payloads: dict[str, list[str]] = {}

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
            return self._create(root, query.get("secretId", ""))
        if name not in self.payloads:
            raise GoogleRefusal(404, "NOT_FOUND", f"Secret [{root}/{name}] not found.")
        if verb == "addVersion":
            self.payloads[name].append(body["payload"]["data"])
            made = {"name": f"{root}/{name}/versions/{len(self.payloads[name])}"}
            # Without this gcloud takes the payload for damaged.
            return {**made, "state": "ENABLED", "clientSpecifiedPayloadChecksum": True}
        if versions:
            return self._version(f"{root}/{name}", self.payloads[name], version, verb)
        if method == "DELETE":
            del self.payloads[name]
            return {}
        return {"name": f"{root}/{name}", "replication": {"automatic": {}}}

    def _create(self, root: str, name: str) -> dict[str, Any]:
        if name in self.payloads:
            raise GoogleRefusal(409, "ALREADY_EXISTS", f"Secret [{root}/{name}] already exists.")
        self.payloads[name] = []
        return {"name": f"{root}/{name}", "replication": {"automatic": {}}}

    def _version(
        self, secret: str, payloads: list[str], version: str | None, verb: str | None
    ) -> dict[str, Any]:
        if version is None:
            names = [f"{secret}/versions/{n + 1}" for n in range(len(payloads))]
            return {"versions": [{"name": name, "state": "ENABLED"} for name in names]}
        number = len(payloads) if version == "latest" else int(version)
        if not 1 <= number <= len(payloads):
            what = f"Secret Version [{secret}/versions/{version}] not found."
            raise GoogleRefusal(404, "NOT_FOUND", what)
        found: dict[str, Any] = {"name": f"{secret}/versions/{number}", "state": "ENABLED"}
        if verb == "access":
            found = {"name": found["name"], "payload": {"data": payloads[number - 1]}}
        return found


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
        self.entries.append({**own, "severity": "DEFAULT", **entry})


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
    """Whether `entry` is meant by a filter of comparisons joined by AND; other terms are ignored.

    Without its time bounds gcloud would read everything: so those, severities, equality and
    containment are understood, and that is what tests may rely on.
    """
    for field, sign, value in _FILTER_TERM.findall(expression):
        found: Any = entry
        for key in field.replace('"', "").split("."):
            found = found.get(key, "") if isinstance(found, Mapping) else ""
        left: Any = str(found)
        right: Any = value
        if field == "severity":
            left, right = _severity(left), _severity(value)
        verdicts = {
            "=": left == right,
            "!=": left != right,
            ">=": left >= right,
            "<=": left <= right,
            ":": str(value) in str(found),
        }
        if not verdicts[sign]:
            return False
    return True


def _severity(name: str) -> int:
    return _SEVERITIES.index(name) if name in _SEVERITIES else 0
