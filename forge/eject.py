"""`python3 -m forge.eject RIG`: a rig's server.py, programs and test_server.py become its own.

From then on the build leaves both alone, everything else of the rig is still built, and the check
reports how far the server has drifted from what the forge would build, instead of failing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from forge.build import (
    EJECTED_MARK,
    ROOT,
    BuildError,
    build,
    is_ejected,
    load_rig,
    module_of,
    source_line,
)


def eject(name: str) -> None:
    """Mark the files of the rig `name` as its own. Raises BuildError where that makes no sense."""
    module = module_of(name)
    folder = ROOT / name.strip("/")
    programs = [("programs", name, f"{name}.py") for name in load_rig(module).programs]
    own = [("rigs", module, "server.py"), ("suites", module, "test_server.py"), *programs]
    for kind, source, file in own:
        path = folder / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if file == "server.py" and is_ejected(text):
            raise BuildError(f"{name}/{file} is ejected already: nothing to do")
        built = source_line(source, kind) + "\n"
        if built in text:
            mark = f"{EJECTED_MARK}the rig's own since; it came from forge/{kind}/{source}.py.\n"
            path.write_text(text.replace(built, mark, 1), encoding="utf-8")
        elif file == "server.py":
            raise BuildError(f"{name}/{file} does not say that it is built: build the rig first")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m forge.eject", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("rig", metavar="RIG")
    name = parser.parse_args(argv).rig
    try:
        eject(name)
        modules = [module_of(name)]
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return build(modules)  # what quotes the server, such as the skill's snapshot, follows


if __name__ == "__main__":
    sys.exit(main())
