"""Sphinx's settings. The pages are plain Markdown; what is special about the site is here, and not in them."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import rallypoint  # noqa: E402 - found like what is beside it
from tools.site.navigation import toctrees  # noqa: E402

project = "rallypoint"
author = "The rallypoint authors"
project_copyright = author
version = release = rallypoint.__version__
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # named as GitHub names them
myst_links_external_new_tab = False
templates_path = ["templates"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
pygments_style = "friendly"
pygments_dark_style = "monokai"

html_theme = "furo"
html_title = "rallypoint"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
html_sidebars = {
    "**": [
        "sidebar/brand.html", "sidebar/versions.html", "sidebar/search.html", "sidebar/scroll-start.html",
        "sidebar/navigation.html", "sidebar/scroll-end.html",
    ]
}  # fmt: skip


def add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    if page == "index":
        source[0] += toctrees()


def outdated(*_changes: object) -> list[str]:
    """The navigation is not in the page that it is added to, so that its changes would not be seen."""
    return ["index"]


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("env-get-outdated", outdated)
