"""Runs every row of experiments.yaml one after the other, each in a process of its own; resumable.

    python eval/quality/run_queue.py                 # rows already done are skipped

ZeroLock rows wait until `peft_zerolock` can be imported; meanwhile later rows that do not need it run. A failed
ZeroLock row runs again only when the package's code has changed since, other failed rows with --retry-failed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from run import describe_run, package_fingerprint
from specs import DATA, RESULTS, ROOT, Row, load_experiments, read_result, write_result

POLL_SECONDS = 60


def next_row(rows: list[Row], experiments: dict, results: Path, ready: bool, retry: set[Row]) -> Row | None:
    """The row to run now: never-run rows first, then failed ones that may succeed now; None if none can run."""
    again = []
    for row in rows:
        zerolock = experiments[row.experiment]["methods"][row.method]["trainer"] == "zerolock"
        if zerolock and not ready:
            continue
        result = read_result(row.result_file(results))
        if result is None:
            return row
        changed = zerolock and result["package_sha256"] != package_fingerprint()
        if result["status"] == "failed" and (changed or row in retry):
            again.append(row)
    return again[0] if again else None


def unfinished(rows: list[Row], results: Path) -> list[Row]:
    """Rows that were never run."""
    return [row for row in rows if read_result(row.result_file(results)) is None]


def package_ready(environment: dict) -> bool:
    """Whether a fresh process can import the trainer."""
    command = [sys.executable, "-c", "from peft_zerolock import ZeroLockConfig, ZeroLockTrainer"]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False).returncode == 0


def run_in_process(row: Row, arguments: argparse.Namespace, environment: dict) -> None:
    """Runs one row; a process that died without writing a result is recorded as a failed row."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--experiment", row.experiment]
    command += ["--method", row.method, "--seed", str(row.seed), "--threads", str(arguments.threads)]
    command += ["--data", str(arguments.data.resolve()), "--out", str(arguments.out.resolve())]
    path = row.result_file(arguments.out)
    written = path.stat().st_mtime_ns if path.exists() else None
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False)
    if not path.exists() or path.stat().st_mtime_ns == written:
        error = f"the row's process ended with exit status {done.returncode} before it wrote a result"
        details = {"experiment": row.experiment, "method": row.method, "seed": row.seed}
        write_result(path, {**details, **describe_run(arguments.threads), "status": "failed", "error": error})


def commit(path: Path, row: Row) -> None:
    """Commits one result file alone; another git process may hold the lock for a moment, so it tries a few times."""
    message = f"eval: result of {row.experiment} {row.method} seed {row.seed}"
    for _ in range(10):
        steps = (["add", "--", str(path)], ["commit", "--quiet", "-m", message, "--", str(path)])
        if all(subprocess.run(["git", "-C", str(ROOT), *step], check=False).returncode == 0 for step in steps):
            return
        time.sleep(5)
    print(f"could not commit {path.name}; commit it by hand", flush=True)


def main() -> int:
    """Runs until every row has a result, or until the package did not arrive within --wait minutes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a row (default 1)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets (default ../shared/data)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--wait", type=float, default=90, help="minutes to wait for peft_zerolock (default 90)")
    parser.add_argument("--retry-failed", action="store_true", help="run failed rows once more")
    parser.add_argument("--commit", action="store_true", help="commit each result as it comes")
    arguments = parser.parse_args()
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    experiments, rows = load_experiments()
    retry = set(rows) if arguments.retry_failed else set()
    ready, deadline = False, time.monotonic() + 60 * arguments.wait
    while True:
        ready = ready or package_ready(environment)
        row = next_row(rows, experiments, arguments.out, ready, retry)
        if row is None:
            left = unfinished(rows, arguments.out)
            if not left:
                return 0
            if time.monotonic() > deadline:
                print(
                    f"gave up after {arguments.wait:g} minutes without peft_zerolock; {len(left)} rows left",
                    flush=True,
                )
                return 1
            time.sleep(POLL_SECONDS)
            continue
        retry.discard(row)
        print(f"{time.strftime('%H:%M:%S')} {row}", flush=True)
        run_in_process(row, arguments, environment)
        if arguments.commit:
            commit(row.result_file(arguments.out), row)


if __name__ == "__main__":
    sys.exit(main())
