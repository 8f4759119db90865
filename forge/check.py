"""`python3 -m forge.check`: what must hold across rigs. One line a fault, which says what to do.

Builds every rig into a temporary folder and compares, so that nothing in the repository is touched;
then asks each built server for its tools, and reads the files as a client's validator would not.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge.build import (
    ROOT,
    BuildError,
    StagedRig,
    abandoned,
    drift,
    rig_modules,
    root_files,
    stage_all,
)
from forge.manifests import manifest_faults, marketplace_faults
from forge.rollup import tree_faults
from forge.text_checks import (
    committed_files,
    forbidden_faults,
    import_faults,
    lint_faults,
    outside_faults,
)
from forge.tool_checks import budget_faults, listed_tools, token_count, tool_faults

# Of a server.py; what it is made of is bounded part by part. One that rents carries a provider, a
# sweep, ownership and a way into its machine besides.
MAX_LINES = 13_500
MAX_RENTING_LINES = 18_750
BY_HAND = ("tpu.env", "README.md", "AGENTS.md")
_SERVERS_AT_ONCE = 4


def check() -> list[str]:
    """Every fault, in the order of the rigs; prints sizes and drift on the way."""
    with tempfile.TemporaryDirectory(prefix="forge-check-") as temporary:
        staged, faults = stage_all(rig_modules(), Path(temporary))
        faults += _stray_folders()
        try:
            faults += _stale(ROOT, root_files())
        except BuildError:
            pass  # said already, when that rig was staged
        names = [rig.name for rig in staged]
        for rig, listing in zip(staged, asyncio.run(_listings(staged)), strict=True):
            print(_report(rig, listing))
            found = [*rig_faults(rig, names), *listing.faults]
            faults += [f"{rig.name}/{fault}" for fault in found]
    faults += marketplace_faults(ROOT)
    faults += tree_faults(ROOT)
    faults += forbidden_faults(committed_files(ROOT), ROOT)
    return faults


def rig_faults(rig: StagedRig, names: Sequence[str]) -> Iterator[str]:
    """Faults of the files of one rig, each beginning with a path in its folder."""
    home = ROOT / rig.name
    for name in BY_HAND:
        if not (home / name).is_file():
            yield f"{name} is missing: write it"
    yield from rig.problems.values()
    yield from _stale(home, rig.files)
    yield from (f"{name} is not built any more: run make build" for name in abandoned(rig))
    yield from manifest_faults(home)
    yield from outside_faults(home, [name for name in names if name != rig.name])
    yield from import_faults(home)
    yield from lint_faults(home)
    lines = _line_count(home / "server.py")
    most = MAX_RENTING_LINES if rig.rents else MAX_LINES
    if lines > most:
        yield f"server.py has {lines:,} lines, {most:,} may be: shorten a part that it carries"


@dataclass
class _Listing:
    """What one built server lists by default, and the faults of that and of its whole list."""

    tools: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)


async def _listings(staged: Sequence[StagedRig]) -> list[_Listing]:
    """Ask the staged servers, a few at a time."""
    gate = asyncio.Semaphore(_SERVERS_AT_ONCE)

    async def one(rig: StagedRig) -> _Listing:
        listing = _Listing()
        async with gate:
            for toolsets in ("default", "all"):
                state = rig.folder.parent / f"{rig.name}.state"
                try:
                    tools = await listed_tools(rig.folder / "server.py", toolsets, state)
                except RuntimeError as error:
                    fault = (
                        f"with RIG_TOOLSETS={toolsets} it lists no tools ({error}): correct that"
                    )
                    listing.faults.append(f"server.py: {fault}")
                    continue
                if toolsets == "default":
                    listing.tools, listing.tokens = len(tools), token_count(tools)
                    found = budget_faults(tools)
                else:
                    found = tool_faults(tools)
                listing.faults += [f"server.py: {fault}" for fault in found]
        return listing

    return await asyncio.gather(*(one(rig) for rig in staged))


def _stale(folder: Path, wanted: dict[str, bytes]) -> Iterator[str]:
    """Built files that are not what the forge would build now."""
    for name, data in wanted.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing: run make build"
        elif path.read_bytes() != data:
            yield f"{name} is stale: run make build (and change its source, not the file)"


def _stray_folders() -> Iterator[str]:
    """Folders with a server that no module of forge/rigs stands for."""
    known = set(rig_modules())
    for server in sorted(ROOT.glob("*/server.py")):
        name = server.parent.name
        if name.replace("-", "_") not in known:
            yield f"{name}/: has a server.py and no module in forge/rigs: add one, or delete it"


def _report(rig: StagedRig, listing: _Listing) -> str:
    """One line on the size of a rig, and one on its drift where it was ejected."""
    path = ROOT / rig.name / "server.py"
    lines, before = _line_count(path), _committed_lines(f"{rig.name}/server.py")
    change = "no commit has it" if before is None else f"{lines - before:+,} since the last commit"
    text = (
        f"{rig.name}/server.py: {lines:,} lines ({change}); "
        f"{listing.tools} tools, {listing.tokens:,} tokens"
    )
    if rig.ejected and path.is_file():
        added, removed = drift(rig.server, path.read_text(encoding="utf-8"))
        text += (
            f"\n{rig.name}/server.py: ejected; it has {added:,} lines that the forge would not "
            f"build, and lacks {removed:,} that it would"
        )
    return text


def _line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _committed_lines(name: str) -> int | None:
    """Lines of a file in the last commit; None where git or the commit does not have it."""
    try:
        shown = subprocess.run(
            ["git", "show", f"HEAD:./{name}"],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
    except OSError:
        return None
    return shown.stdout.count(b"\n") if shown.returncode == 0 else None


def main() -> int:
    """Print every fault; returns 1 if there is one, 2 where the check cannot be made."""
    try:
        token_count([])
    except RuntimeError as error:
        print(f"{error}: use `make check`, which gets it", file=sys.stderr)
        return 2
    faults = check()
    print("".join(f"{fault}\n" for fault in faults), end="")
    print(f"{len(faults)} faults." if faults else "All of it holds.")
    return 1 if faults else 0


if __name__ == "__main__":
    gc.disable()  # syntax trees hold no rings, and looking for some takes half of the time
    sys.exit(main())
