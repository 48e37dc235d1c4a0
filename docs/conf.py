"""How the site is built from these pages: `make docs`. Warnings are errors; nothing is fetched when it is viewed."""

import sys
from pathlib import Path

import mpi4py

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]
mpi4py.rc.initialize = False  # the reference is read from the modules; no MPI is started for that

import pmm3d  # noqa: E402

project = "pmm3d"
author = "the pmm3d authors"
copyright = "the pmm3d authors, Apache-2.0"
version = release = pmm3d.__version__

extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "docstrings", "generated",
]  # fmt: skip
source_suffix = {".md": "markdown"}
exclude_patterns = ["extensions"]

myst_heading_anchors = 3  # as GitHub makes them, so that links work in both places
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]

napoleon_google_docstring = napoleon_use_param = napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # autodoc describes the properties
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
add_module_names = False
autodoc_preserve_defaults = True
smartquotes = False  # -- is how options begin

html_theme = "furo"
html_title = f"pmm3d {release}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
