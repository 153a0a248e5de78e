"""Execute the tutorials and keep their results in docs/tutorials/results, which the site is built from.

    python3 noxfile.py -s tutorials                # all of them, minutes each
    python3 noxfile.py -s tutorials -- mace        # one
    python3 noxfile.py -s tutorials -- --check     # compares with the kept results and changes nothing

Runs in the NequIP environment; the kernels e2ip-nequip and e2ip-mace are those of both hosts.
"""

import argparse
import base64
import io
import re
import sys
from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig
from nbclient import NotebookClient
from PIL import Image

TUTORIALS = Path(__file__).parent / "tutorials"

#: Folder of the results, one notebook for each tutorial, with its code cells alone.
RESULTS = TUTORIALS / "results"

#: Largest width of a kept picture in pixels, and its number of colours: figures are flat.
WIDTH, COLOURS = 1100, 64

#: Seconds that a cell may take.
TIMEOUT = 3600

#: What the frameworks print about the machine, not about the tutorial; `fold` may have broken its lines.
NOISE = re.compile(r"cuequivariance or .* is not\s+available\.\s+Cuequivariance\s+acceleration\s.*\s*.*disabled\.\n")


def code_of(name: str) -> nbformat.NotebookNode:
    """Return the code cells of a tutorial as a notebook without outputs."""
    text = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    notebook = read_myst_markdown_notebook(text, MdParserConfig())
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    return notebook


def execute(name: str) -> nbformat.NotebookNode:
    """Return a tutorial with fresh outputs; an exception in a cell ends it."""
    notebook = code_of(name)
    metadata = notebook.metadata.copy()
    options = {"timeout": TIMEOUT, "coalesce_streams": True, "record_timing": False}
    kernel = notebook.metadata.kernelspec.name
    NotebookClient(notebook, kernel_name=kernel, resources={"metadata": {"path": str(TUTORIALS)}}, **options).execute()
    # The cache of the site knows a notebook by its code and this.
    notebook.metadata = metadata
    for cell in notebook.cells:
        # Standard error has warnings with paths of the machine.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = small(output.data["image/png"])
        clean(cell)
    return notebook


def clean(cell: nbformat.NotebookNode) -> None:
    """Remove `NOISE` from the printed text of a cell, and outputs that have nothing else."""
    for output in cell.outputs:
        if "text" in output:
            output.text = NOISE.sub("", output.text)
    cell.outputs = [output for output in cell.outputs if output.get("text") != ""]


def small(png: str) -> str:
    """Return a picture (base64) with at most `WIDTH` pixels in width and `COLOURS` colours."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.quantize(COLOURS).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def kinds(notebook: nbformat.NotebookNode) -> list:
    """Return of every cell its code and the kinds of its outputs, such as ``stdout`` or ``image/png``."""
    return [
        (cell.source, [sorted(output.get("data", [])) or output.get("name") for output in cell.outputs])
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def check(name: str, fresh: nbformat.NotebookNode) -> list:
    """Return the cells of a fresh run whose code or kinds of outputs differ from the kept ones; numbers may."""
    kept = kinds(nbformat.read(RESULTS / f"{name}.ipynb", as_version=4))
    new = kinds(fresh)
    if len(kept) != len(new):
        return [f"{name}: {len(new)} cells, {len(kept)} are kept"]
    pairs = enumerate(zip(kept, new, strict=True))
    return [f"{name}, cell {i}: kept {old[1]}, now {now[1]}" for i, (old, now) in pairs if old != now]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tutorials; all by default")
    parser.add_argument("--check", action="store_true", help="compare with the kept results and change nothing")
    options = parser.parse_args()
    differences = []
    for name in options.names or sorted(path.stem for path in TUTORIALS.glob("*.md")):
        print(f"executing {name}", flush=True)
        notebook = execute(name)
        if options.check:
            differences += check(name, notebook)
        else:
            RESULTS.mkdir(exist_ok=True)
            nbformat.write(notebook, RESULTS / f"{name}.ipynb")
    sys.exit("\n".join(differences) or None)


if __name__ == "__main__":
    main()
