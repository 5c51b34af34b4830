"""Settings of the web site; `checkpoints/website.py` lays out what it is built of."""

from importlib.util import find_spec
from pathlib import Path

project = "llorch"
html_title = "llorch"
extensions = ["myst_nb"]
nb_execution_mode = "off"  # pages are written with what their cells printed
myst_enable_extensions = ["alert", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_copyright = False
highlight_language = "text"  # of blocks that name none
pygments_style = "tango"
pygments_dark_style = "github-dark"

found = find_spec("sphinx-mathjax-offline")  # as an extension it copies all of MathJax, 15 MB; one file of it is enough
assert found is not None
html_static_path = [str(Path(str(found.origin)).parent / "static/mathjax/tex-svg.js"), "site.css"]
mathjax_path = "tex-svg.js"
html_css_files = ["site.css"]
