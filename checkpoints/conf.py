"""Settings of the web site; `checkpoints/website.py` arranges its pages."""

from importlib.util import find_spec
from pathlib import Path

project = "llorch"
html_title = "llorch"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["**.ipynb"]  # files to download
nb_execution_mode = "off"  # pages are written with what their cells printed
myst_enable_extensions = ["alert", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_copyright = False
copybutton_prompt_text = "$ "  # if a block has prompts, only these lines are copied
highlight_language = "text"  # of blocks that name none
pygments_style = "tango"
pygments_dark_style = "github-dark"

mathjax_spec = find_spec("sphinx-mathjax-offline")  # as an extension it would copy all of MathJax, 15 MB
assert mathjax_spec is not None
html_static_path = [str(Path(str(mathjax_spec.origin)).parent / "static/mathjax/tex-svg.js"), "site.css"]
mathjax_path = "tex-svg.js"
html_css_files = ["site.css"]
