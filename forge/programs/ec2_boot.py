#!/usr/bin/env python3
"""Boots an EC2 machine whose GPU serves one model from a container; ends it when nobody uses it.

    ec2_boot.py           at its first start by cloud-init, as root, and later by systemd
    boot.py idle          the watch that ends a machine without use, by systemd
    python3 - ACT DATA    through Systems Manager. ACT: boot_log status logs start stop restart rm
                          gpu. DATA: a JSON object in URL-safe base64: lines, limit (bytes)

What differs between machines comes as one JSON document that the user data laid down; nothing is
filled into this text. Steps are marked on the console, and one that fails says why. Python 3.10, no
package, no shell. Exit status: 0, 1 a step failed, 2 wrong usage.
"""

from __future__ import annotations

import sys

from forge.machine.acts import main
from forge.machine.docker import Docker
from forge.machine.ec2 import Ec2
from forge.machine.machine import Machine

if __name__ == "__main__":
    cloud = Ec2()
    sys.exit(main(sys.argv[1:], Machine(cloud, Docker(cloud, gpu=True), first="driver")))
