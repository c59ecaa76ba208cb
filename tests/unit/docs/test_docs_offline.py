"""The site loads nothing from another host. `make docs` checks every page by the same rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

from docs.hooks import offline, site

OWN = (
    '<link rel="canonical" href="https://example.org/a.html"><link rel="stylesheet" href="a.css">'
    '<script src="javascripts/iframe-worker.js"></script><img src="images/window.svg">'
    '<a href="https://arxiv.org/abs/1707.06347">PPO</a><pre class="mermaids">url(https://a.b)</pre>'
)


@pytest.mark.parametrize(
    "loaded",
    [
        '<script src="https://unpkg.com/iframe-worker/shim"></script>',
        '<script src="//unpkg.com/iframe-worker/shim"></script>',
        '<link href="https://fonts.example/css" rel="stylesheet">',
        '<link rel="shortcut icon" href="https://a.example/icon.png">',
        '<img src="https://a.example/badge.svg">',
        '<img srcset="a.png, https://a.example/b.png 2x">',
        "<style>@import 'https://a.example/b.css';</style>",
        '<p style="background: url(https://a.example/b.png)">',
        '<pre class="mermaid"><code>flowchart LR</code></pre>',
    ],
)
def test_page_that_loads_from_another_host_is_found(loaded: str) -> None:
    """Scripts, styles, fonts, images, and diagrams that need a script."""
    assert len(offline.in_page(OWN + loaded)) == 1


def test_page_with_own_files_and_links_is_accepted() -> None:
    """A link to another host loads nothing."""
    assert offline.in_page(OWN) == []


def test_build_fails_with_the_file_and_the_address(tmp_path: Path) -> None:
    """Style sheets count too; the message has all files."""
    (tmp_path / "index.html").write_text('<script src="https://a.example/b.js"></script>')
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "fonts.css").write_text("@font-face { src: url(//a.example/c.woff2) }")
    config = MkDocsConfig()
    config.site_dir = str(tmp_path)
    with pytest.raises(PluginError) as failed:
        site.on_post_build(config)
    assert "index.html: https://a.example/b.js" in str(failed.value)
    assert "assets/fonts.css: //a.example/c.woff2" in str(failed.value)
    (tmp_path / "index.html").write_text(OWN)
    (tmp_path / "assets" / "fonts.css").write_text("@font-face { src: url(../fonts/c.woff2) }")
    site.on_post_build(config)
