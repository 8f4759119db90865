"""Systems Manager as the fake AWS answers it: parameters, commands on machines, sessions.

A command runs in a thread through a callable that somebody plugs in; its result is cut as the real
agent cuts it. Knows no machine but whether it runs, and no HTTP.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forge.suites.fake_aws_ec2 import FakeEc2
from forge.suites.fake_aws_places import image_of, image_parameters
from forge.suites.fake_aws_world import AwsRefusal, AwsWorld

# The limits in the API's documentation of GetCommandInvocation; the mark that the agent puts there.
STDOUT_LIMIT, STDERR_LIMIT = 24_000, 8_000
CUT_MARK = "--output truncated--"
_SESSION_TOKEN = "made-up-session-token"


@dataclass
class FakeCommand:
    """One command that was sent to one machine."""

    id: str
    machine: str
    region: str
    script: str
    limit_s: float
    status: str = "Pending"
    stdout: str = ""
    stderr: str = ""
    code: int = -1
    reads: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0


@dataclass
class FakeSession:
    """One session that was started: a machine, a port, the token that was given out."""

    id: str
    machine: str
    region: str
    document: str
    port: int
    token: str
    open: bool = True


@dataclass
class FakeSsm:
    """Systems Manager in all regions. `lock` is the fake's; results are written under it."""

    world: AwsWorld
    ec2: FakeEc2
    lock: Any = field(default_factory=threading.RLock)
    run_command: Callable[[str, str], tuple[str, str, int]] = lambda _machine, _script: ("", "", 0)
    agent_online: Callable[[str], bool] = lambda _machine: True
    end_command: Callable[[str], None] = lambda _machine: None
    commands: dict[tuple[str, str], FakeCommand] = field(default_factory=dict)  # id, machine
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    parameters: dict[tuple[str, str], str] = field(default_factory=dict)  # our own, if any

    def answer(self, region: str, action: str, given: dict[str, Any]) -> dict[str, Any]:
        self.ec2.model(region)
        self.ec2.settle()
        own = getattr(self, f"_do_{action}", None)
        if own is None:
            raise AwsRefusal("InvalidAction", f"the fake's Systems Manager has no {action}")
        answer: dict[str, Any] = own(region, given)
        return answer

    def online(self, region: str, machine: str) -> bool:
        """Whether the machine runs and its agent has registered."""
        found = self.ec2.machines.get(machine)
        runs = found is not None and found.region == region and found.state == "running"
        return runs and bool(self.agent_online(machine))

    # -- parameters

    def _known(self, region: str) -> dict[str, str]:
        gone = self.world.script.no_parameters
        public = {path: image_of(region, path) for path in image_parameters() if path not in gone}
        own = {name: value for (where, name), value in self.parameters.items() if where == region}
        return {**public, **own}

    def _row(self, region: str, name: str, value: str) -> dict[str, Any]:
        return {
            "Name": name,
            "Type": "String",
            "Value": value,
            "Version": 1,
            "DataType": "aws:ec2:image" if name.startswith("/aws/") else "text",
            "ARN": f"arn:aws:ssm:{region}::parameter{name}",
            "LastModifiedDate": 1_793_000_000.0,
        }

    def _do_GetParameter(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        known, name = self._known(region), str(given.get("Name", ""))
        if name not in known:
            raise AwsRefusal("ParameterNotFound", "")
        return {"Parameter": self._row(region, name, known[name])}

    def _do_GetParameters(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        known, asked = self._known(region), list(given.get("Names", []))
        return {
            "Parameters": [self._row(region, one, known[one]) for one in asked if one in known],
            "InvalidParameters": [one for one in asked if one not in known],
        }

    def _do_GetParametersByPath(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        path = str(given.get("Path", "")).rstrip("/") + "/"
        deep = bool(given.get("Recursive"))
        rows = [
            self._row(region, name, value)
            for name, value in sorted(self._known(region).items())
            if name.startswith(path) and (deep or "/" not in name[len(path) :])
        ]
        size = min(int(given.get("MaxResults") or 10), 10)  # the real one's most is 10
        start = int(given.get("NextToken") or 0)
        more = {"NextToken": str(start + size)} if start + size < len(rows) else {}
        return {"Parameters": rows[start : start + size], **more}

    # -- machines

    def _do_DescribeInstanceInformation(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        asked: list[str] | None = None
        for one in given.get("Filters") or []:
            if one.get("Key") == "InstanceIds":
                asked = list(one.get("Values", []))
        for one in given.get("InstanceInformationFilterList") or []:
            if one.get("key") == "InstanceIds":
                asked = list(one.get("valueSet", []))
        rows = [
            {
                "InstanceId": machine,
                "PingStatus": "Online",
                "LastPingDateTime": self.world.now,
                "AgentVersion": "3.3.2299.0",
                "PlatformType": "Linux",
                "PlatformName": "Ubuntu",
                "PlatformVersion": "24.04",
                "ResourceType": "EC2Instance",
            }
            for machine in list(self.ec2.machines)
            if (asked is None or machine in asked) and self.online(region, machine)
        ]
        return {"InstanceInformationList": rows}

    def _do_SendCommand(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        machines = list(given.get("InstanceIds") or [])
        absent = [one for one in machines if not self.online(region, one)]
        if absent or not machines:
            words = f"Instances [[{', '.join(absent)}]] not in a valid state for account "
            raise AwsRefusal("InvalidInstanceId", words + self.world.account)
        if given.get("DocumentName") != "AWS-RunShellScript":
            raise AwsRefusal("InvalidDocument", f"Document {given.get('DocumentName')} not found")
        parameters = given.get("Parameters") or {}
        limit = float((parameters.get("executionTimeout") or ["3600"])[0])
        command_id = str(uuid.uuid4())
        script = "\n".join(parameters.get("commands") or [])
        for one in machines:
            command = FakeCommand(command_id, one, region, script, limit)
            self.commands[command_id, one] = command
            threading.Thread(target=self._run, args=(command,), daemon=True).start()
        row = {
            "CommandId": command_id,
            "DocumentName": "AWS-RunShellScript",
            "Comment": given.get("Comment", ""),
            "Parameters": parameters,
            "InstanceIds": machines,
            "Status": "Pending",
            "StatusDetails": "Pending",
            "RequestedDateTime": self.world.now,
        }
        return {"Command": row}

    def _run(self, command: FakeCommand) -> None:
        with self.lock:
            if command.status == "Pending":
                command.status = "InProgress"
            command.started_at = time.monotonic()
        try:
            stdout, stderr, code = self.run_command(command.machine, command.script)
        except Exception as broken:  # of the machine that a test plugged in
            stdout, stderr, code = "", f"the fake machine broke: {broken!r}", 1
        with self.lock:
            command.ended_at = time.monotonic()
            if command.status in ("Cancelling", "Cancelled"):
                command.status = "Cancelled"
                return
            if command.status != "InProgress":
                return
            command.stdout, command.stderr, command.code = stdout, stderr, code
            command.status = "Success" if code == 0 else "Failed"

    def _do_GetCommandInvocation(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        key = (str(given.get("CommandId", "")), str(given.get("InstanceId", "")))
        command = self.commands.get(key)
        if command is None or command.region != region:
            raise AwsRefusal("InvocationDoesNotExist", "")
        command.reads += 1
        if command.reads <= self.world.script.invocation_hidden:
            raise AwsRefusal("InvocationDoesNotExist", "")
        late = command.started_at and time.monotonic() - command.started_at > command.limit_s
        if command.status == "InProgress" and late:
            command.status, command.code = "TimedOut", 137
            self._end(command)
        details = {"TimedOut": "Execution Timed Out"}.get(command.status, command.status)
        return {
            "CommandId": command.id,
            "InstanceId": command.machine,
            "DocumentName": "AWS-RunShellScript",
            "PluginName": "aws:runShellScript",
            "ResponseCode": command.code,
            "Status": command.status,
            "StatusDetails": details,
            "StandardOutputContent": cut_output(command.stdout, STDOUT_LIMIT),
            "StandardErrorContent": cut_output(command.stderr, STDERR_LIMIT),
            "StandardOutputUrl": "",
            "StandardErrorUrl": "",
        }

    def _do_CancelCommand(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        wanted = str(given.get("CommandId", ""))
        found = [one for one in self.commands.values() if one.id == wanted]
        if not found or found[0].region != region:
            raise AwsRefusal("InvalidCommandId", "")
        for command in found:
            if command.status in ("Pending", "InProgress"):
                command.status = "Cancelled"
                self._end(command)
        return {}

    def _end(self, command: FakeCommand) -> None:
        """Has the machine end what the command runs; outside the lock."""
        machine = command.machine
        threading.Thread(target=self.end_command, args=(machine,), daemon=True).start()

    # -- sessions

    def _do_StartSession(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        machine = str(given.get("Target", ""))
        if not self.online(region, machine):
            raise AwsRefusal("TargetNotConnected", f"{machine} is not connected.")
        document = str(given.get("DocumentName", "SSM-SessionManagerRunShell"))
        if document not in ("AWS-StartPortForwardingSession", "SSM-SessionManagerRunShell"):
            raise AwsRefusal("InvalidDocument", f"Document with name {document} does not exist.")
        port = int(((given.get("Parameters") or {}).get("portNumber") or ["0"])[0])
        one = f"made-up-{uuid.uuid4().hex[:17]}"
        token = f"{_SESSION_TOKEN}-{uuid.uuid4().hex}"
        self.sessions[one] = FakeSession(one, machine, region, document, port, token)
        stream = f"wss://ssmmessages.{region}.amazonaws.com/v1/data-channel/{one}"
        return {
            "SessionId": one,
            "TokenValue": token,
            "StreamUrl": f"{stream}?role=publish_subscribe",
        }

    def _do_TerminateSession(self, region: str, given: dict[str, Any]) -> dict[str, Any]:
        one = str(given.get("SessionId", ""))
        if one in self.sessions:
            self.sessions[one].open = False
        return {"SessionId": one}


def cut_output(text: str, limit: int) -> str:
    """The first characters, with the agent's mark at the end of what was cut."""
    return text if len(text) <= limit else text[: limit - len(CUT_MARK)] + CUT_MARK
