"""A module and all that it imports from the source packages, as one readable Python file.

Cuts the import lines, keeps the other text as it stands, and refuses whatever would mean something
else in one file than in many. It never imports what it bundles, and knows nothing about rigs.
"""

from __future__ import annotations

import ast
import builtins
import functools
import graphlib
import heapq
import io
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WIDTH = 100  # columns of a built file
_UNNUMBERED = "-----"  # as wide as the line number that takes its place

# Reading order, and the only direction of imports: from a section's own modules or earlier ones.
SECTIONS: tuple[str, ...] = (
    "forge.parts.ground",
    "forge.parts.knowledge",
    "forge.parts.boundaries",
    "forge.parts.planes",
    "forge.parts.runtimes",
    "forge.parts.toolsets",
    "forge.parts.assembly",
    "forge.machine",
    "forge.engines.serving",
    "forge.engines.gemma4",
    "forge.engines.jax",
    "forge.programs",
    "forge.rigs",
    "forge.suites",
)

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
IMPORTS = (ast.Import, ast.ImportFrom)


class BundleError(Exception):
    """A source broke a rule; the message is the rule, then each place as file:line."""


@dataclass(frozen=True)
class _Import:
    """One imported name: `from module import name`, or `import module` where name is empty."""

    module: str
    name: str
    alias: str | None
    line: int

    @property
    def statement(self) -> str:
        """The import as a line of its own; ruff joins those of one module again."""
        what = f"from {self.module} import {self.name}" if self.name else f"import {self.module}"
        return f"{what} as {self.alias}" if self.alias else what

    @property
    def binds(self) -> str:
        """The name that it binds: `import a.b` binds a."""
        return self.alias or self.name or self.module.partition(".")[0]

    @property
    def origin(self) -> str:
        """What the name is bound to, comparable: `import a.b` and `import a.c` both bind a to a."""
        return self.statement if self.alias or self.name else f"import {self.binds}"


@dataclass(frozen=True)
class _Module:
    """One source file, read and split, its imports checked.

    `file` is relative to the root, `docstring` the source text of it, `body` the text without
    imports and docstring, `sources` the imports from source packages, `others` the remaining ones,
    `lazy` the top-level names imported within functions, `defined` the names bound and their lines.
    """

    name: str
    file: str
    text: str
    tree: ast.Module
    docstring: str
    body: str
    sources: tuple[_Import, ...]
    others: tuple[_Import, ...]
    lazy: frozenset[str]
    defined: tuple[tuple[str, int], ...]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The top-level names that it binds."""
        return frozenset(name for name, _ in self.defined)

    def at(self, line: int) -> str:
        """A place in it, as file:line."""
        return f"{self.file}:{line}"


@dataclass(frozen=True)
class Bundle:
    """What goes into one file: the modules in output order, the entry last.

    `third_party` holds the sorted top-level names of imports that are neither of the standard
    library nor of the source packages, those within functions included.
    """

    entry: str
    modules: tuple[str, ...]
    third_party: tuple[str, ...]
    _sources: tuple[_Module, ...] = field(repr=False, compare=False)
    _sections: tuple[str, ...] = field(repr=False, compare=False)

    def render(self, head: str = "", *, contents: bool = False) -> str:
        """The file's text, formatted; `head` is comment lines that go first (PEP 723 and so on).

        `contents` adds a list of the modules under the docstring, each with the line of its banner.

        Raises BundleError for a head that is not comments, for what ruff refuses, and when a
        statement of the sources is not found again in the result.
        """
        for number, line in enumerate(head.split("\n"), 1):
            if line.strip() and not line.startswith("#"):
                raise BundleError(f"the head holds comment lines only: head:{number}")
        entry = self._sources[-1]
        statements = {item.statement for module in self._sources for item in module.others}
        statements.add("from __future__ import annotations")
        listed = _contents(self._sources, self._sections) if contents else ""
        top = [head.strip("\n"), entry.docstring, listed, "\n".join(sorted(statements))]
        blocks = ["\n\n".join(text for text in top if text)]
        for module in self._sources:
            banner = _banner(module, self._sections, with_docstring=module is not entry)
            blocks.append(f"{banner}\n\n{module.body}")
        text = _ruff("check", "\n\n\n".join(blocks) + "\n", "--select", "I", "--fix")
        text = _ruff("format", text)
        _prove(self._sources, statements, text)
        return _numbered(text) if contents else text


def bundle(entry: str, root: Path, *, sections: Sequence[str] = SECTIONS) -> Bundle:
    """Collects `entry`, a dotted module name, and all that it imports from the source packages.

    Modules are files below `root` (a.b.c is a/b/c.py), each in one of `sections`; the source
    packages are the first components of the sections. The order comes from a ranking of every
    module on disk, so it is the same in every bundle, and a bad import in a module that this
    bundle does not use is reported too. Raises BundleError.
    """
    modules = _read_all(root, tuple(sections))
    if entry not in modules:
        file = entry.replace(".", "/") + ".py"
        raise BundleError(f"no module {entry} in the sections: {file}:1")
    ranked = _rank(modules, tuple(sections))
    needed: set[str] = set()
    queue = [entry]
    while queue:
        name = queue.pop()
        if name not in needed:
            needed.add(name)
            queue += [item.module for item in modules[name].sources]
    members = tuple(modules[name] for name in ranked if name in needed)
    for module in members:
        _check_body(module, is_entry=module.name == entry)
    _check_names(members)
    outside = {item.module.partition(".")[0] for module in members for item in module.others}
    outside |= {name for module in members for name in module.lazy}
    return Bundle(
        entry=entry,
        modules=tuple(module.name for module in members),
        third_party=tuple(sorted(outside - sys.stdlib_module_names)),
        _sources=members,
        _sections=tuple(sections),
    )


@functools.cache
def _section(name: str, sections: tuple[str, ...]) -> str | None:
    """The section that a module lies in, the innermost one; None where it lies in none."""
    found = [section for section in sections if name.startswith(section + ".")]
    return max(found, key=len, default=None)


# Reading


def _read_all(root: Path, sections: tuple[str, ...]) -> dict[str, _Module]:
    """Every module of the sections by name, in alphabetical order, its imports checked."""
    packages = frozenset(section.partition(".")[0] for section in sections)
    modules: dict[str, _Module] = {}
    for section in sections:
        for path in root.joinpath(*section.split(".")).rglob("*.py"):
            if path.name != "__init__.py":
                file = path.relative_to(root)
                name = ".".join(file.with_suffix("").parts)
                modules[name] = _read(name, file.as_posix(), path.read_bytes(), packages)
    modules = dict(sorted(modules.items()))
    for module in modules.values():
        for item in module.sources:
            _check_source_import(module, item, modules, sections)
    return modules


@functools.cache  # all rigs are built in one run, mostly from the same modules
def _read(name: str, file: str, data: bytes, packages: frozenset[str]) -> _Module:
    """Parses one file and splits it into docstring, imports and body."""
    try:
        # Universal newlines, and no more: str.splitlines would also cut at U+2028 within a string.
        text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
        tree = _parse(text)
    except SyntaxError as error:
        raise BundleError(f"cannot be parsed ({error.msg}): {file}:{error.lineno or 1}") from error
    except ValueError as error:  # not UTF-8, or a null byte
        raise BundleError(f"cannot be read ({error}): {file}:1") from error
    lines = text.split("\n")
    dropped: set[int] = set()

    def cut(node: ast.stmt, what: str) -> str:
        """Drops a statement's lines and returns their text; nothing else may stand there."""
        span = range(node.lineno - 1, node.end_lineno or node.lineno)
        if any("#" in lines[line] for line in span) and not _comment_lines(text).isdisjoint(span):
            raise BundleError(f"a comment on {what} would be lost: {file}:{node.lineno}")
        beside = lines[span[0]].encode()[: node.col_offset]
        beside += lines[span[-1]].encode()[node.end_col_offset :]
        if beside.strip():
            raise BundleError(f"several statements on the line of {what}: {file}:{node.lineno}")
        dropped.update(span)
        return "\n".join(lines[line] for line in span)

    docstring = cut(tree.body[0], "a docstring") if _has_docstring(tree) else ""
    sources: list[_Import] = []
    others: list[_Import] = []
    lazy: set[str] = set()
    if "TYPE_CHECKING" in text:
        _refuse_type_checking(tree, file)
    for node in statements_within(tree.body):
        if not isinstance(node, IMPORTS):
            continue
        at_top = node in tree.body
        for item in _imports(node, file):
            if item.module.partition(".")[0] not in packages:
                if at_top:
                    others.append(item)
                else:
                    lazy.add(item.module.partition(".")[0])
            elif not at_top:
                raise BundleError(
                    f"import of the source module {item.module} below the top level"
                    f" (function, class, if or try): {file}:{item.line}"
                )
            else:
                sources.append(item)
        if at_top:
            cut(node, "an import")
    return _Module(
        name=name,
        file=file,
        text=text,
        tree=tree,
        docstring=docstring,
        body="\n".join(line for i, line in enumerate(lines) if i not in dropped).strip("\n"),
        sources=tuple(sources),
        others=tuple(others),
        lazy=frozenset(lazy),
        defined=tuple(pair for node in tree.body for pair in _bindings(node)),
    )


def statements_within(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement, however deep, and no expression: most of a tree is expressions."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            yield from statements_within(getattr(node, part, ()))
        for part in ("handlers", "cases"):
            for inner in getattr(node, part, ()):
                yield from statements_within(inner.body)


@functools.cache
def _comment_lines(text: str) -> frozenset[int]:
    """The lines, from 0, that hold a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return frozenset(token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT)


def _refuse_type_checking(tree: ast.Module, file: str) -> None:
    for node in ast.walk(tree):
        if "TYPE_CHECKING" in (getattr(node, key, None) for key in ("id", "attr", "name")):
            line = getattr(node, "lineno", 1)
            raise BundleError(f"TYPE_CHECKING hides imports from the running file: {file}:{line}")


def _parse(text: str) -> ast.Module:
    """The syntax tree by the grammar of the oldest Python that a built file runs on."""
    return ast.parse(text, feature_version=(3, 11))


def _has_docstring(tree: ast.Module) -> bool:
    """Whether the first statement is a plain string, be it empty."""
    return ast.get_docstring(tree, clean=False) is not None


def _imports(node: ast.Import | ast.ImportFrom, file: str) -> Iterator[_Import]:
    """The names that an import statement brings; refuses relative and star imports."""
    if isinstance(node, ast.ImportFrom) and node.level:
        raise BundleError(f"relative import: {file}:{node.lineno}")
    for alias in node.names:
        if alias.name == "*":
            raise BundleError(f"star import: {file}:{node.lineno}")
        if isinstance(node, ast.ImportFrom):
            yield _Import(node.module or "", alias.name, alias.asname, node.lineno)
        else:
            yield _Import(alias.name, "", alias.asname, node.lineno)


def _bindings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that a top-level statement binds in its module, imports aside, with their lines."""
    if isinstance(node, DEFINITIONS):
        yield node.name, node.lineno
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
    elif not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            # A comprehension's target is its own; a := within it is not.
            if not (isinstance(node, ast.comprehension) and child is node.target):
                yield from _bindings(child)


# Rules


def _check_source_import(
    module: _Module, item: _Import, modules: Mapping[str, _Module], sections: tuple[str, ...]
) -> None:
    """Refuses an import between source modules by its form, its target or its direction."""
    place = module.at(item.line)
    own, other = (_section(name, sections) for name in (module.name, item.module))
    if not item.name:
        raise BundleError(f"write `from {item.module} import Name`, not `import`: {place}")
    if item.alias:
        raise BundleError(f"alias in an import of the source module {item.module}: {place}")
    if own is None or other is None:
        raise BundleError(f"import of {item.module}, which lies in no section: {place}")
    if item.module not in modules:
        raise BundleError(f"import of {item.module}, which does not exist: {place}")
    if sections.index(other) > sections.index(own):
        raise BundleError(f"import against the order of sections, {own} from {other}: {place}")
    target = modules[item.module]
    if item.name not in target.names:
        lines = [i.line for i in target.sources + target.others if i.binds == item.name]
        how = "only imports itself (re-export)" if lines else "does not define"
        there = target.at(lines[0] if lines else 1)
        raise BundleError(f"import of {item.name}, which {item.module} {how}: {place}, {there}")


def _rank(modules: Mapping[str, _Module], sections: tuple[str, ...]) -> list[str]:
    """All modules by section, then dependency, then name; refuses a ring of imports."""
    ranked: list[str] = []
    for section in sections:
        sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
        inside = [name for name in modules if _section(name, sections) == section]
        for name in inside:
            sorter.add(name, *sorted({i.module for i in modules[name].sources} & set(inside)))
        try:
            sorter.prepare()
        except graphlib.CycleError as error:
            raise BundleError(_ring(error.args[1][:0:-1], modules)) from error
        ready = list(sorter.get_ready())
        heapq.heapify(ready)
        while ready:
            name = heapq.heappop(ready)
            ranked.append(name)
            sorter.done(name)
            for follower in sorter.get_ready():
                heapq.heappush(ready, follower)
    return ranked


def _ring(names: Sequence[str], modules: Mapping[str, _Module]) -> str:
    """The message for modules each of which imports the next, the last one the first."""
    start = names.index(min(names))
    ring = [*names[start:], *names[:start], names[start]]
    places = [
        modules[name].at(next(i.line for i in modules[name].sources if i.module == following))
        for name, following in zip(ring, ring[1:], strict=False)
    ]
    return f"ring of imports, {' -> '.join(ring)}: {', '.join(places)}"


def _check_body(module: _Module, *, is_entry: bool) -> None:
    """Refuses top-level statements other than definitions, and names that lose their meaning."""
    for node in module.tree.body[int(_has_docstring(module.tree)) :]:
        place = module.at(node.lineno)
        if isinstance(node, ast.Expr):
            raise BundleError(f"top-level expression statement: {place}")
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            if not is_entry or node.orelse or node is not module.tree.body[-1]:
                raise BundleError(f"the __main__ block stands last in the entry, only: {place}")
        elif not isinstance(node, (*DEFINITIONS, *ASSIGNMENTS, *IMPORTS)):
            raise BundleError(f"top-level {type(node).__name__.lower()}: {place}")
        elif isinstance(node, ASSIGNMENTS):
            for part in ast.walk(node):
                if isinstance(part, (ast.Attribute, ast.Subscript)):
                    if isinstance(part.ctx, ast.Store):
                        raise BundleError(f"top-level assignment to other than a name: {place}")
    if "__file__" not in module.text and "global " not in module.text:
        return
    names = {name for name, _ in module.defined}
    for inner in ast.walk(module.tree):
        if isinstance(inner, ast.Name) and inner.id == "__file__" and not is_entry:
            raise BundleError(f"__file__ outside the entry: {module.at(inner.lineno)}")
        if isinstance(inner, ast.Global) and not names.issuperset(inner.names):
            raise BundleError(f"global without a top-level definition: {module.at(inner.lineno)}")


def _check_names(members: Sequence[_Module]) -> None:
    """Refuses names that two places bind, unless by the same import, and names of builtins."""
    bound: dict[str, tuple[str, str]] = {}
    for module in members:
        names = [(name, line, module.at(line)) for name, line in module.defined]
        names += [(item.binds, item.line, item.origin) for item in module.others]
        for name, line, origin in sorted(names, key=lambda entry: entry[1]):
            place = module.at(line)
            if name == "__all__":
                raise BundleError(f"__all__ has no meaning in one file: {place}")
            if hasattr(builtins, name):
                raise BundleError(f"top-level name {name} is a builtin's: {place}")
            known, where = bound.setdefault(name, (origin, place))
            if known != origin:
                raise BundleError(f"name {name} bound twice: {where}, {place}")


# Writing


def _title(module: _Module, sections: tuple[str, ...]) -> str:
    """A module's section and name, as its banner and the contents have them."""
    section = _section(module.name, sections) or ""
    path = module.name.removeprefix(section + ".").split(".")
    return " / ".join([section.rpartition(".")[2], *path])


def _contents(sources: Sequence[_Module], sections: tuple[str, ...]) -> str:
    """The list of what is in the file; `_numbered` fills in the lines once they are known."""
    lines = ["# Contents, by line:"]
    for module in sources:
        docstring = ast.get_docstring(module.tree) or ""
        line = f"# {_UNNUMBERED} {_title(module, sections)}: {docstring.partition(chr(10))[0]}"
        lines.append(textwrap.shorten(line, WIDTH, placeholder=" …"))
    return "\n".join(lines)


def _numbered(text: str) -> str:
    """`text` with the lines of the banners in its contents. Both are in the order of the file."""
    lines = text.split("\n")
    banners = iter([n for n, line in enumerate(lines, 1) if line.startswith("# ── ")])
    mark = f"# {_UNNUMBERED} "
    found = [
        f"# {next(banners):5} {line[len(mark) :]}" if line.startswith(mark) else line
        for line in lines
    ]
    return "\n".join(found)


def _banner(module: _Module, sections: tuple[str, ...], *, with_docstring: bool) -> str:
    """The comment block over a module: its section and name, then its docstring."""
    lines = [f"# ── {_title(module, sections)} ".ljust(WIDTH, "─")]
    docstring = ast.get_docstring(module.tree) if with_docstring else None
    for line in docstring.split("\n") if docstring else ():
        indent = line[: len(line) - len(line.lstrip())]
        wrapped = textwrap.wrap(
            line,
            WIDTH - 2,  # a docstring line of full width does not fit behind "# "
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [f"# {text}".rstrip() for text in wrapped or [""]]
    return "\n".join(lines)


def _ruff(command: str, text: str, *options: str) -> str:
    """Runs ruff over a text so that neither the working folder nor its settings play a part."""
    done = subprocess.run(
        # -P: a folder named ruff in the working folder is not ruff. The file's folder must not
        # exist: in a package folder ruff would take imports of that package as first-party.
        [sys.executable, "-P", "-m", "ruff", command, "--isolated", "--no-cache", "--quiet"]
        + ["--line-length", str(WIDTH), "--target-version", "py311", "--config", "src = []"]
        + [*options, "--stdin-filename", "/no/such/folder/bundle.py", "-"],
        input=text.encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr + done.stdout).decode(errors="replace").strip()
        raise BundleError(f"ruff {command} failed: {said}")
    return done.stdout.decode()


def _prove(sources: Sequence[_Module], imports: set[str], text: str) -> None:
    """Raises unless the result has every statement of the sources, in order, and no other."""
    wanted = [(module, node) for module in sources for node in _shown_statements(module.text)]
    result = _shown_statements(text)
    for (module, own), found in zip(wanted, result, strict=False):
        # What stands there to the letter means the same; only what was formatted anew is compared.
        if own.text != found.text and own.meaning() != found.meaning():
            hint = "is the source formatted, are the imports in its functions sorted?"
            where = f"{module.at(own.line)}, result:{found.line}"
            raise BundleError(f"statement lost or changed ({hint}): {where}")
    if len(wanted) != len(result):
        places = [module.at(own.line) for module, own in wanted[len(result) :]]
        places += [f"result:{found.line}" for found in result[len(wanted) :]]
        raise BundleError(f"statement lost or added: {', '.join(places)}")
    nodes = [node for node in _parse(text).body if isinstance(node, IMPORTS)]
    if {item.statement for node in nodes for item in _imports(node, "result")} != imports:
        raise BundleError("import lost or added: result:1")


@dataclass(frozen=True)
class _Shown:
    """A top-level statement with its line and its text, decorators included."""

    line: int
    text: str
    node: ast.stmt

    def meaning(self) -> str:
        """Its tree as text, without what the formatter may change in a docstring."""
        for node in ast.walk(self.node):
            # It trims and indents docstrings anew, as is its right; other strings never.
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    lines = node.value.value.strip().split("\n")
                    node.value.value = "\n".join(line.strip() for line in lines)
        return ast.dump(self.node)


@functools.cache  # all rigs are built in one run, mostly from the same modules
def _shown_statements(text: str) -> list[_Shown]:
    """Each top-level statement, the imports and the docstring left out."""
    tree, lines = _parse(text), text.split("\n")
    shown = []
    for node in tree.body[int(_has_docstring(tree)) :]:
        if not isinstance(node, IMPORTS):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            own = "\n".join(lines[first - 1 : node.end_lineno])
            shown.append(_Shown(node.lineno, own, node))
    return shown
