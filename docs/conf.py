"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "sb3_ano"
author = "The sb3_ano developers"
copyright = "2026, the sb3_ano developers"
version = release = installed_version("sb3-ano")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "separated"
exclude_patterns = ["_build", "results/*"]

html_theme = "sphinx_rtd_theme"
html_title = f"sb3_ano {release}"
nitpicky = False
