"""MACE's half: its own ``take_step``, and what its ASE calculator evaluates, as functions without arguments.

Models, losses and optimisers come from the functions that ``mace_run_train`` calls, with its defaults; the
plugin's import hook must be active, as it is wherever e2ip-plugins is installed.
"""

import copy
import functools
import logging
from collections.abc import Callable

import mace  # noqa: F401  (before e3nn: e3nn 0.4.4 cannot load its constants otherwise)
import numpy as np
import torch
from ase import Atoms
from ase.data import atomic_numbers
from e3nn.util import jit
from mace import data, tools
from mace.tools import torch_geometric
from mace.tools.model_script_utils import configure_model
from mace.tools.scripts_utils import get_loss_fn, get_optimizer, get_params_options
from mace.tools.train import take_step

from host_cost.measure import as_fitted
from host_cost.settings import Settings
from host_cost.systems import SPECIES, with_labels

_HEADS = ["Default"]


class Host:
    """Models, data and steps of one system."""

    package = "mace-torch"

    def __init__(self, settings: Settings, frame: Atoms) -> None:
        logging.disable(logging.INFO)
        torch.set_default_dtype(getattr(torch, settings.dtype))
        self.settings = settings
        self.table = tools.AtomicNumberTable(sorted(atomic_numbers[s] for s in SPECIES))
        keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
        graphs = [
            data.AtomicData.from_config(
                data.config_from_atoms(with_labels(frame, seed), key_specification=keys),
                z_table=self.table,
                cutoff=settings.architecture["r_max"],
                heads=_HEADS,
            )
            for seed in range(settings.frames)
        ]
        self.loader = torch_geometric.dataloader.DataLoader(graphs, batch_size=len(graphs), shuffle=False)
        self.batch = next(iter(self.loader)).to(settings.device)

    @property
    def edges(self) -> int:
        return self.batch.edge_index.shape[1]

    @functools.cache  # noqa: B019 (building takes seconds; the process ends with its only host)
    def _built(self, variant: str, seed: int) -> tuple:
        """Arguments, model and output arguments as in ``mace_run_train``."""
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

    def inference(self) -> dict[str, Callable[[], dict]]:
        """Variant -> function that predicts once: energies, forces, stress, and all uncertainty keys for e2ip."""
        baseline, e2ip = self._evaluator("baseline", 1), self._evaluator("e2ip", 1)
        members = [self._evaluator("baseline", seed) for seed in self.settings.member_seeds]
        self.parts = {"readout": e2ip}

        def predict(model: torch.nn.Module) -> dict:
            # A clone for every call and a stress for every system, as in MACECalculator.
            return model(self.batch.clone().to_dict(), compute_stress=True, training=False)

        def committee() -> dict:
            forces = torch.stack([predict(member)["forces"].detach() for member in members])
            return {"forces": forces.mean(0), "forces_std": forces.std(0)}

        return {"baseline": lambda: predict(baseline), "e2ip": lambda: predict(e2ip), "committee": committee}

    def _evaluator(self, variant: str, seed: int) -> torch.nn.Module:
        model = copy.deepcopy(self._built(variant, seed)[1])
        if variant == "e2ip":
            as_fitted(model.e2ip_readout)
        for parameter in model.parameters():  # as MACECalculator does
            parameter.requires_grad = False
        return jit.compile(model) if self.settings.mode == "script" else model

    def training(self) -> dict[str, Callable[[], None]]:
        """Variant -> function that does one step as ``mace_run_train`` with default options does it."""
        trained = {variant: self._trainer(variant, 1) for variant in ("baseline", "e2ip")}
        members = [self._trainer("baseline", seed) for seed in self.settings.member_seeds]
        self.parts = {"readout": trained["e2ip"][0], "losses": [loss for _, loss, *_ in trained.values()]}

        def stepper(model, loss_fn, optimizer, output_args, max_grad_norm) -> Callable[[], None]:
            device = torch.device(self.settings.device)
            return lambda: take_step(model, loss_fn, self.batch, optimizer, None, output_args, max_grad_norm, device)

        committee = [stepper(*member) for member in members]
        steps = {variant: stepper(*made) for variant, made in trained.items()}
        return {**steps, "committee": lambda: [step() for step in committee]}

    def _trainer(self, variant: str, seed: int) -> tuple:
        args, model, output_args = copy.deepcopy(self._built(variant, seed))
        loss_fn = get_loss_fn(args, dipole_only=False, compute_dipole=False)
        optimizer = get_optimizer(args, get_params_options(args, model))
        return model, loss_fn, optimizer, output_args, args.clip_grad
