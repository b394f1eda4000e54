"""Measure extraction, aggregation and rounds against their floors: `make bench`. Prints a table and writes JSON."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import extraction, precision, rounds, tallying


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="repeats of every measurement (default 9)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results.json"), help="where the JSON goes")
    options = parser.parse_args()

    times, claims = extraction.measure(options.repeats)
    more_times, more_claims = tallying.measure(options.repeats)
    times, claims = {**times, **more_times}, [*claims, *more_claims, *tallying.memory()]
    claims += [*rounds.measure(2 * options.repeats), *rounds.memory(), *precision.measure(options.repeats)]

    console = Console()
    table = Table("what", "median ms", title=f"ViT-base at half size, {torch.get_num_threads()} threads")
    for name, taken in times.items():
        table.add_row(name, f"{taken.median:.1f}")
    console.print(table)
    table = Table("ratio", "measured", "limit", "")
    for name, measured, limit in claims:
        table.add_row(name, f"{measured:.2f}", f"{limit:.2f}", "holds" if measured <= limit else "MISSED")
    console.print(table)
    content = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "milliseconds": {name: taken.milliseconds for name, taken in times.items()},
        "ratios": [{"what": name, "measured": measured, "limit": limit} for name, measured, limit in claims],
    }
    options.out.write_text(json.dumps(content, indent=1).replace("Infinity", "null") + "\n", encoding="utf-8")
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
