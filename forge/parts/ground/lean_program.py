"""A Python program's text without what only people read, for where every byte of it counts.

Takes out docstrings, comments and blank lines, and nothing that runs. Knows no program.
"""

from __future__ import annotations

import ast
import io
import tokenize


def lean_program(text: str) -> str:
    """`text` without docstrings, comments and blank lines; its first line stays where it is `#!`.

    Every other character stays as it is, because what another release of Python would write for the
    same program the machine's own may not read. Raises SyntaxError where `text` is no program.
    """
    lines = text.splitlines(keepends=True)
    gone: set[int] = set()  # numbers of whole lines
    for rows in _docstring_rows(ast.parse(text)):
        gone.update(rows)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT and not (row == 1 and token.string.startswith("#!")):
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
        if token.type == tokenize.NL and not lines[row - 1].strip():
            gone.add(row)
    return "".join(line for row, line in enumerate(lines, 1) if row not in gone)


def _docstring_rows(tree: ast.Module) -> list[range]:
    """The lines of each docstring that is not all that its body has."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            told = ast.get_docstring(node, clean=False) is not None
            if told and first is not None and len(node.body) > 1:
                found.append(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found
