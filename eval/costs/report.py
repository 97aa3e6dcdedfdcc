"""Rebuilds the memory and throughput tables and plots from their JSON results.

python eval/costs/report.py                                    # prints the tables and draws the plots
python eval/costs/report.py --write docs/memory.md README.md   # puts them between these files' markers

A file may have any of the markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`, NAME being targets, memory,
throughput, or that of a memory experiment with `_table` behind it.
"""

import argparse
import re
from pathlib import Path

from plots import draw
from tables import load_results, memory_table, memory_tables, targets, throughput_tables

RESULTS = Path(__file__).resolve().parents[1] / "results"


def sections(results: Path) -> dict[str, str]:
    """Everything that can be reported, by the name of its marker.

    Raises:
        ValueError: there are no results.
    """
    memory, throughput = (load_results(results / kind) for kind in ("memory", "throughput"))
    if not memory and not throughput:
        raise ValueError(f"There are no results in {results}; run `make -C eval memory throughput` first.")
    found = {f"{result['experiment']}_table": memory_table(result) for result in memory}
    found |= {"targets": targets(memory, throughput)}
    return found | {"memory": memory_tables(memory), "throughput": throughput_tables(throughput)}


def fill(text: str, found: dict[str, str]) -> str:
    """`text` with each reported section between its markers.

    Raises:
        ValueError: a marker is open, has no section of its name, or there is none at all.
    """
    begun = re.findall(r"<!-- (\w+):begin -->", text)
    own = [name for name in begun if name != "report"]
    for name in own:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if name not in found:
            raise ValueError(f"The marker {begin} has no section; there are {sorted(found)}.")
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"The file needs {begin} and, after it, {end}, once each.")
        text = text[: text.index(begin) + len(begin)] + f"\n{found[name]}\n" + text[text.index(end) :]
    if not own:
        raise ValueError("The file has no marker such as <!-- memory:begin -->.")
    return text


def main() -> None:
    """Prints the tables, or writes them into files, and draws the plots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--write", type=Path, nargs="+", help="Markdown files whose marked sections are replaced")
    arguments = parser.parse_args()
    try:
        found = sections(arguments.results)
        for path in arguments.write or []:
            path.write_text(fill(path.read_text(encoding="utf-8"), found), encoding="utf-8")
    except ValueError as error:
        parser.error(str(error))
    if not arguments.write:
        print("\n\n".join(found[name] for name in ("targets", "memory", "throughput")))
    draw(arguments.results)


if __name__ == "__main__":
    main()
