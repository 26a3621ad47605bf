"""Words that a newcomer would have to decode, in what users read: `python docs/prose.py` names each and ends with 1.

It reads README, docs/, lab/README.md, benchmarks/README.md, the guides at the top, and the messages and help texts in
the source.  In comments and docstrings it looks for the words of IN_CODE alone, in those of hooks/ without PLACE.  A
docstring may not begin as a fragment, with `Of` and the like.  Names of variables are not looked at: inside of a kernel
that is compiled another name would be another stamp.  `make check` runs it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
# what not to write: what to write instead
BANNED: Final[dict[str, str]] = {
    r"served by (?:stock )?torch": "runs on stock torch",
    r"dearest": "most expensive",
    r"told": "reported, listed, recognised by",
    r"a unit(?! of (?:time|work))|units? of sums": "per SM; a problem; a block of 512 bytes",
    r"of a thread": "per thread",
    r"so many(?! that)": "how many, or the number",
    r"of before": "earlier",
    r"likewise": "in the same way; in a table, say it again",
    r"worker is gone|workers are gone": "has ended",
    r"what it was at": "what it was doing",
    r"of what gives none": "a sentence with a subject",
    r"whoever it (?:is|was)": "who",
    r"in want of": "without",
    r"nobody(?: is)? told": "nobody reads it",
}
# A place is where a process runs a GEMM (docs/glossary.md): the hook's own word, elsewhere said with an example.  What
# may be said besides is "in place", "in place of", "takes its place" and the like.
PLACE: Final = (
    r"(?<=\S )(?<!in )(?<!into )(?<!take )(?<!takes )(?<!taken )(?<!took )(?<!taking )(?<!its )(?<!their )(?<!whose )"
    r"(?<!our )(?<!'s )(?<!in the )(?<!take the )(?<!takes the )places?(?![:=])(?!.*cuda:0)"
)
TOLD: Final = r"told(?! to| otherwise| apart)"  # "told to stop" may be said of code
BANNED[PLACE] = "position, address, point, folder, path"
_PATTERNS: Final = {re.compile(rf"\b(?:{text})\b", re.IGNORECASE): better for text, better in BANNED.items()}
# of these also what readers of the code would have to decode
IN_CODE: Final = (r"served by (?:stock )?torch", "dearest", "of before", "likewise", TOLD, PLACE)
_IN_CODE: Final = {re.compile(rf"\b(?:{text})\b", re.IGNORECASE): BANNED.get(text, BANNED["told"]) for text in IN_CODE}
_IN_HOOKS: Final = {pattern: better for pattern, better in _IN_CODE.items() if PLACE not in pattern.pattern}
PAGES: Final = (
    "README.md", "CONTRIBUTING.md", "SECURITY.md", "RELEASING.md", "docs/*.md", "docs/reference/*.md", "lab/README.md",
    "benchmarks/README.md",
)  # fmt: skip
SOURCES: Final = (
    "configs",
    "db",
    "kernels",
    "hooks",
    "daemon",
    "gemmtuned/commands",
    "gemmtuned/reports",
    "gemmtuned/demo",
)
CODE: Final = ("configs", "db", "kernels", "hooks", "daemon", "gemmtuned")
# A docstring says what its function gives or does: one that begins so has no such word
_FRAGMENT: Final = re.compile(r"(Of|Those|Its|By) ")
_OF: Final = re.compile(r"#\s*of\b")  # as a unit of the number before it


def found_in(text: str, patterns: dict[re.Pattern[str], str] = _PATTERNS) -> Iterator[tuple[int, str, str]]:
    """(line, words, what to write instead) of each word of the list."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in patterns.items():
            for match in pattern.finditer(line):
                yield number, match[0], better


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the string literals of a Python file that can be read by a user; help texts of commands are."""
    tree = ast.parse(path.read_text())
    quiet = set() if "commands" in path.parts else set(_docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
            yield node.lineno, node.value


def _docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield id(first.value)


def remarks(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments of a source file, and of the docstrings of a Python file."""
    text = path.read_text()
    if path.suffix != ".py":
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition("//")[2]
        return
    tree = ast.parse(text)
    quiet = set(_docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) in quiet:
            yield from enumerate(str(node.value).splitlines(), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def fragments(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, first words, what to write) of docstrings that begin as _FRAGMENT, and comments behind code as _OF."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip() and _OF.match(token.string):
            yield token.start[0], token.string[:30], "the unit: rows of W, per thread, share of the time"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            said = ast.get_docstring(node) or ""
            if _FRAGMENT.match(said):
                yield node.lineno, said[:30], "what it gives or does: The hash of ..."


def main() -> int:
    """Print each finding as FILE:LINE."""
    said = []
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            said += [(page, *found) for found in found_in(page.read_text())]
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in messages(path):
                said += [(path, line, words, better) for _, words, better in found_in(text)]
    for folder in CODE:
        patterns = _IN_HOOKS if folder == "hooks" else _IN_CODE
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp") and any(found_in(path.read_text(), patterns)):
                for line, text in remarks(path):
                    said += [(path, line, words, better) for _, words, better in found_in(text, patterns)]
            if path.suffix == ".py":
                said += [(path, *found) for found in fragments(path)]
    for path, line, words, better in said:
        print(f"{path.relative_to(ROOT)}:{line}: {words!r}: write {better!r}, or say it in other words")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
