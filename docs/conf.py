"""Sphinx configuration. The site is built, and read, without a network: scripts and mathematics are files of its own."""

import os
from importlib.metadata import version as installed_version

version = release = installed_version("sb3-ano")
project = f"sb3_ano {release}"
author = "The sb3_ano developers"
copyright = "2026, the sb3_ano developers"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build", "results/mujoco/README.md", "results/speed/*"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = ">>> "

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

# Names of other projects link to their documentation on Read the Docs only, because their inventories have to be fetched.
if os.environ.get("READTHEDOCS") == "True":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "gymnasium": ("https://gymnasium.farama.org", None),
        "stable_baselines3": ("https://stable-baselines3.readthedocs.io/en/master", None),
        "sb3_contrib": ("https://sb3-contrib.readthedocs.io/en/master", None),
    }
nitpicky = True
nitpick_ignore_regex = [
    # A type variable.
    ("py:class", "sb3_ano.fast.ppo.Algorithm"),
    ("py:.*", r"(?!sb3_ano).*"),
]

html_theme = "sphinx_rtd_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_context = {
    "display_github": True,
    "github_user": "sb3-ano",
    "github_repo": "sb3-ano",
    "github_version": "main",
    "conf_py_path": "/docs/",
}
