"""The attack corpus over every tool and every parameter of the live list, over stdio.

What is refused is refused by the parameter's name and starts nothing; free text that passes is
data, and the model server has received exactly that text. Witnesses: the process table, the
journal, the fake engine's own notes, the file system.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from mcp.types import Tool

from forge.suites.catalogue import listed_tools, parameters_of
from forge.suites.raw_stdio import RawServer, call_fault, raw_server
from forge.suites.rig_case import RigCase

# Shell, option, path, URL, template and Unicode attacks; each once led to a CVE somewhere.
ATTACK_CORPUS = (
    "; touch P #",
    "$(touch P)",
    "`touch P`",
    "a\nb",
    "a\rb",
    "a\x00b",
    "--help",
    "-x",
    "--flags-file=/etc/passwd",
    "--impersonate-service-account=a@b",
    "projects/o/zones/z/instances/i",
    "https://www.googleapis.com/compute/v1/projects/o/zones/z/instances/i",
    "user@host",
    "../../etc/passwd",
    "/../../etc/passwd",
    "a,startup-script=x",
    "x OR name~.*",
    "ＡＢＣ",
    "a\u202eb",
    "a" * 10_000,
    "a" * 10_000_000,
    "",
    " ",
    "%0a",
    "{0.__class__}",
    "{{x}}",
    "'\"\\",
    "embedded\n",
    "google/gemma-4-E2B-it\x00",
)
# A log pasted into these is read as data, whatever it holds: nothing in it can be refused.
_LOG_TEXTS = (("analyze_logs", "text"), ("suggest_sre_remediation", "text"))
# What a required argument is given while another one is attacked.
STAND_INS = {
    "first": "2026-01-01-gemma4-e2b-vllm-cpu",
    "second": "2026-01-02-gemma4-e2b-vllm-cpu",
    "name": "2026-01-01-gemma4-e2b-vllm-cpu",
    "job_id": "serve-20260101-000000-abcdef",
}
_WRONG_TYPES: tuple[Any, ...] = (5, 1.5, True, None, [], ["a"], {}, {"a": 1})


def _tells(fault: str, parameter: str) -> bool:
    """Whether `fault` refuses `parameter` by its name, and as the first thing that it says."""
    return fault.startswith(f"INVALID {parameter}: ")


class BadInputSuite(RigCase):
    """Nothing that a confused or steered agent sends starts anything that it should not."""

    keeps_running = True
    stand_ins: ClassVar[Mapping[str, str]] = STAND_INS
    tools: list[Tool]
    server: ClassVar[RawServer]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.serve_for_class()
        server_file = cls.rig_folder / "server.py"
        running = raw_server(server_file, cls.environment, cls.place / "stderr.txt")
        cls.server = cls.enterClassContext(running)

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        async with self.in_process() as client:
            self.tools = await listed_tools(client)

    @contextmanager
    def unharmed(self) -> Iterator[RawServer]:
        """The server; at the end nothing was started, stopped, written or killed, itself least."""
        before = (self.processes(), len(self.journal()), len(self.engine.starts()))
        jobs = sorted((self.rig_state / "jobs").iterdir())
        yield self.server
        self.assertTrue(self.server.answers_ping(), "the server does not answer any more")
        self.assertEqual(self.processes(), before[0])
        self.assertEqual(len(self.journal()), before[1])
        self.assertEqual(len(self.engine.starts()), before[2])
        self.assertEqual(sorted((self.rig_state / "jobs").iterdir()), jobs)
        self.assertEqual(list(self.place.rglob("P")), [], "an attack ran as a command")

    def required(self, tool: Tool, but: str = "") -> dict[str, str]:
        """A fitting value for every argument that `tool` requires, `but` aside."""
        names = [name for name in tool.input_schema.get("required", []) if name != but]
        return {name: self.stand_ins.get(name, "hello") for name in names}

    def _strings(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(tool, parameter, the other arguments that the tool requires) of each string."""
        for tool in self.tools:
            for name, schema in parameters_of(tool).items():
                if schema.get("type") == "string":
                    yield tool.name, name, self.required(tool, name)

    def test_every_attack_on_every_string_of_every_tool(self) -> None:
        attacked = passed = 0
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                default = next(
                    parameters_of(t)[parameter].get("default") for t in self.tools if t.name == tool
                )
                for attack in ATTACK_CORPUS:
                    if attack == default:
                        continue  # leaving the argument out is no attack
                    attacked += 1
                    seen = len(self.engine.requests())
                    fault = call_fault(server.call(tool, {**others, parameter: attack}))
                    arrived = self.engine.requests()[seen:]
                    where = f"{tool}.{parameter} = {attack[:60]!r}: {fault[:200]}"
                    if (tool, parameter) in _LOG_TEXTS and len(attack) < 1_000_000:
                        self.assertEqual(fault, "", where)
                        self.assertEqual(arrived, [], f"{where} went to the model")
                    elif fault:
                        self.assertTrue(_tells(fault, parameter), where)
                        self.assertEqual(arrived, [], where)
                        if len(attack) > 20:
                            self.assertNotIn(attack[:200], fault, "the value came back")
                    else:
                        passed += 1
                        self.assertEqual(len(arrived), 1, where)
                        said = [m["content"] for m in arrived[0]["body"]["messages"]]
                        self.assertIn(attack, said, f"{where} did not arrive as it was")
        # A list of tools that shrank, or a gate that refuses all, must not make this pass.
        self.assertGreaterEqual(attacked, 7 * (len(ATTACK_CORPUS) - 1))
        self.assertGreater(passed, 0)
        self.assertLess(passed, attacked / 2)

    def test_wrong_types_are_refused_by_name(self) -> None:
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                for value in _WRONG_TYPES:
                    fault = call_fault(server.call(tool, {**others, parameter: value}))
                    self.assertTrue(_tells(fault, parameter), f"{tool}.{parameter}: {fault}")

    def test_numbers_out_of_range_are_refused_by_name(self) -> None:
        numbers = 0
        with self.unharmed() as server:
            for tool in self.tools:
                required = self.required(tool)
                for name, schema in parameters_of(tool).items():
                    if schema.get("type") not in ("integer", "number"):
                        continue
                    numbers += 1
                    low, high = schema["minimum"], schema["maximum"]
                    bad = [low - 1, high + 1, -(10**40), 10**40, "abc", "", None, [], {}]
                    bad += [float("nan"), float("inf"), "1; touch P"]
                    for value in bad:
                        fault = call_fault(server.call(tool.name, {**required, name: value}))
                        self.assertTrue(_tells(fault, name), f"{tool.name}.{name}={value}: {fault}")
        self.assertGreaterEqual(numbers, 8)

    def test_missing_and_additional_arguments_are_refused_by_name(self) -> None:
        with self.unharmed() as server:
            for tool in self.tools:
                for name in tool.input_schema.get("required", []):
                    fault = call_fault(server.call(tool.name, self.required(tool, name)))
                    self.assertTrue(_tells(fault, name), f"{tool.name}: {fault}")
                for stranger in ("confirm", "__class__", "ctx", "self", "a\nb", "x" * 10_000):
                    arguments = {**self.required(tool), stranger: "yes"}
                    fault = call_fault(server.call(tool.name, arguments))
                    self.assertTrue(fault.startswith("INVALID "), f"{tool.name}: {fault[:200]}")
                    self.assertLess(len(fault), 10_000)

    def test_lines_that_are_no_request_harm_nothing(self) -> None:
        with self.unharmed() as server:
            for line in (b"", b"no json", b"[]", b"{}", b"\xff\xfe\x00", b'{"jsonrpc":"2.0"}'):
                server.send_text(line)
            server.send_text(b"[" * 100_000)
            self.assertTrue(server.answers_ping())
            for arguments in (["a"], "text", 5):
                self.assertTrue(call_fault(server.call("get_job", arguments)))
            self.assertTrue(call_fault(server.call("no_such_tool", {})))

    def test_a_lone_surrogate_on_the_wire_reaches_no_tool(self) -> None:
        """The SDK drops such a line, which is no JSON to it; nothing starts, all else goes on."""
        with self.unharmed() as server:
            seen = len(self.engine.requests())
            for tool, parameter, others in self._strings():
                number = server.send(
                    "tools/call", {"name": tool, "arguments": {**others, parameter: "a\ud800b"}}
                )
                self.assertTrue(server.answers_ping())
                answer = server.receive(number, 0.05)
                if answer is not None:
                    self.assertTrue(_tells(call_fault(answer), parameter), answer)
            self.assertEqual(len(self.engine.requests()), seen)

    async def test_a_lone_surrogate_in_process_is_refused_by_name(self) -> None:
        async with self.in_process() as client:
            for tool, parameter, others in self._strings():
                arguments = {**others, parameter: "a\ud800b"}
                text = await self.refusal(client, tool, "INVALID", **arguments)
                self.assertTrue(_tells(text, parameter), text)

    def test_a_value_that_looks_like_a_secret_never_comes_back(self) -> None:
        secret = "hf_" + "Q" * 40
        with self.unharmed() as server:
            for tool, parameter, others in self._strings():
                answer = server.call(tool, {**others, parameter: f"\x00{secret}"})
                if (tool, parameter) not in _LOG_TEXTS:
                    self.assertTrue(call_fault(answer), tool)
                self.assertNotIn(secret, json.dumps(answer))
        self.assertNotIn(secret, self.stderr_file.read_text())
