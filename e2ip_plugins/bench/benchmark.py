"""One call of `e2ip bench`: everything is checked, then trained, then judged."""

from pathlib import Path
from typing import Callable, List, Tuple

from e2ip_plugins.bench import commands, cost, data, runs, tables
from e2ip_plugins.bench.plan import Options, Plan, Run
from e2ip_plugins.errors import InputError


def benchmark(options: Options, tell: Callable[[str], None] = print) -> Tuple[List[Path], List[Run]]:
    """Train what is not finished, write the tables; the files that were written, and runs that failed."""
    plan = Plan.of(options)
    failed: List[Run] = []
    if options.results:
        tables.read_results(options.results)
    if options.tables:
        runs.check_settings(plan.runs, plan, with_data=False)
        if not any(runs.finished(run, plan.out) for run in plan.runs) and not options.results:
            tell(f"{plan.out}: none of the {len(plan.runs)} runs that this call names is finished")
    else:
        commands.check_host(plan.runs[0].host)
        runs.check_cluster(options.cluster)
        for name in {run.dataset for run in plan.runs}:  # before anything is written
            data.find_all(name, plan.sets[name], plan.roots)
        runs.check_settings(plan.runs, plan)
        try:
            plan.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {plan.out}: cannot make this folder ({error.strerror})") from error
        failed = runs.execute_all(plan, tell)
        cost.measure(plan, tell)
    return list(tables.write(plan)) if len(failed) < len(plan.runs) else [], failed
