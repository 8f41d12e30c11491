"""Hook of mkdocs.yml for links that leave docs/: the files that they lead to become pages of the site, under files/.

Links to folders become text. On GitHub the same links lead to the files themselves. The hook also
puts answers first in the search: said here, since GitHub would show it at the top of the page.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\[((?:[^\]\\]|\\.)*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", "": "docker"}
FOLDER = "files"
ANSWERS = "faq.md"


def outside(page: str, target: str) -> str | None:
    """Returns the end in the repository of a link of docs/`page`, if it leaves docs/: a path from the top."""
    parts: list[str] = []
    for part in (PurePosixPath("docs", page).parent / target).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return None if parts[:1] == ["docs"] else "/".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file that a page links to."""
    top = Path(config.docs_dir).parent
    pages = [file for file in files if file.is_documentation_page()]
    linked = {outside(page.src_uri, link[2]) for page in pages for link in LINK.finditer(page.content_string)}
    for path in sorted(path for path in linked if path is not None and (top / path).is_file()):
        text = (top / path).read_text(encoding="utf-8")
        fence = "`" * 4
        language = LANGUAGES.get(Path(path).suffix, "text")
        content = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n{fence}{language}\n{text}{fence}\n"
        files.append(File.generated(config, f"{FOLDER}/{path}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ lead to the pages that on_files made."""
    if page.file.src_uri == ANSWERS:
        page.meta["search"] = {"boost": 4}

    def replaced(found: re.Match[str]) -> str:
        path = outside(page.file.src_uri, found[2])
        if path is None:
            return found[0]
        up = "../" * page.file.src_uri.count("/")
        return f"[{found[1]}]({up}{FOLDER}/{path}.md)" if files.get_file_from_path(f"{FOLDER}/{path}.md") else found[1]

    return LINK.sub(replaced, markdown)
