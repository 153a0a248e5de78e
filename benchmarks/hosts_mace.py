"""MACE's half of `hosts.py`: its ``take_step``, and what its ASE calculator evaluates, as functions without arguments.

Models, losses and optimisers come from the functions that ``mace_run_train`` calls, with its defaults; the
plugin's import hook must be active, as it is wherever e2ip-plugins is installed.
"""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import hosts_models
import mace  # noqa: F401  (before e3nn: e3nn 0.4.4 cannot load its constants otherwise)
import numpy as np
import torch
from ase import Atoms
from ase.data import atomic_numbers
from e3nn.util import jit
from hosts_models import SPECIES, Settings, as_fitted, with_labels
from mace import data, tools
from mace.calculators import MACECalculator
from mace.tools import torch_geometric
from mace.tools.model_script_utils import configure_model
from mace.tools.scripts_utils import get_loss_fn, get_optimizer, get_params_options
from mace.tools.train import take_step

_HEADS = ["Default"]


class Host(hosts_models.Host):
    """Models, data and steps of one system."""

    package = "mace-torch"

    def __init__(self, settings: Settings, frame: Atoms) -> None:
        logging.disable(logging.INFO)
        torch.set_default_dtype(torch.float32)
        self.settings = settings
        self.table = tools.AtomicNumberTable(sorted(atomic_numbers[s] for s in SPECIES))
        keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
        labelled = [with_labels(frame, seed) for seed in range(settings.frames)]
        configurations = [data.config_from_atoms(atoms, key_specification=keys) for atoms in labelled]
        graph_of = functools.partial(
            data.AtomicData.from_config, z_table=self.table, cutoff=settings.architecture["r_max"], heads=_HEADS
        )
        graphs = [graph_of(configuration) for configuration in configurations]
        self.loader = torch_geometric.dataloader.DataLoader(graphs, batch_size=len(graphs), shuffle=False)
        self.batch = next(iter(self.loader)).to(settings.device)
        self.edges = self.batch.edge_index.shape[1]

    @functools.cache  # noqa: B019 (building takes seconds; the process ends with its only host)
    def _built(self, variant: str, seed: int) -> tuple:
        """Return arguments, model and output arguments as in ``mace_run_train``."""
        options = [f"--{name}={value}" for name, value in self.settings.architecture.items()]
        parser = tools.build_default_arg_parser()
        args = parser.parse_args(["--name=cost", "--model=MACE", "--scaling=no_scaling", "--lr=1e-4", *options])
        args.mean, args.avg_num_neighbors, args.seed = 0.0, 50.0, seed
        args.compute_energy, args.compute_forces = True, True
        args.compute_dipole, args.compute_polarizability = False, False
        # Not on the command line: there it asks for training files.
        args.readout = "e2ip" if variant == "e2ip" else "stock"
        torch.manual_seed(seed)
        energies = np.zeros((1, len(self.table)))
        model, output_args = configure_model(args, self.loader, energies, heads=_HEADS, z_table=self.table)
        return args, model.to(self.settings.device), output_args

    def _model(self, variant: str, seed: int) -> torch.nn.Module:
        model = copy.deepcopy(self._built(variant, seed)[1])
        if variant == "e2ip":
            as_fitted(model.e2ip_readout)
        return model

    def calculator(self, variant: str, **options: Any) -> MACECalculator:
        """Return a ``MACECalculator``."""
        model = self._model(variant, 1)
        return MACECalculator(models=model, device=self.settings.device, default_dtype="float32", **options)

    def predictor(self, variant: str, seed: int) -> Callable[[], dict[str, torch.Tensor]]:
        """Return what ``MACECalculator`` does: a clone for every call, and a stress for every system."""
        model = self._model(variant, seed)
        for parameter in model.parameters():
            parameter.requires_grad = False
        model = jit.compile(model) if self.settings.mode == "script" else model
        return lambda: model(self.batch.clone().to_dict(), compute_stress=True, training=False)

    def stepper(self, variant: str, seed: int) -> Callable[[], None]:
        """Return a step as ``mace_run_train`` with default options does it."""
        args, model, output_args = copy.deepcopy(self._built(variant, seed))
        loss = get_loss_fn(args, dipole_only=False, compute_dipole=False)
        optimizer = get_optimizer(args, get_params_options(args, model))
        arguments = (None, output_args, args.clip_grad, torch.device(self.settings.device))
        return lambda: take_step(model, loss, self.batch, optimizer, *arguments)
