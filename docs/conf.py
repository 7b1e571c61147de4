"""The site: MyST pages, and API pages from the docstrings. Built without the network."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# FBGEMM-GPU reports every library it loads.
logging.disable(logging.INFO)
import jagged.models  # noqa: E402

logging.disable(logging.NOTSET)

project = "jagged"
author = "the jagged authors"
copyright = f"2026, {author}"
release = version = jagged.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Tables that the operators' pages include.
exclude_patterns = ["_build", "ops/_benchmarks"]

html_theme = "furo"
html_title = f"jagged {release}"
html_show_sourcelink = False

autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "extra_repr"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Else a dataclass's fields are described twice.
napoleon_use_ivar = True
napoleon_custom_sections = ["Shape", ("Source", "notes_style")]
# Docstrings put code between single backquotes.
default_role = "code"
python_use_unqualified_type_names = True


def figures(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the figures that benchmarks have drawn into the benchmarks page."""
    if name == "benchmarks":
        folder = ROOT / "benchmarks" / "figures"
        paths = sorted(path for path in folder.rglob("*") if path.suffix in (".svg", ".png"))
        images = [f"## {path.stem.replace('_', ' ')}\n\n![{path.stem}](../{path.relative_to(ROOT)})\n" for path in paths]
        source[0] += "\n" + ("\n".join(images) or "No figure has been drawn yet.\n")


def setup(app: Sphinx) -> None:
    """Register what this file adds."""
    app.connect("source-read", figures)
