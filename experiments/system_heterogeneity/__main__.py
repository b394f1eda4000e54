"""RaFFM on five fleets, from Raspberry Pis to GPUs, against full-size FedAvg: the small ViT on CIFAR-10.

python -m experiments.system_heterogeneity --scale smoke        # a minute on a CPU: all of it, tiny
python -m experiments.system_heterogeneity --scale cpu          # two hours on a core: few local steps
python -m experiments.system_heterogeneity                      # minutes on a GPU; what is in `results` is not run again
python -m experiments.system_heterogeneity --what report        # the tables and plots from `results`, without a run
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from experiments.options import options_of, parser_of
from experiments.running import essential, kept
from experiments.system_heterogeneity import report
from experiments.system_heterogeneity.catalogue import contents, full_size_rounds
from raffm.devices.profiles import FLEETS

HERE = Path(__file__).parent


def main() -> None:
    """Run what is asked for and missing, then write the tables and plots."""
    options = options_of(parser_of(__doc__, tuple(FLEETS)).parse_args(), HERE)
    asked = contents(options.scale, options.runs.folder)
    for fleet in (fleet for fleet in options.what if fleet in asked):
        found = options.runs.of(fleet, asked[fleet])
        about = {"run": essential(asked[fleet])}
        kept(options.runs.results / f"fedavg-{fleet}.json", about, partial(full_size_rounds, asked[fleet]))
        print(f"{fleet}: {100 * report.on_devices(found)[-1]:.2f} % on its devices", flush=True)
    if "report" in options.what:
        report.write(options)


if __name__ == "__main__":
    main()
