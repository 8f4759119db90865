"""Which releases the built files ask for: one range for every package that a server imports.

A range begins at a release that was tried and ends below the first that may break; it is moved
here, once, for all rigs.
What loads the weights (torch and so on) is the runtime's: see Rig.runtime_requirements.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable

REQUIRES_PYTHON = ">=3.11"

# Import name -> requirement. mcp is held to one minor release: its minors changed signatures.
SERVER_PINS: dict[str, str] = {
    "filelock": "filelock>=4,<5",
    "httpx2": "httpx2>=2.16,<3",
    "matplotlib": "matplotlib>=3.10,<4",
    "mcp": "mcp>=2.3,<2.4",
    "platformdirs": "platformdirs>=4.3,<5",
    "psutil": "psutil>=7,<8",
    "pydantic": "pydantic>=2.14,<3",
    "pydantic_core": "pydantic>=2.14,<3",  # which brings the one release of it that fits
    "pydantic_settings": "pydantic-settings>=2.16,<3",
    # The load generator does without; with it a token costs about half (`make bench-client`).
    "uvloop": "uvloop>=0.22,<1; sys_platform != 'win32'",
}

# Brought by a runtime's requirements: what a server imports inside functions only, and what a model
# server imports that a rig carries as a program.
RUNTIME_IMPORTS = frozenset(
    "boto3 botocore gguf google huggingface_hub jax jinja2 llguidance ml_dtypes numpy "
    "prometheus_client requests starlette tokenizers torch transformers uvicorn".split()
)

# Imported by the suites alone: a rig whose suite does has a requirements-test.txt.
SUITE_PINS: dict[str, str] = {
    "moto": "moto>=5.2.5,<5.3",
    "yaml": "pyyaml>=6,<7",
}


def suite_requirements(imports: Iterable[str]) -> list[str]:
    """What a suite that imports `imports` needs beyond its rig's own packages, sorted."""
    return sorted(SUITE_PINS[name] for name in set(imports) & SUITE_PINS.keys())


def server_requirements(imports: Iterable[str]) -> list[str]:
    """The requirements of a file that imports `imports` (top-level names), sorted.

    Raises ValueError that names the imports which have no range here.
    """
    needed = set(imports) - RUNTIME_IMPORTS
    unknown = sorted(needed - SERVER_PINS.keys())
    if unknown:
        raise ValueError(f"no pinned range for {', '.join(unknown)}: add it to forge/pins.py")
    return sorted({SERVER_PINS[name] for name in needed})


def requirements_among(imports: Iterable[str], requirements: Iterable[str]) -> list[str]:
    """Those of a runtime's `requirements` whose package is among `imports` (top-level names)."""
    known = set(imports)
    names = {text: re.split(r"[^\w.-]", text)[0].replace("-", "_") for text in requirements}
    return sorted(text for text, name in names.items() if name in known)


def script_block(requirements: Iterable[str]) -> str:
    """The PEP 723 block that says what a single file needs, as comment lines."""
    lines = [
        "# /// script",
        f'# requires-python = "{REQUIRES_PYTHON}"',
        "# dependencies = [",
    ]
    lines += [f'#     "{requirement}",' for requirement in requirements]
    return "\n".join([*lines, "# ]", "# ///"])


def requirements_of_script(text: str) -> list[str]:
    """The dependencies in the PEP 723 block of a file's text.

    Raises ValueError where there is no such block, or it is no TOML.
    """
    block = re.search(r"(?m)^# /// script$\n((?:#(?: .*)?\n)+?)^# ///$", text)
    if block is None:
        raise ValueError("has no PEP 723 block")
    content = "\n".join(line[2:] for line in block[1].splitlines())
    return [str(item) for item in tomllib.loads(content).get("dependencies", [])]
