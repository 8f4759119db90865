"""How the stand-in for gcloud reads its arguments, asks the fake Google, and prints.

Its class is copied into the program that `fake_gcloud` writes, so it uses the standard library
alone and nothing of this project. Knows gcloud's forms, and no command.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from typing import Any


class GcloudFailed(Exception):
    """What ends the stand-in: the text for its standard error, and its status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class FakeGcloudWire:
    """Arguments, requests and output, in the forms of gcloud 528 (seen 2026-11-30)."""

    # The flags of a command, each with its form: nothing for a text, `?` for one that also has a
    # --no- form, `!` for a switch, `*` for pairs, `@` for files by key, `#` for a number, `~` for
    # a duration, `%` for a size, `=A|B` for a closed list. A name in capitals in front says that a
    # positional argument is needed.
    COMMANDS: dict[str, str] = {}
    COMMON = "project quiet! format=json"
    GROUPS = (["beta", "compute"], ["beta", "compute", "tpus"])  # without commands here
    FORMS = {
        "#": (r"-?\d+", "invalid int value: '{}'"),
        "~": (
            r"(\d+[smhdw]?)+",
            "Failed to parse duration: Duration unit '{}' must be preceded by a number",
        ),
        "%": (
            r"\d+([KMGTP]i?B|B)?",
            "given value must be of the form DECIMAL[UNITS] where units can be one of B, KB, KiB, "
            "MB, MiB, GB, GiB, TB, TiB, PB, PiB and value must be a whole number of Bytes; "
            "received: {}",
        ),
    }
    SEARCH = "\n\nTo search the help text of gcloud commands, run:\n  gcloud help -- SEARCH_TERMS"

    def __init__(self, argv: list[str], old: bool) -> None:
        self.old = old
        self.command = ""
        self.plain = False
        self.flags: dict[str, Any] = {}
        self.name = ""
        self.extra: list[str] | None = None
        self.read_arguments(argv)
        self.alpha = self.command.startswith("alpha ")
        self.project = str(self.flags.get("project") or "")
        if not self.project and self.command not in ("version", "auth list"):
            raise self.refuse(
                "The required property [project] is not currently set.\nIt can be set on a "
                "per-command basis by re-running your command with the [--project] flag.\n\nYou "
                "may set it for your current workspace by running:\n\n  $ gcloud config set "
                "project VALUE\n\nor it can be set temporarily by the environment variable "
                "[CLOUDSDK_CORE_PROJECT]"
            )

    # -- arguments

    @property
    def words(self) -> list[str]:
        """The command's words, without the track."""
        return self.command.removeprefix("alpha ").split()

    @property
    def dotted(self) -> str:
        return "gcloud." + self.command.replace(" ", ".")

    def refuse(self, text: str, status: int = 1) -> GcloudFailed:
        return GcloudFailed(f"ERROR: ({self.dotted}) {text}", status)

    def read_arguments(self, argv: list[str]) -> None:
        """Finds the command and its flags; raises with status 2 what gcloud would not take."""
        if "--" in argv:
            cut = argv.index("--")
            argv, self.extra = argv[:cut], argv[cut + 1 :]
        words = [word for word in argv if not word.startswith("-")]
        for size in range(len(words), 0, -1):
            if " ".join(words[:size]) in self.COMMANDS and argv[:size] == words[:size]:
                self.command = " ".join(words[:size])
                break
        else:
            raise self.unknown_command(words)
        spec = self.COMMANDS[self.command].split()
        needed = spec.pop(0) if spec and spec[0].isupper() else ""
        known = {re.split(r"[?!*@#~%=]", one)[0]: one for one in spec + self.COMMON.split()}
        names, strange = [], []
        for word in argv[len(self.command.split()) :]:
            if not word.startswith("--"):
                names.append(word)
            elif not self.take_flag(word, known):
                strange.append(word)
        if strange:
            raise self.unrecognized(strange)
        if len(names) > 1 or (names and not needed):
            raise self.unrecognized(names[1:] if needed else names)
        if needed and not names:
            what = f"argument {needed}: Must be specified.\nUsage: gcloud {self.command} {needed}"
            raise self.refuse(f"{what} [optional flags]", 2)
        self.name = names[0] if names else ""

    def unknown_command(self, words: list[str]) -> GcloudFailed:
        """Of the longest known beginning: the next word is no choice."""
        known = 0
        for size in range(len(words) + 1):
            begin = words[:size]
            if any(one.split()[:size] == begin for one in self.COMMANDS) or begin in self.GROUPS:
                known = size
        group = ".".join(["gcloud", *words[:known]])
        if known == len(words):
            return GcloudFailed(f"ERROR: ({group}) Command name argument expected.", 2)
        return GcloudFailed(f"ERROR: ({group}) Invalid choice: '{words[known]}'.{self.SEARCH}", 2)

    def unrecognized(self, words: list[str]) -> GcloudFailed:
        if len(words) == 1:
            return self.refuse(f"unrecognized arguments: {words[0]} {self.SEARCH}", 2)
        listed = "".join(f"\n  {word}" for word in words)
        return self.refuse(f"unrecognized arguments:{listed}{self.SEARCH[1:]}", 2)

    def take_flag(self, word: str, known: dict[str, str]) -> bool:
        """Reads one flag; whether the command has it."""
        name, has_value, value = word[2:].partition("=")
        form = known.get(name, "")
        if not form and name.startswith("no-") and known.get(name[3:], "").endswith(("!", "?")):
            self.flags[name[3:]] = False
            return not has_value
        if not form:
            return False
        mark, choices = form[len(name) : len(name) + 1], form.partition("=")[2]
        if (mark == "!") == bool(has_value):
            what = "ignored explicit argument" if has_value else "expected one argument"
            raise self.refuse(f"argument --{name}: {what}", 2)
        if choices and value not in choices.split("|"):
            listed = ", ".join(sorted(choices.split("|")))
            what = f"Invalid choice: '{value}'.\n\nValid choices are [{listed}]."
            raise self.refuse(f"argument --{name}: {what}", 2)
        if mark in self.FORMS and not re.fullmatch(self.FORMS[mark][0], value):
            what = self.FORMS[mark][1].format(value)
            raise self.refuse(f"argument --{name}: {what}", 2)
        if mark == "!":
            self.flags[name] = True
        elif mark and mark in "*@":
            self.flags[name] = dict(self.pair(name, one) for one in value.split(","))
        elif name == "ssh-flag":
            self.flags.setdefault(name, []).append(value)
        else:
            self.flags[name] = value
        return True

    def pair(self, name: str, text: str) -> tuple[str, str]:
        key, has_value, value = text.partition("=")
        if not has_value:
            what = f"Bad syntax for dict arg: [{text}]. Please see `gcloud topic flags-file`"
            raise self.refuse(f"argument --{name}: {what}", 2)
        if name == "labels" and not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key):
            what = f"Bad value [{key}]: Only hyphens (-), underscores (_), lowercase characters, "
            what += "and numbers are allowed. Keys must start with a lowercase character. "
            what += "International characters are allowed. Key length must not exceed 63 "
            raise self.refuse(f"argument --{name}: {what}characters.", 2)
        return key, value

    def files(self, name: str) -> dict[str, str]:
        """The texts of the files that a flag names by key."""
        found = {}
        for key, path in self.flags.get(name, {}).items():
            try:
                with open(path, encoding="utf-8") as file:
                    found[key] = file.read()
            except OSError as error:
                raise self.refuse(f"Unable to read file [{path}]: {error}") from None
        return found

    def matches(self, thing: dict[str, Any]) -> bool:
        """Whether --filter means `thing`: terms key=value (equal) or key:value (has the word)."""
        for path, sign, wanted in self.terms():
            have: Any = thing
            for key in path.split("."):
                have = have.get(key) if isinstance(have, dict) else None
            word = wanted == "*" or re.search(rf"\b{re.escape(wanted)}\b", str(have))
            if have is None or not (str(have) == wanted if sign == "=" else word):
                return False
        return True

    def terms(self) -> list[tuple[str, str, str]]:
        """Key, sign and value of each term of --filter."""
        expression = str(self.flags.get("filter", ""))
        found = []
        for term in expression.split(" AND ") if expression else []:
            parts = re.fullmatch(r"\s*([\w.\-]+)(=|:)(.*?)\s*", term)
            if not parts:
                raise self.refuse(f"Syntax error in filter, or one unknown here: [{term}]")
            found.append((parts[1], parts[2], parts[3].strip("\"'")))
        return found

    def sent_filter(self) -> str:
        """--filter as gcloud hands it on to Compute Engine, as a part of a query."""
        sent = []
        for path, _sign, wanted in self.terms():
            word = re.sub(r"(\W)", r"\\\1", wanted)
            pattern = wanted if wanted.isdigit() else rf'".*\b{word}\b.*"'
            sent.append(f"{path} eq {pattern}")
        if not sent:
            return ""
        whole = sent[0] if len(sent) == 1 else "".join(f"({one})" for one in sent)
        return "&filter=" + "".join(f"%{byte:02X}" for byte in whole.encode())

    # -- requests

    def login(self) -> str:
        """The access token. Raises as gcloud does without a login, or with one that is over."""
        steps = "Please run:\n\n  $ gcloud auth login\n\nto obtain new credentials."
        other = "\n\nIf you have already logged in with a different account, run:\n\n"
        other += "  $ gcloud config set account ACCOUNT\n\nto select an already authenticated "
        try:
            with open(os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"], encoding="utf-8") as file:
                token = file.read().strip()
        except (KeyError, OSError):
            what = f"You do not currently have an active account selected.\n{steps}{other}"
            raise self.refuse(f"{what}account to use.") from None
        if token.startswith("expired"):
            what = "There was a problem refreshing your current auth tokens: ('invalid_grant: "
            what += "Token has been expired or revoked.', {'error': 'invalid_grant'})\n"
            raise self.refuse(f"{what}{steps}{other}account to use.")
        return token

    def base(self, service: str) -> str:
        over = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}")
        if over is None:
            raise self.refuse(f"the stand-in reaches no {service}: no endpoint override is set")
        return over.rstrip("/") + "/"

    def ask(self, method: str, url: str, body: Any = None, query: str = "", tries: int = 1) -> Any:
        """The parsed answer; an error status is raised as `told` has it.

        What met a fault is sent again up to `tries` times in all, without gcloud's waits between.
        """
        raw = b""
        for _ in range(tries):
            raw = self.exchange(method, url, body, query)
            if raw and not raw.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")):
                break
        if not raw:
            why = "RemoteDisconnected('Remote end closed connection without response')"
            why = f"ProxyError('Unable to connect to proxy', {why})"
            raise self.crashed(url, why)
        top, _, text = raw.partition(b"\r\n\r\n")
        status = int(top.split()[1])
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text.decode("utf-8", "replace")
        if status >= 400:
            raise self.told(status, answer, url, top.decode())
        return answer

    def exchange(self, method: str, url: str, body: Any, query: str) -> bytes:
        """One request; empty where the other side ended it without an answer."""
        host, _, path = url.removeprefix("http://").partition("/")
        data = b"" if body is None else json.dumps(body, sort_keys=True).encode()
        head = f"{method} /{path}?alt=json{query} HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Authorization: Bearer {self.login()}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        name, _, port = host.partition(":")
        try:
            with socket.create_connection((name, int(port))) as connection:
                connection.sendall(head.encode() + data)
                with connection.makefile("rb") as stream:
                    return stream.read()
        except ConnectionResetError:
            return b""
        except OSError as error:
            raise self.crashed(url, f"NewConnectionError('{error}')") from None

    def crashed(self, url: str, why: str) -> GcloudFailed:
        name, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
        return GcloudFailed(
            f"ERROR: gcloud crashed (ProxyError): HTTPConnectionPool(host='{name}', port={port}): "
            f"Max retries exceeded with url: {url}?alt=json (Caused by {why})\n\nIf you would like "
            "to report this issue, please run the following command:\n  gcloud feedback\n\nTo "
            "check gcloud for common problems, please run the following command:\n"
            "  gcloud info --run-diagnostics"
        )

    def told(self, status: int, answer: Any, url: str, top: str) -> GcloudFailed:
        """An error answer as most commands print it, or as those do that fetch (`plain`): the bare
        message under a title."""
        if self.plain:
            what = answer["error"]["message"] if isinstance(answer, dict) else answer
            return self.refuse(f"Could not fetch resource:\n - {what}\n")
        if not isinstance(answer, dict) or status >= 500:
            lines = dict(one.split(": ", 1) for one in top.split("\r\n")[1:] if ": " in one)
            heads = {key.lower(): value for key, value in lines.items()}
            content = answer if isinstance(answer, str) else json.dumps(answer)
            return self.refuse(
                f"HttpError accessing <{url}?alt=json>: response: <{ {**heads, 'status': status} }>"
                f", content <{content}>\nThis may be due to network connectivity issues. Please "
                "check your network settings, and the status of the service you are trying to "
                "reach."
            )
        error = answer["error"]
        message, dot = str(error["message"]), ""
        if status in (403, 404):
            token = os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", "")
            dot = "." if message.endswith(".") else ""
            message = message.rstrip(".") + ". This command is authenticated with an access token "
            message += f"from {token} specified by the [auth/access_token_file] property{dot}"
        details = self.yaml(error["details"]) if error.get("details") else ""
        return self.refuse(f"{error['status']}: {message}" + (f"\n{details}" if details else ""))

    # -- output

    def yaml(self, value: Any, indent: str = "") -> str:
        """As much of YAML as gcloud's error texts need: keys in order, folded plain texts."""
        if isinstance(value, list):
            listed = [self.yaml(one, indent + "  ").lstrip() for one in value]
            return "\n".join(f"{indent}- {one}" for one in listed)
        lines = []
        for key, one in sorted(value.items()):
            shown = f"'{key}'" if key.startswith("@") else key
            if isinstance(one, dict | list):
                deeper = indent + ("  " if isinstance(one, dict) else "")
                lines.append(f"{indent}{shown}:\n{self.yaml(one, deeper)}")
            else:
                lines.append(self.folded(f"{indent}{shown}: {one}", indent + "  "))
        return "\n".join(lines)

    def folded(self, text: str, indent: str) -> str:
        """YAML breaks a long plain text at the first single space past column 80."""
        done: list[str] = []
        line, *words = re.split(r"(?<! ) (?! )", text)
        for word in words:
            if len(line) > 80:
                done, line = [*done, line], indent + word
            else:
                line += " " + word
        return "\n".join([*done, line])

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def show(self, value: Any) -> None:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
        print(text)

    def run(self) -> int:
        """Runs the command; its status."""
        name = "_".join(self.words).replace("-", "_")
        return int(getattr(self, name)() or 0)
