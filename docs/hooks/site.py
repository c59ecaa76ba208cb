"""The hook that MkDocs calls: adds generated pages, leads links to pages, keeps the site offline.

A file of the repository that a page links and that is no page itself gets one with its content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page as SitePage

from docs.hooks import api, commands, links, metrics, offline, protos, settings
from docs.hooks.page import ROOT, Page

_COPIED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "deploy/README.md": "bare_metal.md",
    "examples/README.md": "examples.md",
}
"""Pages beside their code, and their paths in the site."""

_LANGUAGES = {".py": "python", ".mjs": "javascript", ".cc": "cpp"}
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"

_places: dict[str, str] = {}
"""Where the site has each file of the repository that it has; filled by `on_files`."""
_sources: dict[str, str] = {}
"""The file behind each page that is written by hand, by its path in the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put one entry for each page of protos and packages behind the reference's other pages."""
    (reference,) = (entry["Reference"] for entry in config.nav or () if "Reference" in entry)
    reference.append({"Wire format": [page.path for page in protos.pages()]})
    reference.append({"Library": [page.path for page in api.pages()]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add every generated page."""
    _places.clear()
    _places.update({f"docs/{file.src_uri}": file.src_uri for file in files})
    _places.update(_COPIED | dict(protos.places()) | dict(api.places()))
    _sources.clear()
    _sources.update({f"{at}": name for name, at in _places.items() if name.endswith(".md")})
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in _sources.values()}
    copied = [Page(path=path, text=texts[name]) for name, path in _COPIED.items()]
    for page in (*copied, *_shown(texts.items()), *_references()):
        files.append(File.generated(config, page.path, content=page.text))
    return files


def on_page_markdown(markdown: str, *, page: SitePage, **_: Any) -> str:
    """Lead the links of a page that is written by hand to pages of the site."""
    path = page.file.src_uri
    if path not in _sources:
        return markdown
    return links.redirect(markdown, source=_sources[path], page=path, pages=_places)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page loads something from another host."""
    if found := list(offline.external(Path(config.site_dir))):
        raise PluginError("pages load from other hosts:\n" + "\n".join(found))


def _shown(texts: Iterable[tuple[str, str]]) -> Iterator[Page]:
    """A page for each file that a text links and that the site has nowhere yet."""
    linked = {target for source, text in texts for target in links.targets(text, source=source)}
    for name in sorted(linked - _places.keys()):
        language = _LANGUAGES.get(Path(name).suffix, "text")
        content = (ROOT / name).read_text(encoding="utf-8")
        _places[name] = f"source/{name}.md"
        text = f"{_UNSEARCHED}# {name}\n\n````{language}\n{content}\n````\n"
        yield Page(path=_places[name], text=text)


def _references() -> Iterator[Page]:
    yield settings.page()
    yield metrics.page()
    yield commands.page()
    yield from protos.pages()
    yield from api.pages()
