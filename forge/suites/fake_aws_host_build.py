"""Stand-ins for what a fake machine builds llama.cpp with: pip's download, cmake, ninja, compilers.

The source is an archive without a source in it, the files are made one by one at the script's pace,
and what comes out is a scripted llama-server that knows which GPU it was made for. Its class is
copied into a program, so it uses the standard library alone.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import time
from pathlib import Path

from forge.suites.fake_host_programs import FakeMachineProgram
from forge.suites.fake_llama_server import FakeLlama

_SOURCE_FILES = {
    "CMakeLists.txt": "project(stand-in)\n",
    "LICENSE": "a stand-in's license\n",
    "ggml/src/ggml-cuda/ggml-cuda.cu": "// no source\n",
    "benches/bench.cpp": "// left out by whoever unpacks it\n",
}
# A program for one GPU's architecture does nothing on another's; nor does one without a driver.
_GPU_CHECK = """
def gpu_fault():
    control = json.loads(pathlib.Path({control!r}).read_text())
    gpu = control.get("gpu")
    if control.get("driver") or not gpu:
        return "no CUDA-capable device is detected"
    if gpu["compute_cap"].replace(".", "") != {arch!r}:
        return "no kernel image is available for execution on the device"
    return ""


if sys.argv[1:] == ["--list-devices"]:
    told = json.loads(pathlib.Path({control!r}).read_text()).get("gpu") or {{}}
    row = "CUDA0: {{name}} ({{memory}} MiB, {{memory}} MiB free)" if told else "(none)"
    print("Available devices:\\n  " + row.format(**told))
    sys.exit(0)
if "--model" in sys.argv and gpu_fault():
    print("ggml_cuda_init: failed to initialize CUDA: " + gpu_fault(), file=sys.stderr)
    print("CUDA error: " + gpu_fault(), file=sys.stderr)
    sys.exit(1)


main()
"""


class FakeBuildProgram(FakeMachineProgram):
    """One call of a tool. The faults that it knows: `source`, `configure`, `build` (the words of
    the program that fails), `disk`, `killed` (a compiler's end for memory); `build_files` and
    `build_pace_s` are how many files there are, and seconds for each."""

    def do_pip3(self, argv: list[str]) -> int:
        """`download --require-hashes -r FILE --dest FOLDER`, as a boot asks for its source."""
        if argv[:1] != ["download"]:
            return self.failed(f'ERROR: unknown command "{" ".join(argv[:1])}"')
        given = dict(zip(argv, argv[1:], strict=False))
        with open(given["-r"], encoding="utf-8") as file:
            what, _, wanted = file.read().strip().partition(" --hash=sha256:")
        if self.fault("offline") or self.fault("source"):
            default = f"ERROR: Could not find a version that satisfies the requirement {what} "
            default += f"(from versions: none)\nERROR: No matching distribution found for {what}"
            return self.failed(str(self.fault("source") or default))
        with open(os.path.join(self.place, "source.tar.gz"), "rb") as source:
            data = source.read()
        import hashlib

        got = hashlib.sha256(data).hexdigest()
        if got != wanted:
            return self.failed(
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you "
                "have updated the package versions, please update the hashes. Otherwise, examine "
                "the package contents carefully; someone may have tampered with them.\n"
                f"    {what}:\n        Expected sha256 {wanted}\n             Got        {got}\n"
            )
        name, _, version = what.partition("==")
        archive = f"{name.replace('-', '_')}-{version}.tar.gz"
        with open(os.path.join(given["--dest"], archive), "wb") as target:
            target.write(data)
        return 0

    def do_ninja(self, argv: list[str]) -> int:
        if argv == ["--version"]:
            print("1.11.1")
            return 0
        folder = argv[argv.index("-C") + 1] if "-C" in argv else "."
        return self.build(folder, argv[-1])

    def do_cmake(self, argv: list[str]) -> int:
        given = dict(zip(argv, argv[1:], strict=False))
        if argv == ["--version"]:
            print("cmake version 3.28.3")
            return 0
        if argv[:1] == ["--build"]:
            return self.build(argv[1], given.get("--target", "all"))
        if "-S" not in given or "-B" not in given:
            return self.failed("CMake Error: this stand-in configures with -S and -B")
        return self.configure(given["-S"], given["-B"], argv)

    def configure(self, source: str, folder: str, argv: list[str]) -> int:
        if not os.path.exists(os.path.join(source, "CMakeLists.txt")):
            what = f"\n\n  {source}\n\n  does not appear to contain CMakeLists.txt."
            return self.failed(f"CMake Error: The source directory{what}")
        flags = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("-D"))
        flags = {key.partition(":")[0]: value for key, value in flags.items()}
        if self.fault("configure"):
            return self.failed(f"CMake Error at CMakeLists.txt:1:\n  {self.fault('configure')}")
        os.makedirs(os.path.join(folder, "bin"), exist_ok=True)
        with open(os.path.join(folder, "flags.json"), "w", encoding="utf-8") as file:
            json.dump(flags, file)
        print("-- The CXX compiler identification is GNU 13.3.0\n-- Configuring done (0.1s)")
        print(f"-- Generating done (0.0s)\n-- Build files have been written to: {folder}")
        return 0

    def build(self, folder: str, target: str) -> int:
        """The objects that are missing, one after the other, and then the program."""
        try:
            with open(os.path.join(folder, "flags.json"), encoding="utf-8") as file:
                flags = json.load(file)
        except OSError:
            return self.failed("ninja: error: loading 'build.ninja': No such file or directory")
        number = int(self.fault("build_files") or 6)
        objects = [os.path.join(folder, f"file{one}.cu.o") for one in range(number)]
        missing = [path for path in objects if not os.path.exists(path)]
        for done, path in enumerate(missing, 1):
            name = f"ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/{os.path.basename(path)}"
            time.sleep(float(self.fault("build_pace_s") or 0))
            why = self.compile_fault() if done > len(missing) // 2 else ""
            if why:
                print(f"FAILED: {name}\n{why}\nninja: build stopped: subcommand failed.")
                return 1
            with open(path, "w", encoding="utf-8") as file:
                file.write("an object of a stand-in\n")
            print(f"[{done}/{len(missing) + 1}] Building CUDA object {name}", flush=True)
        print(f"[{len(missing) + 1}/{len(missing) + 1}] Linking CXX executable bin/{target}")
        arch = flags.get("CMAKE_CUDA_ARCHITECTURES", "").partition("-")[0]
        with open(os.path.join(self.place, "llama-server.py"), encoding="utf-8") as file:
            program = file.read().replace("MADE_FOR_ARCH", arch)
        made = os.path.join(folder, "bin", target)
        with open(made, "w", encoding="utf-8") as file:
            file.write(program)
        os.chmod(made, 0o755)
        return 0

    def compile_fault(self) -> str:
        """What a compiler says that does not come to its end."""
        if self.fault("killed"):
            return "c++: fatal error: Killed signal terminated program cc1plus"
        if self.fault("disk"):
            return "fatal error: error writing to /tmp/cc2x9f.s: No space left on device"
        return str(self.fault("build") or "")


def write_llama_template(place: Path, folder: Path) -> FakeLlama:
    """What a build makes, into docker's `place`; the script that it obeys lies in `folder`."""
    engine = FakeLlama(folder)
    engine.install()
    text = engine.program.read_text()
    library = engine.library.read_bytes().replace(b"\0", b" ").decode("latin-1")
    check = _GPU_CHECK.format(control=str(place / "control.json"), arch="MADE_FOR_ARCH")
    whole = text[: text.rindex("\nmain()\n")] + check + f"\n# {library[4:]}\n"
    (place / "llama-server.py").write_text(whole)
    return engine


def write_llama_source(place: Path, inner: str) -> str:
    """The archive that pip finds, with its files below `inner`; its SHA-256."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in _SOURCE_FILES.items():
            member = tarfile.TarInfo(inner + name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    import hashlib

    whole = gzip.compress(packed.getvalue(), 1, mtime=0)  # the same on every machine
    (place / "source.tar.gz").write_bytes(whole)
    return hashlib.sha256(whole).hexdigest()
