"""Rebuilds the tables and plots of the evaluation from the JSON results; failed rows included.

python eval/report.py                                         # prints the tables and draws the plots
python eval/report.py --write docs/quality.md                # puts the tables between the report markers of that file
python eval/report.py --results eval/results/quality_first    # another folder of results
"""

import argparse
from pathlib import Path

from comparison import Comparison, load_results
from quality_plots import draw_all
from quality_tables import quality_tables

RESULTS = Path(__file__).with_name("results")
BEGIN, END = "<!-- report:begin -->", "<!-- report:end -->"


def replace_report(text: str, report: str) -> str:
    """`text` with `report` between its two markers.

    Raises:
        ValueError: if the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"The file needs one line {BEGIN} and, after it, one line {END}.")
    return text[: text.index(BEGIN) + len(BEGIN)] + f"\n{report}\n" + text[text.index(END) :]


def main() -> None:
    """Prints the tables, or writes them into a file, and draws the plots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "quality", help="folder of the JSON files")
    parser.add_argument("--write", type=Path, help="Markdown file whose report is replaced")
    parser.add_argument("--plots", type=Path, help="folder of the plots (default eval/results/plots/RESULTS' NAME)")
    arguments = parser.parse_args()
    try:
        comparison = Comparison(load_results(arguments.results))
    except ValueError as error:
        parser.error(str(error))
    report = quality_tables(comparison)
    if arguments.write is None:
        print(report)
    else:
        text = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(replace_report(text, report), encoding="utf-8")
    draw_all(comparison, arguments.plots or RESULTS / "plots" / arguments.results.resolve().name)


if __name__ == "__main__":
    main()
