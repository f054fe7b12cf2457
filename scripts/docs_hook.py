"""What MkDocs has of files outside of docs/ (mkdocs.yml): three pages of the root, and what pages link to with ../"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files, config):
    texts = "".join(file.content_string for file in files.documentation_pages())
    for name in sorted({*re.findall(r"\]\(\.\./([\w./-]+)", texts)} - PAGES.keys()):
        if (ROOT / name).is_file():  # else the link is broken, which MkDocs says
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, page in PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page, content=_moved(text, "](").replace("](docs/", "](")))
    return files


def on_page_markdown(markdown, page, config, files):
    return _moved(markdown, "](../").replace("](../", "](")


def _moved(text: str, before: str) -> str:
    """`text`, whose links to pages of the root lead to where these are."""
    for name, there in PAGES.items():
        text = text.replace(before + name, "](" + there)
    return text
