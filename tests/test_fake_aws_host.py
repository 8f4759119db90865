"""The fake EC2's machines: they boot their user data as cloud-init does, and end with the instance.

Machines are launched by boto3 and boot small scripts of these tests; commands go through Systems
Manager, ports through the stand-in for session-manager-plugin.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from forge.parts.planes.ec2_user_data import user_data
from forge.suites.fake_aws import FakeAws
from forge.suites.fake_aws_host import FakeAwsHosts
from forge.suites.fake_aws_host_data import user_data_parts
from forge.suites.fake_aws_host_machine import FakeAwsHost
from forge.suites.fake_aws_places import image_of, image_parameters

ROOT = Path(__file__).resolve().parent.parent
REGION = "us-east-1"
PATIENCE_S = 60.0
HELLO = b"#!/usr/bin/env python3\nprint('hello from the boot')\n"


class AwsHostCase(unittest.TestCase):
    """A fake AWS with machines that run, and boto3 that launches them."""

    automatic = True
    minute_s = 1.0

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.cloud = self.enterContext(FakeAws())
        hosts = FakeAwsHosts(
            self.cloud, self.folder / "hosts", minute_s=self.minute_s, automatic=self.automatic
        )
        self.hosts = self.enterContext(hosts)
        self.surroundings = self.cloud.environment(self.folder)
        self.enterContext(mock.patch.dict(os.environ, self.surroundings))
        self.cloud.put_profile()
        self.cloud.script.quotas = dict.fromkeys(self.cloud.script.quotas, 64.0)
        self.addCleanup(self.ended)

    def ended(self) -> None:
        """Nothing asked for a host outside this computer."""
        self.assertEqual(self.cloud.escapes, [])

    def client(self, service: str) -> Any:
        import boto3  # type: ignore[import-untyped]

        return boto3.client(service, region_name=REGION)

    def launch(self, data: bytes = HELLO, name: str = "rig-1", **more: Any) -> str:
        given = {
            "ImageId": image_of(REGION, image_parameters()[0]),
            "InstanceType": "g6.xlarge",
            "IamInstanceProfile": {"Name": "gemma4-rig"},
            "InstanceInitiatedShutdownBehavior": "terminate",
            **more,
        }
        tags = [{"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": name}]}]
        made = self.client("ec2").run_instances(
            MinCount=1, MaxCount=1, UserData=data, TagSpecifications=tags, **given
        )
        return str(made["Instances"][0]["InstanceId"])

    def machine(self, data: bytes = HELLO, **more: Any) -> FakeAwsHost:
        return self.hosts.host(self.launch(data, **more))

    def state(self, host: FakeAwsHost) -> str:
        found = self.client("ec2").describe_instances(InstanceIds=[host.id])
        return str(found["Reservations"][0]["Instances"][0]["State"]["Name"])

    def until(self, holds: Callable[[], Any], host: FakeAwsHost | None = None) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            shown = host.console() if host is not None else ""
            self.assertLess(time.monotonic(), end, f"it did not come to that: {shown}")
            time.sleep(0.05)

    def marked(self, host: FakeAwsHost) -> list[int]:
        """The processes of a machine."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("GEMMA4_ROOT") == str(host.root):
                    found.append(process.pid)
        return found

    def ask(self, port: int, path: str = "/health") -> int:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(line):
            line.request("GET", path)
            return int(line.getresponse().status)

    def served(self, port: int) -> bool:
        try:
            return self.ask(port) == 200
        except (OSError, http.client.HTTPException):
            return False

    def send(self, host: FakeAwsHost, *lines: str, seconds: int = 60) -> dict[str, Any]:
        """A command through Systems Manager, to its end."""
        ssm = self.client("ssm")
        sent = ssm.send_command(
            InstanceIds=[host.id],
            DocumentName="AWS-RunShellScript",
            Parameters={"commands": list(lines), "executionTimeout": [str(seconds)]},
        )
        found: dict[str, Any] = {}

        def over() -> bool:
            with contextlib.suppress(ssm.exceptions.InvocationDoesNotExist):
                found.update(
                    ssm.get_command_invocation(
                        CommandId=sent["Command"]["CommandId"], InstanceId=host.id
                    )
                )
            return found.get("Status", "Pending") not in ("Pending", "InProgress")

        self.until(over)
        return found


def mime(*parts: tuple[str, str, str]) -> bytes:
    """Parts (kind, name, text) as one message, packed."""
    lines = ['MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="mark"\n']
    for kind, name, text in parts:
        head = f'Content-Disposition: attachment; filename="{name}"'
        lines.append(f"--mark\nContent-Type: text/{kind}\n{head}\n\n{text}")
    return gzip.compress(("\n".join(lines) + "\n--mark--\n").encode())


class CloudInitTest(AwsHostCase):
    """User data become files and processes as cloud-init makes them."""

    def test_a_plain_script_runs_and_its_words_are_on_the_console(self) -> None:
        host = self.machine()
        self.assertEqual(host.booted(), 0)
        shown = self.client("ec2").get_console_output(InstanceId=host.id)["Output"]
        self.assertRegex(shown, r"\[ +\d+\.\d+\] cloud-init\[\d+\]: hello from the boot\r\n")

    def test_hook_file_and_script_come_in_their_order_and_the_file_is_private(self) -> None:
        content = 'one: "two" #three\n'
        file = {"path": "/var/lib/some/order", "permissions": "0600", "content": content}
        data = mime(
            (
                "x-shellscript",
                "last",
                '#!/bin/sh\ncat "$GEMMA4_ROOT/var/lib/some/order"\nls "$0"\n',
            ),
            ("cloud-config", "files", "#cloud-config\n" + json.dumps({"write_files": [file]})),
            (
                *("cloud-boothook", "first"),
                '#!/bin/sh\nls "$GEMMA4_ROOT/var/lib/some" >"$GEMMA4_ROOT/seen" 2>&1\n'
                'echo "$INSTANCE_ID" >>"$GEMMA4_ROOT/seen"\n',
            ),
        )
        host = self.machine(data)
        self.assertEqual(host.booted(), 0)
        path = host.root / "var/lib/some/order"
        self.assertEqual((path.read_text(), path.stat().st_mode & 0o777), (content, 0o600))
        self.assertIn('one: "two" #three', host.console())
        self.assertIn("/last\r\n", host.console())
        seen = (host.root / "seen").read_text()
        self.assertIn("No such file", seen)  # the hook came first
        self.assertIn(host.id, seen)

    def test_a_config_in_yaml(self) -> None:
        text = "#cloud-config\nwrite_files:\n- path: /etc/some\n  content: |\n    a: b\n"
        host = self.machine(mime(("cloud-config", "files", text)))
        host.booted()
        self.assertEqual((host.root / "etc/some").read_text(), "a: b\n")

    def test_what_cloud_init_would_not_take(self) -> None:
        cases = {
            b"echo hello; docker ps": "Unhandled non-multipart",
            b"\x1f\x8bno gzip": "Failed to decompress",
            mime(("x-anything", "a", "b")): "Unhandled non-multipart (text/x-anything)",
            mime(("x-shellscript", "a", "echo no first line")): "Exec format error",
            mime(("cloud-config", "a", '#cloud-config\n{"runcmd": []}')): "no runcmd",
        }
        for data, words in cases.items():
            with self.subTest(words):
                host = self.machine(data)
                host.booted()
                self.assertIn(words, host.console())
                self.assertEqual(host.programs(), [])

    def test_user_data_of_the_plane_have_their_three_parts(self) -> None:
        parts = user_data_parts(user_data(HELLO, b'{"v": 1}', 60))
        kinds = ["cloud-boothook", "cloud-config", "x-shellscript"]
        self.assertEqual([part.kind for part in parts], kinds)
        self.assertEqual(parts[2].text, HELLO)

    def test_a_script_that_fails_is_told_and_ends_no_other(self) -> None:
        one, two = "#!/bin/sh\necho one\nexit 3\n", "#!/bin/sh\necho two\n"
        host = self.machine(mime(("x-shellscript", "a", one), ("x-shellscript", "b", two)))
        self.assertEqual(host.booted(), 3)
        self.assertIn("Failed to run module scripts_user", host.console())
        self.assertLess(host.console().index("one\r\n"), host.console().index("two\r\n"))

    def test_a_later_start_runs_the_hook_and_what_is_enabled_and_no_script(self) -> None:
        note = 'echo {} >>"$GEMMA4_ROOT/notes"\n'
        unit = '[Service]\\nExecStart=/bin/sh -c "echo unit >>$GEMMA4_ROOT/notes"\\n'
        unit += "[Install]\\nWantedBy=multi-user.target\\n"
        script = f"#!/bin/sh\n{note.format('script')}printf '{unit}' >"
        script += '"$GEMMA4_ROOT/etc/systemd/system/later.service"\nsystemctl enable later\n'
        hook = "#!/bin/sh\n" + note.format("hook")
        host = self.machine(mime(("cloud-boothook", "h", hook), ("x-shellscript", "s", script)))
        host.booted()
        notes = host.root / "notes"
        self.assertEqual(notes.read_text().split(), ["hook", "script"])
        ec2 = self.client("ec2")
        ec2.stop_instances(InstanceIds=[host.id])
        self.until(lambda: self.state(host) == "stopped" and not self.marked(host))
        ec2.start_instances(InstanceIds=[host.id])
        self.until(lambda: notes.read_text().split() == ["hook", "script", "hook", "unit"], host)
        self.assertEqual(self.state(host), "running")

    def test_a_machine_that_is_pending_does_not_run(self) -> None:
        self.cloud.script.pending_s = 600
        one = self.launch()
        with self.assertRaises(LookupError):
            self.hosts.host(one, patience_s=0.5)
        self.cloud.advance(601)
        self.assertEqual(self.hosts.host(one).booted(), 0)

    def test_what_a_machine_has_around_it(self) -> None:
        script = (
            b"#!/bin/sh\nenv | cut -d= -f1 | sort | tr '\\n' ' '\ncommand -v psql || echo none\n"
        )
        host = self.machine(script)
        host.booted()
        self.assertIn("none", host.console())
        self.assertIn("GEMMA4_ROOT", host.console())
        self.assertNotIn("AWS_SECRET_ACCESS_KEY", host.console())


class EndingTest(AwsHostCase):
    """A machine ends with its instance, whoever ends that."""

    SLEEPER = b"#!/bin/sh\necho up\nsleep 300\n"

    def up(self, **more: Any) -> FakeAwsHost:
        host = self.machine(self.SLEEPER, **more)
        self.until(lambda: "up\r\n" in host.console())
        self.assertTrue(self.marked(host))
        return host

    def test_its_processes_end_with_it(self) -> None:
        spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
        ends: tuple[tuple[Callable[[FakeAwsHost], Any], dict[str, Any]], ...] = (
            (lambda h: self.client("ec2").terminate_instances(InstanceIds=[h.id]), {}),
            (lambda h: self.cloud.take_away(h.id), {}),
            (lambda h: self.cloud.interrupt(h.id), spot),
            (lambda h: h.run("shutdown", "-h", "now"), {}),
            (lambda h: h.run("systemctl", "poweroff"), {}),
        )
        for number, (end, more) in enumerate(ends):
            with self.subTest(number):
                host = self.up(**more)
                end(host)
                self.until(lambda: not self.marked(host))  # noqa: B023
                self.until(lambda: self.state(host) == "terminated")  # noqa: B023
                self.assertIn("up", host.console())
        self.assertEqual(self.cloud.held().get("instances"), None)

    def test_shutting_down_stops_one_that_was_ordered_so(self) -> None:
        host = self.up(InstanceInitiatedShutdownBehavior="stop")
        host.run("shutdown", "-P", "now")
        self.until(lambda: self.state(host) == "stopped" and not self.marked(host))

    def test_a_planned_shutdown_comes_unless_it_is_called_off(self) -> None:
        host = self.up()
        self.assertEqual(host.run("shutdown", "-P", "+240").returncode, 0)
        self.assertEqual(host.run("shutdown", "-c").returncode, 0)
        self.assertEqual(host.run("shutdown", "-P", "+2").returncode, 0)
        self.until(lambda: self.state(host) == "terminated")
        self.assertNotEqual(host.run("shutdown", "tomorrow").returncode, 0)

    def test_an_account_that_is_emptied_takes_its_machines_along(self) -> None:
        host = self.up()
        self.cloud.renew()
        self.until(lambda: not self.marked(host) and not host.on)

    def test_others_machines_are_only_records(self) -> None:
        other = self.cloud.put_machine("us-east-1a")
        host = self.up()
        self.assertEqual(list(self.hosts.hosts), [host.id])
        self.assertFalse(self.cloud.agent_online(other))


class CommandTest(AwsHostCase):
    """Commands through Systems Manager."""

    def setUp(self) -> None:
        super().setUp()
        self.host = self.machine()

    def test_both_streams_and_the_exit_status_of_a_real_shell(self) -> None:
        found = self.send(self.host, "echo out; echo err >&2", "exit 7")
        self.assertEqual((found["Status"], found["ResponseCode"]), ("Failed", 7))
        self.assertEqual(found["StandardOutputContent"], "out\n")
        told = "err\nfailed to run commands: exit status 7"
        self.assertEqual(found["StandardErrorContent"], told)
        found = self.send(self.host, "exit 3")
        self.assertEqual(found["StandardErrorContent"], "failed to run commands: exit status 3")
        found = self.send(self.host, "echo fine")
        self.assertEqual((found["Status"], found["ResponseCode"]), ("Success", 0))
        self.assertEqual(found["StandardErrorContent"], "")

    def test_a_first_line_chooses_the_shell(self) -> None:
        found = self.send(self.host, "#!/bin/bash", "a=(1 2 3); echo ${#a[@]} $BASH_VERSION")
        self.assertRegex(found["StandardOutputContent"], r"^3 \d+\.")
        found = self.send(self.host, "echo ${BASH_VERSION:-another shell}")
        self.assertEqual(found["Status"], "Success")

    def test_what_is_quoted_stays_data(self) -> None:
        found = self.send(self.host, "printf %s 'a; touch \"$GEMMA4_ROOT/x\" $(id) `id`'")
        self.assertEqual(found["StandardOutputContent"], 'a; touch "$GEMMA4_ROOT/x" $(id) `id`')
        self.assertFalse((self.host.root / "x").exists())

    def test_only_the_first_24000_characters_come_back(self) -> None:
        found = self.send(self.host, "seq 1 9000; echo the end; seq 1 5000 >&2; exit 1")
        text = found["StandardOutputContent"]
        self.assertEqual(len(text), 24_000)
        self.assertTrue(text.startswith("1\n2\n") and text.endswith("--output truncated--"))
        self.assertNotIn("the end", text)
        self.assertEqual(len(found["StandardErrorContent"]), 8000)

    def test_it_runs_on_its_own_machine(self) -> None:
        other = self.machine(name="rig-2")
        self.send(other, 'echo here >"$GEMMA4_ROOT/mine"')
        self.assertTrue((other.root / "mine").exists())
        self.assertFalse((self.host.root / "mine").exists())

    def test_one_that_is_cancelled_ends(self) -> None:
        ssm = self.client("ssm")
        sent = ssm.send_command(
            InstanceIds=[self.host.id],
            DocumentName="AWS-RunShellScript",
            Parameters={"commands": ["echo $$ >$GEMMA4_ROOT/pid; sleep 300"]},
        )
        pid = self.host.root / "pid"
        self.until(lambda: pid.exists() and pid.read_text().strip())
        ssm.cancel_command(CommandId=sent["Command"]["CommandId"])
        self.until(lambda: not psutil.pid_exists(int(pid.read_text())))

    def test_an_agent_that_is_not_online(self) -> None:
        ssm = self.client("ssm")

        def online(host: FakeAwsHost) -> bool:
            filters = [{"Key": "InstanceIds", "Values": [host.id]}]
            told = ssm.describe_instance_information(Filters=filters)
            return bool(told["InstanceInformationList"])

        self.assertTrue(online(self.host))
        for orders in ({"agent": False}, {"network": False}, {"profile": False}):
            with self.subTest(str(orders)):
                self.host.script(**orders)
                self.assertFalse(online(self.host))
                with self.assertRaises(ssm.exceptions.InvalidInstanceId):
                    self.send(self.host, "true")
        self.hosts.orders = {"agent": 1.5}
        late = self.machine(name="rig-2")
        self.assertFalse(online(late))
        self.until(lambda: online(late))
        self.hosts.orders = {}
        bare = self.machine(name="rig-3", IamInstanceProfile={})
        self.assertFalse(online(bare))


class PluginTest(AwsHostCase):
    """session-manager-plugin, as a tunnel starts it."""

    def setUp(self) -> None:
        super().setUp()
        document = json.dumps({"health": "http://127.0.0.1:8000/health"})
        file = {"path": "/var/lib/gemma4/order.json", "content": document}
        script = (
            "#!/usr/bin/env python3\nimport http.server, json, os\n"
            "order = json.load(open(os.environ['GEMMA4_ROOT'] + '/var/lib/gemma4/order.json'))\n"
            "port = int(order['health'].split(':')[2].split('/')[0])\n"
            "class Handler(http.server.BaseHTTPRequestHandler):\n"
            "    def do_GET(self):\n"
            "        self.send_response(200); self.end_headers(); self.wfile.write(b'served')\n"
            "http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()\n"
        )
        config = "#cloud-config\n" + json.dumps({"write_files": [file]})
        self.host = self.machine(
            mime(("cloud-config", "a", config), ("x-shellscript", "b", script))
        )
        self.until(lambda: self.served(self.host.port), self.host)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.local = int(probe.getsockname()[1])

    def session(self, remote: int = 8000) -> dict[str, Any]:
        given = {"portNumber": [str(remote)], "localPortNumber": [str(self.local)]}
        self.request = {
            "Target": self.host.id,
            "DocumentName": "AWS-StartPortForwardingSession",
            "Parameters": given,
        }
        return dict(self.client("ssm").start_session(**self.request))

    @contextlib.contextmanager
    def plugin(self, session: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
        words = ["AWS_SSM_START_SESSION_RESPONSE", REGION, "StartSession", ""]
        words += [json.dumps(self.request), self.cloud.base]
        child = subprocess.Popen(
            [str(self.hosts.bin / "session-manager-plugin"), *words],
            env={**os.environ, words[0]: json.dumps(session)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield child
        finally:
            child.kill()
            child.communicate()

    def opened(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.local)) == 0

    def told(self, child: subprocess.Popen[str]) -> str:
        return child.communicate(timeout=30)[0]

    def test_it_carries_a_port_until_it_is_told_to_end(self) -> None:
        session = self.session()
        with self.plugin(session) as child:
            self.until(lambda: self.served(self.local))
            child.terminate()
            text = self.told(child)
        self.assertEqual(child.returncode, 0)
        self.assertIn(f"Port {self.local} opened for sessionId {session['SessionId']}.", text)
        self.assertIn("Waiting for connections...\n", text)
        self.assertIn("Exiting session with sessionId", text)
        self.assertFalse(self.cloud.ssm.sessions[session["SessionId"]].open)
        journal = self.hosts.plugin_journal.read_text()
        self.assertNotIn(session["TokenValue"], journal)
        self.assertIn("StartSession", journal)

    def test_it_ends_with_the_machine(self) -> None:
        with self.plugin(self.session()) as child:
            self.until(lambda: self.served(self.local))
            self.client("ec2").terminate_instances(InstanceIds=[self.host.id])
            self.assertIn("Exiting session", self.told(child))

    def test_a_port_that_nobody_listens_on(self) -> None:
        with self.plugin(self.session(remote=9)) as child:
            self.until(self.opened)
            self.assertFalse(self.served(self.local))
            child.terminate()
            self.assertIn("Connection to destination port failed", self.told(child))

    def test_what_it_cannot_do(self) -> None:
        session = self.session()
        with self.plugin({**session, "TokenValue": "another"}) as child:
            self.assertIn("Cannot perform start session", self.told(child))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", self.local))
            taken.listen()
            with self.plugin(session) as child:
                self.assertIn("address already in use", self.told(child))
            self.assertEqual(child.returncode, 0)  # as the real one
        program = str(self.hosts.bin / "session-manager-plugin")
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        self.assertRegex(version, r"^\d+\.\d+\.\d+\.\d+\n$")
        self.hosts.write_plugin("1.2.0.0")
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        self.assertEqual(version, "1.2.0.0\n")

    def test_the_tunnel_program_becomes_it(self) -> None:
        argv = [sys.executable, "-m", "forge.programs.ssm_tunnel", self.host.id, REGION]
        path = f"{self.hosts.bin}{os.pathsep}{os.environ['PATH']}"
        child = subprocess.Popen(
            [*argv, "8000", str(self.local)],
            env={**os.environ, "PATH": path},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            self.until(lambda: self.served(self.local) or child.poll() is not None)
            self.assertIn("session-manager-plugin", " ".join(psutil.Process(child.pid).cmdline()))
            child.terminate()
            self.assertIn("Exiting session", child.communicate(timeout=30)[0])
        finally:
            child.kill()
            child.communicate()


if __name__ == "__main__":
    unittest.main()
