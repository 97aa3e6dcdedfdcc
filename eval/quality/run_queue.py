"""Runs the rows of experiments.yaml in its order, each in a process of its own; resumable, with several workers.

    python eval/quality/run_queue.py                                     # rows already done are skipped
    python eval/quality/run_queue.py --workers 2 --match 'cola.*.seed0'  # some rows, and what tunes their methods

A method's rows are known once its tuning rows are there: they run at the learning rate that did best. The YAML file
is read again before each row, so its order may be changed meanwhile. A failed row runs again when the package's code
has changed since, or with --retry-failed.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from claims import claim
from rows import Row, best_rate, mean_losses, read_result, write_result
from run import describe_run, package_fingerprint
from specs import DATA, EXPERIMENTS, RESULTS, ROOT, Suite, load_suite

POLL_SECONDS = 5.0


def plan(suite: Suite, results: Path, match: str = "*") -> tuple[list[Row], list[str]]:
    """The rows that are known by now, in order, and the names of those that wait for their learning rate.

    Args:
        match: only rows whose EXPERIMENT.METHOD.seedN this pattern matches, and the tuning rows of their methods.
    """
    rows: dict[Row, None] = {}  # a set that keeps its order
    waiting = []
    for experiment, method, seed in suite.cells():
        name = f"{experiment}.{method}.seed{seed}"
        if not fnmatch(name, match):
            continue
        family = suite.experiments[experiment]["family"]
        tuning = suite.tuning_rows(family, method)
        rows |= dict.fromkeys(tuning)
        done = [read_result(row.result_file(results)) for row in tuning]
        rate = suite.families[family]["learning_rates"][0]
        if tuning:
            found = [result for result in done if result is not None]
            rate = best_rate(mean_losses(found)) if len(found) == len(tuning) else None
        if rate is None:
            waiting.append(name)
        else:
            rows[Row(experiment, method, seed, rate)] = None
    return list(rows), waiting


class Worker:
    """Takes one row after the other until none is left.

    Args:
        arguments: the command line's.
        retry: failed rows to run once more; shared by the workers.
    """

    def __init__(self, arguments: argparse.Namespace, retry: set[Row]):
        self.arguments, self.retry = arguments, retry
        self.suite = load_suite(arguments.experiments)

    def run(self) -> None:
        """Runs rows; waits while other workers run some, because those may make further rows known."""
        while True:
            ran, busy = self.run_next()
            if not ran and not busy:
                return
            if not ran:
                time.sleep(POLL_SECONDS)

    def run_next(self) -> tuple[bool, bool]:
        """Runs the first row that needs it and that nobody else runs; returns (ran one, others run some)."""
        try:
            self.suite = load_suite(self.arguments.experiments)
        except ValueError as error:
            print(f"the order stays as it was: {error}", flush=True)
        out, busy = self.arguments.out, False
        rows, _ = plan(self.suite, out, self.arguments.match)
        for row in sorted(rows, key=lambda row: row.result_file(out).exists()):
            if not self.needs_run(row):
                continue
            with claim(out / "claims" / f"{row.name}.lock") as held:
                if held is None:
                    busy = True
                elif self.needs_run(row):  # nobody finished it between the two looks
                    self.retry.discard(row)
                    print(f"{time.strftime('%H:%M:%S')} {row.name}", flush=True)
                    self.run_in_process(row, held)
                    return True, busy
        return False, busy

    def needs_run(self, row: Row) -> bool:
        """Whether the row was never run, or failed and may succeed now."""
        result = read_result(row.result_file(self.arguments.out))
        if result is None or result["status"] == "ok":
            return result is None
        return row in self.retry or result["package_sha256"] != package_fingerprint()

    def run_in_process(self, row: Row, held: int) -> None:
        """Runs one row; a process that died without writing a result is recorded as a failed row."""
        arguments = self.arguments
        command = [sys.executable, str(Path(__file__).with_name("run.py"))]
        command += ["--experiment", row.experiment, "--method", row.method, "--seed", str(row.seed)]
        command += ["--learning-rate", repr(row.learning_rate), *(["--tune"] if row.tuning else [])]
        command += ["--threads", str(arguments.threads), "--data", str(arguments.data.resolve())]
        command += ["--out", str(arguments.out.resolve()), "--experiments", str(arguments.experiments.resolve())]
        path = row.result_file(arguments.out)
        written = path.stat().st_mtime_ns if path.exists() else None
        environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
        # The child holds the claim too: should this process die, nobody else starts the row while the child runs.
        done = subprocess.run(command, env=environment, cwd=ROOT, check=False, pass_fds=[held])
        if not path.exists() or path.stat().st_mtime_ns == written:
            error = f"the row's process ended with exit status {done.returncode} before it wrote a result"
            settings = self.suite.settings(row.experiment, row.method)
            own = {**asdict(row), "family": settings["family"], "config": settings}
            write_result(path, {**own, **describe_run(arguments.threads), "status": "failed", "error": error})
        if arguments.commit:
            commit(path, row)


def commit(path: Path, row: Row) -> None:
    """Commits one result file alone; another git process may hold the lock for a moment, so it tries a few times."""
    for _ in range(10):
        steps = (["add", "--", str(path)], ["commit", "--quiet", "-m", f"eval: result of {row.name}", "--", str(path)])
        if all(subprocess.run(["git", "-C", str(ROOT), *step], check=False).returncode == 0 for step in steps):
            return
        time.sleep(5)
    print(f"could not commit {path.name}; commit it by hand", flush=True)


def main() -> int:
    """Runs until every row has a result; returns 1 where a method has no learning rate, as all its tuning failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=1, help="rows that run at a time (default 1)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a row (default 1)")
    parser.add_argument("--match", default="*", help="only rows whose EXPERIMENT.METHOD.seedN matches (* and ?)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets (default ../shared/data)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, help="the YAML file")
    parser.add_argument("--retry-failed", action="store_true", help="run failed rows once more")
    parser.add_argument("--commit", action="store_true", help="commit each result as it comes")
    arguments = parser.parse_args()
    if arguments.workers < 1:
        parser.error(f"--workers is {arguments.workers}; give at least 1.")
    try:
        suite = load_suite(arguments.experiments)
    except ValueError as error:
        parser.error(str(error))
    retry = set(plan(suite, arguments.out, arguments.match)[0]) if arguments.retry_failed else set()
    workers = [threading.Thread(target=Worker(arguments, retry).run) for _ in range(arguments.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    waiting = plan(load_suite(arguments.experiments), arguments.out, arguments.match)[1]
    if waiting:
        print(f"no learning rate worked for {len(waiting)} rows: {', '.join(waiting)}", flush=True)
    return 1 if waiting else 0


if __name__ == "__main__":
    sys.exit(main())
