#!/usr/bin/env python3
"""Boots a machine that serves one model from a container, and ends it when nobody uses it.

    boot.py               at each start of the machine, by its start-up agent, as root
    boot.py idle          the watch that ends a machine without use, by systemd
    python3 - ACT DATA    over ssh, with this file as the input. ACT: boot_log logs status start
                          stop restart rm. DATA: a JSON object in URL-safe base64

What differs between machines comes as one JSON document from the metadata server; nothing is filled
into this text. Steps are marked on the console, and one that fails says why. The watch runs before
the first step, so that a broken boot costs no more than an idle machine. Python 3.10, no package,
no shell. Knows no model and composes no container. Exit status: 0, 1 a step failed, 2 wrong usage.
"""

from __future__ import annotations

import sys

from forge.machine.acts import main
from forge.machine.docker import Docker
from forge.machine.google import Google
from forge.machine.machine import Machine

if __name__ == "__main__":
    cloud = Google()
    sys.exit(main(sys.argv[1:], Machine(cloud, Docker(cloud), first="docker")))
