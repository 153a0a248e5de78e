"""The first commands of a new user, on few frames and in a folder of their own: does an installation work?

    python demo/first_steps.py mace demo/data out      # in an environment with e2ip-plugins[mace]
    python demo/first_steps.py nequip demo/data out    # in an environment with e2ip-plugins[nequip]

A stock model and one with a readout are trained for an epoch. The stock model gets error bars from ``e2ip fit``; both
are evaluated and compared. A minute or two; the figures mean nothing. The session ``package`` runs it with a wheel.
"""

import os
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

import ase.io

FRAMES = {"train": 24, "valid": 12, "test": 8}

#: Options of a small network of each framework.
MACE = "--E0s=average --r_max=4 --num_channels=4 --max_L=1 --correlation=1 --max_ell=1 --num_radial_basis=4"
MACE += " --radial_MLP=[4] --MLP_irreps=4x0e --max_num_epochs=1 --batch_size=4 --valid_batch_size=4 --device=cpu"
MACE += " --default_dtype=float64 --energy_key=REF_energy --forces_key=REF_forces"
NEQUIP = "model_dtype=float64 num_features=4 l_max=1 num_layers=2 radial_mlp_width=4 num_bessels=4"


def run(*command: object) -> None:
    """Run a command of this environment and print it first."""
    words = [str(word) for word in command]
    print("$", shlex.join(words), flush=True)
    subprocess.run([Path(sys.executable).parent / words[0], *words[1:]], check=True)


def train_mace(name: str, *options: str) -> str:
    """Train a model with MACE's command; return its file."""
    files = ("--train_file=train.xyz", "--valid_file=valid.xyz", f"--name={name}", f"--work_dir={name}")
    run("mace_run_train", *files, *MACE.split(), *options)
    return f"{name}/{name}.model"


def train_nequip(name: str, config: str, model: str) -> str:
    """Train a model with NequIP's command and a config of the package; return the checkpoint that has its leverage."""
    configs = resources.files("e2ip_plugins") / "configs"
    files = [f"{key}_file={Path(f'{part}.xyz').resolve()}" for key, part in (("train", "train"), ("val", "valid"))]
    sizes = [f"++training_module.{model}.{size}" for size in NEQUIP.split()]
    settings = ("max_epochs=1", "chemical_species=[H,C,N,O]", f"hydra.run.dir={Path(name).resolve()}", "run=[train]")
    run("nequip-train", "-cp", configs, "-cn", config, *files, *settings, *sizes)
    return f"{name}/best.ckpt"


def main(host: str, data: Path, out: Path) -> None:
    """Run everything in the folder ``out``."""
    out.mkdir(parents=True)
    for part, count in FRAMES.items():
        ase.io.write(out / f"{part}.xyz", ase.io.read(data / f"{part}.extxyz", f":{count}"), format="extxyz")
    os.chdir(out)
    run("e2ip", "--help")
    if host == "mace":
        stock, readout = train_mace("stock"), train_mace("readout", "--readout=e2ip")
    else:
        stock = train_nequip("stock", "nequip_baseline", "model")
        readout = train_nequip("readout", "nequip_e2ip", "model.model")
    fitted = Path(f"fitted{Path(stock).suffix}")
    run("e2ip", "fit", stock, "--train", "train.xyz", "--valid", "valid.xyz", "--output", fitted)
    for name, model in (("fitted", fitted), ("readout", readout)):
        run("e2ip", "evaluate", model, "test.xyz", f"{name}.xyz")
    run("e2ip", "compare", "fitted.xyz", "readout.xyz")
    print("All went well.")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]))
