"""Code in two processes of one group, as in a distributed training on CPUs."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forked_commands import run_command

#: `rank` and `folder` are what the code has.
START = """
import sys
from pathlib import Path

import torch

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
"""


def run_in_two_processes(code: str, folder: Path) -> None:
    """Run ``code`` in two processes, which share ``folder``; assert that both end well."""
    with ThreadPoolExecutor(2) as pool:
        commands = [[sys.executable, "-c", START + code, rank, folder] for rank in range(2)]
        for done in pool.map(run_command, commands):
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
