"""What a machine on EC2 gets with its create call: its end, its boot's document and its program.

Three parts for cloud-init, packed. Knows no machine's state and nothing of what the program does.
"""

from __future__ import annotations

import gzip
import json

from forge.parts.ground.errors import RigError

# EC2's limit of user data in bytes, before base64 (EC2's user guide, "User data", 2026).
USER_DATA_LIMIT = 16_384
MACHINE_DOCUMENT = "/var/lib/gemma4/order.json"
MACHINE_END = "/var/lib/gemma4/end"
END_TIMER = "gemma4-end"

# Every boot runs it before anything else; by cloud-init's own rules only a boothook is. Its first
# one writes down when the machine ends, later ones read that. A timer on an absolute time ends the
# machine; Persistent lets it fire at once where that time came while the machine was stopped.
#
# Nothing here may wait for a unit: cloud-init runs before sysinit.target, for which units wait by
# themselves. So the timer depends on nothing, and its start is only asked for. Where it cannot be
# asked for, or the end is over already, the machine goes at once: one without an end may not stay.
# A boothook's output is kept by cloud-init, so what matters is said to the console.
_BOOTHOOK = """\
#!/bin/sh
root="${{GEMMA4_ROOT:-}}"
say() {{
  echo "GEMMA4-END $*"
  [ ! -w "$root/dev/console" ] || echo "GEMMA4-END $*" >"$root/dev/console"
}}
leave() {{
  say "$1: the machine ends now"
  shutdown -P now || systemctl poweroff --force
  exit 1
}}
now=$(date +%s)
end=$(cat "$root{end}" 2>/dev/null)
case $end in
'' | *[!0-9]* | ????????????*)
  end=$((now + {life_s}))
  umask 022
  mkdir -p "$root{folder}"
  file="$root{end}"
  if ! {{ echo "$end" >"$file.new" && mv -f "$file.new" "$file"; }}; then
    leave "its end could not be written"
  fi
  say "written: in {life_s} seconds"
  ;;
esac
units="$root/etc/systemd/system"
mkdir -p "$units"
keep() {{ # keep UNIT LINE: the unit as given, or as it is, where the disk is full and LINE in it
  if ! {{ cat >"$units/$1.new" && mv -f "$units/$1.new" "$units/$1"; }}; then
    grep -qsxF "$2" "$units/$1" || leave "$1 could not be written"
  fi
}}
keep {name}.timer "OnCalendar=@$end" <<END
[Unit]
Description=The end of this rented machine
DefaultDependencies=no
Conflicts=shutdown.target
Before=shutdown.target
[Timer]
OnCalendar=@$end
AccuracySec=1s
Persistent=true
[Install]
WantedBy=timers.target
END
keep {name}.service "ExecStart=/sbin/shutdown -P now" <<END
[Unit]
Description=Ends this rented machine, because its time is over
FailureAction=poweroff-force
[Service]
Type=oneshot
StandardOutput=journal+console
ExecStartPre=-/bin/echo GEMMA4-END its time is over: the machine ends now
ExecStart=/sbin/shutdown -P now
TimeoutStartSec=60
END
[ "$now" -lt "$end" ] || leave "its time is over"
if ! {{
  systemctl daemon-reload && systemctl enable {name}.timer &&
    systemctl --no-block start {name}.timer
}}; then
  leave "its timer could not be started"
fi
"""


def user_data(program: bytes, document: bytes, life_s: int) -> bytes:
    """User data for RunInstances, before base64: gzip of a MIME message with a boothook, a
    cloud-config and a script.

    `program` begins with a `#!` line and runs once, at the end of the first boot; `document` lies
    at MACHINE_DOCUMENT by then, 0600. The machine shuts down `life_s` seconds after its first boot
    began. Raises RigError INVALID over USER_DATA_LIMIT bytes, and for what cannot travel.
    """
    if not program.startswith(b"#!") or not document.strip().startswith(b"{"):
        raise RigError("INVALID", "a boot is a program with a #! line and a JSON object")
    if life_s < 1:
        raise RigError("INVALID", "a machine's life is at least one second; nothing was started")
    try:
        packed = gzip.compress(_message(program, document, life_s), 9, mtime=0)
    except UnicodeError as error:
        raise RigError("INVALID", f"a boot is ASCII text ({error})") from None
    if len(packed) > USER_DATA_LIMIT:
        raise RigError(
            "INVALID",
            f"the boot program and its document have {len(packed)} bytes packed, and EC2 takes "
            f"{USER_DATA_LIMIT}",
            "shorten what tpu.env makes the document of",
        )
    return packed


def boothook(life_s: int) -> str:
    """The script of every boot, for a POSIX sh as root. GEMMA4_ROOT is a sandbox, for tests."""
    return _BOOTHOOK.format(
        life_s=int(life_s),
        end=MACHINE_END,
        folder=MACHINE_END.rpartition("/")[0],
        name=END_TIMER,
    )


def _message(program: bytes, document: bytes, life_s: int) -> bytes:
    """All of it as 7-bit text: base64 inside would cost a third more once packed."""
    file = {
        "path": MACHINE_DOCUMENT,
        "permissions": "0600",
        "owner": "root:root",
        "content": document.decode("ascii"),
    }
    parts = (
        ("cloud-boothook", "end", boothook(life_s)),
        # JSON is YAML; its strings need no care for what a document's values may hold.
        ("cloud-config", "order", "#cloud-config\n" + json.dumps({"write_files": [file]})),
        ("x-shellscript", "boot", program.decode("ascii")),
    )
    mark = "gemma4"
    while any(f"--{mark}" in text for _, _, text in parts):
        mark += "-"
    lines = [f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{mark}"\n']
    for kind, name, text in parts:
        lines.append(
            f"--{mark}\nContent-Type: text/{kind}; charset=us-ascii\n"
            f'Content-Disposition: attachment; filename="{name}"\n\n{text}'
        )
    return ("\n".join(lines) + f"\n--{mark}--\n").encode("ascii")
