"""Subcommands on the energies of prediction files: difference, members."""

import enum
import math
from pathlib import Path
from typing import Annotated, List, Optional

import typer

from e2ip_plugins.cli import checks


class MembersFormat(str, enum.Enum):
    """What `e2ip members` writes."""

    extxyz = "extxyz"
    ipi = "ipi"


def difference_command(
    files: Annotated[
        List[Path], typer.Argument(metavar="PREDICTIONS.xyz ...", help="Files of `e2ip evaluate`, all of one model.")
    ],
    of: Annotated[
        Optional[List[str]],
        typer.Option(
            metavar='"A - B"',
            help="Sum of energies; may be repeated. A and B are names of frames, or numbers of frames, which begin at "
            "0 and go on from file to file. Spaces belong on both sides of + and -. Coefficients: `2*A`, `1/2*A`. "
            "[default: the energy of every frame]",
        ),
    ] = None,
    key: Annotated[
        Optional[str],
        typer.Option(
            help="Info of the frames that has their names; then all terms are names. [default: 'name', and terms of "
            "digits are numbers of frames]"
        ),
    ] = None,
    output: Annotated[
        Optional[Path], typer.Option(metavar="FILE.json", help="The same numbers, with the covariance of all sums.")
    ] = None,
    overwrite: checks.Overwrite = False,
) -> None:
    """Print differences of energies, or other sums of them, with standard deviations.

    Errors of like environments cancel: the standard deviation of a difference goes to 0 where two frames become the
    same. Reaction energies, barriers and adsorption energies ("slab+CO - slab - CO") are such sums. A warning names the
    species whose atoms do not cancel. Without --of the energies of all frames are listed.
    """
    import json

    import numpy as np

    from e2ip_plugins.energies.differences import differences, warn_uncancelled
    from e2ip_plugins.energies.expressions import coefficients_of
    from e2ip_plugins.energies.frames import read_energies
    from e2ip_plugins.files import replacing

    if output is not None:
        checks.check_output(output, files, overwrite)
    read = read_energies(files)
    if of is None:
        of, rows = [str(number) for number in range(len(read.atoms))], np.eye(len(read.atoms))
    else:
        rows = np.stack([coefficients_of(text, read.atoms, key) for text in of])
        for text, row in zip(of, rows, strict=True):
            warn_uncancelled(read.atoms, row, f"E({text})")
    result = differences(read, rows)
    for text, value, std in zip(of, result.values, result.std, strict=True):
        decimals = _decimals(std)
        typer.echo(f"E({text}) = {value:.{decimals}f} +- {std:.{decimals}f} eV (one standard deviation)")
    if output is not None:
        sums = [
            {"of": text, "energy": value, "energy_uncertainty": std}
            for text, value, std in zip(of, result.values.tolist(), result.std.tolist(), strict=True)
        ]
        content = {"unit": "eV", "uq_model": read.uq_model, "sums": sums, "covariance": result.covariance.tolist()}
        with replacing(output) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"Written: {output}")


def _decimals(std: float) -> int:
    """Return how many decimals show two digits of a standard deviation: 3 to 6."""
    return 3 if not std > 0.0 else min(max(3, 1 - math.floor(math.log10(std))), 6)


def members_command(
    file: Annotated[Path, typer.Argument(metavar="PREDICTIONS.xyz", help="File of `e2ip evaluate`.")],
    number: Annotated[int, typer.Option(min=1, help="Number of members.")] = 32,
    output: Annotated[Path, typer.Option(help="The frames with energies of the members.")] = Path("members.xyz"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the members; the same for files that belong together.")] = 0,
    format: Annotated[
        MembersFormat,
        typer.Option(help="extxyz: info energy_members of every frame, in eV; ipi: a committee as i-PI prints it."),
    ] = MembersFormat.extxyz,
    overwrite: checks.Overwrite = False,
) -> None:
    """Draw members: energies of every frame that err together, as those of several models would.

    Member k is the same model in all frames, and in all files with predictions of one model and one seed.

    ipi writes a text file for i-pi-committee-reweight: a row for every frame, a column for every member, in hartree.
    Its members are shifted so that their mean is the model, for which that tool takes it.
    """
    import ase.io

    from e2ip_plugins.energies.draws import member_energies
    from e2ip_plugins.energies.frames import read_energies
    from e2ip_plugins.energies.ipi_files import committee_text
    from e2ip_plugins.files import replacing

    ipi = format is MembersFormat.ipi
    checks.check_output(output, [file], overwrite, frames=not ipi)
    read = read_energies(file)
    energies = member_energies(read, number, seed, centred=ipi)
    with replacing(output) as unfinished:
        if ipi:
            title = f"energies of {number} members in hartree; model {read.uq_model}, seed {seed}"
            unfinished.write_text(committee_text(energies, title), encoding="utf-8")
        else:
            for atoms, row in zip(read.atoms, energies, strict=True):
                atoms.info["energy_members"] = row
            ase.io.write(unfinished, read.atoms, format="extxyz")
    typer.echo(f"Written: {output}")
