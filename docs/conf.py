"""Settings of Sphinx for the documentation site; ``nox -s docs`` builds it, in the NequIP environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from jupyter_cache import get_cache
from sphinx import addnodes

import e2ip_plugins

HERE = Path(__file__).parent

project = "e2ip-plugins"
version = release = e2ip_plugins.__version__
author = copyright = "The e2ip-plugins developers"

extensions = ["myst_nb", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "tutorials/results"]
# Options in running text keep their two hyphens.
smartquotes = False
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "e2ip-plugins"
# Names in docstrings become links where the API reference has them, and code elsewhere.
default_role = "py:obj"

# No environment holds both hosts. NequIP's adapter has the larger interface, of subclasses of the host's classes.
autodoc_mock_imports = ["mace", "nequip.integrations.torchsim", "torch_sim"]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
# Attributes as one list: fields of dataclasses and named tuples would be there twice otherwise.
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

# Formulas between dollar signs, and grids of cards.
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
# Links in Markdown lead to pages, headings and files, never to a Python name that happens to be the same word.
myst_ref_domains = ["std"]
# Nothing is executed: tutorials/results has the outputs, and run_tutorials.py makes them. A tutorial whose code has
# changed since is not in the cache, and its kernel does not exist here, which is an error.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "jupyter-cache")
nb_execution_raise_on_error = True


def fill_cache(app):
    """Put the kept results of the tutorials into the cache of the build."""
    cache = get_cache(nb_execution_cache_path)
    cache.clear_cache()
    for path in sorted((HERE / "tutorials" / "results").glob("*.ipynb")):
        cache.cache_notebook_file(str(path), check_validity=False)


def write_command_line(app):
    """Describe the command line, from the help that it prints itself."""
    command = [sys.executable, "-m", "typer", "e2ip_plugins.cli", "utils", "docs", "--name", "e2ip"]
    page = HERE / "_build" / "generated" / "cli.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout, encoding="utf-8")


def skip_fields(app, what, name, obj, skip, options):
    """Leave fields of named tuples to the list of attributes in the docstring of their class."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field number") else None


def before_napoleon(app, what, name, obj, options, lines):
    """Give attributes that share a line, ``a, b : type``, an entry each, as napoleon does with parameters."""
    if "Attributes" not in lines:
        return
    start = lines.index("Attributes") + 2
    for i in range(len(lines) - 1, start - 1, -1):
        shared = re.fullmatch(r"(\w+(?:, \w+)+) : (.*)", lines[i])
        if shared:
            end = next((j for j in range(i + 1, len(lines)) if not lines[j].startswith(" ")), len(lines))
            body = lines[i + 1 : end]
            lines[i:end] = [line for each in shared[1].split(", ") for line in (f"{each} : {shared[2]}", *body)]


def keep(app, what, name, obj, options, lines):
    if what == "data":
        _comments[name] = list(lines)


def restore(app, what, name, obj, options, lines):
    """Comments of constants as they are: napoleon takes what stands before a colon in them for a type."""
    lines[:] = _comments.pop(name, lines)


_comments = {}


def as_on_github(app, doctree):
    """Pages read well on GitHub too: folders become text, and Markdown outside this folder can be downloaded."""
    page = HERE / app.env.docname
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftype"] != "myst":
            continue
        outside = (HERE / link["reftarget"]).with_suffix(".md")
        if (page.parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)
        elif link["refdomain"] == "doc" and outside.exists() and HERE not in outside.resolve().parents:
            target = os.path.relpath(outside, page.parent)
            link.replace_self(
                addnodes.download_reference("", "", *link.children, reftarget=target, refdoc=app.env.docname)
            )


def lengths(app, what, name, obj, options, lines):
    """Bars around a length are no substitutions of reStructuredText."""
    for i, line in enumerate(lines):
        parts = re.split("(``.*?``)", line)
        if not line.lstrip().startswith(">>>"):
            lines[i] = "".join(part if k % 2 else part.replace("|", "\\|") for k, part in enumerate(parts))


def dashes(app, doctree):
    """Set the dash between a parameter and its description, which Sphinx leaves to the smart quotes."""
    for text in [text for text in doctree.findall(nodes.Text) if text == " -- "]:
        text.parent.replace(text, nodes.Text(" – "))


def setup(app):
    app.connect("builder-inited", fill_cache)
    app.connect("builder-inited", write_command_line)
    app.connect("autodoc-skip-member", skip_fields)
    # Napoleon's own priority is 500.
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    app.connect("autodoc-process-docstring", lengths, priority=700)
    # Before the files to be downloaded are collected.
    app.connect("doctree-read", as_on_github, priority=100)
    app.connect("doctree-read", dashes)
