"""The programs of a fake machine on EC2 that ask about it or act on it: nvidia-smi, aws, shutdown.

Its class is copied into a program, so it uses the standard library alone. What a machine is and
what is wrong with it stands in docker's control.json; the cloud is asked through its owner.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from typing import Any

from forge.suites.fake_aws_host_systemd import FakeSystemd
from forge.suites.fake_host_programs import FakeMachineProgram


class FakeEc2Program(FakeMachineProgram):
    """One call of such a program, by the name that it was called with."""

    def owner(self, word: str, **asked: str) -> dict[str, Any]:
        """What the machine's owner says to a question."""
        import urllib.parse

        path = f"/{word}/{self.alias}?{urllib.parse.urlencode(asked)}"
        with socket.create_connection(("127.0.0.1", self.port)) as line:
            line.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            with line.makefile("rb") as stream:
                answer = stream.read()
        return dict(json.loads(answer.partition(b"\r\n\r\n")[2] or b"{}"))

    # -- systemd

    def do_systemctl(self, argv: list[str]) -> int:
        if self.fault("systemd"):
            return self.failed(str(self.fault("systemd")))
        return FakeSystemd(self.place, self.root).systemctl(argv)

    def do_journalctl(self, argv: list[str]) -> int:
        return FakeSystemd(self.place, self.root).journalctl(argv)

    def keep(self, unit: str) -> int:
        if unit != "shutdown":
            return FakeSystemd(self.place, self.root).keep(unit)
        while (moment := self.goes_down_at()) and time.time() < moment:
            time.sleep(0.05)
        return self.do_shutdown(["now"]) if moment else 0

    def goes_down_at(self) -> float:
        try:
            with open(os.path.join(self.place, "shutdown"), encoding="utf-8") as file:
                return float(file.read())
        except (OSError, ValueError):
            return 0.0

    def do_shutdown(self, argv: list[str]) -> int:
        """`now`, in some minutes, in one where no time is given, or `-c`: not after all."""
        planned = os.path.join(self.place, "shutdown")
        if "-c" in argv:
            if os.path.exists(planned):
                os.remove(planned)
            return 0
        moment = next((word for word in argv if not word.startswith("-")), "+1")
        if moment in ("now", "+0"):
            self.owner("shutdown")
            return 0
        found = re.fullmatch(r"\+(\d+)", moment)
        if not found:
            return self.failed(f"Failed to parse time specification: {moment}")
        minute_s = float(os.environ.get("GEMMA4_MINUTE_S", "60"))
        with open(planned, "w", encoding="utf-8") as file:
            file.write(str(time.time() + int(found[1]) * minute_s))
        quiet = subprocess.DEVNULL
        keep = [sys.executable, sys.argv[0], "--keep", "shutdown"]
        subprocess.Popen(keep, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        return 0

    def do_apt_get(self, argv: list[str]) -> int:
        """`install` of what the machine lacks: it lies beside, under its package's name."""
        if self.fault("apt") or self.fault("offline"):
            default = "E: Unable to fetch some archives, maybe run apt-get update?"
            return self.failed(str(self.fault("apt") or default), 100)
        folder = os.path.dirname(os.path.abspath(sys.argv[0]))
        for package in argv if "install" in argv else []:
            name = {"ninja-build": "ninja", "python3-pip": "pip3", "docker.io": "docker"}
            spare = os.path.join(self.place, f"{name.get(package, package)}.spare")
            if os.path.exists(spare):
                os.rename(spare, os.path.join(folder, name.get(package, package)))
        return 0

    # -- the GPU

    def do_nvidia_smi(self, argv: list[str]) -> int:
        gpu = self.fault("gpu")
        if self.fault("driver"):
            print(self.fault("driver"))
            return 9
        if not gpu:
            print("No devices were found")
            return 6
        options = dict(word.partition("=")[::2] for word in argv)
        if "-L" in argv or "--list-gpus" in argv:
            print(f"GPU 0: {gpu['name']} (UUID: {gpu['uuid']})")
        elif "--query-gpu" in options:
            return self.gpu_fields(gpu, options["--query-gpu"].split(","), options["--format"])
        elif argv:
            print(f"Invalid combination of input arguments. '{argv[0]}'")
            return 1
        else:
            version = gpu["driver_version"]
            print(f"| NVIDIA-SMI {version:<22} Driver Version: {version:<14}", end="")
            print(f" CUDA Version: {gpu['cuda']:<8} |\n| 0  {gpu['name']:<30} {gpu['memory']}MiB |")
        return 0

    def gpu_fields(self, gpu: dict[str, Any], fields: list[str], form: str) -> int:
        units = {"memory.total": "MiB", "memory.free": "MiB", "memory.used": "MiB"}
        units |= {"utilization.gpu": "%"}
        total, used = int(gpu["memory"]), 0 if self.fault("gpu_idle") else 1
        known: dict[str, Any] = {
            "memory.total": total,
            "memory.free": total - used,
            "memory.used": used,
        }
        known |= {"utilization.gpu": 0, "temperature.gpu": 31, "index": 0, "count": 1}
        known |= {"gpu_name": gpu["name"], "pstate": "P8", "ecc.mode.current": "Enabled"}
        known |= {key: gpu[key] for key in ("name", "compute_cap", "driver_version", "uuid")}
        row, heads = [], []
        for asked in (one.strip() for one in fields):
            if asked not in known:
                print(f'Field "{asked}" is not a valid field to query.\n')
                return 2
            unit = units.get(asked, "")
            plain = "nounits" in form or not unit
            row.append(str(known[asked]) + ("" if plain else f" {unit}"))
            heads.append(asked + (f" [{unit}]" if unit and not plain else ""))
        if "noheader" not in form:
            print(", ".join(heads))
        print(", ".join(row))
        return 0

    def do_nvcc(self, argv: list[str]) -> int:
        release = self.fault("toolkit") or "12.8"
        print("nvcc: NVIDIA (R) Cuda compiler driver")
        print("Copyright (c) 2005-2025 NVIDIA Corporation")
        print(f"Cuda compilation tools, release {release}, V{release}.93")
        return 0

    # -- memory

    def do_fallocate(self, argv: list[str]) -> int:
        """A file of that length, as a hole."""
        size, path = argv[-2].partition("=")[2] or argv[-2], argv[-1]
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size.rstrip("iB")[-1:], 1)
        if self.fault("disk"):
            return self.failed("fallocate: fallocate failed: No space left on device")
        with open(path, "wb") as file:
            file.truncate(int(re.sub(r"\D", "", size)) * factor)
        return 0

    def do_mkswap(self, argv: list[str]) -> int:
        with open(argv[-1], "r+b") as file:
            file.seek(4086)
            file.write(b"SWAPSPACE2")
        print(f"Setting up swapspace version 1, size = {os.path.getsize(argv[-1])} bytes")
        return 0

    def do_swapon(self, argv: list[str]) -> int:
        path = argv[-1]
        if path.startswith("-"):
            swaps = self.swaps()
            print("\n".join(swaps) if swaps else "", end="\n" if swaps else "")
            return 0
        with open(path, "rb") as file:
            file.seek(4086)
            if file.read(10) != b"SWAPSPACE2":
                return self.failed(f"swapon: {path}: read swap header failed", 255)
        return self.set_swaps([*self.swaps(), path])

    def do_swapoff(self, argv: list[str]) -> int:
        if argv[-1] not in self.swaps():
            return self.failed(f"swapoff: {argv[-1]}: swapoff failed: Invalid argument", 4)
        return self.set_swaps([one for one in self.swaps() if one != argv[-1]])

    def swaps(self) -> list[str]:
        with open(os.path.join(self.root, "proc/swaps"), encoding="utf-8") as file:
            return [line.split()[0] for line in file.read().splitlines()[1:]]

    def set_swaps(self, paths: list[str]) -> int:
        """Writes what the kernel would tell of these swap files."""
        lines = ["Filename\tType\tSize\tUsed\tPriority"]
        lines += [f"{path}\tfile\t{os.path.getsize(path) // 1024}\t0\t-2" for path in paths]
        with open(os.path.join(self.root, "proc/swaps"), "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        size = sum(os.path.getsize(path) for path in paths) // 1024
        about = os.path.join(self.root, "proc/meminfo")
        with open(about, encoding="utf-8") as file:
            text = re.sub(r"(Swap(?:Total|Free): +)\d+", rf"\g<1>{size}", file.read())
        with open(about, "w", encoding="utf-8") as file:
            file.write(text)
        return 0

    # -- the AWS CLI, version 2, with the credentials of the machine's instance profile

    def do_aws(self, argv: list[str]) -> int:
        words = [word for word in argv if not word.startswith("-")]
        pairs = zip(argv, argv[1:], strict=False)
        options = {key: value for key, value in pairs if key.startswith("--")}
        options |= dict(
            word.split("=", 1) for word in argv if word.startswith("--") and "=" in word
        )
        if argv == ["--version"]:
            print("aws-cli/2.31.0 Python/3.13.7 Linux/6.14.0-aws exe/x86_64.ubuntu.24")
            return 0
        region = options.get("--region", os.environ.get("AWS_REGION", ""))
        service = "s3" if words[:1] == ["s3"] else "secretsmanager"
        if self.fault("offline"):
            host = f"https://{service}.{region}.amazonaws.com/"
            return self.failed(f'\nCould not connect to the endpoint URL: "{host}"', 255)
        if self.fault("profile"):
            what = "Unable to locate credentials. You can configure credentials by running "
            return self.failed(f'\n{what}"aws login".', 253)
        if words[:2] == ["secretsmanager", "get-secret-value"]:
            return self.secret(region, options)
        if words[:1] == ["s3"] and words[1] in ("sync", "cp"):
            return self.bucket(words[1], argv[2:], region)
        return self.failed(f"\naws: error: argument operation: Invalid choice: {words[:2]}", 252)

    def secret(self, region: str, options: dict[str, str]) -> int:
        if not region:
            return self.failed("\nYou must specify a region.", 253)
        found = self.owner("secret", region=region, name=options.get("--secret-id", ""))
        if "value" not in found:
            return self.failed(
                f"\nAn error occurred ({found['code']}) when calling the GetSecretValue operation: "
                f"{found['message']}",
                254,
            )
        if options.get("--query") == "SecretString" and options.get("--output") == "text":
            print(found["value"])
        else:
            print(json.dumps({"SecretString": found["value"]}, indent=4))
        return 0

    def bucket(self, verb: str, argv: list[str], region: str) -> int:
        if self.fault("bucket"):
            return self.failed(f"fatal error: {self.fault('bucket')}")
        ends, skip = [], False
        for word in argv:
            valued = word in ("--region", "--exclude", "--include", "--sse", "--output")
            if not skip and not word.startswith("--"):
                ends.append(word)
            skip = valued
        found = self.owner("s3", verb=verb, source=ends[0], target=ends[1])
        if "message" in found:
            return self.failed(f"fatal error: {found['message']}")
        if "--only-show-errors" not in argv and "--quiet" not in argv:
            print("\n".join(found["done"]))
        return 0
